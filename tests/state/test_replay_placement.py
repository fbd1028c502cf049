"""Where the replay layout reads and writes, what it stores on the way and what it leaves behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from helpers.plain_manager import (
    BLOCK,
    K,
    begin,
    counts,
    exact,
    manager,
)
from helpers.replay_model import ReplayRunner
from hypothesis import given

from hybrid_runtime.state import (
    HybridStateManager,
    StepRows,
)

LIVE = 5
replay = partial(manager, kind="replay", columns=LIVE + 1)


def placed(
    made: HybridStateManager, n: list[int], s: list[int], d: list[int], a: list[int]
) -> dict[str, list[int]]:
    """One step of slots 0 .., and where its rows were placed."""
    step = begin(made, exact(n, s, d))
    found = {k: v.tolist()[: len(n)] for k, v in made._policy.outputs._asdict().items()}
    made.end_step(step, counts(*a))
    return found


def test_a_chunk_after_drafts_is_refused_and_changes_nothing() -> None:
    """A scan over many tokens starts from a state in memory: it cannot fold what that lacks."""
    made = replay()
    made.admit(0)
    placed(made, [0], [5], [0], [1])
    placed(made, [5], [4], [3], [1])
    held = [t.clone() for t in (*made._policy.outputs, *made._policy.slots)]
    for s, d in ((2, 0), (5, 3)):
        with pytest.raises(ValueError, match=rf"rows.scheduled\[0\] is {s}; it must be draft \+ 1"):
            made.begin_step(StepRows.exact([0], [6], [s], [d]))
    for now, then in zip((*made._policy.outputs, *made._policy.slots), held, strict=True):
        assert torch.equal(now, then)
    placed(made, [6], [1], [0], [1])
    placed(made, [7], [4], [0], [1])  # nothing is recorded any more


def test_a_table_of_one_column_serves_who_keeps_nothing() -> None:
    made = replay(columns=1)
    made.admit(0)
    for n, s, d in ((0, 100, 0), *((n, 4, 3) for n in range(100, 140, 2))):
        step = made.begin_step(exact([n], [s], [d]))
        assert step.write_column[0] == 0
        made.end_step(step, counts(2 if d else 1))


def test_what_is_pending_follows_the_slot_not_the_step() -> None:
    made = replay()
    for slot in (0, 1):
        made.admit(slot)
    assert placed(made, [0, 0], [3, 4], [0, 0], [1, 1])["writes"] == [1, 1]
    found = placed(made, [3, 4], [4, 4], [3, 3], [3, 2])
    assert (found["pending"], found["writes"]) == ([0, 0], [0, 0])
    found = placed(made, [6], [4], [3], [1])  # slot 1 pauses
    assert (found["pending"], found["cursor"], found["offset"]) == ([3], [3], [2])
    assert (found["certain"], found["writes"]) == ([7], [0])
    found = placed(made, [7, 6], [4, 1], [3, 0], [1, 1])
    assert (found["pending"], found["cursor"]) == ([4, 2], [3, 4])
    assert (found["offset"], found["checkpoint_column"]) == ([0, 1], [0, -1])
    assert (found["read_column"], found["write_column"]) == ([LIVE] * 2, [LIVE] * 2)
    assert found["writes"] == [1, 1]  # a checkpoint is stored; no drafts


def test_a_boundary_among_the_drafts_or_at_the_end_is_stored_on_the_way() -> None:
    made = replay()
    for slot in (0, 1, 2):
        made.admit(slot)
    placed(made, [0] * 3, [4, 6, 6], [0] * 3, [1] * 3)
    found = placed(made, [4, 6, 6], [4, 4, 2], [3, 3, 0], [4, 2, 1])
    assert found["checkpoint_column"] == [-1, -1, -1]
    assert found["write_column"] == [LIVE, LIVE, 0]  # the chunk ends on 8: that is the checkpoint
    found = placed(made, [8, 8, 8], [4, 1, 4], [3, 0, 3], [1, 1, 1])
    assert found["checkpoint_column"] == [0, 0, -1]
    assert found["checkpoint_after"] == [0, 0, 0]
    assert found["writes"] == [1, 1, 1]  # the last one moves the state to the live column
    assert found["read_column"] == [LIVE, LIVE, 0]
    assert found["write_column"] == [LIVE] * 3
    assert found["certain"] == [9] * 3


def test_a_checkpoint_is_published_by_the_step_that_writes_it() -> None:
    made = replay()
    made.admit(0)
    placed(made, [0], [6], [0], [1])
    steps = []
    for n, d in ((6, 3), (9, 0)):
        step = begin(made, StepRows.exact([0], [n], [d + 1], [d]))
        made.end_step(step, torch.tensor([3 if d else 1], dtype=torch.int32))
        steps.append(step)
    assert [made.published(step) for step in steps] == [[], [(0, 0, 8, 0)]]
    assert made.stats().rows_copied == 1


@pytest.mark.parametrize("depth", [0, 1])
def test_a_released_request_leaves_what_its_last_drafts_reached(depth: int) -> None:
    """To be folded where no step is queued behind them, by that step where one is."""
    runs = ReplayRunner(num_draft=K, block_size=BLOCK, max_requests=1, depth=depth)
    for i in range(4 * BLOCK):
        runs.admit(0, list(range(5 + i % BLOCK)))
        first = min(5 + i % BLOCK, BLOCK)
        runs.step([(0, first, [], int(first == 5 + i % BLOCK))])
        if first < 5 + i % BLOCK:
            runs.step([(0, 5 + i % BLOCK - first, [], 1)])
        for accepted in (4, 1 + i // BLOCK):
            runs.step([(0, 1, [1, 2, 3], accepted)])
        runs.release(0)
    assert bool(runs.last_folded) == (depth == 0)
    assert bool(runs.last_stored) == (depth == 1)


SAVES = st.tuples(st.integers(0, 12), st.integers(0, 12))


@given(
    data=st.data(), cuts=st.booleans(), chunk=st.integers(1, 12), saves=SAVES,
    steps=st.lists(st.tuples(st.integers(0, K), SAVES), max_size=6),
)  # fmt: skip
def test_a_checkpoint_goes_where_the_row_says(
    data: st.DataObject, cuts: bool, chunk: int, saves: tuple[int, int], steps: list[Any]
) -> None:
    """At any position, in any column but the one that is read; whatever else is named is left
    alone."""
    made = replay(prompt_cuts=cuts)
    made.admit(0)
    n = certain = 0  # tokens computed, and those of them that were certain in the last step
    held = LIVE
    for draft, (ahead, further) in [(0, saves), *steps]:
        scheduled = draft + 1 if n else chunk
        first = certain + ahead if ahead else 0
        second = first + K + further if ahead and further else 0
        at = data.draw(st.permutations([first, second]))
        to = data.draw(st.permutations([c for c in range(LIVE) if c != held]))[:2]
        step = made.begin_step(StepRows.exact([0], [n], [scheduled], [draft], None, [at], [to]))
        found = {k: int(v[0]) for k, v in made._policy.outputs._asdict().items()}
        end = n + scheduled - draft
        column = dict(zip(at, to, strict=True))
        passed = [p for p in at if certain < p <= n]
        inside = sorted(p for p in at if n < p < end and not draft and cuts)
        stored = (passed or inside[-1:] or ([end] if draft and end in at and end else []))[:1]
        left = column[end] if not draft and end in at else LIVE
        assert found["write_column"] == left
        assert found["checkpoint_column"] == (column[stored[0]] if stored else -1)
        assert found["checkpoint_after"] == (stored[0] - n if stored else 0)
        accepted = data.draw(st.integers(1, draft + 1))
        made.end_step(step, counts(accepted))
        want = {(p, column[p]) for p in {*stored, *([end] if left != LIVE else [])}}
        assert {(c.position, c.column) for c in made.published(step)} == want
        n, certain, held = end + accepted - 1, end, left


def test_a_row_killed_in_flight_is_never_run_again() -> None:
    made = replay()
    for slot in (0, 1):
        made.admit(slot)
    placed(made, [0, 0], [5, 5], [0, 0], [1, 1])
    placed(made, [5, 5], [4, 4], [3, 3], [0, 4])
    found = placed(made, [6, 9], [4, 4], [3, 3], [1, 1])
    assert (found["write_column"], found["read_column"]) == ([-1, LIVE], [-1, LIVE])
    assert (found["checkpoint_column"], found["checkpoint_after"]) == ([-1, 0], [0, -1])
