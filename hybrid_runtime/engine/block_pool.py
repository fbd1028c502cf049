"""Fixed-size blocks, handed out and taken back, and the tables that map columns to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import PinnedBuffers
from hybrid_runtime.state.demand import BlockDemand

Ints = NDArray[Any]

FREE = -1
REMEMBERED = 4
"""Keys of evicted blocks that are remembered, to say why a prefix was not found, per block."""


class BlockPool:
    """Block ids `0 .. size-1`, owned by any number of requests, and findable by their content.

    A block that was filed under a key keeps its content after its last owner has gone, until
    somebody needs the room: the one that was used longest ago goes first. Blocks without a key are
    taken before those, the warmest first. An owned block is never taken away.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; a pool must hold at least 1 block")
        self.size = size
        self.evictions = 0
        self.reset()

    def reset(self) -> None:
        """Nobody owns a block, and no content can be found, whatever was before."""
        self._free = list(range(self.size - 1, -1, -1))
        self._owners = [0] * self.size
        self._key: list[bytes | None] = [None] * self.size
        self._block: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that nobody owns, those that are kept for their content included."""
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


class BlockTable:
    """int32 `[slots, columns]` on the device, -1 where a slot owns no block, and its host copy.

    `device_table` never moves; `upload` copies what the host changed, in stream order. `depth`
    pinned buffers are used in turn, one for each upload that may not have run yet. `always`: a
    column that every slot owns from its first step to its end.
    """

    def __init__(
        self,
        slots: int,
        columns: int,
        pool: BlockPool,
        device: torch.device,
        depth: int,
        waits: Waits,
        always: int | None = None,
    ) -> None:
        self.pool = pool
        self.columns, self._always = columns, always
        self._staging = PinnedBuffers(slots, columns, depth, device, waits)
        self._view: NDArray[np.int32] = np.full((slots, columns), FREE, np.int32)
        self.device_table: Tensor = torch.full(
            (slots, columns), FREE, dtype=torch.int32, device=device
        )
        # The last demand of each slot.
        self._held = np.full((slots, 4), -1, np.int64)
        self._dirty = False

    def can_allocate(self, slots: Ints, demand: BlockDemand) -> bool:
        """Whether there are enough free blocks for `allocate`."""
        wanted = np.stack(demand, 1)
        changed = (self._held[slots] != wanted).any(1).nonzero()[0]
        count = 0
        for i in changed:
            first, fresh, last, kept = wanted[i]
            row = self._view[slots[i]]
            count += int((row[fresh : last + 1] == FREE).sum())
            count += self._always is not None and row[self._always] == FREE
            dropped = row[self._dropped(slots[i], first, kept)]
            count -= self.pool.sole(dropped.tolist())
        return count <= self.pool.free

    def allocate(self, slots: Ints, demand: BlockDemand) -> list[int]:
        """Let each slot own the columns of its row of `demand`, and nothing else; the blocks newly
        taken. Slots whose demand is the last one again cost nothing."""
        wanted = np.stack(demand, 1)
        changed = (self._held[slots] != wanted).any(1).nonzero()[0]
        taken: list[int] = []
        # What one slot gives back another one may need.
        for i in changed:
            for column in self._dropped(slots[i], wanted[i, 0], wanted[i, 3]):
                self._drop(int(slots[i]), int(column))
        for i in changed:
            _, fresh, last, _ = wanted[i]
            row = self._view[slots[i]]
            missing = list(fresh + np.flatnonzero(row[fresh : last + 1] == FREE))
            if self._always is not None and row[self._always] == FREE:
                missing.append(self._always)
            for column in missing:
                row[column] = self.pool.take()
                taken.append(int(row[column]))
        self._held[slots[changed]] = wanted[changed]
        self._dirty |= bool(taken)
        return taken

    def free(self, slot: int) -> None:
        """Give all blocks of a slot back."""
        for column in np.flatnonzero(self._view[slot] != FREE):
            self._drop(slot, int(column))
        self._held[slot] = -1

    def reset(self) -> None:
        """Nobody owns a block, whatever was before; their content is forgotten."""
        self.pool.reset()
        self._view.fill(FREE)
        self._held.fill(-1)
        self._dirty = True

    def _dropped(self, slot: int, first: int, kept: int) -> Ints:
        """Columns that a slot owns and need not keep."""
        owned = np.flatnonzero(self._view[slot] != FREE)
        always = FREE if self._always is None else self._always
        return owned[((owned < first) | (owned > kept)) & (owned != always)]

    def block(self, slot: int, column: int) -> int:
        """The block in a column, -1 where there is none."""
        return int(self._view[slot, column])

    def adopt(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Let a slot own blocks that were found, in columns from `first` on."""
        for column, block in enumerate(blocks, first):
            self.pool.share(block)
            self._view[slot, column] = block
        self._dirty |= bool(blocks)

    def upload(self) -> None:
        """Make the host's changes visible to launches that come after."""
        if not self._dirty:
            return
        index, packed = self._staging.take()
        packed[:] = self._view
        self._staging.copy(index, [(self.device_table, slice(None))])
        self._dirty = False

    def _drop(self, slot: int, column: int) -> None:
        self.pool.put(int(self._view[slot, column]))
        self._view[slot, column] = FREE
        self._dirty = True
