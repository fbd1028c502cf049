"""The replay layout: one live state per request, snapshots stored on the way past a boundary."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.advance_columns import Positions
from hybrid_runtime.kernels.step.advance_replay import (
    IDLE,
    ReplayPositions,
    ReplaySlots,
    advance_replay,
)
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.state import align
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.layouts.base import NO_ROWS, Settled
from hybrid_runtime.state.layouts.pack import Plan, Refusal, pack_rows, pack_unfinished, refuse
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.slot_table import Held, SlotTable
from hybrid_runtime.state.step import Step


class Replaying:
    """`LayoutPolicy` by which the forward pass itself folds, stores and writes. Besides it there
    are only the launch that places a step (`advance`) and, for requests that end, `Flusher`'s.

    The last column of a block table is the live one and always owned; the others hold snapshots. A
    row reads the state as its last step left it, in the live column or, if that step ended on a
    retained boundary without guesses, in the boundary's; `fold` recorded guesses and the row's own
    certain tokens go into it. Nobody can write what he reads: a snapshot's column is written once.
    """

    def __init__(
        self, layout: StateLayout, slot_table: SlotTable, max_requests: int, device: torch.device
    ) -> None:
        def ints(value: int) -> Tensor:
            return torch.full((max_requests,), value, dtype=torch.int32, device=device)

        self.layout = layout
        self.slots = ReplaySlots(ints(-1), ints(-1), ints(0), ints(0))
        self.outputs = ReplayPositions(*(ints(value) for value in IDLE))
        self.nowhere = ReplayPositions(*(ints(value) for value in IDLE))
        self.positions = Positions(
            self.outputs.read_column, self.outputs.fold, self.outputs.write_column
        )
        self.columns = 0
        self._slot_table = slot_table

    @property
    def _live(self) -> int:
        return self.columns - 1

    def bind(self, states: StateTable, columns: int) -> None:
        self.columns = columns

    def needed(self, rows: StepRows) -> tuple[align.Ints, align.Ints]:
        """The snapshot columns that this step may write or read (0, -1: none); the live column is
        needed besides."""
        known = self._slot_table.known.take(rows.slot, axis=0, mode="wrap")
        low = self._first_stored(rows, known)
        first, last = self._span(low, _certain(rows.computed_max, rows), self._kept(rows))
        held_min, held_max = known[:, SlotTable.HELD_MIN], known[:, SlotTable.HELD_MAX]
        held = (held_max >= 0) & (held_max < self._live)
        first = np.where(held & ((last < 0) | (held_min < first)), held_min, first)
        last = np.where(held & (held_max > last), held_max, last)
        padded = rows.slot < 0
        return np.where(padded, 0, first), np.where(padded, -1, last)

    def held(self, rows: StepRows) -> Held:
        certain = _certain(rows.computed_min, rows)
        if (rows.draft > 0).all():
            return Held(-1, -1, certain)
        first, last = self._span(certain, _certain(rows.computed_max, rows), self._kept(rows))
        direct = (rows.draft == 0) & (last >= 0)
        return Held(np.where(direct, first, -1), np.where(direct, last, -1), certain)

    def pack(self, packed: NDArray[np.int32], rows: StepRows) -> tuple[Plan, int]:
        """Fill `packed`: lines of this step's rows, then of the pending step's other slots."""
        known = pack_rows(packed, self._slot_table, rows)
        last_draft, low = known[:, SlotTable.LAST_DRAFT], self._first_stored(rows, known)
        high, kept = _certain(rows.computed_max, rows), self._kept(rows)
        refuse(
            self._slot_table,
            rows,
            known,
            Refusal(
                (last_draft > 0) & (rows.scheduled - rows.draft > 1),
                rows.scheduled,
                "scheduled",
                "draft + 1 in a row whose last step had drafts, which only such a step can fold",
            ),
            Refusal(
                self._far(low, high, kept),
                high,
                "computed_max + rows.scheduled - rows.draft",
                f"below any retained boundary that {self._live} snapshot columns do not reach",
            ),
        )
        may_store = align.replay_candidates(
            low, rows.computed_max, high, rows.draft, last_draft, kept
        )
        if rows.padded:
            may_store &= rows.slot >= 0
        plan = Plan(self.held(rows), may_store.nonzero()[0], NO_ROWS)
        return plan, pack_unfinished(packed, self._slot_table, len(rows))

    def repeat(
        self,
        rows: StepRows,
        last: StepRows,
        end_min: align.Ints,
        end_max: align.Ints,
        kept: align.Retention,
    ) -> NDArray[np.intp] | None:
        covered = np.maximum(_certain(last.computed_min, last), rows.computed_min - rows.draft)
        low = align.first_stored(covered, end_min - rows.draft, rows.draft)
        high = end_max - rows.draft
        if self._far(low, high, kept).any():
            return None
        may_store = align.replay_candidates(
            low, rows.computed_max, high, rows.draft, rows.draft, kept
        )
        return may_store.nonzero()[0]

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
        advance_replay(
            entries,
            lines,
            num_rows,
            self.slots,
            previous,
            accepted,
            placed,
            ReplayPositions._make(outputs),
            self.layout.block_size,
            self._live,
        )

    def before(self, entries: Tensor, plan: Plan) -> None:
        """Nothing: kernels take separate read and write columns."""

    def after(
        self,
        step: Step,
        accepted: Tensor,
        candidates: NDArray[np.intp],
        current: NDArray[np.bool_] | None,
        decided: bool,
        every_row: bool,
    ) -> None:
        """Nothing: the next step folds what was accepted."""

    def settle(
        self,
        step: Step,
        computed: align.Ints,
        certain: align.Ints,
        accepted: NDArray[np.int32],
        current: NDArray[np.bool_],
    ) -> Settled:
        slot, draft, covered = step.rows.slot, step.rows.draft, self._slot_table.covered
        kept = align.Retention(*step.retention.T)
        block = self.layout.block_size
        stored = align.replay_snapshot(covered[slot], computed, certain, draft, block, kept)
        covered[slot[current]] = certain[current]
        dead = (accepted == 0) & (draft > 0)
        return Settled(stored.boundary, stored.boundary > 0, stored.extra & ~dead)

    def _kept(self, rows: StepRows) -> align.Retention:
        if self._slot_table.uniform:
            return align.Retention(self.layout.block_size)
        lines = self._slot_table.lines.take(rows.slot, axis=0, mode="wrap")
        return align.Retention(*lines[:, fields.EVERY : fields.SECOND + 1].T)

    def _first_stored(self, rows: StepRows, known: NDArray[np.int32]) -> align.Ints:
        last_draft = known[:, SlotTable.LAST_DRAFT]
        covered = np.maximum(known[:, SlotTable.COVERED], rows.computed_min - last_draft)
        return align.first_stored(covered, _certain(rows.computed_min, rows), last_draft)

    def _span(
        self, low: align.Ints, high: align.Ints, kept: align.Retention
    ) -> tuple[align.Ints, align.Ints]:
        """First and last column of the retained boundaries in `low .. high`; 0, -1: none."""
        first, last = align.next_retained(low, kept), align.last_retained(high, kept)
        some, block = first <= high, self.layout.block_size
        return np.where(some, first // block - 1, 0), np.where(some, last // block - 1, -1)

    def _far(self, low: align.Ints, high: align.Ints, kept: align.Retention) -> align.Bools:
        """Rows that may store a snapshot for which there is no column."""
        most = self.columns * self.layout.block_size
        if not high.size or high.max() < most:
            return np.zeros(high.shape, bool)
        return align.next_retained(np.maximum(low, most), kept) <= high


def _certain(computed: align.Ints, rows: StepRows) -> align.Ints:
    return computed + rows.scheduled - rows.draft
