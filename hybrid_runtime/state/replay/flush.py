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


class Flusher:
    """Finds last checkpoints from exact counts, and folds those that no step is going to store.
    column: see `LayoutPolicy.column`.

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
    ) -> None:
        slots = ledger.max_requests
        self._recurrence, self._table, self._source = recurrence, table, source
        self._live, self._ring = place.live_column, place.ring
        self._cuts, self._column = place.cuts, column
        self._ledger = ledger
        self._slot = torch.arange(slots, dtype=torch.int32, device=device)
        self._read = torch.full_like(self._slot, self._live)
        # By row: slots. By slot: tokens to fold and their index in the ring, the accepted drafts
        # among them, and tokens in the state after them.
        self._staging = Staging(5, slots, depth, device, waits)

    def find(self, slot: int, step: Step | None) -> Checkpoint | None:
        """The checkpoint that the counts known of `slot` lead to; else the last one that was
        stored, which a strategy that reads counts early may not have published yet; None: there
        is neither.

        step: the oldest outstanding one that has a row of the request; None: there is none.
        """
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

    def prepare(self) -> None:
        """Compile what `fold` launches, with a row that touches nothing."""
        if self._source is not None:
            index, packed = self._staging.take()
            packed[0, 0] = -1
            self._launch(self._source, index, 1)

    def fold(self, checkpoints: Sequence[Checkpoint]) -> int:
        """Fold those that belong in the live column, as `find` gives them, in one launch; how
        many."""
        rows = [s for s in checkpoints if s.column == self._live]
        if not rows or self._source is None:
            return 0
        table = self._ledger
        index, packed = self._staging.take()
        for i, checkpoint in enumerate(rows):
            packed[0, i] = slot = checkpoint.slot
            packed[1, slot] = checkpoint.position - table.written[slot]
            packed[2, slot] = table.written[slot] % self._ring
            packed[3, slot] = checkpoint.position - table.certain[slot]
            packed[4, slot] = checkpoint.position
        self._launch(self._source, index, len(rows))
        for checkpoint in rows:
            table.flushed(checkpoint.slot, checkpoint.position)
        return len(rows)

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
