"""Which block makes room: filed blocks that nobody owns, in the order in which they go."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import inf

Rank = tuple[float, int]
"""What its content is worth, and when it was used last."""
WORTHLESS = -inf

OUTDATED = 4
"""Entries of the heap per block; with more it is made anew."""


class IdleBlocks:
    """Filed blocks without owner. The one that is worth least goes first, of equals the one whose
    use is longest ago; a demoted one before all others.

    size: of the pool. An operation takes O(log size) in the mean.
    ranks: of all of them; how many there are is asked in every step.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.ranks: dict[int, Rank] = {}
        # Ranks that blocks have or have had; one that is not its block's any more is outdated.
        self._heap: list[tuple[Rank, int]] = []
        self._clock, self._demotions = 0, 0

    def __len__(self) -> int:
        return len(self.ranks)

    def __contains__(self, block: int) -> bool:
        return block in self.ranks

    def __iter__(self) -> Iterator[int]:
        """In the order in which they go."""
        return iter(sorted(self.ranks, key=self.ranks.__getitem__))

    def clear(self) -> None:
        self.ranks.clear()
        self._heap.clear()

    def add(self, block: int, worth: float) -> None:
        """It was used until now; or it is worth more now, or less."""
        self._clock += 1
        self._push(block, (worth, self._clock))

    def demote(self, block: int) -> None:
        """Let it go before all others."""
        self._demotions -= 1
        self._push(block, (WORTHLESS, self._demotions))

    def discard(self, block: int) -> None:
        self.ranks.pop(block, None)

    def pop(self) -> int:
        """Take out the one that goes first."""
        while True:
            rank, block = heappop(self._heap)
            if self.ranks.get(block) == rank:
                del self.ranks[block]
                return block

    def _push(self, block: int, rank: Rank) -> None:
        self.ranks[block] = rank
        heappush(self._heap, (rank, block))
        if len(self._heap) > OUTDATED * self._size:
            self._heap = [(rank, block) for block, rank in self.ranks.items()]
            heapify(self._heap)
