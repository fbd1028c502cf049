"""Where the replay layout reads and writes, what it stores on the way and what it leaves behind."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from helpers.plain_manager import (
    BLOCK,
    K,
    counts,
    exact,
    manager,
)
from helpers.replay_model import ReplayRunner

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
    step = made.begin_step(exact(n, s, d))
    found = {k: v.tolist()[: len(n)] for k, v in made._policy.outputs._asdict().items()}
    made.end_step(step, counts(*a))
    return found


def needed(made: HybridStateManager, n: int, s: int, d: int) -> tuple[int, int]:
    """First and last column that is read or written."""
    demand = made.block_demand(StepRows.exact([0], [n], [s], [d]))
    return int(demand.first[0]), int(demand.kept[0])


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


def test_only_checkpoints_need_columns() -> None:
    made = replay()
    made.admit(0)
    longest = (LIVE + 1) * BLOCK - 1
    message = rf"rows.computed_max \+ rows.scheduled - rows.draft\[0\] is {longest + 1}; it must"
    placed(made, [0], [longest], [0], [1])
    with pytest.raises(ValueError, match=message):
        made.begin_step(StepRows.exact([0], [longest], [4], [3]))
    made.retain(0, 0)
    for n in range(longest, longest + 40, 4):
        found = placed(made, [n], [4], [3], [4])
        assert (found["write_column"], found["checkpoint_column"]) == ([LIVE], [-1])
    with pytest.raises(ValueError, match="hit_column is 6"):
        made.admit(1, 8, LIVE + 1)


def test_a_table_of_one_column_serves_who_keeps_nothing() -> None:
    made = replay(columns=1)
    made.admit(0)
    made.retain(0, 0)
    placed(made, [0], [100], [0], [1])
    for n in range(100, 140, 2):
        assert needed(made, n, 4, 3) == (0, -1)
        assert placed(made, [n], [4], [3], [2])["write_column"] == [0]


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
        step = made.begin_step(StepRows.exact([0], [n], [d + 1], [d]))
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


def test_columns_are_asked_for_while_a_boundary_may_be_stored_or_is_read() -> None:
    made = replay()
    made.admit(0)
    assert needed(made, 0, 7, 0) == (0, -1)
    assert needed(made, 0, 8, 0) == (0, 0)
    assert needed(made, 0, 40, 0) == (4, 4)  # boundaries within a chunk are not stored
    placed(made, [0], [8], [0], [1])
    assert needed(made, 8, 3, 0) == (0, 0)  # read
    assert needed(made, 8, 16, 0) == (0, 2)  # read, and written
    placed(made, [8], [6], [0], [1])
    assert needed(made, 14, 4, 3) == (0, -1)  # 15 certain
    placed(made, [14], [4], [3], [3])
    assert needed(made, 17, 4, 3) == (1, 1)  # 16 is among the drafts accepted
    placed(made, [17], [4], [3], [1])
    assert needed(made, 18, 4, 3) == (0, -1)
    made.retain(0, 16)
    assert needed(made, 18, 14, 0)[1] == 3
    nothing = made.block_demand(StepRows.exact([-1], [0], [1], [0]))
    assert [int(column[0]) for column in nothing] == [0, 0, -1, -1]


def test_a_row_killed_in_flight_is_never_run_again() -> None:
    made = replay()
    for slot in (0, 1):
        made.admit(slot)
    placed(made, [0, 0], [5, 5], [0, 0], [1, 1])
    placed(made, [5, 5], [4, 4], [3, 3], [0, 4])
    found = placed(made, [6, 9], [4, 4], [3, 3], [1, 1])
    assert (found["write_column"], found["read_column"]) == ([-1, LIVE], [-1, LIVE])
    assert (found["checkpoint_column"], found["checkpoint_after"]) == ([-1, 0], [0, -1])
