"""A runner of the stand-in whose layers replay: states are sums of integers, one per token, which
the specification of the state update adds up."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from helpers.vllm_stand_in import (
    SLOTS,
    TAPS,
    B,
    InputBatch,
    K,
    NewRequestData,
    VllmState,
    cache_groups,
    vllm_config,
)

from hybrid_runtime.integrations.vllm.mamba2_layers import MAMBA2
from hybrid_runtime.integrations.vllm.replay_layers import ReplayLayers
from hybrid_runtime.integrations.vllm.replay_state import ReplayStates
from hybrid_runtime.kernels.mamba2.naive import replay_update_reference
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.replay.rows import ReplayRows

HEADS, DIM, STATE = 2, 2, 4
ONE = math.log(math.e - 1)
"""Raw time step that softplus makes 1."""


class ReplayState(ReplayStates, VllmState):
    pass


def token(request: int, position: int) -> int:
    """What the token at a position adds to its request's state."""
    return (request * 31 + position * 17) % 13 + 1


def total(request: int, tokens: int) -> int:
    """A request's state after so many tokens."""
    return 1000 * request + sum(token(request, p) for p in range(tokens))


class ReplayEngine:
    """One runner: exact counts, block tables, and layers that replay. Takes the traffic of
    `vllm_stand_in.Traffic`, as its engines do.

    Rejected drafts add something else than the tokens that replace them; records of a slot that is
    taken anew are NaN. plain: rows without drafts run through vLLM's code for prompts.
    """

    def __init__(
        self,
        mode: str = "align",
        slot_tables: bool = True,
        retained: int | None = None,
        plain: bool = False,
    ) -> None:
        self.align, self.random = mode == "align", np.random.default_rng(0)
        self.plain, self.flushed = plain, 0
        self.config = vllm_config(cache_config__mamba_cache_mode=mode)
        self.groups = cache_groups(retained, num_speculative_blocks=0)
        self.layers = []
        for name, layer in self.config.compilation_config.static_forward_context.items():
            sizes = {"num_heads": HEADS, "n_groups": 1, "tp_size": 1}
            sizes |= {"head_dim": DIM, "ssm_state_size": STATE}
            conv1d = SimpleNamespace(weight=torch.zeros(1, 1, TAPS + 1))
            vars(layer).update(sizes, conv1d=conv1d, prefix=name, A=torch.full((HEADS,), -1e-38))
            self.layers.append(layer)
        kind = dataclasses.replace(MAMBA2, flushes_plain_rows=lambda: plain)
        # The cache's groups have layers in another order than the model.
        shared = ReplayLayers(kind, self.layers[::-1], SLOTS, K, torch.float32, "cpu")
        model = SimpleNamespace(replay_layers=shared)
        self.shared = shared
        self.state = ReplayState(self.config, model, None, torch.device("cpu"))
        self.computed = torch.zeros(SLOTS, dtype=torch.int32)
        self.inputs = (torch.empty(0), *(torch.zeros_like(x.table) for x in self.layers))
        self.boundaries = 0
        if slot_tables:
            tables = [None, *(SimpleNamespace(gpu=x.table) for x in self.layers)]
            both = SimpleNamespace(block_tables=tables, input_block_tables=self.inputs)
            self.state.initialize_kv_cache(self.groups, both)

    def admit(self, slot: int, request: int, computed: int) -> None:
        computed = computed if self.align else 0
        self.computed[slot] = computed
        for part in self.shared.rings:
            part[:, slot] = math.nan
        for layer in self.layers if computed else ():
            self.write(layer, slot, computed // B - 1, request, computed)
        self.state.add_request(slot, NewRequestData(computed))

    def write(self, layer: Any, slot: int, column: int, request: int, tokens: int) -> None:
        """A state that a prompt's kernels leave, or a prefix hit finds."""
        window, ssm = layer.kv_cache
        block = int(layer.table[slot, column])
        ssm[block] = total(request, tokens)
        window[block] = math.nan
        window[block, :TAPS] = inputs(request, tokens)

    def begin(self, batch: InputBatch) -> None:
        for target, layer in zip(self.inputs[1:], self.layers, strict=True):
            target[: batch.num_reqs] = layer.table[batch.idx_mapping_np]
        self.told = self.state.num_accepted_tokens_gpu[batch.idx_mapping].tolist()
        self.state.preprocess_state(batch, self.inputs, self.groups, self.computed)
        self.prepare(batch)

    def prepare(self, batch: Any) -> None:
        self.state.prepare_attn(batch, None, self.inputs, None, None, self.groups)

    def forward(self, batch: InputBatch) -> None:
        rows = list(zip(batch.idx_mapping_np, batch.requests, strict=True))
        for row, (slot, request) in enumerate(rows):
            s, d = int(batch.num_scheduled_tokens[row]), int(batch.num_draft_tokens_per_req[row])
            n, a = int(self.computed[slot]), int(self.state.num_accepted_tokens_gpu[slot])
            column = -(-(n + s) // B) - 1 if self.align else 0
            decodes = n > 0 and s == d + 1 and not (self.plain and d == 0)
            told = self.told[row]
            self.flushed += not decodes and told > 1
            tokens = [token(request, n + i) for i in range(s)]
            for i in range(max(int(batch.accepted[row]), 1), s if decodes else 0):
                tokens[i] = 50 + int(self.random.integers(50))
            for layer in self.layers:
                window, states = layer.kv_cache
                block = int(layer.table[slot, column])
                if self.plain and n and not decodes:
                    assert states[block].allclose(torch.tensor(float(total(request, n))))
                if n:
                    taps = window[block, a - 1 : a - 1 + TAPS]
                    assert torch.equal(taps, inputs(request, n)), (n, a, column)
                if decodes:
                    past = inputs(request, n)[1:]
                    window[block] = math.nan
                    window[block, : TAPS + d] = torch.cat([past, inputs_of(tokens)])
                    self.update(layer.replay_index, layer, row, tokens, d)
                else:
                    assert a == 1
                    self.write(layer, slot, column, request, n + s - d)

    def update(self, index: int, layer: Any, row: int, tokens: list[int], drafts: int) -> None:
        """The state update of one row."""
        step = self.shared.rows.whole
        ones = torch.ones(len(tokens), 1, STATE)
        one = step._replace(
            slot=step.slot[row : row + 1],
            draft=step.draft[row : row + 1],
            positions=type(step.positions)(*(part[row : row + 1] for part in step.positions)),
        )
        assert one.draft == drafts
        replay_update_reference(
            torch.tensor(tokens).float().view(-1, 1, 1).expand(-1, HEADS, DIM),
            torch.full((len(tokens), HEADS), ONE),
            self.shared.params[0][index],
            ones,
            ones,
            torch.zeros(HEADS),
            torch.zeros(HEADS),
            layer.kv_cache[1],
            Records(*self.shared.records[index]),
            ReplayRows(
                self.shared.tables[index],
                one.slot,
                torch.tensor([0, len(tokens)]),
                one.draft,
                one.positions,
            ),
            len(tokens),
        )

    def end(self, batch: InputBatch, accepted: list[int]) -> None:
        rejected = batch.num_draft_tokens_per_req - np.maximum(accepted, 1) + 1
        added = (batch.num_scheduled_tokens - rejected).astype(np.int32)
        certain = self.computed[batch.idx_mapping_np].numpy() + batch.num_scheduled_tokens
        certain = certain - batch.num_draft_tokens_per_req
        self.computed[batch.idx_mapping_np] += torch.from_numpy(added)
        self.state.postprocess_state(batch.idx_mapping, torch.tensor(accepted), self.computed)
        if not self.align:
            return
        for row, (slot, request) in enumerate(
            zip(batch.idx_mapping_np, batch.requests, strict=True)
        ):
            boundary = int(self.computed[slot]) // B * B
            if boundary >= certain[row] and self.keeps(boundary, int(batch.prefill_len_np[row])):
                self.boundaries += 1
                self.check_boundary(int(slot), request, boundary)

    def keeps(self, boundary: int, prompt: int) -> bool:
        every = self.groups.prefix_cache_retention_interval
        return every is None or boundary == prompt or bool(every and boundary % every == 0)

    def check_boundary(self, slot: int, request: int, boundary: int) -> None:
        """What a prefix hit there would find."""
        for layer in self.layers:
            window, ssm = layer.kv_cache
            block = int(layer.table[slot, boundary // B - 1])
            assert torch.equal(window[block, :TAPS], inputs(request, boundary))
            expected = torch.full_like(ssm[block], total(request, boundary))
            torch.testing.assert_close(ssm[block], expected, rtol=0, atol=0.01)

    def memory(self) -> torch.Tensor:
        parts = [t for layer in self.layers for t in layer.kv_cache]
        return torch.cat([t.flatten() for t in (*parts, *self.shared.rings)])


def inputs(request: int, tokens: int) -> torch.Tensor:
    """The convolution's inputs after so many tokens, `[TAPS, 4]`."""
    found = [token(request, p) if p >= 0 else 0 for p in range(tokens - TAPS, tokens)]
    return inputs_of(found)


def inputs_of(tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens).float()[:, None].expand(-1, 4)
