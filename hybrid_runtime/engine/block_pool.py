"""Fixed-size blocks, handed out and taken back, and the tables that map columns to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.engine.device_tables import FREE, DeviceTables
from hybrid_runtime.state.placement import BlockDemand

Ints = NDArray[Any]

REMEMBERED = 4
"""Keys of evicted blocks that are remembered, to say why a prefix was not found, per block."""


class BlockPool:
    """Block ids `0 .. size-1`, owned by any number of requests, and findable by their content.

    A block that was filed under a key keeps its content after its last owner has gone, until
    the room is needed: the one that was used longest ago goes first. Blocks without a key are
    taken before those, the warmest first. An owned block is never taken away.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; a pool must hold at least 1 block")
        self.size = size
        self.evictions = 0
        self.reset()

    def reset(self) -> None:
        """No block has an owner, and no content can be found, whatever was before."""
        self._free = list(range(self.size - 1, -1, -1))
        self._owners = [0] * self.size
        self._key: list[bytes | None] = [None] * self.size
        self._block: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks without owner, those that are kept for their content included."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks that can be found by their content."""
        return len(self._block)

    def take(self) -> int:
        """A block for a first owner, its content lost."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._evict(block)
        self._owners[block] = 1
        return block

    def put(self, block: int) -> None:
        """One owner less."""
        self._owners[block] -= 1
        if self._owners[block]:
            return
        if self._key[block] is None:
            self._free.append(block)
        else:
            self._idle[block] = None

    def share(self, block: int) -> None:
        """One owner more, of a block that was found."""
        self._idle.pop(block, None)
        self._owners[block] += 1

    def unowned(self, blocks: Iterable[int]) -> int:
        """How many of these found blocks `share` would take out of `free`."""
        return sum(block in self._idle for block in blocks)

    def sole(self, blocks: Iterable[int]) -> int:
        """How many of these owned blocks `put` would make free."""
        return sum(self._owners[block] == 1 for block in blocks)

    def file(self, key: bytes, block: int) -> bool:
        """Let an owned block be found by `key`; False where another one is found by it already."""
        if key in self._block or self._key[block] is not None:
            return False
        self._block[key], self._key[block] = block, key
        self._evicted.pop(key, None)
        return True

    def find(self, key: bytes) -> int | None:
        return self._block.get(key)

    def evicted(self, key: bytes) -> bool:
        """Whether the content of `key` was there once, as far back as is remembered."""
        return key in self._evicted

    def forget(self, key: bytes) -> None:
        """Let the content of `key` not be found any more."""
        block = self._block.pop(key, None)
        if block is None:
            return
        self._key[block] = None
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def clear(self) -> None:
        """Forget all content; owned blocks stay with their owners."""
        for block in list(self._block.values()):
            del self._block[self._key[block] or b""]
            self._key[block] = None
        self._free.extend(self._idle)
        self._idle.clear()
        self._evicted.clear()

    def _evict(self, block: int) -> None:
        key = self._key[block]
        assert key is not None
        del self._block[key]
        self._key[block] = None
        self.evictions += 1
        self._evicted[key] = None
        if len(self._evicted) > REMEMBERED * self.size:
            self._evicted.popitem(last=False)


class Change(NamedTuple):
    """Of the columns that a slot owns. wanted: its demand. dropped: columns whose blocks it gives
    back. missing: those that it needs blocks for."""

    slot: int
    wanted: Ints
    dropped: list[int]
    missing: list[int]


class BlockTable:
    """Which block a slot owns in each column, FREE where none.

    device_table: int32 `[slots, columns]` on the device, as of the last upload of `tables`.

    tables, index: whose table this is, and which of them. always: a column that every slot owns
    from its first step to its end.
    """

    def __init__(
        self, pool: BlockPool, tables: DeviceTables, index: int, always: int | None = None
    ) -> None:
        self.pool, self.tables, self._always = pool, tables, always
        self._view, self.device_table = tables.host[index], tables.device[index]
        slots, self.columns = self._view.shape
        # The last demand of each slot, one per column.
        self._held = np.full((len(BlockDemand._fields), slots), -1, np.int64)

    def changes(self, slots: Ints, demand: BlockDemand) -> list[Change]:
        """What must change for each slot to own the columns of its row of `demand`, and nothing
        else. Slots whose demand is the last one again cost nothing."""
        wanted = np.array(demand)
        rows = (self._held[:, slots] != wanted).any(0).nonzero()[0]
        if not len(rows):
            return []
        return [self._change(int(slots[row]), wanted[:, row]) for row in rows]

    def can_allocate(self, changes: Sequence[Change]) -> bool:
        """Whether there are enough free blocks for them."""
        count = 0
        for change in changes:
            count += len(change.missing)
            count -= self.pool.sole(self._view[change.slot, change.dropped].tolist())
        return count <= self.pool.free

    def allocate(self, changes: Sequence[Change]) -> list[int]:
        """Make changes for which there is room; the blocks newly taken."""
        # What one slot gives back another one may need.
        for slot, _, dropped, _ in changes:
            for column in dropped:
                self._drop(slot, column)
        taken: list[int] = []
        for slot, wanted, _, missing in changes:
            for column in missing:
                block = self._view[slot, column] = self.pool.take()
                taken.append(block)
            self._held[:, slot] = wanted
        self.tables.changed |= bool(taken)
        return taken

    def free(self, slot: int) -> None:
        """Give all blocks of a slot back."""
        for column in np.flatnonzero(self._view[slot] != FREE):
            self._drop(slot, int(column))
        self._held[:, slot] = -1

    def reset(self) -> None:
        """No block has an owner, whatever was before; their content is forgotten."""
        self.pool.reset()
        self._view.fill(FREE)
        self._held.fill(-1)
        self.tables.changed = True

    def _change(self, slot: int, wanted: Ints) -> Change:
        first, fresh, last, kept = wanted.tolist()
        row = self._view[slot]
        below = (row[:first] != FREE).nonzero()[0]
        above = (row[kept + 1 :] != FREE).nonzero()[0] + (kept + 1)
        dropped = [c for c in (*below.tolist(), *above.tolist()) if c != self._always]
        missing = (fresh + (row[fresh : last + 1] == FREE).nonzero()[0]).tolist()
        if self._always is not None and row[self._always] == FREE:
            missing.append(self._always)
        return Change(slot, wanted, dropped, missing)

    def block(self, slot: int, column: int) -> int:
        """The block in a column, -1 where there is none."""
        return int(self._view[slot, column])

    def adopt(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Let a slot own blocks that were found, in columns from `first` on."""
        for column, block in enumerate(blocks, first):
            self.pool.share(block)
            self._view[slot, column] = block
        self.tables.changed |= bool(blocks)

    def _drop(self, slot: int, column: int) -> None:
        self.pool.put(int(self._view[slot, column]))
        self._view[slot, column] = FREE
        self.tables.changed = True
