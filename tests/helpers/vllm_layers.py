"""Two of vLLM's Mamba-2 layers with the same weights, one as it is and one that replays, stepped
side by side as vLLM's V2 runner steps them."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_runtime.integrations.vllm import replay_layers
from hybrid_runtime.integrations.vllm.mamba2_layers import MAMBA2
from hybrid_runtime.integrations.vllm.replay_checker import ReplayChecker
from hybrid_runtime.integrations.vllm.replay_layers import ReplayLayers
from hybrid_runtime.kernels.step.vllm_decide import VllmCounts
from hybrid_runtime.kernels.step.vllm_rows import BlockTables, place_rows

HEADS, DIM, GROUPS, STATE, HIDDEN, TAPS = 4, 16, 2, 16, 32, 3
LAYER = "vllm.model_executor.layers.mamba.mamba_mixer2"
NONE = 1 << 30
"""Block size without prefix caching."""


@functools.cache
def parallel() -> Any:
    """A configuration, and vLLM's process groups for one process."""
    from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms import current_platform

    type(current_platform).get_device_name = classmethod(lambda cls, *given: "cpu")
    cache = CacheConfig(
        block_size=16, mamba_cache_mode="align", enable_prefix_caching=True, mamba_block_size=16
    )
    config = VllmConfig(device_config=DeviceConfig("cpu"), cache_config=cache)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29541", 0, "gloo")
        initialize_model_parallel(1)
    return config


def _layer(config: Any, prefix: str) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    config.compilation_config.static_forward_context.pop(prefix, None)
    with set_current_vllm_config(config):
        return MambaMixer2(
            hidden_size=HIDDEN,
            ssm_state_size=STATE,
            conv_kernel_size=TAPS + 1,
            intermediate_size=HEADS * DIM,
            use_conv_bias=True,
            use_bias=False,
            n_groups=GROUPS,
            num_heads=HEADS,
            head_dim=DIM,
            model_config=SimpleNamespace(dtype=torch.float32),
            cache_config=config.cache_config,
            prefix=prefix,
        )


