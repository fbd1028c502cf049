"""Steady decode repeats the last step: nothing is sent, and nothing may be forgotten by it."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.hash_request import TOKENS
from helpers.replay_model import RUNNERS
from helpers.toy_recurrences import HASH
from hypothesis import given

from hybrid_runtime.state import HybridStateManager, StateLayout, StepRows
from hybrid_runtime.state.boundaries import LONGEST, RetentionRule

SLOTS, K = 3, 3
layouts = pytest.mark.parametrize("kind", sorted(RUNNERS))


def runner(kind: str, **options: Any) -> HashRunner:
    """Three requests whose prompts have been read, in slots 2, 0 and 1."""
    runs = RUNNERS[kind](num_draft=K, max_requests=4, block_size=64, columns=12, **options)
    for slot in range(SLOTS):
        runs.admit(slot, list(range(5 + slot)))
    runs.step([(slot, 5 + slot, [], 1) for slot in (2, 0, 1)])
    return runs


def decode(runs: HashRunner, rng: random.Random, slots: tuple[int, ...] = (2, 0, 1)) -> None:
    """One step of K drafts per row; the runner checks every state that it reads."""
    runs.step(
        [
            (slot, 1, [rng.randrange(TOKENS) for _ in range(K)], rng.randrange(1, K + 2))
            for slot in slots
        ]
    )


@pytest.mark.parametrize(
    ("strategy", "depth"),
    [
        ("auto", 0),
        ("auto", 1),
        ("auto", 2),
        ("always", 0),
        ("blocking", 0),
        ("defer", 0),
        ("defer", 2),
    ],
)
@layouts
def test_long_runs_cross_boundaries_and_stay_exact(kind: str, strategy: str, depth: int) -> None:
    runs, rng = runner(kind, strategy=strategy, depth=depth), random.Random(depth)
    for _ in range(120):
        decode(runs, rng)
    while runs.outstanding:
        runs.read_oldest()
    stats = runs.manager.stats()
    assert stats.rows_copied > 5
    assert stats.uploads < stats.steps / 2
    if kind == "replay":
        assert stats.copy_launches == 0
        assert stats.candidate_rows >= stats.rows_copied
        assert stats.skipped > stats.steps / 4
    else:
        assert (stats.copy_launches < stats.steps / 2) == (strategy != "always")


@layouts
def test_a_repeated_step_sends_nothing(kind: str) -> None:
    runs, rng = runner(kind, strategy="auto"), random.Random(0)
    decode(runs, rng)  # the first decode step admits nobody any more, but folds the prompts' in
    decode(runs, rng)
    before = runs.manager.stats()
    uploads, launches, steps = before.uploads, before.copy_launches, before.steps
    for _ in range(4):
        decode(runs, rng)
    after = runs.manager.stats()
    assert (after.uploads, after.copy_launches, after.steps) == (uploads, launches, steps + 4)


@pytest.mark.parametrize(
    "event", ["release", "admit", "retain", "other rows", "fewer rows", "dead"]
)
@pytest.mark.parametrize("depth", [0, 2])
@layouts
def test_whatever_changes_ends_the_repetition(kind: str, event: str, depth: int) -> None:
    runs, rng = runner(kind, depth=depth), random.Random(1)
    for _ in range(5):
        decode(runs, rng)
    slots: tuple[int, ...] = (2, 0, 1)
    if event == "release":
        runs.release(0)
        runs.admit(0, [9, 8, 7])
        runs.step([(0, 3, [], 1)])
    elif event == "admit":
        runs.admit(3, [1, 2, 3, 4])
        runs.step([(3, 4, [], 1)])
        slots = (3, 2, 0, 1)
    elif event == "retain":
        runs.retain(1, 0)
    elif event == "other rows":
        runs.step([(1, 1, [4], 2), (2, 1, [], 1)])
    elif event == "fewer rows":
        decode(runs, rng, (0, 1))
    else:
        runs.release(2)
        slots = (0, 1)
    for _ in range(40):
        decode(runs, rng, slots)
    assert runs.manager.stats().rows_copied > 0


@layouts
def test_a_new_tenant_with_the_same_rows_is_not_taken_for_the_old_one(kind: str) -> None:
    runs, rng = runner(kind), random.Random(3)
    for _ in range(5):
        decode(runs, rng)
    runs.release(0)
    runs.admit(0, [77])  # its first step is a verify, shaped like everybody's
    for _ in range(5):
        decode(runs, rng)


@layouts
def test_retention_changes_are_seen_by_repeated_rows(kind: str) -> None:
    runs = runner(kind)
    for _ in range(5):
        runs.step([(slot, 1, [1, 2, 3], 4) for slot in (2, 0, 1)])
    runs.retain(0, 0)
    for _ in range(20):
        runs.step([(slot, 1, [1, 2, 3], 4) for slot in (2, 0, 1)])
    assert {s.slot for s in runs.recent} == {1, 2}


def test_a_slot_that_changes_hands_inside_a_repeated_step_starts_afresh() -> None:
    layout = StateLayout(HASH.recurrence, K, 64)
    manager = HybridStateManager(layout, 3, K, "cpu")
    manager.bind({0: layout.allocate(40, "cpu")}, torch.arange(36, dtype=torch.int32).view(3, 12))
    for slot in range(3):
        manager.admit(slot)
    computed, counts = np.array([5, 6, 7], np.int32), torch.tensor([1, 1, 1], dtype=torch.int32)
    manager.end_step(
        manager.begin_step(StepRows.exact([0, 1, 2], [0] * 3, computed, [0] * 3)), counts
    )
    for number in range(5):
        step = manager.begin_step(StepRows.exact([0, 1, 2], computed, [K + 1] * 3, [K] * 3))
        if number == 4:
            manager.release(0)
            manager.admit(0)
        manager.end_step(step, counts)
        computed = computed + 1
    assert manager.stats().uploads < manager.stats().steps
    rows = StepRows.exact([1, 0, 2], [computed[1], 0, computed[2]], [4, 3, 4], [K, 0, K])
    step = manager.begin_step(rows)
    assert step.read_column.tolist() == [0, -1, 0]
    assert step.write_column.tolist() == [0, 0, 0]
    assert manager.computed.tolist() == [0, *computed[1:]]


@pytest.mark.parametrize("draft", range(K + 1))
@pytest.mark.parametrize("exact", [True, False])
def test_far_from_boundaries_one_comparison_says_that_nothing_is_due(
    draft: int, exact: bool
) -> None:
    """A range tells of no repetition that the policy would plan otherwise, and of all those that
    stay within their block."""
    block, runs = 16, RUNNERS["columns"](block_size=16, num_draft=K, columns=12)
    policy, kept = runs.manager._policy, RetentionRule(block)

    def of(computed: int, more: int = 0) -> StepRows:
        low = np.array([computed], np.int32)
        high = low if exact else low + more
        return StepRows(np.zeros(1, np.int32), low, high, [draft + 1], [draft])

    for start in range(16, 64, 3):
        stretch = policy.repeat_range(of(start))
        held = [n for n in range(100) if stretch.holds(of(n))]
        assert held == [
            n
            for n in range(100)
            if n // 16 == start // 16 and n % 16 >= draft and n % 16 + draft + 1 < 16
        ]
        for n in held:
            more = 0 if exact else held[-1] - n
            assert stretch.holds(of(n, more))
            assert exact or not (stretch.holds(of(n, more + 1)) or stretch.holds(of(n, -1)))
            assert exact or not stretch.holds(of(held[0] - 1, 1))
            plan = policy.repeat(of(n, more), of(0), kept)
            assert plan is not None
            assert not len(plan.candidates)
            assert [np.asarray(v).tolist() for v in plan.columns[:2]] == [
                np.asarray(v).tolist() for v in policy.state_columns(of(n))[:2]
            ]


@given(
    st.integers(0, 60), st.integers(0, K), st.lists(st.integers(1, 90), max_size=2), st.booleans()
)
def test_far_from_named_positions_one_comparison_says_that_nothing_is_due(
    start: int, draft: int, named: list[int], exact: bool
) -> None:
    """A range tells of no repetition that the policy would plan otherwise, and of all those that
    cannot reach the next position."""
    policy = RUNNERS["replay"](num_draft=K).manager._policy
    save_at = np.array([[*named, 0, 0][:2]])

    def of(computed: int, more: int = 0) -> StepRows:
        low = np.array([computed], np.int32)
        high = low if exact else low + more
        slot = np.zeros(1, np.int32)
        return StepRows(slot, low, high, [draft + 1], [draft], None, save_at, save_at * 0)

    found = policy.repeat_range(of(start))
    ahead = [at for at in named if at > start - draft]
    held = [n for n in range(100) if found.holds(of(n))]
    assert held == [n for n in range(start, 100) if all(n + 1 < at for at in ahead)]
    for n in held:
        plan = policy.repeat(of(n), of(max(n - 1 - draft, 0)), policy.kept(of(n)))
        assert plan is not None
        assert not len(plan.candidates)


@pytest.mark.parametrize("block", [48, 33], ids=["within a block", "a token behind its start"])
def test_repeated_rows_end_where_positions_do(block: int) -> None:
    layout = StateLayout(HASH.recurrence, K, block, kind="replay")
    manager = HybridStateManager(layout, 1, K, "cpu")
    manager.bind({0: layout.allocate(12, "cpu")}, torch.arange(12, dtype=torch.int32).view(1, 12))
    at = LONGEST - 41
    manager.admit(0, at, 11)
    while at < LONGEST:
        step = manager.begin_step(StepRows.exact([0], [at], [K + 1], [K]))
        manager.end_step(step, torch.tensor([K + 1], dtype=torch.int32))
        at += K + 1
    assert manager.stats().uploads < 4
    with pytest.raises(ValueError, match=rf"^rows.computed_max\[0\] is {at}; .* below {LONGEST}"):
        manager.begin_step(StepRows.exact([0], [at], [K + 1], [K]))


def test_repeated_rows_end_where_the_table_has_no_column_for_their_drafts() -> None:
    block, columns = 8, 6
    layout = StateLayout(HASH.recurrence, K, block)
    manager = HybridStateManager(layout, 1, K, "cpu")
    table = torch.arange(columns, dtype=torch.int32).view(1, columns)
    manager.bind({0: layout.allocate(columns, "cpu")}, table)
    manager.admit(0)
    manager.retain(0, 0)
    at, counts = 4, torch.tensor([K + 1], dtype=torch.int32)
    manager.end_step(manager.begin_step(StepRows.exact([0], [0], [at], [0])), counts * 0 + 1)
    most = (columns - K) * block
    while at < most:
        manager.end_step(manager.begin_step(StepRows.exact([0], [at], [K + 1], [K])), counts)
        at += K + 1
    assert at == most
    assert manager.stats().uploads < manager.stats().steps
    with pytest.raises(ValueError, match=rf"rows.scheduled\[0\] is {at + K + 1}; it must"):
        manager.begin_step(StepRows.exact([0], [at], [K + 1], [K]))


@layouts
def test_bounds_in_the_wrong_order_are_refused_beside_a_boundary_too(kind: str) -> None:
    runs = RUNNERS[kind](block_size=16, num_draft=K, columns=12, debug=False)
    runs.admit(0, list(range(5)))
    runs.step([(0, 5, [], 1)])
    while runs.requests[0].computed < 17:  # from there on, drafts could have passed token 16
        runs.step([(0, 1, [1, 2, 3], 4)])
    n = runs.requests[0].computed
    assert n == 17
    with pytest.raises(ValueError, match=rf"^rows.computed_max\[0\] is {n}; it must be >= "):
        runs.manager.begin_step(StepRows([0], [n + 1], [n], [K + 1], [K]))  # type: ignore[arg-type]


def test_drafts_behind_a_chunk_are_not_repeated_unchecked() -> None:
    runs = RUNNERS["replay"](block_size=64, num_draft=K)
    runs.admit(0, list(range(9)))
    runs.step([(0, 5, [], 0)])
    runs.step([(0, 2, [], 0)])
    runs.step([(0, 2, [1, 2, 3], 2)])
    with pytest.raises(ValueError, match=r"^rows.scheduled\[0\] is 5; it must be draft \+ 1"):
        runs.manager.begin_step(StepRows.exact([0], [10], [5], [K]))
