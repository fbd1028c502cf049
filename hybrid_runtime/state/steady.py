"""Steady decode: the same rows again, only further on. Nothing has to be sent to the device then,
since it holds the exact counts, and the host's book can wait until somebody looks into it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.state import align
from hybrid_runtime.state.layouts.base import LayoutPolicy
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.slot_table import SlotTable
from hybrid_runtime.state.step import Step


class Steady:
    """The step whose packed entries would be those of the next one too, and its repetitions."""

    def __init__(self, slot_table: SlotTable, rule: LayoutPolicy, block_size: int) -> None:
        self._slot_table, self._policy, self._block_size = slot_table, rule, block_size
        self._step: Step | None = None
        self._last: Step | None = None
        self._late: Step | None = None
        self._key: tuple[bytes, ...] = ()
        self._version = -1

    def remember(self, step: Step, lines: int) -> None:
        """A step was placed in full; keep it if it can be repeated as it is."""
        rows, n = step.rows, len(step.rows)
        self._step = self._last = None
        previous = step.packed[:n, fields.PREVIOUS]
        admits = step.packed[:n, fields.ADMIT]
        if not n or lines != n or rows.padded or admits.any() or (previous != np.arange(n)).any():
            return
        if ((rows.scheduled - rows.draft > 1) & (rows.draft > 0)).any():
            return
        self._step = self._last = step
        self._key, self._version = rows.key(), self._slot_table.version

    def repeats(self, rows: StepRows, pending: Step | None) -> tuple[Step, NDArray[np.intp]] | None:
        """The step whose entries serve `rows` as well, and the candidates of `rows`; or None: then
        `rows` go the whole way.

        None also for whatever would be refused: the whole way names it.
        """
        step, last = self._step, self._last
        if (
            step is None
            or last is None
            or pending is not last
            or self._version != self._slot_table.version
        ):
            return None
        if rows.computed_min.shape != rows.slot.shape or rows.key() != self._key:
            return None
        end_min = rows.computed_min + rows.scheduled
        end_max = end_min
        if not rows.exact_counts:
            end_max = rows.computed_max + rows.scheduled
            if (end_max < end_min).any():
                return None
        if rows.computed_min.min() < 0:
            return None
        kept = align.Retention(self._block_size)
        if not self._slot_table.uniform:
            kept = align.Retention(*step.retention.T)
        candidates = self._policy.repeat(rows, last.rows, end_min, end_max, kept)
        return None if candidates is None else (step, candidates)

    def postpone(self, step: Step) -> None:
        """`step` repeats the last one; the book learns of it when `catch_up` is called."""
        self._late = self._last = step

    def covers(self, step: Step) -> bool:
        """`step` is the repetition that the book does not know of yet, and no slot has changed."""
        return step is self._late

    def catch_up(self) -> None:
        """Bring the book up to date. Repetitions before the last one have left no trace in it."""
        late, self._late = self._late, None
        if late is None:
            return
        rows = late.rows
        self._slot_table.begin(rows, self._policy.held(rows), late.number)
        if late.ended:
            self._slot_table.end(rows.slot, np.ones(len(rows), bool))
