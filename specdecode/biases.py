"""Biases of logits, by slot, on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Staging
from hybrid_runtime.specdecode.sampling import MAX_LOGIT_BIAS


class Biases:
    """A table of at most `MAX_LOGIT_BIAS` biased tokens per slot.

    tokens: int32 `[slots + 1, MAX_LOGIT_BIAS]`, -1 = none.
    values: float32 `[slots + 1, MAX_LOGIT_BIAS]`.

    slots: requests that run at once. depth: of the staging buffers.
    """

    def __init__(self, slots: int, depth: int, device: torch.device) -> None:
        shape = (slots + 1, MAX_LOGIT_BIAS)
        self.tokens = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.values = torch.zeros(shape, dtype=torch.float32, device=device)
        self._staging = Staging(slots, 1 + 2 * MAX_LOGIT_BIAS, depth, device, Waits())

    def admit(self, entries: Sequence[tuple[int, Mapping[int, float] | None]]) -> None:
        """Slots and the biases that they have from now on, by one copy to the device."""
        index, packed = self._staging.take()
        for line, (slot, bias) in zip(packed, entries, strict=False):
            bias = bias or {}
            line[0], line[1 : 1 + MAX_LOGIT_BIAS] = slot, -1
            line[1 : 1 + len(bias)] = list(bias)
            values = line[1 + MAX_LOGIT_BIAS :].view(np.float32)
            values[: len(bias)] = list(bias.values())
        lines = self._staging.upload(index, len(entries))[: len(entries)]
        slots = lines[:, 0].long()
        self.tokens.index_copy_(0, slots, lines[:, 1 : 1 + MAX_LOGIT_BIAS])
        values = lines[:, 1 + MAX_LOGIT_BIAS :].contiguous().view(torch.float32)
        self.values.index_copy_(0, slots, values)
