"""Bounds on each request's token count while results are in flight, and the rows of a step that may
therefore have a state to move."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.state import boundaries
from hybrid_runtime.state.align import arithmetic

Rows = NDArray[np.intp]


class Candidates(NamedTuple):
    """Rows of a step that may have a state to move, as indices into the batch.

    precopy: before the forward pass, to a new running column.
    postcopy: after the sampler, because a retained boundary may have been passed.
    first: int32 `[rows]` or `[0]`, a boundary (tokens) retained whatever the interval; 0 = none.
    """

    precopy: Rows
    postcopy: Rows
    first: NDArray[np.int32]


class Bounds:
    """Bounds by request slot; all counts are tokens.

    low, high: int32 `[max_requests]`, `low <= computed <= high` before the slot's next step.
    lost: bool `[max_requests]`, the bounds do not hold; until its slot is taken again the row is a
        candidate in every step.
    retained: boundaries of generated tokens that are kept: None = all, 0 = none, else multiples.
    every: the same as an interval in tokens.

    The scheduler counts all drafts in flight as accepted, so its count is the upper bound. With
    `asynchronous` scheduling one step of a request can be in flight, otherwise none. vLLM retains
    boundaries of the prompt by rules of its own; a step with drafts can reach only the last one, at
    the prompt's end.
    """

    LOW, HIGH, UNSETTLED, HELD_MIN, HELD_MAX = range(5)

    def __init__(self, max_requests: int, block_size: int, asynchronous: bool) -> None:
        self.resize(block_size)
        self._asynchronous = asynchronous
        # One line per slot: low, high, drafts that may still be rejected, and the least and largest
        # column that the last step ran in (-1: no state yet). A step is one gather and one scatter
        # of whole lines, which NumPy moves as single items in a third of the time.
        self._known = np.zeros((max_requests, 5), np.int32)
        self._lines = self._known.view(_LINE)[:, 0]
        self.low, self.high = self._known[:, self.LOW], self._known[:, self.HIGH]
        self.lost = np.zeros(max_requests, bool)
        self._any_lost = False

    def resize(self, block_size: int) -> None:
        """Set the block size in tokens, before requests are admitted."""
        self.block_size = block_size
        self.retain(None)

    def retain(self, retained: int | None) -> None:
        """Set `retained` from the next step on."""
        self.retained = retained
        self.every = self.block_size if retained is None else retained

    def admit(self, slot: int, computed: int) -> None:
        """A new, resumed or prefix-hit request with `computed` tokens of state takes `slot`."""
        column = (computed - 1) // self.block_size
        self._known[slot] = computed, computed, 0, column, column
        self.lost[slot] = False

    def candidates(
        self,
        slot: NDArray[Any],
        computed: NDArray[Any],
        scheduled: NDArray[Any],
        draft: NDArray[Any],
        prompt: NDArray[Any],
    ) -> Candidates:
        """Candidates of a step; moves the bounds past it. All arguments are int32 `[rows]`.

        slot: request slots.
        computed: the scheduler's count before the step.
        scheduled: tokens of the step, drafts included.
        draft: drafts among them.
        prompt: tokens that the request was admitted to prefill.
        """
        known = self._lines.take(slot, mode="wrap").view(np.int32).reshape(-1, 5)
        known_low, known_high, unsettled, held_min, held_max = known.T
        impossible = (computed < known_low) | (computed > known_high)
        if impossible.any():
            self.distrust(slot[impossible])
        end_low = np.maximum(known_low, computed - unsettled) + scheduled
        end_high = computed + scheduled
        certain_low = end_low - draft
        column_low = arithmetic.running_column(end_low, self.block_size)
        column_high = arithmetic.running_column(end_high, self.block_size)
        precopy = arithmetic.precopy_candidates(column_low, column_high, held_min, held_max, None)
        # Without a state there is nothing to copy, but the device must set the running column.
        precopy |= held_max < 0
        kept, first = self._retention(prompt, certain_low)
        if kept is None:
            postcopy = np.zeros(len(slot), bool)
        else:
            postcopy = arithmetic.postcopy_candidates(certain_low, end_high - draft, draft, kept)
        if self._any_lost:
            lost = self.lost[slot]
            precopy |= lost
            postcopy |= lost
        after = np.empty_like(known)
        after[:, self.LOW], after[:, self.HIGH] = certain_low, end_high
        after[:, self.UNSETTLED] = draft if self._asynchronous else 0
        after[:, self.HELD_MIN], after[:, self.HELD_MAX] = column_low, column_high
        self._lines.put(slot, after.view(_LINE)[:, 0])
        return Candidates(precopy.nonzero()[0], postcopy.nonzero()[0], first)

    def _retention(
        self, prompt: NDArray[Any], certain: NDArray[Any]
    ) -> tuple[boundaries.RetentionRule | None, NDArray[np.int32]]:
        """The rule for this step's rows (None: nothing is kept), and `Candidates.first`."""
        if self.retained is None or (prompt < certain).all():
            return boundaries.RetentionRule(self.every) if self.every else None, _NO_POSITIONS
        first = np.where(prompt % self.block_size == 0, prompt, 0).astype(np.int32)
        return boundaries.RetentionRule(self.every, first), first

    def distrust(self, slots: NDArray[Any]) -> None:
        """The bounds of these slots no longer hold."""
        self.lost[slots] = True
        self._any_lost = True


_LINE = np.dtype("V20")
_NO_POSITIONS = np.zeros(0, np.int32)
