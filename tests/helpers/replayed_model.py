"""A model of any family run step by step in the replay layout, placed by a state manager."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from helpers.oracle import row_batch
from torch import Tensor

from hybrid_runtime.engine.config import EngineConfig
from hybrid_runtime.models.forward_batch import Caches, StatePositions
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.replay.flush import FlushInputs
from hybrid_runtime.state.rows import StepRows


class ReplayedModel:
    """Caches of NaN, and the steps that run on them.

    slots: places of requests; each begins with its first step.
    caches: all memory.
    """

    def __init__(
        self,
        model: HybridModel,
        num_draft: int,
        slots: int = 3,
        max_tokens: int = 320,
        heads: Sequence[Any] = (),
    ) -> None:
        self.model, self.computed, device = model, [0] * slots, model.device
        config = EngineConfig(drafter=None, block_size=16)
        if num_draft:
            config = EngineConfig(drafter="ngram", num_speculative_tokens=num_draft, block_size=16)
        self.layout = layout = config.layout(model)
        (group,) = model.groups
        self.manager = HybridStateManager(layout, slots, num_draft, device, prompt_cuts=True)
        columns = -(-max_tokens // 16)
        order = torch.randperm(slots * columns, generator=torch.Generator().manual_seed(0))
        table = order.reshape(slots, columns).to(device, torch.int32)
        state_table = torch.arange(3 * slots, dtype=torch.int32, device=device).reshape(slots, 3)

        def nan(*shape: int) -> Tensor:
            return torch.full(shape, float("nan"), dtype=model.dtype, device=device)

        networks = [model, *heads]
        kv = {
            layer: (
                nan(slots * columns, 16, *net.kv_shape),
                nan(slots * columns, 16, *net.kv_shape),
            )
            for net in networks
            for layer in net.kv_layers
        }
        states = {layer: layout.allocate(3 * slots, device) for layer in group.layers}
        for pair in states.values():
            for part in pair:
                part.fill_(float("nan"))
        records = layout.allocate_records(len(group.layers), slots, device)
        self.manager.bind(states, state_table, flush_inputs=FlushInputs(records, ()))
        self.caches = Caches(
            kv=kv,
            states={i: (layout.positions_first(c), m) for i, (c, m) in states.items()},
            kv_block_table=table,
            state_block_table=state_table,
            records={
                layer: tuple(part[i] for part in records) for i, layer in enumerate(group.layers)
            },
        )
        self._live: set[int] = set()

    def step(self, *rows: tuple[int, Tensor, int, int]) -> list[Tensor]:
        """Logits of each row's tokens.

        rows: (slot, tokens, drafts among them, how many of the drafts are accepted); -1 for drafts:
            the row is part of a prompt. Prompts come last.
        """
        for slot, *_ in rows:
            if slot not in self._live:
                self.manager.admit(slot)
                self._live.add(slot)
        computed = [self.computed[row[0]] for row in rows]
        scheduled = [len(row[1]) for row in rows]
        drafts = [max(row[2], 0) for row in rows]
        decodes = [row[2] >= 0 for row in rows]
        device = self.model.device
        batch = row_batch(
            [(row[0], n, s) for row, n, s in zip(rows, computed, scheduled, strict=True)],
            num_update_rows=sum(decodes),
        )
        batch = replace(
            batch,
            slot=batch.slot.to(device),
            cu_seqlens=batch.cu_seqlens.to(device),
            computed=batch.computed.to(device),
        )
        step = self.manager.begin_step(
            StepRows([row[0] for row in rows], computed, computed, scheduled, drafts, decodes)
        )
        at = step.positions.first(len(rows))
        positions = StatePositions(
            draft=torch.tensor(drafts, dtype=torch.int32, device=device),
            read_column=at.read_column,
            read_offset=at.read_offset,
            write_column=at.write_column,
            replay=at.replay,
            cuts=at.cuts,
            ring_length=self.layout.ring_length,
        )
        tokens = torch.cat([row[1] for row in rows]).to(device)
        hidden = self.model(tokens, batch, positions, self.caches)
        accepted = [1 + row[3] if row[2] >= 0 else 0 for row in rows]
        counts = torch.tensor(accepted, dtype=torch.int32, device=device)
        self.manager.end_step(step, counts)
        for row, s, d in zip(rows, scheduled, drafts, strict=True):
            self.computed[row[0]] += s - d + row[3]
        return list(self.model.logits(hidden).cpu().split(scheduled))
