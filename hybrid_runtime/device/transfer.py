"""Host-to-device staging: pinned NumPy-backed buffers used in turn, copied asynchronously."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import Waits, wait

Part = slice | tuple[int, slice]
"""Lines of a buffer, or fields of one line."""


class PinnedBuffers:
    """`depth` int32 host buffers `[lines, fields]`, pinned, from which the device copies.

    tensors: the buffers. None is handed out again before the copies that read it have passed.
    """

    def __init__(
        self, lines: int, fields: int, depth: int, device: torch.device, waits: Waits
    ) -> None:
        both = [pinned_like((lines, fields), device) for _ in range(depth)]
        self.tensors, self._arrays = [t for t, _ in both], [a for _, a in both]
        cuda = device.type == "cuda"
        self._copied: list[torch.cuda.Event | None] = [None] * depth
        self._events = [torch.cuda.Event() if cuda else None for _ in range(depth)]
        self._turn = 0
        self._waits = waits

    def take(self) -> tuple[int, NDArray[np.int32]]:
        """Index of the next buffer and its array `[lines, fields]`, free to be written; the same
        one again until `copy` is called."""
        copied = self._copied[self._turn]
        if copied is not None:
            wait(copied, self._waits, "staging buffer still being copied")
            self._copied[self._turn] = None
        return self._turn, self._arrays[self._turn]

    def copy(self, index: int, copies: Iterable[tuple[Tensor, Part]]) -> None:
        """Start copying parts of the buffer taken last, each onto a tensor, in stream order."""
        self._turn = (index + 1) % len(self.tensors)
        for target, part in copies:
            target.copy_(self.tensors[index][part], non_blocking=True)
        event = self._events[index]
        if event is not None:
            event.record()
            self._copied[index] = event


class Staging:
    """Pinned buffers, each with its device twin. On the CPU a buffer is its own twin and nothing is
    copied."""

    def __init__(
        self, lines: int, fields: int, depth: int, device: torch.device, waits: Waits
    ) -> None:
        self._pinned = PinnedBuffers(lines, fields, depth, device, waits)
        self._copies = device.type == "cuda"
        self._twins = [host.to(device) for host in self._pinned.tensors]

    def take(self) -> tuple[int, NDArray[np.int32]]:
        """As of `PinnedBuffers`."""
        return self._pinned.take()

    def upload(self, index: int, lines: int) -> Tensor:
        """Start copying the first `lines` lines of the buffer taken last; its device twin, valid in
        stream order."""
        twin, part = self._twins[index], slice(lines)
        self._pinned.copy(index, [(twin[part], part)] if self._copies else [])
        return twin


def pinned_like(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, NDArray[Any]]:
    """An int32 host tensor that `device` can copy into asynchronously, and its NumPy view."""
    host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host, host.numpy()


class Readback:
    """`depth` pinned int32 buffers `[width]`, each of one step until its turn comes again."""

    def __init__(self, width: int, depth: int, device: torch.device, waits: Waits) -> None:
        self._buffers = [pinned_like((width,), device) for _ in range(depth)]
        self.depth, self._owner = depth, [-1] * depth
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
