"""Bounds on the tokens that a live state lacks: exact after one queued step with any counts, sound
after several, and what debug mode says of a device that is beyond them."""

from __future__ import annotations

import itertools
import random

import pytest
from helpers.replay_model import ReplayRunner

from hybrid_runtime.state.layouts.pending import pending_bounds

BLOCK = 8


def runner(window: int, depth: int) -> ReplayRunner:
    return ReplayRunner(num_draft=3, window=window, block_size=BLOCK, max_requests=1, depth=depth)


def bounds(runs: ReplayRunner) -> tuple[int, int]:
    manager = runs.manager
    queued = manager._in_flight.queued
    low, high = pending_bounds(manager._slot_table, queued, runs.live, BLOCK, runs.layout.window)
    return int(low[0]), int(high[0])


def lacks(
    window: int, history: list[tuple[int, int]], drafts: list[int], accepted: tuple[int, ...]
) -> tuple[int, tuple[int, int]]:
    """Tokens that the state lacks after a history whose results are read and queued steps whose
    aren't; and the bounds."""
    runs = runner(window, depth=len(drafts))
    runs.admit(0, [1, 2, 3, 4])
    runs.step([(0, 4, [], 1)])
    for count, taken in history:
        runs.step([(0, 1, [5] * count, taken)])
    while runs.outstanding:
        runs.read_oldest()
    assert bounds(runs) == (runs.requests[0].computed - runs.requests[0].written,) * 2
    for count, taken in zip(drafts, accepted, strict=True):
        runs.step([(0, 1, [5] * count, taken)])
    return runs.requests[0].computed - runs.requests[0].written, bounds(runs)


@pytest.mark.parametrize("window", [0, 4, 7, 16])
@pytest.mark.parametrize("seed", range(2))
def test_bounds_hold_whatever_is_accepted(window: int, seed: int) -> None:
    rng = random.Random(seed)
    for steps in (1, 1, 2):
        history = []
        for _ in range(rng.randrange(7)):
            count = rng.randrange(4)
            history.append((count, rng.randint(1, count + 1)))
        drafts = [rng.randrange(4) for _ in range(steps)]
        found, known = set(), set()
        for accepted in itertools.product(*(range(1, count + 2) for count in drafts)):
            pending, between = lacks(window, history, drafts, accepted)
            found.add(pending)
            known.add(between)
        ((low, high),) = known  # the host has not seen what was accepted
        assert low <= min(found)
        assert max(found) <= high
        assert steps > 1 or (low, high) == (min(found), max(found))


def test_a_device_beyond_the_bounds_is_refused() -> None:
    runs = runner(16, depth=0)
    runs.admit(0, [1, 2, 3, 4])
    runs.step([(0, 4, [], 1)])
    runs.step([(0, 1, [5, 5, 5], 2)])
    runs.manager._policy.slots.written[:] = 3
    message = r"the window cache has 3 tokens .*slot 0, generation 0, step 2.* it must be 2\.\.2"
    with pytest.raises(ValueError, match=message):
        runs.step([(0, 1, [5, 5, 5], 1)])
