"""Last checkpoints of requests that leave their slots, in the replay layout.

The last tokens of a request may not be in its state yet: their records are in the ring. A wanted
position among the drafts that the last step accepted is stored by the next one; if none comes, the
state there is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Staging
from hybrid_runtime.kernels.recurrence import Recurrence
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.advance_replay import ReplayPlace, ReplayPositions
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.state.boundaries import Ints, RetentionRule
from hybrid_runtime.state.ledger import Ledger
from hybrid_runtime.state.replay import arithmetic
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Checkpoint, Step


class FlushInputs(NamedTuple):
    """What `flush` reads besides the states, layers in the order of the states that are bound.

    records: of all layers and slots, as `StateLayout.allocate_records` makes them.
    params: `[layers, *]` each, what the recurrence says that it needs of each layer's weights.
    seed: int32 `[slots]`, of each slot's stochastic rounding; None: states are rounded to nearest.
    """

    records: tuple[Tensor, ...]
    params: tuple[Tensor, ...]
    seed: Tensor | None = None


class LiveState(NamedTuple):
    """A request's state once all that is queued has run.

    certain: tokens that are in it whatever is accepted, the fewest that it can be folded to.
    computed: the most.
    written: those in memory. column: where.
    """

    certain: int
    computed: int
    written: int
    column: int


class Flusher:
    """Finds last checkpoints and last states from exact counts, and folds those that no step is
    going to store. column: see `LayoutPolicy.column`.

    A checkpoint is folded into the live block. The request needs that no longer, so no block has to
    be allocated when blocks may be scarce.
    """

    def __init__(
        self,
        recurrence: Recurrence,
        table: StateTable,
        source: FlushInputs | None,
        place: ReplayPlace,
        ledger: Ledger,
        depth: int,
        waits: Waits,
        device: torch.device,
        column: Callable[[StepRows, Ints], Ints],
        ring_tokens: int,
    ) -> None:
        slots = ledger.max_requests
        self._recurrence, self._table, self._source = recurrence, table, source
        self._live, self._ring = place.live_column, place.ring
        self._cuts, self._column, self._ring_tokens = place.cuts, column, ring_tokens
        self._ledger = ledger
        self._slot = torch.arange(slots, dtype=torch.int32, device=device)
        self._read = torch.full_like(self._slot, self._live)
        # By row: slots. By slot: tokens to fold and their index in the ring, the accepted drafts
        # among them, and tokens in the state after them.
        self._staging = Staging(5, slots, depth, device, waits)

    def find(self, slot: int, queued: list[Step]) -> Checkpoint | None:
        """The checkpoint that the counts known of `slot` lead to; else the last one that was
        stored, which a strategy that reads counts early may not have published yet; None: there
        is neither.

        queued: outstanding steps that have a row of the request, oldest first.
        """
        step = queued[0] if queued else None
        ledger, at = self._ledger, np.array([slot])
        before, computed = ledger.certain[at], ledger.computed[at]
        certain, draft = computed, computed * 0
        line, column = ledger.lines[at], self._live
        kept = RetentionRule(0, line[:, fields.FIRST_SAVE], line[:, fields.SECOND_SAVE])
        if step is not None:
            row = np.flatnonzero(step.rows.slot == slot)
            draft = step.rows.draft[row]
            certain = computed + step.rows.scheduled[row] - draft
            kept = step.kept.of(row)
        position = arithmetic.replay_checkpoint(before, computed, certain, draft, kept).position
        if self._cuts and not position[0]:
            position = arithmetic.save_inside(computed, certain, draft, kept)
        if step is not None:
            column = int(self._column(step.rows, position)[row[0]])
        wanted = int(position[0])
        possible = self._source is not None if step is None else step.ended
        if wanted <= before[0] or not possible:
            wanted, column = ledger.stored[slot].tolist()
        return Checkpoint(slot, int(ledger.generation[slot]), wanted, column) if wanted else None

    def state(self, slot: int, queued: list[Step], most: int) -> Checkpoint | None:
        """The state after as many of the first `most` tokens as can be, see
        `HybridStateManager.last_state`. queued: as of `find`."""
        flushed = self._ledger.known[slot, Ledger.OPEN_STEP] == Ledger.FLUSHED
        if self._source is None or flushed or not all(step.ended for step in queued):
            return None
        if len(queued) > 1:  # where the second goes on from is known to the device alone
            return None
        live = self._live_state(slot, queued)
        position = min(most, live.computed)
        if position < max(live.certain, 1) or live.column < 0:
            return None
        return Checkpoint(slot, int(self._ledger.generation[slot]), position, live.column)

    def _live_state(self, slot: int, queued: list[Step]) -> LiveState:
        """Of a request that one step, or none, still has to run."""
        ledger, at = self._ledger, np.array([slot])
        certain, computed = ledger.certain[at], ledger.computed[at]
        written, held = ledger.written[at], ledger.held[at]
        for step in queued:
            rows, row = step.rows, np.flatnonzero(step.rows.slot == slot)
            draft, scheduled, kept = rows.draft[row], rows.scheduled[row], step.kept.of(row)
            after = computed + scheduled - draft
            stored = arithmetic.replay_checkpoint(certain, computed, after, draft, kept)
            writes = arithmetic.replay_writes(
                computed - written, scheduled, rows.folds[row], stored.position > 0,
                held == self._live, self._ring_tokens,
            )  # fmt: skip
            ends = (draft == 0) & kept.keeps(after)
            column = self._column(rows, np.full(len(rows), after[0]))[row]
            held = np.where(ends, column, self._live)
            written, certain, computed = np.where(writes, after, written), after, after
        return LiveState(int(certain[0]), int(computed[0]), int(written[0]), int(held[0]))

    def prepare(self) -> None:
        """Compile what `fold` launches, with a row that touches nothing."""
        if self._source is not None:
            index, packed = self._staging.take()
            packed[0, 0] = -1
            self._launch(self._source, index, 1)

    def fold(self, checkpoints: Sequence[Checkpoint], queued: Callable[[int], list[Step]]) -> int:
        """Fold those that belong in the live column, as `find` and `state` give them, in one
        launch, or none if all are there already; how many. queued: the steps that still run a
        slot."""
        rows = [s for s in checkpoints if s.column == self._live]
        states = [self._live_state(s.slot, queued(s.slot)) for s in rows]
        pending = [
            (s.slot, s.position, live)
            for s, live in zip(rows, states, strict=True)
            if not live.written == live.certain == s.position
        ]
        if pending and self._source is not None:
            index, packed = self._staging.take()
            for i, (slot, position, live) in enumerate(pending):
                packed[0, i] = slot
                packed[1, slot] = position - live.written
                packed[2, slot] = live.written % self._ring
                packed[3, slot] = position - live.certain
                packed[4, slot] = position
            self._launch(self._source, index, len(pending))
        for checkpoint in rows:
            self._ledger.flushed(checkpoint.slot, checkpoint.position)
        return len(pending)

    def _launch(self, source: FlushInputs, index: int, count: int) -> None:
        listed, pending, cursor, offset, certain = self._staging.upload(index, 5)
        positions = ReplayPositions(
            read_column=self._read,
            offset=offset,
            pending=pending,
            cursor=cursor,
            write_column=self._read,
            writes=listed,
            checkpoint_column=self._read,
            checkpoint_after=offset,
            certain=certain,
        )
        self._recurrence.flush(
            self._table,
            source.records,
            source.params,
            listed[:count],
            self._slot,
            positions,
            None if source.seed is None else Rounding(source.seed, layer=0),
        )
