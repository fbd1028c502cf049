"""Block tables on the device, in one memory, so that one copy brings them all there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import PinnedBuffers

FREE = -1
"""Of a column in which a slot owns no block."""
ALIGNED = 64
"""Entries; each table begins at a multiple."""


class DeviceTables:
    """int32 tables `[slots, columns]`, FREE at first.

    host: each table as the host has it; a change of one must set `changed`.
    device: the same as of the last `upload`, at addresses that never change.

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
        self.host: list[NDArray[np.int32]] = []
        self.device: list[Tensor] = []
        start = 0
        for size, n in zip(sizes, columns, strict=True):
            part = slice(start, start + slots * n)
            self.host.append(self._host[part].reshape(slots, n))
            self.device.append(self._device[part].view(slots, n))
            start += size
        self.changed = False

    def upload(self) -> None:
        """Make the host's changes visible to launches that come after."""
        if not self.changed:
            return
        index, packed = self._staging.take()
        packed[0] = self._host
        self._staging.copy(index, [(self._device, (0, slice(None)))])
        self.changed = False
