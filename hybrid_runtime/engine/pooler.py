"""Embeddings: hidden states of prompts, pooled on the device while the prompts run."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Readback, Staging
from hybrid_runtime.engine.scheduler import Schedule
from hybrid_runtime.kernels.layers.pooling import ENTRY_FIELDS, pooling
from hybrid_runtime.state.step import Step

Pooling = Literal["last", "mean"]


def pooled_from(pooling: Pooling, tokens: int, instruction: int) -> int:
    """Position of the first token that is pooled, of so many, the first of which are an
    instruction's: "last" is the mean of one token."""
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling is {pooling!r}; it must be one of {get_args(Pooling)}")
    return instruction if pooling == "mean" else tokens - 1


class Pooler:
    """Means of hidden states, one running sum per slot, fp32.

    What is pooled is known on the host from the lengths alone, and goes to the device as a few
    integers per row of a prompt's chunk; what comes back are finished embeddings.
    """

    def __init__(
        self, slots: int, size: int, steps_ahead: int, device: torch.device, waits: Waits
    ) -> None:
        self.size = size
        self._sums = torch.zeros((slots, size), dtype=torch.float32, device=device)
        self._means = torch.zeros_like(self._sums)
        self._staging = Staging(slots, ENTRY_FIELDS, steps_ahead + 2, device, waits)
        self._results = Readback(slots * size, steps_ahead + 1, device, waits)

    def add(self, schedule: Schedule, step: int, hidden: Tensor, cu_seqlens: Tensor) -> None:
        """Queue the pooling of a step that is not counted in its requests yet.

        hidden: `[T, size]`. cu_seqlens: int32 `[rows + 1]`, first token of each row.
        """
        result = {row: line for line, row in enumerate(schedule.pooled)}
        lines: list[tuple[int, ...]] = []
        most = 0
        for row in range(schedule.num_decoding, len(schedule.requests)):
            request = schedule.requests[row]
            if request.pooled_from is None:
                continue
            last = int(schedule.rows.scheduled[row])
            # A hit never covers what is pooled, so all of it runs since the request was admitted.
            before = request.computed_min - request.pooled_from
            first = max(-before, 0)
            if first < last:
                lines.append((row, first, last, request.slot, max(before, 0), result.get(row, -1)))
                most = max(most, last - first)
        if lines:
            index, packed = self._staging.take()
            packed[: len(lines)] = lines
            entries = self._staging.upload(index, len(lines))[: len(lines)]
            pooling(hidden, cu_seqlens, entries, self._sums, self._means, most)
        if result:
            done = self._means[: len(result)].flatten()
            self._results.start(step, done.view(torch.int32))

    def read(self, schedule: Schedule, step: Step, reason: str) -> dict[int, Tensor]:
        """Embeddings that a step completed, float32 `[size]` on the CPU, by row."""
        if not schedule.pooled:
            return {}
        values = self._results.read(step.number, reason).view(np.float32)
        lines = torch.from_numpy(values.reshape(-1, self.size))
        return dict(zip(schedule.pooled, lines.unbind(), strict=True))
