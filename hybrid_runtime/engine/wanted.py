"""Where a request's checkpoints are worth a block."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hybrid_runtime.engine.config import RetentionPolicy
from hybrid_runtime.state.boundaries import NEVER


class Wanted(NamedTuple):
    """Positions, in tokens.

    every: a grid of its multiples; 0: none.
    places: positions beside it.
    named: those that the prompt asks for. Each stands in for what of the grid lies less than
        `every` in front of it: that saves blocks, and steps, because a chunk of a prompt can leave
        two checkpoints only.
    apart: of the grid nothing is wanted that lies so many tokens from another position, or fewer. A
        row can pass as many drafts in one step, and leave only one checkpoint among them.
    """

    every: int
    places: tuple[int, ...] = ()
    named: tuple[int, ...] = ()
    apart: int = 0

    def next(self, position: int) -> int:
        """The first one behind `position`; NEVER: there is none."""
        every, places, named, _ = self
        if every and not (places or named):  # as texts mostly are, behind their prompts
            return (position // every + 1) * every
        ahead = min((at for at in places + named if at > position), default=NEVER)
        if not every:
            return ahead
        grid = (position // every + 1) * every
        while grid < ahead and self._is_left_out(grid):
            grid += every
        return min(ahead, grid)

    def _is_left_out(self, grid: int) -> bool:
        return any(abs(at - grid) <= self.apart for at in self.places + self.named) or any(
            0 < at - grid < self.every for at in self.named
        )


def spread(positions: Iterable[int], apart: int, taken: Iterable[int] = ()) -> tuple[int, ...]:
    """Those of `positions` that are more than `apart` tokens from each other and from all that are
    `taken`, ascending: of neighbours the last."""
    kept, others = list[int](), list(taken)
    for at in sorted(set(positions), reverse=True):
        if all(abs(at - other) > apart for other in (*kept, *others)):
            kept.append(at)
    return tuple(reversed(kept))


def where(
    retention: RetentionPolicy,
    block: int,
    hit: int,
    known: int,
    length: int,
    named: Iterable[int],
    apart: int,
) -> Wanted:
    """What a request of `length` tokens wants that goes on behind `hit` of them.

    known: where known keys and values end: the text parts from others there. named, apart: as of
    `Wanted`.
    """
    named, beside = spread((at for at in named if at > hit), apart), {known}
    if retention != "all":
        last = (length - 1) // block * block
        if not any(last < at < length for at in named):
            beside.add(last)
    places = spread((at for at in beside if at > hit), apart, named)
    every = block if retention == "all" else 0 if retention == "prompt" else retention
    return Wanted(int(every), places, named, apart)
