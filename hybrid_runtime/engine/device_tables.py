"""Block tables on the device, in one memory, so that one upload brings their changes there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import PinnedBuffers, Staging
from hybrid_runtime.kernels.step.write_cells import write_cells

FREE = -1
"""Of a column in which a slot owns no block."""
ALIGNED = 64
"""Entries; each table begins at a multiple."""
MOST_CELLS = 4096
"""Changes of one upload that are sent by themselves. With more the tables travel whole."""


class DeviceTables:
    """int32 tables `[slots, columns]`, FREE at first.

    host: each table as the host has it, changed by `write` and `clear` alone.
    device: the same as of the last `upload`, at addresses that never change.
    start: cells, counted over all tables, in front of each.

    columns: of each table.
    depth: pinned buffers that are used in turn, one for each upload that may not have run yet.
    """

    def __init__(
        self, slots: int, columns: Sequence[int], device: torch.device, depth: int, waits: Waits
    ) -> None:
        sizes = [-(-slots * n // ALIGNED) * ALIGNED for n in columns]
        self._host: NDArray[np.int32] = np.full(sum(sizes), FREE, np.int32)
        self._device = torch.full((sum(sizes),), FREE, dtype=torch.int32, device=device)
        self._staging = PinnedBuffers(1, sum(sizes), depth, device, waits)
        self._cells = Staging(MOST_CELLS, 2, depth, device, waits)
        self.host: list[NDArray[np.int32]] = []
        self.device: list[Tensor] = []
        self.start: list[int] = []
        start = 0
        for size, n in zip(sizes, columns, strict=True):
            part = slice(start, start + slots * n)
            self.host.append(self._host[part].reshape(slots, n))
            self.device.append(self._device[part].view(slots, n))
            self.start.append(start)
            start += size
        self._changed: list[int] = []
        self._whole = False
        index, _ = self._cells.take()
        write_cells(self._device, self._cells.upload(index, 0), 0)  # compiled before the first step

    def read(self, cells: list[int]) -> list[int]:
        """What the host has in cells, counted over all tables."""
        blocks: list[int] = self._host[cells].tolist()
        return blocks

    def free(self, cells: NDArray[Any]) -> list[int]:
        """Those of these cells that the host has FREE."""
        found: list[int] = cells[self._host[cells] == FREE].tolist()
        return found

    def write(self, cells: list[int], blocks: list[int] | int) -> None:
        """Set cells to these blocks, or all to one."""
        self._host[cells] = blocks
        self._changed += cells

    def clear(self, table: int) -> None:
        """Set a whole table to FREE, whatever was under way before."""
        self.host[table].fill(FREE)
        self._whole = True

    def upload(self) -> None:
        """Make the host's changes visible to launches that come after."""
        count = len(self._changed)
        if self._whole or count > MOST_CELLS:
            index, packed = self._staging.take()
            packed[0] = self._host
            self._staging.copy(index, [(self._device, (0, slice(None)))])
            self._whole = False
        elif count:
            index, packed = self._cells.take()
            packed[:count, 0] = self._changed
            # As they are now: a cell that was written twice is sent twice, with its last value.
            packed[:count, 1] = self._host[packed[:count, 0]]
            write_cells(self._device, self._cells.upload(index, count), count)
        self._changed.clear()
