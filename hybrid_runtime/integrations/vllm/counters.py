"""What the adapter did, for vLLM's log."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Counters:
    """Since the start.

    steps: steps seen.
    skipped: of these, those without a candidate, for which nothing was launched.
    candidates: rows launched for, pre- and post-copy together.
    handed_back: steps, or ends of steps, left to vLLM's own kernels.
    """

    steps: int = 0
    skipped: int = 0
    candidates: int = 0
    handed_back: int = 0

    def add(self, precopy: int, postcopy: int) -> None:
        """Count a step with so many candidates of each phase."""
        self.steps += 1
        self.skipped += not precopy + postcopy
        self.candidates += precopy + postcopy


@dataclass(slots=True)
class Reporter:
    """Writes the counters every `interval` seconds, through `log`.

    Copies are counted on the device; what is written is the value fetched a line earlier, so that
    nobody waits for it.
    """

    interval: float
    log: Callable[..., None]
    _next: float = field(default_factory=time.monotonic)
    _host: Tensor | None = None
    _fetched: torch.cuda.Event | None = None
    _copied: int = 0

    def tick(self, counters: Counters, totals: Tensor) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.interval
        if counters.steps < 2:
            return
        self._fetch(totals)
        self.log(
            "hybrid-runtime: %d steps, %d skipped (%.1f %%), %d candidates, %d copied",
            counters.steps,
            counters.skipped,
            100 * counters.skipped / counters.steps,
            counters.candidates,
            self._copied,
        )

    def _fetch(self, totals: Tensor) -> None:
        if not totals.is_cuda:
            self._copied = int(totals.sum())
            return
        if self._host is None:
            self._host = torch.zeros(2, dtype=totals.dtype, pin_memory=True)
            self._fetched = torch.cuda.Event()
        elif self._fetched is not None and self._fetched.query():
            self._copied = int(self._host.sum())
        if self._fetched is not None:
            self._host.copy_(totals, non_blocking=True)
            self._fetched.record()
