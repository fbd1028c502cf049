"""Ends of turns and messages inside a KV block: which tokens lie behind which full blocks."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256

from hybrid_runtime.engine.tokenize import Tokens


def tail_key(parent: bytes, tail: Tokens) -> bytes:
    """Key of what is left of a text behind its full KV blocks. parent: key of the last of these.
    tail: fewer tokens than a block has; without any, the key is that of the block."""
    return sha256(parent + tail.tobytes()).digest() if len(tail) else parent


class TurnEnds:
    """Keys of the ends of turns and messages, by the key of the full KV blocks in front of them.

    It only says where to look: state and keys are there as long as the pools, or the host, find
    them. most: keys that are remembered, those that were used last.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # Tokens behind the full blocks, by key, by the key of these blocks.
        self._behind: dict[bytes, dict[bytes, int]] = {}
        self._parent: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parent)

    def clear(self) -> None:
        self._behind.clear()
        self._parent.clear()

    def add(self, parent: bytes, key: bytes, tokens: int) -> bytes | None:
        """A turn or a message has ended so many tokens behind these blocks, or it was found again;
        the key that is forgotten for it, if one is."""
        self._behind.setdefault(parent, {})[key] = tokens
        self._parent[key] = parent
        self._parent.move_to_end(key)
        if len(self._parent) <= self._most:
            return None
        oldest = next(iter(self._parent))
        self.forget(oldest)
        return oldest

    def forget(self, key: bytes) -> None:
        parent = self._parent.pop(key, None)
        if parent is None:
            return
        del self._behind[parent][key]
        if not self._behind[parent]:
            del self._behind[parent]

    def any_behind(self, parent: bytes) -> bool:
        """Whether one has ended behind these blocks."""
        return parent in self._behind

    def matching(self, parent: bytes, tail: Tokens) -> list[tuple[bytes, int]]:
        """Ends behind these blocks with which `tail` begins, the longest first: key and tokens."""
        behind, found, hashed = self._behind.get(parent, {}), list[tuple[bytes, int]](), 0
        # Every length in one pass over the tokens: where KV blocks are large there may be many.
        data, size, digest = tail.tobytes(), tail.itemsize, sha256(parent)
        for tokens in sorted(set(behind.values())):
            if tokens > len(tail):
                break
            digest.update(data[hashed * size : tokens * size])
            hashed = tokens
            key = digest.digest() if tokens else parent
            if key in behind:
                found.append((key, tokens))
        return found[::-1]
