"""Fixed-size blocks, handed out and taken back, and the tables that map columns to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.engine.device_tables import FREE, DeviceTables
from hybrid_runtime.engine.eviction import WORTHLESS, IdleBlocks
from hybrid_runtime.state.placement import BlockDemand

Ints = NDArray[Any]

REMEMBERED = 4
"""Keys of evicted blocks that are remembered, to say why a prefix was not found, per block."""


class BlockPool:
    """Block ids `0 .. size-1`, owned by any number of requests, and findable by their content.

    A block that was filed keeps its content after its last owner has gone, until the room is
    needed, see `IdleBlocks`. It may have several keys: of all its tokens, and of first ones of
    them. Blocks without a key are taken before those that have one, the warmest first. An owned
    block is never taken away.
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
        self._keys: list[tuple[bytes, ...]] = [()] * self.size
        self._block: dict[bytes, int] = {}
        self._idle = IdleBlocks(self.size)
        self._worth = [WORTHLESS] * self.size
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks without owner, those that are kept for their content included."""
        return len(self._free) + len(self._idle.ranks)

    @property
    def cached(self) -> int:
        """Blocks that can be found by their content."""
        return self.size - self._keys.count(())

    def take(self, count: int) -> list[int]:
        """Blocks for a first owner, their content lost. There must be as many."""
        kept = max(len(self._free) - count, 0)
        taken = self._free[kept:][::-1]
        del self._free[kept:]
        while len(taken) < count:
            block = self._idle.pop()
            self._evict(block)
            taken.append(block)
        for block in taken:
            self._owners[block] = 1
        return taken

    def put(self, blocks: Iterable[int]) -> None:
        """One owner less of each."""
        owners, keys = self._owners, self._keys
        for block in blocks:
            owners[block] -= 1
            if owners[block]:
                continue
            if keys[block]:
                self._idle.add(block, self._worth[block])
            else:
                self._worth[block] = WORTHLESS
                self._free.append(block)

    def share(self, blocks: Iterable[int]) -> None:
        """One owner more of each; they were found."""
        for block in blocks:
            self._idle.discard(block)
            self._owners[block] += 1

    def unowned(self, blocks: Iterable[int]) -> int:
        """How many of these found blocks `share` would take out of `free`."""
        return sum(block in self._idle for block in set(blocks))

    def sole(self, blocks: Iterable[int]) -> int:
        """How many of these owned blocks `put` would make free."""
        return [self._owners[block] for block in blocks].count(1)

    def file(self, key: bytes, block: int) -> bool:
        """Let an owned block be found by `key` too; False where one is found by it already."""
        if key in self._block:
            return False
        self._block[key] = block
        self._keys[block] += (key,)
        self._evicted.pop(key, None)
        return True

    def find(self, key: bytes) -> int | None:
        return self._block.get(key)

    def keys_of(self, block: int) -> tuple[bytes, ...]:
        """By which a block is found."""
        return self._keys[block]

    def find_leading(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of these keys, up to the first that is not there."""
        found: list[Any] = [*map(self._block.get, keys)]
        return found[: found.index(None)] if None in found else found

    def value(self, block: int, worth: float) -> None:
        """Say what the content of a filed block is worth."""
        self._worth[block] = worth
        if block in self._idle:
            self._idle.add(block, worth)

    def raise_worth(self, blocks: Sequence[int], worth: Sequence[float]) -> None:
        """Say what owned blocks are worth at least."""
        own = self._worth
        for block, least in zip(blocks, worth, strict=True):
            if least > own[block]:
                own[block] = least

    def demote(self, key: bytes) -> None:
        """Let the content of `key` make room before any other, unless somebody owns it or it has
        another key besides."""
        block = self._block.get(key)
        if block is not None and block in self._idle and len(self._keys[block]) == 1:
            self._idle.demote(block)

    def is_owned(self, key: bytes) -> bool:
        block = self._block.get(key)
        return block is not None and self._owners[block] > 0

    def evicted(self, key: bytes) -> bool:
        """Whether the content of `key` was there once, as far back as is remembered."""
        return key in self._evicted

    def forget(self, key: bytes) -> None:
        """Let the content of `key` not be found any more, by no key that it has."""
        block = self._block.get(key)
        if block is None:
            return
        for each in self._keys[block]:
            del self._block[each]
        self._keys[block] = ()
        self._worth[block] = WORTHLESS
        if block in self._idle:
            self._idle.discard(block)
            self._free.append(block)

    def clear(self) -> None:
        """Forget all content; owned blocks stay with their owners."""
        self._free.extend(self._idle)
        self._idle.clear()
        self._block.clear()
        self._keys = [()] * self.size
        self._worth = [WORTHLESS] * self.size
        self._evicted.clear()

    def _evict(self, block: int) -> None:
        for key in self._keys[block]:
            del self._block[key]
            self._evicted[key] = None
        self._keys[block] = ()
        self._worth[block] = WORTHLESS
        self.evictions += 1
        while len(self._evicted) > REMEMBERED * self.size:
            self._evicted.popitem(last=False)


