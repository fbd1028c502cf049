"""One of vLLM's Gated DeltaNet layers, stepped as its V2 runner steps it: vLLM's model state and
metadata builder say which rows decode, and the layer runs them. What must come out is known from
the rule itself, token by token."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.vllm_layers import parallel
from helpers.vllm_scheduler import Speculation
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as vllm_gdn
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.worker.gpu.model_states import default, mamba_hybrid

from hybrid_runtime.integrations.vllm import replay_layers
from hybrid_runtime.integrations.vllm.gdn_layers import GDN
from hybrid_runtime.integrations.vllm.replay_state import ReplayStates
from hybrid_runtime.kernels.gdn.naive import advance_state, gates, inverse_norm

HIDDEN, KEY_HEADS, HEADS, DIM, TAPS = 32, 2, 4, 16, 3
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
SLOTS, COLUMNS, BLOCK = 5, 12, 8


@dataclass
class Row:
    """A request's part of a step: its slot, tokens, and drafts among them."""

    slot: int
    scheduled: int
    draft: int


@dataclass
class Request:
    """What a slot's request has: tokens computed, of its prompt, and the rule's own state and
    convolution's inputs after them."""

    prompt: int
    computed: int
    state: Tensor
    window: Tensor


class State(ReplayStates, mamba_hybrid.MambaHybridModelState):
    """vLLM's model state with ours before it, as `model_state_class` makes it."""


def layer(prefix: str, drafts: int) -> tuple[Any, Any]:
    """A layer of random weights, of whichever class vLLM builds, and its configuration."""
    config = parallel()
    platform: Any = type(current_platform)
    platform.current_device = classmethod(lambda cls: "cpu")
    sizes = {"linear_num_key_heads": KEY_HEADS, "linear_num_value_heads": HEADS}
    sizes |= {"linear_key_head_dim": DIM, "linear_value_head_dim": DIM}
    sizes |= {"hidden_size": HIDDEN, "linear_conv_kernel_dim": TAPS + 1}
    text = SimpleNamespace(hidden_act="silu", rms_norm_eps=1e-6, **sizes)
    config.model_config = SimpleNamespace(
        dtype=torch.float32, hf_config=text, hf_text_config=text, max_model_len=BLOCK * COLUMNS
    )
    config.cache_config.mamba_ssm_cache_dtype = "float32"
    config.cache_config.mamba_block_size = config.cache_config.block_size = BLOCK
    config.compilation_config.static_forward_context.pop(prefix, None)
    config.speculative_config = None
    with set_current_vllm_config(config):
        made: Any = vllm_gdn.QwenGatedDeltaNetAttention(text, config, prefix=prefix)
    config.speculative_config = Speculation(num_speculative_tokens=drafts, method="mtp")
    made.num_spec = drafts
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn_like(weight) / 4)
        made.A_log.copy_(torch.linspace(-3, 1, HEADS))
    return made, config


