"""Positions on NumPy arrays that get a checkpoint, and which of them a row passes.

Words as in docs/how-it-works.md: before a step `computed` (n) tokens are final; the step runs
`scheduled` (s) tokens of which the last `draft` (d) are drafts; `certain` R = n + s - d tokens are
in the state whatever the sampler says; `accepted` (a, 1..d+1) counts the tokens it emitted.
All arguments broadcast; block sizes and positions are in tokens, columns index a block table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]

NEVER = np.iinfo(np.int32).max
"""Position that no sequence reaches: what `next_retained` returns when nothing is retained."""
LONGEST = 2**30
"""Positions, lengths and periods lie below it, so that the sum of two fits int32."""


class RetentionRule(NamedTuple):
    """Positions that get a checkpoint: in the columns layout boundaries of blocks.

    Each field `[rows]` in tokens, or one int for all rows, which is cheaper.

    every: its multiples are retained; 0: none.
    first, second: so are these two positions; 0: no such position.
    """

    every: Ints | int
    first: Ints | int = 0
    second: Ints | int = 0

    def keeps(self, boundary: Ints) -> Bools:
        """Whether the checkpoint at each `boundary` (tokens, > 0) is kept."""
        every, *pins = self
        if isinstance(every, int):
            kept = boundary % every == 0 if every else boundary < 0
        else:
            kept = np.greater(every, 0) & (boundary % np.maximum(every, 1) == 0)
        for pin in pins:
            if not isinstance(pin, int) or pin:
                kept = kept | (boundary == pin)
        return kept & (boundary > 0)

    def of(self, rows: NDArray[np.intp]) -> RetentionRule:
        """Those of some of the rows."""
        return RetentionRule(*(p if isinstance(p, int) else p[rows] for p in self))


def blocks_below(position: Ints, block_size: int) -> Ints:
    """position // block_size for 0 <= position < 2**31, by a multiplication.

    NumPy's integer division takes several nanoseconds an element, which at a thousand rows is most
    of what a step may cost. Exact: the inverse is a little too large, so that no multiple falls
    below its quotient, and the product by less than 1 / block_size, so that nothing else rises.
    """
    inverse = (1 + 2.0**-40) / block_size
    blocks: Ints = (position * inverse).astype(np.int64)
    return blocks


def next_retained(position: Ints, retention: RetentionRule) -> Ints:
    """First retained boundary at or after `position` (tokens, >= 1); `NEVER`: there is none."""
    every, *pins = retention
    if isinstance(every, int):
        found = np.full_like(position, NEVER)
        if every:
            found = blocks_below(position + (every - 1), every) * every
    else:
        step = np.maximum(every, 1)
        found = np.where(np.greater(every, 0), (position + step - 1) // step * step, NEVER)
    for pin in pins:
        if not isinstance(pin, int) or pin:
            found = np.minimum(found, np.where((pin > 0) & (pin >= position), pin, NEVER))
    return found


def last_retained(position: Ints, retention: RetentionRule) -> Ints:
    """Last retained boundary at or before `position` (tokens, >= 0); 0: there is none."""
    every, *pins = retention
    if isinstance(every, int):
        found = blocks_below(position, every) * every if every else position * 0
    else:
        step = np.maximum(every, 1)
        found = np.where(np.greater(every, 0), position // step * step, 0)
    for pin in pins:
        if not isinstance(pin, int) or pin:
            found = np.maximum(found, np.where(np.less_equal(pin, position), pin, 0))
    return found


def lost_checkpoints(
    computed: Ints, certain: Ints, retention: RetentionRule, cut: Ints | int
) -> Ints:
    """The last wanted position that a row passes on its way from `computed` to `certain` tokens
    without ending on one, so that no checkpoint of it can exist; 0: there is none.

    cut: the one inside that the row leaves a checkpoint of; 0: it leaves none.
    """
    last = last_retained(np.where(np.greater(cut, 0), cut - 1, certain), retention)
    return np.where((last > computed) & (last < certain), last, 0)
