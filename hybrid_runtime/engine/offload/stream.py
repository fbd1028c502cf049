"""A stream for copies beside the one that computes, ordered against it by events alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from hybrid_runtime.engine.offload.memcpy import Copies, CopyPath, paths


@dataclass(frozen=True, slots=True)
class Ticket:
    """A batch of copies under way.

    blocks: int64 `[n]`, the host block of each device block, in the order these were given in.
    """

    blocks: NDArray[np.int64]
    _event: torch.cuda.Event | None = field(repr=False)

    def done(self) -> bool:
        """Whether all bytes are there; never waits."""
        return self._event is None or self._event.query()

    def order(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let what is launched on `stream` (default: the current one) from now on run behind the
        copies; the host goes on."""
        if self._event is not None:
            self._event.wait(stream)


class CopyStream:
    """Batches of copies, numbered from 1, that run one after another.

    One stream for both directions: a load from a host block is behind the store that filled it, and
    a load into a device block behind the store that emptied it, without any further event.
    """

    def __init__(self, device: torch.device, path: CopyPath | None = None) -> None:
        self.path = path or paths(device)[0]
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.issued = 0
        self._recorded = self._passed = 0
        self._events: deque[tuple[int, torch.cuda.Event]] = deque()

    def run(self, copies: Copies) -> torch.cuda.Event | None:
        """Submit a batch, which gets the number `issued + 1`, behind all that the current stream
        was given; the event behind it (None on the CPU, where it has run)."""
        self.passed()  # lets go of old events
        self.issued += 1
        if self.stream is None:
            self.path.submit(copies, 0)
            return None
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            try:
                self.stream.wait_stream(current)
                self.path.submit(copies, self.stream.cuda_stream)
                return self._record()
            except BaseException:
                # Part of the batch may run; blocks that its caller gives up are used on `current`.
                current.wait_stream(self.stream)
                raise

    def passed(self) -> int:
        """Number of the last batch that has run, failed ones included; never waits."""
        if self.stream is None:
            return self.issued
        if self._recorded < self.issued:  # the last batch failed before its event
            self._record()
        while self._events and self._events[0][1].query():
            self._passed, _ = self._events.popleft()
        return self._passed

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream)
        self._recorded = self.issued
        self._events.append((self.issued, event))
        return event
