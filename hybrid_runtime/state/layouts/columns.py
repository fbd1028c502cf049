"""The columns layout: a state for every guess that may be accepted, each in a column of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.transfer import Staging
from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.advance_columns import Positions, SlotState, advance
from hybrid_runtime.kernels.step.state_copy import compile_moves, postcopy, precopy
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.state import align
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.layouts.base import NO_ROWS, Settled
from hybrid_runtime.state.layouts.pack import Plan, pack_step
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.slot_table import Held, SlotTable
from hybrid_runtime.state.stats import Stats
from hybrid_runtime.state.step import Step


class Columns:
    """`LayoutPolicy` that copies accepted states to where the next step or a hit looks for them."""

    def __init__(
        self,
        layout: StateLayout,
        slot_table: SlotTable,
        max_requests: int,
        device: torch.device,
        in_place: bool,
        staging: Staging,
        stats: Stats,
        trace: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        n = max_requests
        self.layout, self.in_place, self._max_requests = layout, in_place, n
        self.slots = SlotState(ints(n), ints(n), ints(n))
        self.outputs = self.positions = Positions(ints(n), ints(n), ints(n))
        self.nowhere = Positions(ints(n), ints(n), ints(n))
        self.columns = 0
        self._moves = ints(3, n)
        self._slot_table, self._staging, self._stats, self._trace = (
            slot_table,
            staging,
            stats,
            trace,
        )
        self._states: StateTable | None = None

    def bind(self, states: StateTable, columns: int) -> None:
        self._states, self.columns = states, columns
        if states.addresses.is_cuda:
            compile_moves(states, self._max_requests, self.layout.block_size, self.in_place)

    def needed(self, rows: StepRows) -> tuple[align.Ints, align.Ints]:
        held = np.where(rows.slot >= 0, self._slot_table.known[rows.slot, SlotTable.HELD_MIN], -1)
        low, high, _ = self.held(rows)
        return align.columns_held(
            held, np.asarray(low), np.asarray(high), self.layout.num_speculative_tokens
        )

    def held(self, rows: StepRows) -> Held:
        block = self.layout.block_size
        return Held(
            align.running_column(rows.computed_min + rows.scheduled, block),
            align.running_column(rows.computed_max + rows.scheduled, block),
            0,
        )

    def pack(self, packed: NDArray[np.int32], rows: StepRows) -> tuple[Plan, int]:
        return pack_step(packed, self._slot_table, rows, self.layout, self.columns, self.in_place)

    def repeat(
        self,
        rows: StepRows,
        last: StepRows,
        end_min: align.Ints,
        end_max: align.Ints,
        kept: align.Retention,
    ) -> NDArray[np.intp] | None:
        most = (self.columns - self.layout.num_speculative_tokens) * self.layout.block_size
        if end_max.max() > most:
            return None
        certain_max = end_max - rows.draft
        certain_min = certain_max if end_min is end_max else end_min - rows.draft
        if align.postcopy_candidates(certain_min, certain_max, rows.draft, kept).any():
            return None
        return NO_ROWS

    def advance(
        self,
        entries: Tensor,
        lines: int,
        num_rows: int,
        previous: Tensor,
        accepted: Tensor,
        placed: Tensor,
        outputs: tuple[Tensor, ...],
    ) -> None:
        advance(
            entries,
            lines,
            num_rows,
            self.slots,
            previous,
            accepted,
            placed,
            Positions._make(outputs),
            self._moves,
            self.layout.block_size,
            self.in_place,
        )

    def before(self, entries: Tensor, plan: Plan) -> None:
        if len(plan.moving):
            assert self._states is not None
            with self._trace("precopy"):
                precopy(self._states, entries, self._moves, len(plan.moving))
            self._stats.copy_launches += 1

    def after(
        self,
        step: Step,
        accepted: Tensor,
        candidates: NDArray[np.intp],
        current: NDArray[np.bool_] | None,
        decided: bool,
        every_row: bool,
    ) -> None:
        if decided:
            assert step.copied is not None
            candidates = step.copied
        count = len(step.rows) if every_row else len(candidates)
        if not count:
            return
        if decided or current is not None:
            self._relist(step, candidates, current)
        assert self._states is not None
        block = self.layout.block_size
        with self._trace("postcopy"):
            postcopy(self._states, step.entries, step.placed, accepted, count, every_row, block)
        self._stats.copy_launches += 1

    def settle(
        self,
        step: Step,
        computed: align.Ints,
        certain: align.Ints,
        accepted: NDArray[np.int32],
        current: NDArray[np.bool_],
    ) -> Settled:
        rows, block = step.rows, self.layout.block_size
        kept = align.Retention(*step.retention.T)
        column = align.running_column(computed + rows.scheduled, block)
        move = align.postcopy(certain, rows.draft, accepted, column, block, kept)
        boundary = (certain + np.maximum(accepted, 1) - 1) // block * block
        complete = (boundary >= certain) & kept.keeps(boundary)
        return Settled(boundary, complete, move.acts)

    def _relist(
        self, step: Step, candidates: NDArray[np.intp], current: NDArray[np.bool_] | None
    ) -> None:
        """Send a step's entries again, with other candidates and without rows that have gone.

        The block table of a gone row may belong to the slot's next tenant by now.
        """
        index, packed = self._staging.take()
        n = len(step.rows)
        packed[:n] = step.packed[:n]
        if current is not None:
            packed[:n][~current, fields.SLOT] = -1
        packed[: len(candidates), fields.CANDIDATE] = candidates
        step.entries, step.packed = self._staging.upload(index, n), packed
        self._stats.uploads += 1
