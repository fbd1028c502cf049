"""How likely it is that texts go on from a checkpoint: what it is worth to keep it.

Observed are checkpoints that can be found, and those that had to make room. How often have texts
gone on from one lately: its *heat*, with that of the end that it superseded. How many of its like
were ever used: left for the same reason, as deep in their texts and with as much heat. What was
observed counts half after some time, or dead conversations would be kept for ever. A worth is a
logarithm, so that those of two blocks that nobody touches keep their order while both lose.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from math import log2

HALF_LIFE = 2.0
"""Turnovers of the pools, see `PrefixCache`, in which what was observed counts half as much."""
WINDOW = 512
"""Checkpoints of one class over which its use is counted; then both counts are halved."""
HOTTEST = 3
"""Power of 2 of a heat beyond which there are no more classes."""
UNSEEN = 1 / 64
"""Chance of what no checkpoint is known to lie behind."""


class Kind(Enum):
    """Why a checkpoint is there: as the end of a text, named by a prompt, where others were found
    to part from it, at a boundary of a prompt or of an answer."""

    TURN = "turn"
    NAMED = "named"
    JUNCTION = "junction"
    PROMPT = "prompt"
    ANSWER = "answer"


Like = tuple[Kind, int, int]
"""Why it is there, and its position and heat, as powers of 2."""


@dataclass(slots=True)
class Seen:
    """like: the class of checkpoints whose use is counted together. heat: texts that went on from
    it, as of the time `at`, with those that it has inherited; texts: without them."""

    like: Like
    heat: float
    at: float
    texts: int = 0


class Reuse:
    """What has been seen of checkpoints. most: that are remembered, those that were left or used
    last. Times are turnovers; an operation takes constant time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: OrderedDict[bytes, Seen] = OrderedDict()
        self._left, self._used = Counter[Like](), Counter[Like]()

    def __contains__(self, key: bytes) -> bool:
        return key in self._seen

    def clear(self) -> None:
        self._seen.clear()

    def forget(self, key: bytes) -> None:
        self._seen.pop(key, None)

    def leave(
        self, key: bytes, kind: Kind, position: int, now: float, older: bytes | None = None
    ) -> None:
        """A checkpoint was filed, of so many tokens. older: the one that its text went on from.
        Unless others have done so too, it is what the next turn would have looked for."""
        known, before = self._seen.get(key), self._seen.get(older) if older else None
        heat = 0.0 if known is None else self._heat(known, now)
        if before is not None and before.texts <= 1:
            heat = max(heat, self._heat(before, now))
        if known is None:
            like = kind, position.bit_length(), min(round(log2(1 + heat)), HOTTEST)
            if self._left[like] >= WINDOW:
                self._left[like] //= 2
                self._used[like] //= 2
            self._left[like] += 1
            self._seen[key] = known = Seen(like, heat, now)
            if len(self._seen) > self._most:
                self._seen.popitem(last=False)
        known.heat, known.at = heat, now
        self._seen.move_to_end(key)

    def go_on(self, key: bytes, now: float) -> None:
        """A text has gone on from a checkpoint, or would have if that had not made room."""
        known = self._seen.get(key)
        if known is None:
            return
        self._used[known.like] += not known.texts
        known.heat, known.at = self._heat(known, now) + 1, now
        known.texts += 1
        self._seen.move_to_end(key)

    def worth(self, key: bytes, now: float, saved: int = 1) -> float:
        """Of a checkpoint that saves so many tokens, or of what is found by it: the more, the later
        does it make room."""
        known, heat, chance = self._seen.get(key), 0.0, UNSEEN
        if known is not None:
            heat = self._heat(known, now)
            chance = (self._used[known.like] + 0.5) / (self._left[known.like] + 0.5)
        return now / HALF_LIFE + log2(chance * (1 + heat) * max(saved, 1))

    def along(
        self, left: Iterable[tuple[int, bytes]], count: int, size: int, now: float
    ) -> list[float]:
        """Of the first `count` KV blocks of a text, `size` tokens each: what the best checkpoint
        behind each is worth by token. left: tokens and keys of its checkpoints."""
        worth = [self.worth(b"", now)] * count
        for position, key in left:
            last = min(-(-position // size), count) - 1
            if last >= 0:
                worth[last] = max(worth[last], self.worth(key, now))
        return [*accumulate(worth[::-1], max)][::-1]

    def _heat(self, known: Seen, now: float) -> float:
        return known.heat * 2 ** ((known.at - now) / HALF_LIFE)
