"""The replay layout: one live state per request, checkpoints stored on the way past positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.kernels.common.varlen import Cuts
from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.advance_replay import (
    IDLE,
    ReplayPlace,
    ReplayPositions,
    ReplaySlots,
    advance_replay,
)
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.state.boundaries import Bools, Ints, RetentionRule, next_retained
from hybrid_runtime.state.checks import Refusal, refuse
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.ledger import Ledger, StateColumns
from hybrid_runtime.state.placement import (
    Ints2D,
    Outcome,
    RepeatRange,
    StepPlan,
    pack_rows,
    pack_unfinished,
)
from hybrid_runtime.state.replay import arithmetic
from hybrid_runtime.state.replay.flush import Flusher, FlushInputs
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Checkpoint, Step, StepPositions

SAVES = slice(fields.FIRST_SAVE.value, fields.SECOND_COLUMN.value + 1)
"""Of a line: two pairs of position and column."""


class ReplayPolicy:
    """The forward pass itself folds, stores and writes. Besides it there are only the launch that
    places a step (`advance`) and, for requests that end, `Flusher`'s.

    The last column of a block table is the live one and always owned; a step's rows say at which
    positions they want checkpoints and in which of the other columns. A row starts from the state
    that its request wrote last: in the live column, or in a checkpoint's after a hit or if that
    step ended on a wanted position without drafts. Pending tokens are folded in from the ring of
    records, and the state is written again if the step's tokens would not fit there or a checkpoint
    is stored. Rows that do not decode (`StepRows.decodes`) can neither fold nor record: nothing may
    be pending, and they write in every step. A row never writes the checkpoint that it starts from,
    because it may not name that column.

    A text that has ended, as a negative count says, is not run by steps that are queued for it.

    Which wanted positions a step stores depends on the counts of the last one only, not on when
    the state was written.
    """

    ends_texts = True

    def __init__(
        self,
        layout: StateLayout,
        ledger: Ledger,
        device: torch.device,
        waits: Waits,
        depth: int,
        cuts: bool,
    ) -> None:
        def ints(value: int, size: int = ledger.max_rows) -> Tensor:
            return torch.full((size,), value, dtype=torch.int32, device=device)

        self.layout, self.columns, self._cuts = layout, 0, cuts
        self._live = -1  # column of the live states; known once tables are bound
        self._place = ReplayPlace(-1, layout.ring_tokens, layout.ring_length, cuts)
        self.slots = ReplaySlots(*(ints(v, ledger.max_requests) for v in (-1, -1, 0, 0)))
        self.outputs = out = ReplayPositions(*(ints(value) for value in IDLE))
        self.nowhere = ReplayPositions(*(ints(value) for value in IDLE))
        inside = Cuts(out.checkpoint_after, out.checkpoint_column) if cuts else None
        self.positions = StepPositions(out.read_column, out.offset, out.write_column, out, inside)
        self._ledger, self._waits, self._depth = ledger, waits, depth
        self._flusher: Flusher | None = None

    def bind(self, states: StateTable, columns: int, flush_inputs: FlushInputs | None) -> None:
        self.columns, self._live = columns, columns - 1
        self._place = self._place._replace(live_column=self._live)
        self._flusher = Flusher(
            self.layout.recurrence, states, flush_inputs, self._place, self._ledger,
            self._depth, self._waits, self.slots.computed.device, self.column,
            self.layout.ring_tokens,
        )  # fmt: skip

    def admit(self, slot: int) -> None:
        """A request begins in `slot`, whose rows have named nothing."""
        self._ledger.lines[slot, SAVES] = 0, -1, 0, -1

    def begun(self, rows: StepRows, packed: NDArray[np.int32]) -> None:
        """A step has begun with these lines: note what its rows named."""
        self._ledger.lines[rows.index, SAVES] = packed[: len(rows), SAVES]

    def kept(self, rows: StepRows) -> RetentionRule:
        return RetentionRule(0) if rows.saves is None else RetentionRule(0, *rows.saves[0].T)

    def inside(self, computed: Ints, certain: Ints, draft: Ints, kept: RetentionRule) -> Ints:
        return arithmetic.save_inside(computed, certain, draft, kept)

    def column(self, rows: StepRows, position: Ints) -> Ints:
        if rows.saves is None:
            return np.full(len(rows), -1)
        at, to = rows.saves
        return np.where(position == at[:, 0], to[:, 0], to[:, 1])

    def state_columns(self, rows: StepRows) -> StateColumns:
        certain, decodes = rows.certain_min, rows.folds
        if rows.saves is None or np.count_nonzero(rows.draft) == len(rows):
            return StateColumns(-1, -1, certain, decodes)
        at, to = rows.saves
        ends = (at > 0) & (at >= certain[:, None]) & (at <= rows.certain_max[:, None])
        left = np.where(ends & (rows.draft == 0)[:, None], to, -1)
        return StateColumns(left[:, 0], left[:, 1], certain, decodes)

    def pack(self, packed: NDArray[np.int32], rows: StepRows) -> tuple[StepPlan, int]:
        known = pack_rows(packed, self._ledger, rows)
        entry = packed[: len(rows)]
        entry[:, fields.DECODES] = decodes = rows.folds
        before = entry[:, SAVES].copy().reshape(-1, 2, 2)  # those of the slots' last rows
        entry[:, SAVES] = 0, -1, 0, -1
        if rows.saves is not None:
            at, to = rows.saves
            entry[:, SAVES] = np.stack([at, to], 2).reshape(-1, 4)
        last_draft, low = known[:, Ledger.LAST_DRAFT], self._first_stored(rows, known)
        high, kept = rows.certain_max, self.kept(rows)
        after_decode = known[:, Ledger.DECODED] > 0
        # Where `decodes` is None, a row without drafts writes, but may fold one token.
        scans = np.zeros(len(rows), bool) if rows.decodes is None else ~decodes
        refuse(
            self._ledger,
            rows,
            known,
            Refusal(scans & (rows.draft > 0), decodes, "decodes", "True in a row with drafts"),
            Refusal(
                decodes & (rows.draft == 0) & (rows.certain > 1),
                rows.scheduled,
                "scheduled",
                "1 in a row that decodes without drafts",
            ),
            Refusal(
                scans & after_decode,
                decodes,
                "decodes",
                "True in a row whose last step decoded, whose records only such a row can fold",
            ),
            Refusal(
                after_decode & (rows.certain > 1),
                rows.scheduled,
                "scheduled",
                "draft + 1 in a row whose last step decoded, which only such a step can fold",
            ),
            *self._misplaced(rows, known, before, low),
        )
        may_store = arithmetic.replay_candidates(
            low, rows.computed_max, high, rows.draft, last_draft, kept
        )
        if rows.padded:
            may_store &= rows.slot >= 0
        plan = StepPlan(self.state_columns(rows), may_store.nonzero()[0])
        return plan, pack_unfinished(packed, self._ledger, len(rows))

    def repeat(self, rows: StepRows, last: StepRows, kept: RetentionRule) -> StepPlan | None:
        high = rows.certain_max
        before = np.maximum(last.certain_min, rows.computed_min - rows.draft)
        low = self._lowest(rows, arithmetic.first_stored(before, rows.certain_min, rows.draft))
        may_store = arithmetic.replay_candidates(
            low, rows.computed_max, high, rows.draft, rows.draft, kept
        )
        return StepPlan(self.state_columns(rows), may_store.nonzero()[0])

    def advance(
        self,
        entries: Tensor,
        lines: int,
        num_rows: int,
        previous: Tensor,
        accepted: Tensor,
        placed: Tensor,
        slots: ReplaySlots,
        outputs: ReplayPositions,
    ) -> None:
        advance_replay(
            entries,
            lines,
            num_rows,
            slots,
            previous,
            accepted,
            placed,
            outputs,
            self._place,
        )

    def touched(
        self, rows: StepRows, computed: Ints, outputs: ReplayPositions
    ) -> tuple[Ints2D, Ints2D]:
        n = len(rows)
        reads = outputs.read_column[:n, None]
        writes = torch.stack([outputs.write_column, outputs.checkpoint_column], 1)[:n]
        return reads.cpu().numpy().astype(np.int64), writes.cpu().numpy().astype(np.int64)

    def prepare_settle(
        self,
        step: Step,
        computed: Ints,
        certain: Ints,
        current: Bools,
    ) -> Callable[[NDArray[np.int32]], Outcome | None]:
        table, rows, slot = self._ledger, step.rows, step.rows.index
        outcome: Outcome | None = None
        stores: Bools | bool = False
        column: Ints | int = self._live
        # A row with drafts stores no checkpoint unless it was a candidate.
        if len(step.candidates) or np.count_nonzero(rows.draft) < len(slot):
            kept = step.kept
            stored = arithmetic.replay_checkpoint(
                table.certain[slot], computed, certain, rows.draft, kept
            )
            stores = stored.position > 0
            ends = (rows.draft == 0) & kept.keeps(certain)
            column = np.where(ends, self.column(rows, certain), self._live)
            outcome = Outcome(stored.position, stores, stored.extra)
        writes = current & arithmetic.replay_writes(
            computed - table.written[slot], rows.scheduled, rows.folds,
            stores, table.held[slot] == self._live, self.layout.ring_tokens,
        )  # fmt: skip
        every = np.count_nonzero(current) == len(slot)

        def book(_: NDArray[np.int32]) -> Outcome | None:
            at = slot if every else slot[current]
            table.certain[at] = certain if every else certain[current]
            table.held[at] = column if every or isinstance(column, int) else column[current]
            table.written[slot[writes]] = certain[writes]
            return outcome

        return book

    def last_checkpoint(self, slot: int, queued: list[Step]) -> Checkpoint | None:
        return None if self._flusher is None else self._flusher.find(slot, queued)

    def last_state(self, slot: int, queued: list[Step], most: int) -> Checkpoint | None:
        return None if self._flusher is None else self._flusher.state(slot, queued, most)

    def flush(self, checkpoints: Sequence[Checkpoint], queued: Callable[[int], list[Step]]) -> int:
        return 0 if self._flusher is None else self._flusher.fold(checkpoints, queued)

    def compile_flush(self) -> None:
        if self._flusher is not None:
            self._flusher.prepare()

    def _first_stored(self, rows: StepRows, known: NDArray[np.int32]) -> Ints:
        last_draft = known[:, Ledger.LAST_DRAFT]
        before = np.maximum(known[:, Ledger.CERTAIN], rows.computed_min - last_draft)
        low = arithmetic.first_stored(before, rows.certain_min, last_draft)
        return self._lowest(rows, low)

    def _lowest(self, rows: StepRows, low: Ints) -> Ints:
        """Least position that a step may store, from that of rows that are not cut."""
        if not (self._cuts and rows.chunked):
            return low
        lowest: Ints = np.where(rows.draft == 0, np.minimum(low, rows.computed_min + 1), low)
        return lowest

    def repeat_range(self, rows: StepRows) -> RepeatRange:
        first = rows.computed_min
        low = np.maximum(first - rows.draft, 0) + 1  # drafts of the last step may be passed
        return RepeatRange.of(first, next_retained(low, self.kept(rows)) - rows.certain)

    def _misplaced(
        self, rows: StepRows, known: NDArray[np.int32], before: NDArray[np.int32], low: Ints
    ) -> list[Refusal]:
        """Refusals of `save_at` and `save_to`. before: what the slots' last rows named, int32
        `[rows, 2, 2]`, pairs of position and column. low: least position that each row may
        store."""
        if rows.saves is None:
            return []
        (at, to), k = rows.saves, self.layout.num_speculative_tokens
        named = at > 0
        both = named[:, 0] & named[:, 1]
        close = both & (abs(at[:, 0] - at[:, 1]) <= k)
        held = known[:, [Ledger.HELD_MIN, Ledger.HELD_MAX]]
        again = (np.stack([at, to], 2)[:, :, None] == before[:, None]).all(3).any(2)
        new = named & ~again & (at >= low[:, None])
        taken = (to[:, :, None] == held[:, None]) & new[:, :, None]
        outside = named & ((to < 0) | (to >= self._live))
        apart = f"two positions more than {k} tokens apart, or 0"
        read = "no column that may hold the state that the row starts from"
        return [
            Refusal(_any(at < 0), at, "save_at", "at least 0"),
            Refusal(close, at, "save_at", apart),
            Refusal(_any(outside), to, "save_to", f"in 0..{self._live - 1}"),
            Refusal(both & (to[:, 0] == to[:, 1]), to, "save_to", "two different columns"),
            Refusal(_any(taken), to, "save_to", read),
        ]


def _any(flags: Bools) -> Bools:
    """Whether some flag of each row is set, `[rows]`."""
    return np.logical_or.reduce(flags.reshape(len(flags), -1), 1)
