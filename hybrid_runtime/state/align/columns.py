"""The columns layout: a state for every draft that may be accepted, each in a column of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.transfer import Staging
from hybrid_runtime.kernels.common.varlen import Cuts
from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.advance_columns import IDLE, Positions, SlotState, advance
from hybrid_runtime.kernels.step.state_copy import compile_moves, postcopy, precopy
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.state.align import arithmetic
from hybrid_runtime.state.boundaries import (
    Bools,
    Ints,
    RetentionRule,
    blocks_below,
    next_retained,
)
from hybrid_runtime.state.checks import Refusal, refuse
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.ledger import Ledger, StateColumns
from hybrid_runtime.state.placement import (
    NO_ROWS,
    BlockDemand,
    Ints2D,
    Outcome,
    RepeatRange,
    StepPlan,
    pack_rows,
    pack_unfinished,
    unfiled_column,
)
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.stats import Stats
from hybrid_runtime.state.step import Step, StepPositions


class ColumnsPolicy:
    """Copies accepted states to where the next step or a prefix hit looks for them."""

    ends_texts = False

    def __init__(
        self,
        layout: StateLayout,
        ledger: Ledger,
        device: torch.device,
        in_place: bool,
        cuts: bool,
        staging: Staging,
        stats: Stats,
    ) -> None:
        slots, n = ledger.max_requests, ledger.max_rows

        def ints(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        self.layout, self.in_place, self.columns = layout, in_place, 0
        self._cuts = cuts
        self.slots = SlotState(ints(slots), ints(slots), ints(slots))
        self.outputs = Positions(*(ints(n).fill_(idle) for idle in IDLE))
        self.nowhere = Positions(*(ints(n).fill_(idle) for idle in IDLE))
        read, offset, write, after, column = self.outputs
        inside = Cuts(after, column) if cuts else None
        self.positions = StepPositions(read, offset, write, cuts=inside)
        self._moves = ints(3, n)
        self._ledger, self._staging, self._stats = ledger, staging, stats
        self._states: StateTable | None = None
        self._bounds: tuple[StepRows, Ints, Ints] | None = None

    def bind(self, states: StateTable, columns: int) -> None:
        self._states, self.columns = states, columns
        if states.addresses.is_cuda:
            most = self._ledger.max_rows
            compile_moves(states, most, self.layout.block_size, self.in_place)

    def block_demand(self, rows: StepRows, known: Ints | None) -> BlockDemand:
        """A row may write the column below its running one (a checkpoint's), the running one,
        and one per draft. A row that runs through several blocks at once reads the column that it
        ran in last, and those between stay empty."""
        low, high = self._columns(rows)
        booked = self._ledger.known.take(rows.index, axis=0, mode="wrap")
        first, last = arithmetic.columns_held(booked[:, Ledger.HELD_MIN], low, high, rows.draft)
        fresh = np.maximum(low - 1, 0)
        read = booked[:, Ledger.HELD_MAX] + booked[:, Ledger.LAST_DRAFT]
        kept = np.maximum(last, read)
        if known is not None:
            k, block = self.layout.num_speculative_tokens, self.layout.block_size
            first = np.minimum(first, unfiled_column(known, k, block))
        if rows.padded:
            live = rows.slot >= 0
            first, fresh = first * live, fresh * live
            last, kept = np.where(live, last, -1), np.where(live, kept, -1)
        return BlockDemand(first, fresh, last, kept)

    def pack(self, packed: NDArray[np.int32], rows: StepRows) -> tuple[StepPlan, int]:
        if rows.saves is not None:
            raise ValueError(
                f"rows.save_at is {rows.save_at}; it must be None in the columns layout, where "
                "retain() says which boundaries are kept"
            )
        return pack_step(packed, self._ledger, rows, self.layout, self.columns, self.in_place)

    def state_columns(self, rows: StepRows) -> StateColumns:
        return StateColumns(*self._columns(rows))

    def kept(self, rows: StepRows) -> RetentionRule:
        return self._ledger.kept(rows.index)

    def inside(self, computed: Ints, certain: Ints, draft: Ints, kept: RetentionRule) -> Ints:
        return arithmetic.prompt_cut(computed, certain, draft, self.layout.block_size, kept)

    def column(self, rows: StepRows, position: Ints) -> Ints:
        return position // self.layout.block_size - 1

    def repeat_range(self, rows: StepRows) -> RepeatRange:
        """Each row stays within the block that it is in, with what it folds and runs."""
        block = self.layout.block_size
        start = blocks_below(rows.computed_min, block) * block
        return RepeatRange.of(start + rows.draft, start + block - rows.scheduled)

    def repeat(self, rows: StepRows, last: StepRows, kept: RetentionRule) -> StepPlan | None:
        end_max = rows.computed_max + rows.scheduled
        most = (self.columns - self.layout.num_speculative_tokens) * self.layout.block_size
        if np.count_nonzero(end_max > most):
            return None
        low, high = rows.certain_min, rows.certain_max
        if np.count_nonzero(arithmetic.postcopy_candidates(low, high, rows.draft, kept)):
            return None
        return StepPlan(self.state_columns(rows), NO_ROWS)

    def advance(
        self,
        entries: Tensor,
        lines: int,
        num_rows: int,
        previous: Tensor,
        accepted: Tensor,
        placed: Tensor,
        slots: SlotState,
        outputs: Positions,
    ) -> None:
        advance(
            entries,
            lines,
            num_rows,
            slots,
            previous,
            accepted,
            placed,
            outputs,
            self._moves,
            self.layout.block_size,
            self.in_place,
            self._cuts,
        )

    def touched(self, rows: StepRows, computed: Ints, outputs: Positions) -> tuple[Ints2D, Ints2D]:
        """In-place rows that move read where the move reads. Written are the running column, one
        per draft, and where a checkpoint may be copied to."""
        n, block = len(rows), self.layout.block_size
        read, offset, write, _, cut = torch.stack(outputs).cpu().numpy()[:, :n].astype(np.int64)
        if self.in_place:
            source, shift, target = self._moves.cpu().numpy()[:, :n]
            read = np.where(target >= 0, source, read)
            offset = np.where(target >= 0, shift, offset)
        ahead = np.arange(self.layout.num_speculative_tokens + 1)
        writes = np.where(
            (write[:, None] >= 0) & (ahead <= rows.draft[:, None]), write[:, None] + ahead, -1
        )
        kept = self.kept(rows)
        certain = computed + rows.scheduled - rows.draft
        boundary = next_retained(certain, kept)
        copies = (write >= 0) & (rows.draft > 0) & (boundary <= certain + rows.draft)
        copied = np.where(copies, boundary // block - 1, -1)
        reads = np.stack([read, np.where(read >= 0, read + offset, -1)], 1)
        return reads, np.concatenate([writes, copied[:, None], cut[:, None]], 1)

    def precopy(self, entries: Tensor, count: int) -> None:
        """Move the states that may have to before the forward pass: `count` rows, as the entries
        list them."""
        assert self._states is not None
        precopy(self._states, entries, self._moves, count)
        self._stats.copy_launches += 1

    def postcopy(
        self,
        step: Step,
        accepted: Tensor,
        candidates: NDArray[np.intp],
        current: NDArray[np.bool_] | None,
        decided: bool,
        every_row: bool,
    ) -> None:
        """Copy boundary states once the counts are there.

        accepted: int32 `[rows]` or longer, on the device.
        candidates: rows that may need a copy.
        current: `[rows]`, whose requests still hold their slots; None: all do.
        decided: the host knows the counts, and `step.copied` are the rows.
        every_row: launch for all rows, candidates or not.
        """
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
        postcopy(self._states, step.entries, step.placed, accepted, count, every_row, block)
        self._stats.copy_launches += 1

    def prepare_settle(
        self,
        step: Step,
        computed: Ints,
        certain: Ints,
        current: Bools,
    ) -> Callable[[NDArray[np.int32]], Outcome]:
        draft, kept, block = step.rows.draft, step.kept, self.layout.block_size
        column = arithmetic.running_column(computed + step.rows.scheduled, block)

        def outcome(accepted: NDArray[np.int32]) -> Outcome:
            move = arithmetic.postcopy(certain, draft, accepted, column, block, kept)
            boundary = (certain + np.maximum(accepted, 1) - 1) // block * block
            return Outcome(boundary, (boundary >= certain) & kept.keeps(boundary), move.acts)

        return outcome

    def _columns(self, rows: StepRows) -> tuple[Ints, Ints]:
        """Bounds on the running column of each row; kept for the rows asked for last."""
        if self._bounds is None or self._bounds[0] is not rows:
            block = self.layout.block_size
            low = high = arithmetic.running_column(rows.computed_min + rows.scheduled, block)
            if not rows.exact_counts:
                high = arithmetic.running_column(rows.computed_max + rows.scheduled, block)
            self._bounds = rows, low, high
        return self._bounds[1:]

    def _relist(
        self, step: Step, candidates: NDArray[np.intp], current: NDArray[np.bool_] | None
    ) -> None:
        """Send a step's lines again, with other candidates and without rows whose requests have
        gone: the block table of such a row may belong to the slot's next tenant by now."""
        index, packed = self._staging.take()
        n = len(step.rows)
        packed[:n] = step.packed[:n]
        if current is not None:
            packed[:n][~current, fields.SLOT] = -1
        packed[: len(candidates), fields.CANDIDATE] = candidates
        step.entries, step.packed = self._staging.upload(index, n), packed


def pack_step(
    packed: NDArray[np.int32],
    ledger: Ledger,
    rows: StepRows,
    layout: StateLayout,
    columns: int,
    in_place: bool,
) -> tuple[StepPlan, int]:
    """Fill `packed` `[lines, ENTRY_FIELDS]` with this step's rows and candidates, then with the
    slots of the pending step that are not among them; the plan, and the number of lines used.

    Raises `ValueError` where a row contradicts its slot; nothing but `packed` has changed then.
    """
    n, slot = len(rows), rows.slot
    entry, known = packed[:n], pack_rows(packed, ledger, rows)
    column_min = arithmetic.running_column(rows.computed_min + rows.scheduled, layout.block_size)
    end_max = rows.computed_max + rows.scheduled
    column_max = (
        column_min if rows.exact_counts else arithmetic.running_column(end_max, layout.block_size)
    )
    _check_slots(ledger, rows, known, column_max, end_max, columns, layout.num_speculative_tokens)

    kept = ledger.kept(rows.index)
    may_act = arithmetic.postcopy_candidates(rows.certain_min, rows.certain_max, rows.draft, kept)
    live = None
    if rows.padded:
        live = slot >= 0
        may_act &= live
    candidates = may_act.nonzero()[0]
    moving = candidates[:0]
    if in_place:
        shifts: NDArray[np.bool_] | None = None
        if rows.decodes is not None:
            entry[:, fields.DECODES] = rows.decodes
            shifts = ~rows.decodes & (known[:, Ledger.LAST_DRAFT] > 0)
        held_min, held_max = known[:, Ledger.HELD_MIN], known[:, Ledger.HELD_MAX]
        may_move = arithmetic.precopy_candidates(column_min, column_max, held_min, held_max, shifts)
        moving = np.flatnonzero(may_move if live is None else may_move & live)
    if len(candidates):
        packed[: len(candidates), fields.CANDIDATE] = candidates
    if len(moving):
        packed[: len(moving), fields.PRECANDIDATE] = moving
    plan = StepPlan(StateColumns(column_min, column_max), candidates, moving)
    return plan, pack_unfinished(packed, ledger, n)


def _check_slots(
    ledger: Ledger,
    rows: StepRows,
    known: NDArray[np.int32],
    column_max: NDArray[Any],
    end_max: NDArray[Any],
    columns: int,
    num_draft: int,
) -> None:
    far = column_max + num_draft >= columns
    fits = f"a position whose column and drafts fit {columns} block-table columns"
    refusals = [Refusal(far, end_max, "computed_max + rows.scheduled", fits)]
    if rows.chunked:
        mixed = (rows.draft > 0) & (rows.certain > 1)
        mixed &= column_max > known[:, Ledger.HELD_MIN] + 1
        must = "draft + 1 in a row with drafts that runs more than one column above its last step"
        refusals.append(Refusal(mixed, rows.scheduled, "scheduled", must))
    refuse(ledger, rows, known, *refusals)