class Changes(NamedTuple):
    """Of the columns that slots own. slots: whose demand is another one than the last, int `[n]`.
    wanted: their demands, one per column. dropped: cells of the tables whose blocks are given back.
    missing: those that blocks are needed for."""

    slots: Ints
    wanted: Ints
    dropped: list[int]
    missing: list[int]


NO_CHANGES = Changes(np.empty(0, np.intp), np.empty((len(BlockDemand._fields), 0), int), [], [])


ONE_MORE = np.array([[0], [0], [1], [1]])  # a line for each field of BlockDemand
"""By how much the demand of a slot grows that needs a column behind what it owns."""


class BlockTable:
    """Which block a slot owns in each column, FREE where none.

    device_table: int32 `[slots, columns]` on the device, as of the last upload of `tables`.

    tables, index: whose table this is, and which of them.
    """

    def __init__(self, pool: BlockPool, tables: DeviceTables, index: int) -> None:
        self.pool, self.tables, self._index = pool, tables, index
        self._view, self.device_table = tables.host[index], tables.device[index]
        slots, self.columns = self._view.shape
        self._start = tables.start[index]
        # The last demand of each slot, one per column.
        self._held = np.full((len(BlockDemand._fields), slots), -1, np.int64)

    def changes(self, slots: Ints, demand: BlockDemand) -> Changes:
        """What must change for each slot to own the columns of its row of `demand`, and nothing
        else. Slots whose demand is the last one again cost nothing, those that need one more column
        behind what they own little."""
        wanted: Ints = np.array(demand)
        more: Ints = wanted - self._held[:, slots]
        (rows,) = np.nonzero(more.any(0))
        if not len(rows):
            return NO_CHANGES
        slots, wanted, more = slots[rows], wanted[:, rows], more[:, rows]
        grows = (more == ONE_MORE).all(0)
        last = slots * self.columns + (wanted[2] + self._start)
        dropped, missing = list[int](), self.tables.free(last[grows])
        for row in (~grows).nonzero()[0].tolist():
            self._change(int(slots[row]), wanted[:, row].tolist(), dropped, missing)
        return Changes(slots, wanted, dropped, missing)

    def can_allocate(self, changes: Changes) -> bool:
        """Whether there are enough free blocks for them."""
        count = len(changes.missing)
        if changes.dropped:
            count -= self.pool.sole(self.tables.read(changes.dropped))
        return count <= self.pool.free

    def allocate(self, changes: Changes) -> list[int]:
        """Make changes for which there is room; the blocks newly taken."""
        # What one slot gives back another one may need.
        if changes.dropped:
            self._drop(changes.dropped)
        taken: list[int] = []
        if changes.missing:
            taken = self.pool.take(len(changes.missing))
            self.tables.write(changes.missing, taken)
        self._held[:, changes.slots] = changes.wanted
        return taken

    def free(self, slot: int) -> None:
        """Give all blocks of a slot back."""
        owned = np.flatnonzero(self._view[slot] != FREE)
        self._drop((self._start + slot * self.columns + owned).tolist())
        self._held[:, slot] = -1

    def reset(self) -> None:
        """No block has an owner, whatever was before; their content is forgotten."""
        self.pool.reset()
        self.tables.clear(self._index)
        self._held.fill(-1)

    def _change(self, slot: int, wanted: list[int], dropped: list[int], missing: list[int]) -> None:
        """Add the cells of one slot's change."""
        first, fresh, last, kept = wanted
        row, start = self._view[slot], self._start + slot * self.columns
        below = (row[:first] != FREE).nonzero()[0]
        above = (row[kept + 1 :] != FREE).nonzero()[0] + (kept + 1)
        dropped += [start + c for c in (*below.tolist(), *above.tolist())]
        missing += (start + fresh + (row[fresh : last + 1] == FREE).nonzero()[0]).tolist()

    def block(self, slot: int, column: int) -> int:
        """The block in a column, -1 where there is none."""
        return int(self._view[slot, column])

    def blocks(self, slot: int, columns: slice) -> list[int]:
        """Those in some columns."""
        owned: list[int] = self._view[slot, columns].tolist()
        return owned

    def adopt(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Let a slot own blocks that were found, in columns from `first` on."""
        self.pool.share(blocks)
        start = self._start + slot * self.columns + first
        self.tables.write([*range(start, start + len(blocks))], list(blocks))

    def give(self, slot: int, column: int, block: int) -> None:
        """Let a slot own a block that was just taken for it."""
        self.tables.write([self._start + slot * self.columns + column], block)

    def _drop(self, cells: list[int]) -> None:
        self.pool.put(reversed(self.tables.read(cells)))  # the end of a text makes room first
        self.tables.write(cells, FREE)
