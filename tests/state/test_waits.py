"""Waits are counted and can be declared; implicit ones raise where torch can see them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.toy_recurrences import HashRule

from hybrid_runtime.device.sync import Waits, wait
from hybrid_runtime.state import (
    HybridStateManager,
    StateLayout,
    StepRows,
    allowed,
    sync_guard,
)


def test_waits_are_counted_and_declared_ones_apart() -> None:
    waits = Waits()
    with sync_guard() as outer:
        wait(None, waits, "counts")
        with sync_guard() as inner, allowed("handed to the caller"):
            wait(None, waits, "counts")
        wait(None, waits, "counts")
    wait(None, waits, "counts")
    assert (waits.count, waits.undeclared) == (4, 3)
    assert waits.reasons == {"counts": 3, "handed to the caller": 1}
    assert (outer.count, outer.undeclared) == (3, 2)
    assert (inner.count, inner.undeclared) == (1, 0)


def test_guards_end_with_their_block_even_by_an_exception() -> None:
    waits = Waits()
    with pytest.raises(RuntimeError), sync_guard() as guard, allowed("why"):
        raise RuntimeError
    wait(None, waits, "counts")
    assert (guard.count, waits.undeclared) == (0, 1)


@pytest.mark.parametrize("strategy", ["blocking", "defer", "always", "auto"])
def test_only_strategies_that_decide_on_the_host_wait_undeclared(strategy: str) -> None:
    runs = HashRunner(strategy=strategy, block_size=8)
    runs.admit(0, [1, 2, 3])
    with sync_guard() as waits:
        runs.step([(0, 3, [], 1)])
        for _ in range(20):
            runs.step([(0, 1, [1, 2, 3], 2)])
    undeclared = {"blocking": 21, "defer": waits.undeclared, "always": 0, "auto": 0}[strategy]
    assert waits.undeclared == undeclared
    if strategy == "defer":
        assert 0 < undeclared < 21


@pytest.mark.gpu
def test_implicit_synchronisation_raises() -> None:
    x = torch.arange(4.0, device="cuda")
    with sync_guard():
        with pytest.raises(RuntimeError):
            x.sum().item()
        with pytest.raises(RuntimeError):
            x[0] = 3.0
        x[:1] = 3.0
        with allowed("the test looks"):
            assert x.sum().item() == 9.0


@pytest.mark.gpu
def test_explicit_waits_are_counted_when_they_wait() -> None:
    waits, event = Waits(), torch.cuda.Event()
    torch.cuda._sleep(100_000_000)
    event.record()
    with sync_guard() as guard:
        wait(event, waits, "slow")
        wait(event, waits, "already there")
    assert guard.reasons == {"slow": 1}
    assert waits.seconds > 0


@pytest.mark.gpu
@pytest.mark.parametrize("in_place", [False, True])
def test_three_hundred_steps_of_the_manager_never_synchronise(in_place: bool) -> None:

    layout = StateLayout(HashRule(64, (4, 8, 16)).recurrence, 3, 32)
    manager = HybridStateManager(layout, 8, 3, "cuda", in_place=in_place)
    table = torch.arange(8 * 48, dtype=torch.int32, device="cuda").view(8, 48)
    manager.bind({0: layout.allocate(8 * 48, "cuda")}, table)
    for slot in range(8):
        manager.admit(slot)
    counts = torch.ones(8, dtype=torch.int32, device="cuda")
    length = [0] * 8
    with sync_guard() as guard:
        for number in range(300):
            slots = [s for s in range(8) if (number + s) % 5]
            draft = [0 if length[s] == 0 else (number + s) % 4 for s in slots]
            first = [10 if length[s] == 0 else d + 1 for s, d in zip(slots, draft, strict=True)]
            step = manager.begin_step(
                StepRows.exact(slots, [length[s] for s in slots], first, draft)
            )
            manager.end_step(step, counts)
            for s, n, d in zip(slots, first, draft, strict=True):
                length[s] += n - d
            if number % 40 == 39:
                manager.release(number % 8)
                manager.admit(number % 8)
                length[number % 8] = 0
    # The counts of two steps may be on their way; whatever was waited for was their turn.
    assert set(guard.reasons) <= {"too many steps in flight", "staging buffer still being copied"}


WAITS = """
import torch
from hybrid_runtime.device.sync import allowed, sync_guard

with allowed("a result is handed to the caller"):
    torch.cuda.synchronize()
with sync_guard(), allowed("a result is handed to the caller"):
    torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_users_hear_nothing_of_torchs_debug_mode() -> None:
    """It warns, once a process, of being a prototype."""
    refused = "error:Synchronization debug mode:UserWarning"
    subprocess.run([sys.executable, "-W", refused, "-c", WAITS], check=True)


def test_guards_with_equal_counts_are_told_apart() -> None:
    with sync_guard() as outer:
        with sync_guard() as inner, allowed("nothing"):
            pass
        wait(None, Waits(), "counts")
    assert (outer.count, inner.count) == (1, 0)
