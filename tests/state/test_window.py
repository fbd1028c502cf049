"""When a live state is written, and how far it may lag behind: the host's exact knowledge once
results are read, its bounds before, and that nobody sees a difference."""

from __future__ import annotations

import itertools
import random

import pytest
from helpers.hash_request import Row
from helpers.replay_model import ReplayRunner
from helpers.toy_recurrences import HASH

from hybrid_runtime.state import StateLayout
from hybrid_runtime.state.replay.pending import pending_bounds

K, BLOCK = 3, 8


@pytest.mark.parametrize(
    ("k", "ring_tokens"), [(3, 3), (3, 16), (3, 30), (3, 32), (3, -1), (15, 8)]
)
def test_a_ring_that_does_not_hold_a_step_is_refused(k: int, ring_tokens: int) -> None:
    least = min(k + 1, 15)
    must = rf"it must be 0, {least}\.\.15 or 31"
    message = rf"ring_tokens is {ring_tokens} with num_speculative_tokens={k}; {must}"
    with pytest.raises(ValueError, match=message):
        StateLayout(HASH.recurrence, k, 16, kind="replay", ring_tokens=ring_tokens)
    for unused in ("columns", "replay"):
        StateLayout(HASH.recurrence, 0, 16, kind=unused, ring_tokens=ring_tokens)  # type: ignore[arg-type]


def test_a_state_is_written_when_the_next_tokens_would_not_fit() -> None:
    """With every guess accepted, after 15 // 4 = 3 steps; with every ring that there is."""
    for ring_tokens in (0, *range(K + 1, 16), 31):
        runs = ReplayRunner(num_draft=K, ring_tokens=ring_tokens, block_size=BLOCK, columns=40)
        runs.admit(0, list(range(100)))
        runs.retain(0, 0)
        runs.step([(0, 100, [], 1)])
        wrote = []
        for n in range(100, 200, 4):
            before = runs.written
            runs.step([(0, 1, [1, 2, 3], 4)])
            wrote += [n] if runs.written > before else []
        # The prompt's state is whole, a later one lacks three guesses from the start.
        first, later = ring_tokens // 4, max(ring_tokens - 3, 0) // 4 + 1
        assert wrote == [*range(100 + 4 * first, 200, 4 * later)]


def test_the_host_knows_exactly_what_is_written_once_results_are_read() -> None:
    runs = ReplayRunner(num_draft=K, block_size=BLOCK, max_requests=2, depth=2)
    for slot in (0, 1):
        runs.admit(slot, list(range(3 + slot)))
    runs.step([(0, 3, [], 1), (1, 4, [], 1)])
    for i in range(40):
        runs.step([(slot, 1, [1, 2, 3][: (i + slot) % 4], 1) for slot in (i % 2, 1 - i % 2)])
    while runs.outstanding:
        runs.read_oldest()  # compares it with the device's
    assert 0 < runs.written < runs.ran


@pytest.mark.parametrize("depth", [0, 2])
def test_the_ring_changes_no_snapshot(depth: int) -> None:
    """Whatever is accepted, retained and released: the same snapshots at the same time, of the same
    bytes, wherever the states in memory stand."""
    rng = random.Random(depth)
    rings = (0, K + 1, 15, 31)
    all_runs = [
        ReplayRunner(num_draft=K, ring_tokens=w, block_size=BLOCK, depth=depth, columns=40)
        for w in rings
    ]
    for number in range(12):
        prompt = [rng.randrange(99) for _ in range(rng.randint(1, BLOCK))]
        plan: list[Row] = [(0, len(prompt), [], 1)]
        for _ in range(rng.randint(1, 14)):
            drafts = [rng.randrange(99) for _ in range(rng.randint(0, K))]
            plan.append((0, 1, drafts, rng.randint(1, len(drafts) + 1)))
        last = []
        for runs in all_runs:
            runs.admit(0, prompt)
            runs.retain(0, BLOCK * (number % 3))
            for row in plan:
                runs.step([row])
            last.append(runs.manager.last_snapshot(0))
            runs.release(0)
        assert last == [last[0]] * 4
        while all_runs[0].outstanding:
            for runs in all_runs:
                runs.recent += runs.read_oldest()
    assert all_runs[0].recent
    assert all(runs.recent == all_runs[0].recent for runs in all_runs)
    written = [runs.written for runs in all_runs]
    assert all_runs[0].ran == written[0] > written[1] > written[2] >= written[3]


# bounds


def runner(ring_tokens: int, depth: int) -> ReplayRunner:
    return ReplayRunner(
        num_draft=3, ring_tokens=ring_tokens, block_size=BLOCK, max_requests=1, depth=depth
    )


def bounds(runs: ReplayRunner) -> tuple[int, int]:
    manager = runs.manager
    queued = manager._in_flight.queued
    low, high = pending_bounds(manager._ledger, queued, runs.live, BLOCK, runs.layout.ring_tokens)
    return int(low[0]), int(high[0])


def lacks(
    ring_tokens: int, history: list[tuple[int, int]], drafts: list[int], accepted: tuple[int, ...]
) -> tuple[int, tuple[int, int]]:
    """Tokens that the state lacks after a history whose results are read and queued steps whose
    aren't; and the bounds."""
    runs = runner(ring_tokens, depth=len(drafts))
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


@pytest.mark.parametrize("ring_tokens", [0, 4, 7, 15, 31])
@pytest.mark.parametrize("seed", range(2))
def test_bounds_hold_whatever_is_accepted(ring_tokens: int, seed: int) -> None:
    rng = random.Random(seed)
    cases = [([(3, 4)], [3]), ([(2, 1), (1, 2)], [2])]  # 8 is among the last guesses, and next
    for steps in (1, 1, 2):
        history = []
        for _ in range(rng.randrange(7)):
            count = rng.randrange(4)
            history.append((count, rng.randint(1, count + 1)))
        cases.append((history, [rng.randrange(4) for _ in range(steps)]))
    for history, drafts in cases:
        found, known = set(), set()
        for accepted in itertools.product(*(range(1, count + 2) for count in drafts)):
            pending, between = lacks(ring_tokens, history, drafts, accepted)
            found.add(pending)
            known.add(between)
        ((low, high),) = known  # the host has not seen what was accepted
        assert low <= min(found)
        assert max(found) <= high
        assert len(drafts) > 1 or (low, high) == (min(found), max(found))


def test_a_device_beyond_the_bounds_is_refused() -> None:
    runs = runner(15, depth=0)
    runs.admit(0, [1, 2, 3, 4])
    runs.step([(0, 4, [], 1)])
    runs.step([(0, 1, [5, 5, 5], 2)])
    runs.manager._policy.slots.written[:] = 3
    message = r"the window cache has 3 tokens .*slot 0, generation 0, step 2.* it must be 2\.\.2"
    with pytest.raises(ValueError, match=message):
        runs.step([(0, 1, [5, 5, 5], 1)])
