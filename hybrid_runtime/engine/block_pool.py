"""Fixed-size blocks, handed out and taken back, and the tables that map columns to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.state.guard import Waits
from hybrid_runtime.state.staging import Staging

Ints = NDArray[Any]

FREE = -1


class BlockPool:
    """Block ids `0 .. size-1`; a LIFO free list, so that warm memory is used again first."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size is {size}; a pool must hold at least 1 block")
        self.size = size
        self._free = list(range(size - 1, -1, -1))
        self._reserved = 0

    @property
    def free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def unreserved(self) -> int:
        """Blocks that no admitted request can still ask for."""
        return self.size - self._reserved

    def reserve(self, count: int) -> None:
        """Set the most blocks that a request can own aside for it; `release` gives them back."""
        if count > self.unreserved:
            raise ValueError(f"count is {count}; only {self.unreserved} blocks are unreserved")
        self._reserved += count

    def release(self, count: int) -> None:
        self._reserved -= count

    def take(self) -> int:
        return self._free.pop()

    def put(self, block: int) -> None:
        self._free.append(block)


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
        self._staging = Staging(slots, columns, depth, device, waits)
        self._view: NDArray[np.int32] = np.full((slots, columns), FREE, np.int32)
        self.device_table: Tensor = torch.full(
            (slots, columns), FREE, dtype=torch.int32, device=device
        )
        # Per slot the columns that are held: from, from (of those that had to be taken), to.
        self._held = np.full((slots, 3), -1, np.int64)
        self._dirty = False

    def hold(self, slots: Ints, first: Ints, fresh: Ints, last: Ints) -> list[int]:
        """Let each slot own its columns `fresh .. last` and what it has of `first .. fresh`, and
        nothing else; the blocks newly taken. Slots that change nothing cost nothing."""
        wanted = np.stack([first, fresh, last], 1)
        changed = (self._held[slots] != wanted).any(1).nonzero()[0]
        taken: list[int] = []
        for i in changed:
            slot, row = int(slots[i]), self._view[slots[i]]
            for column in np.flatnonzero(row != FREE):
                if not first[i] <= column <= last[i] and column != self._always:
                    self._drop(slot, int(column))
            missing = list(fresh[i] + np.flatnonzero(row[fresh[i] : last[i] + 1] == FREE))
            if self._always is not None and row[self._always] == FREE:
                missing.append(self._always)
            for column in missing:
                row[column] = self.pool.take()
                taken.append(int(row[column]))
        self._held[slots[changed]] = wanted[changed]
        self._dirty |= bool(taken)
        return taken

    def clear(self, slot: int) -> None:
        """Give all blocks of a slot back."""
        for column in np.flatnonzero(self._view[slot] != FREE):
            self._drop(slot, int(column))
        self._held[slot] = -1

    def upload(self) -> None:
        """Make the host's changes visible to launches that come after."""
        if not self._dirty:
            return
        index, packed = self._staging.take()
        packed[:] = self._view
        self.device_table.copy_(self._staging.upload(index, len(packed)))
        self._dirty = False

    def _drop(self, slot: int, column: int) -> None:
        self.pool.put(int(self._view[slot, column]))
        self._view[slot, column] = FREE
        self._dirty = True
