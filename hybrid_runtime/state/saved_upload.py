"""Steady decode: the same rows again, only further on. Their packed lines are those of the last
step, and the device has them and the exact counts, so nothing is sent."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.state import boundaries
from hybrid_runtime.state.base import NO_ROWS, LayoutPolicy
from hybrid_runtime.state.ledger import Ledger
from hybrid_runtime.state.pack import StepPlan
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Step


class RepeatRange(NamedTuple):
    """Counts with which repeated rows stay within the block that each is in, with what they fold
    and what they run, so that nothing can be copied or stored.

    first: int32 `[rows]`, the least tokens computed. length: uint32 `[rows]`, so many more counts.
    """

    first: NDArray[np.int32]
    length: NDArray[np.uint32]

    @classmethod
    def of(cls, rows: StepRows, block_size: int) -> RepeatRange:
        start = boundaries.blocks_below(rows.computed_min, block_size) * block_size
        first = np.minimum(start + rows.draft, boundaries.LONGEST)
        room = np.maximum(block_size - rows.draft - rows.scheduled, 0)
        length = np.minimum(room, boundaries.LONGEST - first)
        return cls(first.astype(np.int32), length.astype(np.uint32))

    def holds(self, rows: StepRows) -> bool:
        """Whether all counts of `rows` are among them."""
        # As an unsigned integer what lies before the first one is too large, too.
        outside = (rows.computed_max - self.first).view(np.uint32) >= self.length
        if not rows.exact_counts:
            outside |= (rows.computed_min - self.first).view(np.uint32) >= self.length
            outside |= rows.computed_min > rows.computed_max
        return not np.count_nonzero(outside)


class SavedUpload:
    """The step whose packed lines would be those of the next one too, and its repetitions."""

    def __init__(self, ledger: Ledger, policy: LayoutPolicy, block_size: int) -> None:
        self._ledger, self._policy, self._block_size = ledger, policy, block_size
        self._last: Step | None = None
        self._version = -1
        self._stretch: RepeatRange | None = None

    def keep(self, step: Step, lines: int) -> None:
        """Remember a step that was packed in full, if it can be repeated as it is."""
        rows, n = step.rows, len(step.rows)
        self._last = self._stretch = None
        if not n or lines != n or rows.padded:
            return
        if np.count_nonzero(step.packed[:n, fields.ADMIT]):
            return
        if np.count_nonzero(step.packed[:n, fields.PREVIOUS] != np.arange(n)):
            return
        if rows.chunked and np.count_nonzero((rows.certain > 1) & (rows.draft > 0)):
            return
        self._last, self._version = step, self._ledger.version

    def match(self, rows: StepRows, pending: Step | None) -> tuple[Step, StepPlan] | None:
        """The step whose lines serve `rows` as well, and the plan of `rows`; None: they must be
        packed, or refused by name.

        pending: the last ended step, whose counts the next launch folds in.
        """
        last = self._last
        if last is None or pending is not last or self._version != self._ledger.version:
            return None
        if rows.reads_offset is not None or rows.key != last.rows.key:
            return None
        if self._stretch is not None and self._stretch.holds(rows):
            return last, StepPlan(self._policy.held(rows), NO_ROWS, NO_ROWS)
        # What `check_rows` has not checked with the saved step: the counts.
        high = rows.computed_max.view(np.uint32)  # negative ones are too large as well
        if np.count_nonzero(high >= boundaries.LONGEST):
            return None
        if not rows.exact_counts and np.count_nonzero(rows.computed_min.view(np.uint32) > high):
            return None
        plan = self._policy.repeat(rows, last.rows, last.kept)
        if plan is None:
            return None
        self._stretch = RepeatRange.of(rows, self._block_size)
        return last, plan

    def undisturbed(self, step: Step) -> bool:
        """Whether `step` is the last one begun, and all of its requests still hold their slots."""
        return step is self._last and self._version == self._ledger.version

    def repeated(self, step: Step) -> None:
        """`step` was begun with the saved lines."""
        self._last = step
