"""The replay layout: one live state per request, checkpoints stored on the way past a boundary."""

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
from hybrid_runtime.state.boundaries import (
    Bools,
    Ints,
    RetentionRule,
    blocks_below,
    last_retained,
    next_retained,
)
from hybrid_runtime.state.checks import Refusal, refuse
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.ledger import Ledger, StateColumns
from hybrid_runtime.state.placement import (
    BlockDemand,
    Ints2D,
    Outcome,
    StepPlan,
    pack_rows,
    pack_unfinished,
    unfiled_column,
)
from hybrid_runtime.state.replay import arithmetic
from hybrid_runtime.state.replay.flush import Flusher, FlushInputs
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Checkpoint, Step, StepPositions


class ReplayPolicy:
    """The forward pass itself folds, stores and writes. Besides it there are only the launch that
    places a step (`advance`) and, for requests that end, `Flusher`'s.

    The last column of a block table is the live one and always owned; the others hold checkpoints.
    A row starts from the state that its steps have written last: in the live column, or in a
    boundary's if that step ended on a retained one without drafts. Pending tokens are folded in
    from the ring of records, and it is written again when the step's tokens would not fit there or
    a checkpoint is stored. Rows that do not decode (`StepRows.decodes`) can neither fold nor
    record: nothing may be pending, and they write in every step. No row can write what another
    one reads, because a checkpoint's column is written once.

    Which boundaries a step may store depends on the counts of the last one only, not on when the
    state was written.
    """

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
        self._place = ReplayPlace(
            layout.block_size, -1, layout.ring_tokens, layout.ring_length, cuts
        )
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
            self._depth, self._waits, self.slots.computed.device,
        )  # fmt: skip

    def check_hit(self, computed: int, column: int) -> None:
        """A column of a boundary that is still ahead gets that boundary's checkpoint, which is
        stored before the step has read all of the state it starts from."""
        passed = computed // self.layout.block_size
        if not (column < passed or column == self._live):
            raise ValueError(
                f"hit_column is {column} with computed={computed}; it must be the live column "
                f"({self._live}) or below {passed}, because later checkpoints go to those between"
            )

    def block_demand(self, rows: StepRows, known: Ints | None) -> BlockDemand:
        """The checkpoints that a row may write or read; the live column comes besides. All that the
        bounds leave open may be written: exact ones leave a single boundary, and one at a cut."""
        booked = self._ledger.known.take(rows.index, axis=0, mode="wrap")
        low = self._first_stored(rows, booked)
        fresh, last = self._span(low, rows.certain_max, self._ledger.kept(rows.index))
        held_min, held_max = booked[:, Ledger.HELD_MIN], booked[:, Ledger.HELD_MAX]
        held = (held_max >= 0) & (held_max < self._live)
        first = np.where(held & ((last < 0) | (held_min < fresh)), held_min, fresh)
        kept = np.where(held & (held_max > last), held_max, last)
        if known is not None:
            k, block = self.layout.num_speculative_tokens, self.layout.block_size
            unfiled = unfiled_column(known, k, block)
            first = np.where(kept < 0, unfiled, np.minimum(first, unfiled))
            kept = np.maximum(kept, blocks_below(rows.computed_max, block))
        if rows.padded:
            live = rows.slot >= 0
            first, fresh = first * live, fresh * live
            last, kept = np.where(live, last, -1), np.where(live, kept, -1)
        return BlockDemand(first, fresh, last, kept)

    def state_columns(self, rows: StepRows) -> StateColumns:
        certain, decodes = rows.certain_min, decoding(rows)
        if np.count_nonzero(rows.draft) == len(rows):
            return StateColumns(-1, -1, certain, decodes)
        first, last = self._span(certain, rows.certain_max, self._ledger.kept(rows.index))
        direct = (rows.draft == 0) & (last >= 0)
        low, high = np.where(direct, first, -1), np.where(direct, last, -1)
        return StateColumns(low, high, certain, decodes)

    def pack(self, packed: NDArray[np.int32], rows: StepRows) -> tuple[StepPlan, int]:
        known = pack_rows(packed, self._ledger, rows)
        packed[: len(rows), fields.DECODES] = decodes = decoding(rows)
        last_draft, low = known[:, Ledger.LAST_DRAFT], self._first_stored(rows, known)
        high, kept = rows.certain_max, self._ledger.kept(rows.index)
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
            Refusal(
                self._far(low, high, kept),
                high,
                "computed_max + rows.scheduled - rows.draft",
                f"below any retained boundary that {self._live} checkpoint columns do not reach",
            ),
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
        if np.count_nonzero(self._far(low, high, kept)):
            return None
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
            kept, block = step.kept, self.layout.block_size
            stored = arithmetic.replay_checkpoint(
                table.certain[slot], computed, certain, rows.draft, block, kept
            )
            stores = stored.boundary > 0
            ends = (rows.draft == 0) & kept.keeps(certain)
            column = np.where(ends, certain // block - 1, self._live)
            outcome = Outcome(stored.boundary, stores, stored.extra)
        writes = current & arithmetic.replay_writes(
            computed - table.written[slot], rows.scheduled, decoding(rows),
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

    def last_checkpoint(self, slot: int, step: Step | None) -> Checkpoint | None:
        return None if self._flusher is None else self._flusher.find(slot, step)

    def flush(self, checkpoints: Sequence[Checkpoint]) -> int:
        return 0 if self._flusher is None else self._flusher.fold(checkpoints)

    def compile_flush(self) -> None:
        if self._flusher is not None:
            self._flusher.prepare()

    def _first_stored(self, rows: StepRows, known: NDArray[np.int32]) -> Ints:
        last_draft = known[:, Ledger.LAST_DRAFT]
        before = np.maximum(known[:, Ledger.CERTAIN], rows.computed_min - last_draft)
        low = arithmetic.first_stored(before, rows.certain_min, last_draft)
        return self._lowest(rows, low)

    def _lowest(self, rows: StepRows, low: Ints) -> Ints:
        """Least boundary that a step may store, from that of rows that are not cut."""
        if not (self._cuts and rows.chunked):
            return low
        block = self.layout.block_size
        before = np.maximum(rows.certain_min - 1, 0)
        inside = np.maximum(blocks_below(before, block) * block, rows.computed_min + 1)
        lowest: Ints = np.where(rows.draft == 0, np.minimum(low, inside), low)
        return lowest

    def _span(self, low: Ints, high: Ints, kept: RetentionRule) -> tuple[Ints, Ints]:
        """First and last column of the retained boundaries in `low .. high`; 0, -1: none."""
        first, last = next_retained(low, kept), last_retained(high, kept)
        some, block = first <= high, self.layout.block_size
        return np.where(some, first // block - 1, 0), np.where(some, last // block - 1, -1)

    def _far(self, low: Ints, high: Ints, kept: RetentionRule) -> Bools:
        """Rows that may store a checkpoint for which there is no column."""
        most = self.columns * self.layout.block_size
        far = high >= most
        if not np.count_nonzero(far):
            return far
        return next_retained(np.maximum(low, most), kept) <= high


def decoding(rows: StepRows) -> Bools:
    """Rows that fold what is pending and record their own tokens, bool `[rows]`."""
    return rows.draft > 0 if rows.decodes is None else rows.decodes
