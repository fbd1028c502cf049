"""Checkpoints that prompts name, at the ends of messages: a conversation keeps one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hybrid_runtime.engine.block_pool import BlockPool
from hybrid_runtime.engine.tokenize import Tokens
from hybrid_runtime.engine.turn_ends import TurnEnds


class Pins:
    """Pinned checkpoints, and the texts that go on behind them.

    Once a text has left a newer one, it supersedes those in front of it that it does not name
    itself: a conversation keeps one. A pin that other texts went on from is a beginning that they
    share, and stays.

    state, keys: pools of the checkpoints, and of the partial KV blocks in front of them. most: pins
    that are remembered, those that were used last.
    """

    def __init__(self, state: BlockPool, keys: BlockPool, most: int) -> None:
        self._state, self._keys = state, keys
        self._ends = TurnEnds(most)
        # How many texts went on right there, by key.
        self._hits: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, key: bytes) -> bool:
        return key in self._hits

    def clear(self) -> None:
        self._ends.clear()
        self._hits.clear()

    def add(self, parent: bytes, key: bytes, tail: int) -> None:
        """What is filed under `key` is pinned. parent, tail: as of `TurnEnds.add`."""
        self._hits.setdefault(key, 0)
        forgotten = self._ends.add(parent, key, tail)
        if forgotten is not None:
            del self._hits[forgotten]

    def hit(self, key: bytes, again: bool) -> None:
        """A text goes on right behind this pin. again: it may have done so before."""
        self._hits[key] += not again

    def forget(self, key: bytes) -> None:
        if self._hits.pop(key, None) is not None:
            self._ends.forget(key)

    def any_behind(self, parent: bytes) -> bool:
        """Whether there is one behind these KV blocks."""
        return self._ends.any_behind(parent)

    def supersede(
        self, text: Iterable[tuple[bytes, Tokens]], kept: Collection[bytes], hit: bytes | None
    ) -> None:
        """Let the pins that a text has passed make room first, but for those that are `kept`, that
        other texts went on from, or whose state has an owner.

        text: keys of full KV blocks, and the tokens behind them, fewer than a block has. hit: key
        of the checkpoint that the text went on from itself.
        """
        for parent, tail in text:
            for key, partial in [*self._ends.matching(parent, tail)]:
                others = self._hits[key] - (key == hit)
                if key in kept or others > 0 or self._state.is_owned(key):
                    continue
                self._state.demote(key)
                if partial:  # or it is a full block, in front of the newer pin
                    self._keys.demote(key)
                self.forget(key)
