"""A copy stream without a GPU whose copies run as late as they may."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import torch

from hybrid_runtime.engine.offload.memcpy import Copies, paths
from hybrid_runtime.engine.offload.stream import CopyStream
from hybrid_runtime.engine.offload.tier import HostTier


class LateEvent:
    """Behind batch `number` of a stream. What torch runs on the CPU runs at once, so that whoever
    is ordered behind the event needs the batch now."""

    def __init__(self, stream: LateCopies, number: int) -> None:
        self._stream, self._number = stream, number

    def query(self) -> bool:
        return self._stream.passed() >= self._number

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream.run_until(self._number)


class LateCopies(CopyStream):
    """Batches that run one after another, none before something is ordered behind it or behind a
    later one. A block that is overwritten without that order is copied as it is then: wrong."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._waiting: deque[Copies] = deque()

    def run(self, copies: Copies) -> torch.cuda.Event:
        self._waiting.append(copies)
        self.issued += 1
        return cast(Any, LateEvent(self, self.issued))

    def passed(self) -> int:
        return self.issued - len(self._waiting)

    def run_until(self, number: int) -> None:
        """Let all batches up to `number` run."""
        while self.passed() < number:
            paths(self.device)[0].submit(self._waiting.popleft(), 0)


def late(tier: HostTier) -> LateCopies:
    """Let the copies of a tier be late from now on."""
    tier._copies = copies = LateCopies()
    return copies
