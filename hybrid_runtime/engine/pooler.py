"""Embeddings: hidden states of prompts, pooled on the device while the prompts run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Readback, Staging
from hybrid_runtime.engine.request import Request, raise_first
from hybrid_runtime.engine.scheduler import Schedule
from hybrid_runtime.kernels.layers.pooling import ENTRY_FIELDS, pooling
from hybrid_runtime.state.step import Step

Pooling = Literal["last", "mean"]


def pooled_from(pooling: Pooling, tokens: int, instruction: int) -> int:
    """Position of the first pooled token; pooling goes on to the last token of the prompt.

    tokens: of the prompt, its instruction included. instruction: how many of them, in front, are
    the instruction's.
    """
    if pooling not in get_args(Pooling):
        raise ValueError(f"pooling is {pooling!r}; it must be one of {get_args(Pooling)}")
    return instruction if pooling == "mean" else tokens - 1


def stacked(requests: Sequence[Request], size: int, normalize: bool) -> Tensor:
    """Embeddings of requests that have ended, `[requests, size]`. Raises what a step of theirs has
    raised."""
    raise_first(requests)
    vectors = torch.empty(len(requests), size)
    for line, request in zip(vectors, requests, strict=True):
        assert request.embedding is not None
        line.copy_(request.embedding)
    return F.normalize(vectors) if normalize else vectors


class Pooler:
    """Means of hidden states, one running sum per slot, float32.

    The host knows from lengths alone which tokens are pooled. It sends a few integers for each row
    that runs a prompt's chunk, and gets finished embeddings back.
    """

    def __init__(
        self, slots: int, size: int, steps_ahead: int, device: torch.device, waits: Waits
    ) -> None:
        self.size = size
        self._sums = torch.zeros((slots, size), dtype=torch.float32, device=device)
        self._means = torch.zeros_like(self._sums)
        self._staging = Staging(slots, ENTRY_FIELDS, steps_ahead + 2, device, waits)
        self._results = Readback(slots * size, steps_ahead + 1, device, waits)

    def compile(self, dtype: torch.dtype) -> None:
        """Compile now what `pool` would compile when first needed. dtype: of hidden states."""
        device = self._sums.device
        hidden = torch.zeros((1, self.size), dtype=dtype, device=device)
        row = torch.zeros(2, dtype=torch.int32, device=device)
        entry = torch.tensor([[0, 0, 1, 0, 0, -1]], dtype=torch.int32, device=device)
        pooling(hidden, row, entry, self._sums, self._means, 1)

    def pool(self, schedule: Schedule, step: int, hidden: Tensor, cu_seqlens: Tensor) -> None:
        """Queue the pooling of a step, before its tokens are counted in its requests.

        step: its number. hidden: `[tokens, size]`, after the final norm. cu_seqlens: int32, first
        token of each row that runs a prompt, by row.
        """
        entries, longest = self._entries(schedule)
        if entries:
            index, packed = self._staging.take()
            packed[: len(entries)] = entries
            uploaded = self._staging.upload(index, len(entries))[: len(entries)]
            pooling(hidden, cu_seqlens, uploaded, self._sums, self._means, longest)
        if schedule.pooled:
            done = self._means[: len(schedule.pooled)].flatten()
            self._results.start(step, done.view(torch.int32))

    def read(self, schedule: Schedule, step: Step, reason: str) -> dict[int, Tensor]:
        """Embeddings that a step completed, float32 `[size]` on the CPU, by row."""
        if not schedule.pooled:
            return {}
        values = self._results.read(step.number, reason).view(np.float32)
        embeddings = torch.from_numpy(values.reshape(-1, self.size))
        return dict(zip(schedule.pooled, embeddings.unbind(), strict=True))

    def _entries(self, schedule: Schedule) -> tuple[list[tuple[int, ...]], int]:
        """What the kernel gets for each row that it pools (see `kernels/layers/pooling.py`), and
        the most tokens that one of them pools."""
        output_line = {row: line for line, row in enumerate(schedule.pooled)}
        entries: list[tuple[int, ...]] = []
        longest = 0
        for row in range(schedule.shape.decode_rows, len(schedule.requests)):
            request = schedule.requests[row]
            if request.pooled_from is None:
                continue
            # A hit never covers what is pooled, so all of it runs since the request was admitted.
            pooled = request.computed_min - request.pooled_from
            first, last = max(-pooled, 0), int(schedule.rows.scheduled[row])
            if first < last:
                line = output_line.get(row, -1)
                entries.append((row, first, last, request.slot, max(pooled, 0), line))
                longest = max(longest, last - first)
        return entries, longest