class Layers:
    """layers, caches: vLLM's and ours; a cache is windows and states by block."""

    def __init__(
        self,
        drafts: int,
        slots: int,
        dtype: str,
        channels_first: bool,
        monkeypatch: pytest.MonkeyPatch,
        stochastic: bool = False,
    ) -> None:
        from vllm.model_executor.layers.mamba import mamba_utils
        from vllm.model_executor.layers.mamba.ops import mamba_ssm

        self.config, self.drafts, self.slots = parallel(), drafts, slots
        self.channels_first, self.monkeypatch = channels_first, monkeypatch
        self.config.cache_config.mamba_ssm_cache_dtype = dtype
        assert replay_layers.register(MAMBA2) is None
        theirs = _layer(self.config, "theirs")
        with replay_layers.collecting(True) as found:
            ours = _layer(self.config, "ours")
        assert found == [ours]
        self.module = sys.modules[LAYER]
        monkeypatch.setattr(self.module, "selective_state_update", mamba_ssm.selective_state_update)
        for place in (self.module, mamba_utils):
            monkeypatch.setattr(place, "is_conv_state_dim_first", lambda: channels_first)
        torch.manual_seed(0)
        with torch.no_grad():
            for (name, one), other in zip(
                theirs.named_parameters(), ours.parameters(), strict=True
            ):
                one.copy_(torch.randn_like(one) / 4)
                if name == "A":
                    one.copy_(-torch.rand_like(one) - 0.05)
                other.copy_(one)
        self.layers = (theirs, ours)
        for layer in self.layers:
            layer.num_spec = drafts
        self.shared = ReplayLayers(MAMBA2, [ours], slots, drafts, torch.float32, "cpu", stochastic)
        self.shared.assign([["ours"]])
        self.certain = torch.ones(slots, dtype=torch.int32)  # tokens, without accepted drafts
        blocks = 1 + slots * (1 + drafts)
        shape = (blocks, TAPS + drafts, ours.conv_dim)
        self.caches = []
        for _ in self.layers:
            window = torch.zeros(shape)
            if channels_first:
                window = window.transpose(1, 2).contiguous()
            state = torch.zeros(blocks, HEADS, DIM, STATE, dtype=getattr(torch, dtype))
            self.caches.append((window, state))
        for layer, cache in zip(self.layers, self.caches, strict=True):
            layer.kv_cache = cache
        self.checker = ReplayChecker(self.shared, slots, logging.getLogger())
        self.width = ours.tped_intermediate_size + ours.tped_conv_size + ours.tped_dt_size

    def first_block(self, slot: int) -> int:
        return 1 + slot * (1 + self.drafts)

    def forward(self, layer: Any, projected: torch.Tensor, **given: Any) -> torch.Tensor:
        """One layer's part of a step; `given`: what its metadata says."""
        from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

        for field in dataclasses.fields(Mamba2AttentionMetadata):
            optional = field.default is not dataclasses.MISSING
            if not optional and field.default_factory is dataclasses.MISSING:
                given.setdefault(field.name, None)
        context = SimpleNamespace(attn_metadata={layer.prefix: Mamba2AttentionMetadata(**given)})
        self.monkeypatch.setattr(self.module, "get_forward_context", lambda: context)
        self.monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: context)
        out = torch.zeros(projected.shape[0], HEADS * DIM)
        layer.conv_ssm_forward(projected.clone(), out)
        assert context.attn_metadata[layer.prefix].num_decodes == given["num_decodes"]
        return out

    def place(self, order: list[int], start: torch.Tensor, accepted: list[int]) -> None:
        blocks = [[self.first_block(slot)] for slot in order]
        table = torch.tensor(blocks, dtype=torch.int32)
        counts = torch.tensor(accepted, dtype=torch.int32)
        computed = self.certain + counts - 1
        place_rows(
            self.shared.rows.whole,
            BlockTables.build([table], by_slot=False),
            torch.tensor(order, dtype=torch.int32),
            start[: len(order) + 1],
            VllmCounts(counts, counts, computed),
            NONE,
            self.shared.ring_length,
        )
        self.certain[order] = computed[order] + 1

    def step(
        self, order: list[int], lengths: list[int], accepted: list[int], padded: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of both layers for a step of decode rows, `padded` ones behind them."""
        start = torch.tensor([0, *lengths] + [0] * padded, dtype=torch.int32).cumsum(0).int()
        tokens, rows = sum(lengths), len(order) + padded
        projected = torch.randn(tokens, self.width)
        wide = [[self.first_block(slot) + j for j in range(1 + self.drafts)] for slot in order]
        wide += [[0] * (1 + self.drafts)] * padded
        blocks = torch.tensor(wide, dtype=torch.int32)
        self.place(order, start, accepted)
        outputs = []
        for layer, table in zip(self.layers, (blocks, blocks[:, :1]), strict=True):
            outputs.append(
                self.forward(
                    layer,
                    projected,
                    num_prefills=0,
                    num_prefill_tokens=0,
                    num_decodes=rows,
                    num_decode_tokens=tokens,
                    num_reqs=rows,
                    state_indices_tensor_d=table,
                    query_start_loc_d=start,
                    num_accepted_tokens=torch.tensor(
                        [accepted[slot] for slot in order] + [1] * padded, dtype=torch.int32
                    ),
                    seq_lens=start[1:] - start[:-1],
                )
            )
        return outputs[0], outputs[1]

    def dummy(self, blocks: list[int]) -> None:
        """A step that is no request's, whose rows' tables name these blocks."""
        self.shared.rows.whole.slot.fill_(-1)
        count, tokens = len(blocks), len(blocks) * (1 + self.drafts)
        self.forward(
            self.layers[1],
            torch.randn(tokens, self.width),
            num_prefills=0,
            num_prefill_tokens=0,
            num_decodes=count,
            num_decode_tokens=tokens,
            num_reqs=count,
            state_indices_tensor_d=torch.tensor(blocks, dtype=torch.int32)[:, None],
            query_start_loc_d=torch.arange(count + 1, dtype=torch.int32) * (1 + self.drafts),
            num_accepted_tokens=torch.ones(count, dtype=torch.int32),
            seq_lens=torch.full((count,), 1 + self.drafts),
        )

    def compare(self, order: list[int], tolerance: float) -> None:
        """First columns: windows byte for byte, states within the tolerance."""
        blocks = [self.first_block(slot) for slot in order]
        (window, state), (ours, replayed) = self.caches
        assert torch.equal(ours[blocks], window[blocks])
        one, other = state[blocks].float(), replayed[blocks].float()
        torch.testing.assert_close(other, one, rtol=0, atol=tolerance * float(one.abs().max()))

    def spare_blocks_written(self) -> tuple[bool, ...]:
        spare = [b for b in range(1, len(self.caches[0][1])) if (b - 1) % (1 + self.drafts)]
        return tuple(bool(states[spare].abs().sum()) for _, states in self.caches)

    def spare_blocks(self) -> tuple[int, ...]:
        """Blocks for drafts that vLLM is asked for, had it a configuration with drafts."""
        self.config.speculative_config = SimpleNamespace(num_speculative_tokens=self.drafts)
        try:
            specs = [layer.get_kv_cache_spec(self.config) for layer in self.layers]
        finally:
            self.config.speculative_config = None
        return tuple(spec.num_speculative_blocks for spec in specs)

    def mixed(self, replays: bool) -> tuple[list[dict[str, Any]], torch.Tensor]:
        """What vLLM's code for prompts is handed, and the outputs, in a batch of two decode rows
        and two prompts."""
        seen: list[dict[str, Any]] = []

        def conv(x: torch.Tensor, *_: Any, **given: Any) -> torch.Tensor:
            names = ("cache_indices", "query_start_loc", "has_initial_state")
            seen.append({"x": x.clone()} | {name: given[name] for name in names})
            return x.clone()

        def scan(*vectors: torch.Tensor, **given: Any) -> torch.Tensor:
            inputs = {str(i): vector.clone() for i, vector in enumerate(vectors)}
            seen.append(inputs | {"cu_seqlens": given["cu_seqlens"], "seq_idx": given["seq_idx"]})
            seen[-1]["rows"] = tuple(given["out"].shape)
            given["out"].fill_(7.0)
            return torch.zeros(2, HEADS, DIM, STATE)

        self.monkeypatch.setattr(self.module, "causal_conv1d_fn", conv)
        self.monkeypatch.setattr(self.module, "mamba_chunk_scan_combined_varlen", scan)
        start = torch.tensor([0, 4, 5], dtype=torch.int32)
        self.place([0, 1], start, [1] * self.slots)
        torch.manual_seed(1)
        wide = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32)
        out = self.forward(
            self.layers[replays],
            torch.randn(25, self.width),
            num_prefills=2,
            num_prefill_tokens=20,
            num_decodes=2,
            num_decode_tokens=5,
            num_reqs=4,
            has_initial_states_p=torch.tensor([False, True]),
            query_start_loc_p=torch.tensor([0, 8, 20], dtype=torch.int32),
            state_indices_tensor_p=torch.tensor([9, 13]),
            state_indices_tensor_d=wide[:, :1] if replays else wide,
            query_start_loc_d=start,
            num_accepted_tokens=torch.ones(2, dtype=torch.int32),
            seq_lens=torch.tensor([4, 1, 8, 12]),
            prep_initial_states=True,
            chunk_size=8,
            seq_idx_p=torch.tensor([0, 1, 1]),
            cu_chunk_seqlen_p=torch.tensor([0, 8, 16, 20]),
            last_chunk_indices_p=torch.tensor([0, 2]),
        )
        return seen, out
