"""Fixed-size blocks, handed out and taken back, and the tables that map columns to them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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

    `device_table` never moves; `upload` copies what the host changed, in stream order.
    """

    def __init__(self, slots: int, columns: int, pool: BlockPool, device: torch.device) -> None:
        self.pool = pool
        self.columns = columns
        self._host = torch.full((slots, columns), FREE, dtype=torch.int32)
        self._view: NDArray[np.int32] = self._host.numpy()
        cuda = device.type == "cuda"
        self.device_table: Tensor = self._host.to(device) if cuda else self._host
        # Two pinned buffers in turn: one may still be on its way while the other is filled.
        self._pinned = [self._host.clone().pin_memory() for _ in range(2)] if cuda else []
        self._copied = [torch.cuda.Event() for _ in self._pinned]
        self._dirty = False

    def hold(self, slot: int, first: int, last: int) -> list[int]:
        """Own exactly the columns `first .. last`: free those below, take missing ones; the blocks
        newly taken."""
        row = self._view[slot]
        for column in np.flatnonzero(row[:first] != FREE):
            self._drop(slot, int(column))
        missing = first + np.flatnonzero(row[first : last + 1] == FREE)
        taken = [self.pool.take() for _ in missing]
        if taken:
            row[missing] = taken
            self._dirty = True
        return taken

    def clear(self, slot: int) -> None:
        """Give all blocks of a slot back."""
        for column in np.flatnonzero(self._view[slot] != FREE):
            self._drop(slot, int(column))

    def owned(self, slot: int) -> int:
        return int((self._view[slot] != FREE).sum())

    def upload(self) -> None:
        """Make the host's changes visible to launches that come after."""
        if self._dirty and self._pinned:
            self._pinned.reverse()
            self._copied.reverse()
            self._copied[0].synchronize()
            self._pinned[0].copy_(self._host)
            self.device_table.copy_(self._pinned[0], non_blocking=True)
            self._copied[0].record()
        self._dirty = False

    def _drop(self, slot: int, column: int) -> None:
        self.pool.put(int(self._view[slot, column]))
        self._view[slot, column] = FREE
        self._dirty = True