def chunks(
    self: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **given: Any
) -> Any:
    """vLLM's kernel for prompts, token by token. q and k are normalised."""
    ends, states, outputs = given["cu_seqlens"].tolist(), [], []
    for row, (start, end) in enumerate(itertools.pairwise(ends)):
        state = given["initial_state"][row].float()
        for t in range(start, end):
            key, query = (x[0, t].repeat_interleave(HEADS // KEY_HEADS, 0) for x in (k, q))
            state, _ = advance_state(state, key, v[0, t], g[0, t], beta[0, t])
            outputs.append(torch.einsum("hvk,hk->hv", state, query * DIM**-0.5))
        states.append(state)
    return torch.stack(outputs)[None], torch.stack(states)


def convolution(x: Tensor, weight: Tensor, *_: Any, **given: Any) -> Tensor:
    """vLLM's convolution of prompts, which the interpreter cannot run. x: `[channels, tokens]`."""
    ends, out = given["query_start_loc"].tolist(), torch.zeros_like(x)
    pairs = itertools.pairwise(ends)
    rows = zip(pairs, given["cache_indices"], given["has_initial_state"], strict=True)
    for (start, end), block, known in rows:
        window = given["conv_states"][int(block)]
        before = window[:, :TAPS] if known else torch.zeros(len(window), TAPS)
        own = torch.cat([before, x[:, start:end]], 1)
        taps = own.unfold(1, TAPS + 1, 1)
        out[:, start:end] = F.silu((taps * weight[:, None]).sum(-1))
        window[:, :TAPS] = own[:, -TAPS:]
    return out


class GdnRunner:
    """replays: with our layer and model state; else vLLM's own, without prefix caching.
    channels_first: vLLM's DS layout of conv_states."""

    def __init__(
        self,
        mode: str,
        replays: bool,
        drafts: int,
        patch: pytest.MonkeyPatch,
        channels_first: bool = False,
    ) -> None:
        self.drafts, self.replays, self.align = drafts, replays, mode == "align"
        assert replays or not self.align
        patch.setattr(vllm_gdn.ChunkGatedDeltaRule, "forward", chunks)
        patch.setattr(vllm_gdn, "causal_conv1d_fn", convolution)
        patch.setattr(default.DefaultModelState, "__init__", _init)
        patch.setattr(default.DefaultModelState, "add_request", lambda *_: None)
        for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
            if hasattr(module, "PIN_MEMORY"):
                patch.setattr(module, "PIN_MEMORY", False)
            if hasattr(module, "is_pin_memory_available"):
                patch.setattr(module, "is_pin_memory_available", lambda: False)
        assert replay_layers.register(GDN) is None
        with replay_layers.collecting(replays) as found:
            self.layer, self.config = layer("model.layers.0.linear_attn", drafts)
        self.config.cache_config.mamba_cache_mode = mode
        self.patch = patch
        model = SimpleNamespace(get_mamba_state_copy_func=lambda: ())
        if replays:
            assert found == [self.layer]
            self.shared = model.replay_layers = replay_layers.ReplayLayers(
                GDN, found, SLOTS, drafts, torch.float32, "cpu"
            )
            for ring in self.shared.rings:  # as a slot's request before may have left it
                ring.fill_(torch.nan)
        spec = self.layer.get_kv_cache_spec(self.config)
        assert isinstance(spec, MambaSpec)
        assert spec.num_speculative_blocks == (0 if replays else drafts)
        columns = COLUMNS if self.align else 1 + spec.num_speculative_blocks
        self.table = 1 + torch.arange(SLOTS * columns, dtype=torch.int32).view(SLOTS, columns)
        blocks = 1 + SLOTS * columns
        for place in (vllm_gdn, mamba_utils):
            patch.setattr(place, "is_conv_state_dim_first", lambda: channels_first)
        windows = torch.full((blocks, TAPS + drafts, CHANNELS), torch.nan)
        self.layer.kv_cache = (
            windows.mT.contiguous() if channels_first else windows,
            torch.full((blocks, HEADS, DIM, DIM), torch.nan),
        )
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=[self.layer.prefix])
        self.groups = SimpleNamespace(kv_cache_groups=[group], prefix_cache_retention_interval=None)
        kind: Any = State if replays else mamba_hybrid.MambaHybridModelState
        self.state = kind(self.config, model, None, torch.device("cpu"))
        with set_current_vllm_config(self.config):
            self.builder: Any = GDNAttentionMetadataBuilder(
                spec, [self.layer.prefix], self.config, torch.device("cpu")
            )
        self.input_table = torch.zeros((SLOTS + 2, columns), dtype=torch.int32)
        self.computed = torch.zeros(SLOTS, dtype=torch.int32)
        self.requests: dict[int, Request] = {}

    def admit(self, slot: int, prompt: int) -> None:
        empty = torch.zeros(HEADS, DIM, DIM), torch.zeros(TAPS, CHANNELS)
        self.requests[slot] = Request(prompt, 0, *empty)
        self.computed[slot] = 0
        self.state.add_request(slot, SimpleNamespace(num_computed_tokens=0))
        self.state.num_accepted_tokens_gpu[slot] = 1

    @torch.no_grad()
    def step(self, rows: list[Row], accepted: list[int], padded: int = 0) -> tuple[Tensor, Tensor]:
        """Run the rows in this order; the outputs, and what they must be.

        accepted: tokens of each row that stand, from its last certain one on.
        padded: rows without tokens behind them, as for a captured graph.
        """
        batch = self._batch(rows, padded)
        self.input_table.zero_()
        self.input_table[: len(rows)] = self.table[batch.idx_mapping_np]
        tables = (self.input_table[: len(rows) + padded],)
        if self.replays:
            self.state.preprocess_state(batch, tables, self.groups, self.computed)
        graphs = CUDAGraphMode.FULL if padded else CUDAGraphMode.NONE
        mixed, gate = self._inputs(batch)
        out = self._forward(self._prepared(batch, tables, graphs), mixed, gate)
        expected = self._rule(rows, accepted, mixed, gate)
        sampled = torch.tensor(
            [
                kept if self.requests[row.slot].computed >= self.requests[row.slot].prompt else 0
                for row, kept in zip(rows, accepted, strict=True)
            ],
            dtype=torch.int32,
        )
        for row in rows:
            self.computed[row.slot] = self.requests[row.slot].computed
        self.state.postprocess_state(batch.idx_mapping, sampled, self.computed)
        assert not out[batch.num_tokens :].any()
        return out[: batch.num_tokens], expected

    @torch.no_grad()
    def dummy(self, rows: list[Row]) -> None:
        """A step that is no request's, whose rows name slots and blocks of real requests."""
        batch = self._batch(rows, 0)
        tables = (self.input_table[: len(rows)].zero_(),)
        self._forward(self._prepared(batch, tables, CUDAGraphMode.NONE), *self._inputs(batch))

    def boundary(self, slot: int) -> Tensor | None:
        """The matrix in the block of the last boundary that a request has passed."""
        column = int(self.computed[slot]) // BLOCK - 1
        return None if column < 0 else self.layer.kv_cache[1][int(self.table[slot, column])]

    def _inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Of the convolution, and b and a."""
        tokens = batch.num_tokens_after_padding
        return torch.randn(tokens, CHANNELS), torch.randn(2, tokens, HEADS)

    def _prepared(self, batch: Any, tables: tuple[Tensor, ...], graphs: CUDAGraphMode) -> Any:
        """The metadata of a step's layers."""
        self.builder.use_full_cuda_graph = graphs is CUDAGraphMode.FULL
        return self.state.prepare_attn(
            batch, graphs, tables, [None], [[self._group()]], self.groups
        )

    def _forward(self, metadata: Any, mixed: Tensor, gate: Tensor) -> Tensor:
        context = SimpleNamespace(attn_metadata=metadata)
        for place in (f"{vllm_gdn.__name__}.get_forward_context", _CONTEXT):
            self.patch.setattr(place, lambda: context)
        out = torch.zeros(len(mixed), HEADS, DIM)
        # Qwen3.5's layers hand on a part of a wider projection.
        wide = torch.empty(len(mixed), CHANNELS + HEADS * DIM)[:, :CHANNELS].copy_(mixed)
        self.layer._forward_core(wide, gate[0].clone(), gate[1].clone(), out)
        return out

    def _rule(self, rows: list[Row], accepted: list[int], mixed: Tensor, gate: Tensor) -> Tensor:
        """Outputs by the rule; moves the requests on."""
        weight = self.layer.conv1d.weight.squeeze(1)
        outputs, at = [], 0
        for row, kept in zip(rows, accepted, strict=True):
            request = self.requests[row.slot]
            state, window = request.state, request.window
            stays = row.scheduled - row.draft + max(kept, 1) - 1
            for t in range(row.scheduled):
                window = torch.cat([window, mixed[at : at + 1]])
                x = F.silu((window[-TAPS - 1 :] * weight.T).sum(0))
                window = window[-TAPS:]
                q, k, v = x.split([KEY_HEADS * DIM, KEY_HEADS * DIM, HEADS * DIM])
                q, k = (part.view(KEY_HEADS, DIM) for part in (q, k))
                q, k = (part * inverse_norm(part)[:, None] for part in (q, k))
                q, k = (part.repeat_interleave(HEADS // KEY_HEADS, 0) for part in (q, k))
                b, a = gate[:, at]
                g, beta = gates(a, b, self.layer.A_log, self.layer.dt_bias, torch.float32)
                state, _ = advance_state(state, k, v.view(HEADS, DIM), g, beta)
                outputs.append(torch.einsum("hvk,hk->hv", state, q * DIM**-0.5))
                at += 1
                if t + 1 == stays:
                    request.state, request.window = state, window
            request.computed += stays
        return torch.stack(outputs)

    def _batch(self, rows: list[Row], padded: int) -> Any:
        slots = np.array([row.slot for row in rows], np.int32)
        scheduled = np.array([row.scheduled for row in rows], np.int32)
        drafts = np.array([row.draft for row in rows], np.int32)
        start = np.concatenate([[0], scheduled.cumsum(), [scheduled.sum()] * padded])
        start = start.astype(np.int32)
        requests = [self.requests[row.slot] for row in rows]
        computed = np.array([request.computed for request in requests], np.int32)
        prompts = np.array([request.prompt for request in requests], np.int32)
        lengths = torch.from_numpy(np.concatenate([computed + scheduled, [0] * padded])).int()
        count, tokens = len(rows), int(scheduled.sum())
        return SimpleNamespace(
            num_reqs=count,
            num_reqs_after_padding=count + padded,
            num_tokens=tokens,
            num_tokens_after_padding=tokens + padded * (1 + self.drafts),
            idx_mapping=torch.from_numpy(slots),
            idx_mapping_np=slots,
            num_scheduled_tokens=scheduled,
            num_draft_tokens_per_req=drafts if drafts.any() else None,
            num_computed_tokens_np=computed,
            prefill_len_np=prompts,
            is_prefilling_np=computed < prompts,
            prefill_runs_as_decode_np=None,
            query_start_loc=torch.from_numpy(start),
            query_start_loc_np=start,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            max_query_len=None,
            dcp_local_seq_lens=None,
            prompt_lens=None,
            positions=None,
        )

    def _group(self) -> Any:
        def build(common: Any, _: int, **given: Any) -> Any:
            return self.builder.build(common_prefix_len=0, common_attn_metadata=common, **given)

        spec = self.groups.kv_cache_groups[0].kv_cache_spec
        return SimpleNamespace(
            get_metadata_builder=lambda _: self.builder,
            build_metadata=build,
            layer_names=[self.layer.prefix],
            kv_cache_spec=spec,
        )


_CONTEXT = "vllm.forward_context.get_forward_context"


def _init(self: Any, config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
    """What of vLLM's default state is of interest here."""
    self.vllm_config, self.model, self.device = config, model, device
    self.model_config, self.max_num_reqs = config.model_config, SLOTS
    if not isinstance(getattr(type(self), "max_model_len", None), property):
        self.max_model_len = config.model_config.max_model_len
