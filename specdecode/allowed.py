"""Which tokens can be drawn, by slot, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Staging


class AllowedTokens:
    """A bit per slot and token of the vocabulary.

    bits: int32 `[slots + 1, ceil(vocabulary / 32)]`, as of `Penalties.allowed`.

    slots: requests that run at once. depth: of the staging buffers.
    """

    def __init__(self, slots: int, vocabulary: int, depth: int, device: torch.device) -> None:
        words = -(-vocabulary // 32)
        self.bits = torch.full((slots + 1, words), -1, dtype=torch.int32, device=device)
        self._staging = Staging(slots, 1 + words, depth, device, Waits())

    def admit(self, entries: Sequence[tuple[int, Sequence[int] | None]]) -> None:
        """Slots and the tokens that they can draw from now on (None: all), by one copy to the
        device."""
        index, packed = self._staging.take()
        for line, (slot, tokens) in zip(packed, entries, strict=False):
            line[0], line[1:] = slot, -1
            if tokens is not None:
                bits = np.zeros(32 * self.bits.shape[1], np.uint8)
                bits[list(tokens)] = 1
                line[1:] = np.packbits(bits, bitorder="little").view(np.int32)
        lines = self._staging.upload(index, len(entries))[: len(entries)]
        self.bits.index_copy_(0, lines[:, 0].long(), lines[:, 1:])
