"""Every wait of the host for the device goes through `wait`, which counts it.

`sync_guard` turns implicit synchronisations into errors (torch's sync debug mode) and counts the
explicit waits, which that mode does not see; `allowed` declares the places where waiting is the
point, as when a result is handed to the caller.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(slots=True, eq=False)
class Waits:
    """Waits of the host: how many, how long (seconds), and why; undeclared ones apart."""

    count: int = 0
    seconds: float = 0.0
    undeclared: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


_guards: list[Waits] = []
_allowed: list[str] = []


def wait(event: torch.cuda.Event | None, waits: Waits, reason: str) -> None:
    """Wait for `event` (None: work on the CPU, already done) and count it in `waits`.

    A result that is already there costs no wait and counts as none, except on the CPU, where
    nothing is asynchronous and each demand for a result counts as the wait it would have been.
    """
    start = time.perf_counter()
    if event is not None:
        if event.query():
            return
        with _sync_errors_off():
            event.synchronize()
    elapsed = time.perf_counter() - start
    for counted in (waits, *_guards):
        counted.count += 1
        counted.seconds += elapsed
        counted.reasons[_allowed[-1] if _allowed else reason] += 1
        counted.undeclared += not _allowed


@contextmanager
def _sync_errors_off() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else 0
    if mode == 0:  # no guard: as users run it
        yield
        return
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def allowed(why: str) -> Iterator[None]:
    """Declare that waiting is meant inside this block, and why."""
    depth = len(_allowed)
    try:
        _allowed.append(why)
        with _sync_errors_off():
            yield
    finally:
        del _allowed[depth:]  # also what Ctrl-C left of a block inside this one


def forget_declarations() -> None:
    """After Ctrl-C, which may have come between a block's last line and its end: nothing is
    declared any more. For the outermost caller alone."""
    _allowed.clear()


@contextmanager
def sync_guard() -> Iterator[Waits]:
    """Make implicit synchronisation raise, and count explicit waits in the yielded `Waits`."""
    waits = Waits()
    _guards.append(waits)
    cuda = torch.cuda.is_available()
    mode = torch.cuda.get_sync_debug_mode() if cuda else 0
    if cuda:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
    try:
        yield waits
    finally:
        if cuda:
            torch.cuda.set_sync_debug_mode(mode)
        _guards.remove(waits)
