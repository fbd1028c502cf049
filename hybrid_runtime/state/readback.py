"""Results on their way to the host: a copy into a buffer of that step, and an event."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.state.guard import Waits, wait
from hybrid_runtime.state.staging import pinned_like


class Readback:
    """`depth` pinned int32 buffers `[width]`, each of one step until its turn comes again."""

    def __init__(self, width: int, depth: int, device: torch.device, waits: Waits) -> None:
        self._buffers = [pinned_like((width,), device) for _ in range(depth)]
        self._owner = [-1] * depth
        self._count = [0] * depth
        cuda = device.type == "cuda"
        self._events = [torch.cuda.Event() if cuda else None for _ in range(depth)]
        self._waits = waits

    def start(self, step: int, values: Tensor) -> None:
        """Start copying `values` (int32 `[n]`, n <= width; none: only `read` waits for the step)
        for step number `step`."""
        turn = step % len(self._buffers)
        host, _ = self._buffers[turn]
        self._owner[turn], self._count[turn] = step, values.shape[0]
        host[: values.shape[0]].copy_(values, non_blocking=True)
        event = self._events[turn]
        if event is not None:
            event.record()

    def read(self, step: int, reason: str) -> NDArray[np.int32]:
        """The values of `step`, waiting only if they are still in flight.

        Raises `ValueError` when the buffer has passed to a later step.
        """
        turn = step % len(self._buffers)
        if self._owner[turn] != step:
            raise ValueError(
                f"step is {step}; its results were given up for step {self._owner[turn]} "
                f"(at most {len(self._buffers)} steps may be outstanding)"
            )
        wait(self._events[turn], self._waits, reason)
        return self._buffers[turn][1][: self._count[turn]].copy()
