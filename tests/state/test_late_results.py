"""Rules of the manager that no other test needed: each of these fails without the rule."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.toy_recurrences import HASH

from hybrid_runtime.state import Checkpoint, HybridStateManager, StateLayout, StepRows, Strategy

K, SLOTS, COLUMNS, BLOCK = 3, 4, 12, 8
STRATEGIES = get_args(Strategy)
layouts = pytest.mark.parametrize("kind", ["columns", "replay"])


def manager(kind: Any, slots: int = SLOTS, **options: Any) -> HybridStateManager:
    """A manager in which `slots` have been admitted."""
    layout = StateLayout(HASH.recurrence, K, BLOCK, kind=kind)
    made = HybridStateManager(layout, SLOTS, K, "cpu", **options)
    table = torch.arange(SLOTS * COLUMNS, dtype=torch.int32).view(SLOTS, COLUMNS)
    made.bind({0: layout.allocate(SLOTS * COLUMNS, "cpu")}, table)
    for slot in range(slots):
        made.admit(slot)
    return made


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def between(low: list[int], high: list[int], scheduled: list[int], draft: list[int]) -> StepRows:
    """Rows of slots 0 .. that have computed `low .. high` tokens."""
    fields = [*range(len(low))], low, high, scheduled, draft
    return StepRows(*(np.array(field, np.int32) for field in fields))


def exact(computed: list[int], scheduled: list[int], draft: list[int]) -> StepRows:
    return StepRows.exact(range(len(computed)), computed, scheduled, draft)


def run(made: HybridStateManager, rows: StepRows, *accepted: int) -> Any:
    step = made.begin_step(rows)
    made.end_step(step, counts(*accepted))
    return step


def contents(runs: HashRunner, slot: int) -> list[torch.Tensor]:
    """The states in all blocks of a request."""
    blocks = list(runs.requests[slot].blocks[0].values())
    return [part[blocks].clone() for pair in runs.states.values() for part in pair]


# Requests that leave between the beginning and the end of a step


def crossing(strategy: str) -> tuple[HashRunner, Any]:
    """A step that has run, in which slot 0 passes a boundary; so does slot 1 in the row behind."""
    runs = HashRunner(max_requests=2, strategy=strategy, own_all=True, columns=12)
    for slot in (0, 1):
        runs.admit(slot, list(range(5)))
    runs.step([(0, 5, [], 1), (1, 5, [], 1)])
    opened = runs.begin([(slot, 1, [1, 2, 3], 4) for slot in (0, 1)])
    runs.forward(opened)
    return runs, opened


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_that_left_takes_no_copy_from_those_that_stay(strategy: str) -> None:
    """The row behind still gets its checkpoint, and the slot's next tenant none of the bytes."""
    runs, opened = crossing(strategy)
    runs.release(0)
    runs.admit(0, [9] * 6)
    for column, block in runs.requests[0].blocks[0].items():
        runs.pool.fill(block, column)
    before = contents(runs, 0)
    runs.end(opened)
    (checkpoint,) = runs.read_oldest()  # and checks its bytes
    assert (checkpoint.slot, checkpoint.boundary) == (1, 8)
    for now, then in zip(contents(runs, 0), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("strategy", ["auto", "defer"])
def test_nothing_is_launched_or_waited_for_when_all_candidates_have_left(
    strategy: Strategy,
) -> None:
    made = manager("columns", 2, strategy=strategy)
    run(made, exact([0, 0], [5, 1], [0, 0]), 1, 1)
    step = made.begin_step(exact([5, 1], [4, 4], [3, 3]))
    assert step.candidates.tolist() == [0]
    made.release(0)
    launches, waits = made.stats().copy_launches, made.stats().waits
    made.end_step(step, counts(4, 4))
    assert (made.stats().copy_launches, made.stats().waits) == (launches, waits)


def test_a_steps_places_are_kept_until_its_counts_are_folded_in() -> None:
    """Also when it ends last: as many steps as may be outstanding have begun since."""
    for depth in (0, 1, 2):
        made = manager("columns", depth + 2, steps_in_flight=depth)
        steps = [
            made.begin_step(StepRows.exact([slot], [0], [5 + slot], [0]))
            for slot in range(depth + 1)
        ]
        made.end_step(steps[0], counts(1))
        made.accepted(steps[0])
        before = steps[0].placed.clone()
        made.begin_step(StepRows.exact([depth + 1], [0], [7 + depth], [0]))
        assert torch.equal(steps[0].placed, before)
        assert made.computed[0] == 5


def test_a_step_whose_results_were_read_is_not_abandoned() -> None:
    made = manager("columns", 1)
    step = run(made, exact([0], [5], [0]), 1)
    made.accepted(step)
    with pytest.raises(ValueError, match="step is 0, whose results have been read; it is over"):
        made.abandon(step)
    assert made.holds(0)


def test_a_late_result_says_nothing_of_the_next_tenants_state() -> None:
    """Which has 13 tokens. Had the step of 5 been booked for it, 8 would have to be folded in."""
    made = manager("replay", 1, debug=True)
    step = run(made, exact([0], [5], [0]), 1)
    made.release(0)
    made.admit(0, computed=13, hit_column=COLUMNS - 1)
    made.accepted(step)
    run(made, exact([13], [4], [3]), 1)
    assert made.positions.replay is not None
    assert made.positions.replay.pending[0] == 0


# Counts that the device has and the host has not


@layouts
def test_a_dead_row_stays_dead_over_several_steps(kind: str) -> None:
    """Though its next steps, placed nowhere, end with counts as if it ran."""
    made = manager(kind, 2, steps_in_flight=3)
    run(made, exact([0, 0], [5, 5], [0, 0]), 1, 1)
    run(made, exact([5, 5], [4, 4], [3, 3]), 0, 1)
    for n in (6, 7, 8):
        step = run(made, between([n, n], [n + 3, n + 3], [4, 4], [3, 3]), 1, 1)
        assert step.write_column[0] == step.read_column[0] == -1
        assert step.write_column[1] >= 0


@layouts
def test_a_count_beyond_the_drafts_moves_no_further_than_they_reach(kind: str) -> None:
    """And is told when the host sees it."""
    made = manager(kind, 2)
    run(made, exact([0, 0], [5, 5], [0, 0]), 1, 1)
    step = run(made, exact([5, 5], [4, 4], [3, 3]), 99, 1)
    following = made.begin_step(between([6, 6], [9, 9], [4, 4], [3, 3]))
    assert made.computed[:2].tolist() == [9, 6]
    assert following.read_offset[:2].max() <= K
    with pytest.raises(ValueError, match=r"num_accepted\[0\] is 99 in step 1; it must be in 0..4"):
        made.accepted(step)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_boundary_that_nobody_keeps_leaves_the_state_where_it_is(in_place: bool) -> None:
    """All drafts accepted, up to the block's end: no copy home, so the offset stays."""
    runs = HashRunner(max_requests=1, in_place=in_place)
    runs.admit(0, list(range(4)))
    runs.retain(0, 0)
    runs.step([(0, 4, [], 1)])
    runs.step([(0, 1, [1, 2, 3], 4)])
    assert runs.requests[0].computed == BLOCK
    runs.step([(0, 1, [1, 2, 3], 2)])  # checks the state that it reads


# What is refused, and what is ruled out


def test_steady_decode_ends_where_the_table_does() -> None:
    """A draft needs its column even in a row that has none, whether or not lines are sent."""
    made = manager("columns", 1)
    last = (COLUMNS - K) * BLOCK
    run(made, exact([0], [last - 3], [0]), 1)
    run(made, exact([last - 3], [1], [0]), 1)
    uploads = made.stats().uploads
    run(made, exact([last - 2], [1], [0]), 1)
    run(made, exact([last - 1], [1], [0]), 1)
    assert made.stats().uploads == uploads  # repeated, so the next one is compared first
    message = rf"computed_max \+ rows.scheduled\[0\] is {last + 1}; it must be a position"
    with pytest.raises(ValueError, match=message):
        made.begin_step(exact([last], [1], [0]))


def test_a_row_with_drafts_may_not_jump_from_the_lowest_column_it_may_be_in() -> None:
    """With 4 of 4 .. 7 tokens it ran in column 0; 8 and 9 more then end in column 2."""
    made = manager("columns", 1)
    run(made, exact([0], [3], [0]), 1)
    run(made, exact([3], [4], [3]), 1)
    run(made, between([4], [7], [4], [3]), 4)
    with pytest.raises(ValueError, match=r"rows.scheduled\[0\] is 9; it must be draft \+ 1"):
        made.begin_step(between([5], [11], [9], [3]))


def test_a_fresh_request_moves_nothing_before_its_first_step() -> None:
    made = manager("columns", 2, in_place=True)
    run(made, exact([0, 0], [5, 20], [0, 0]), 1, 1)
    assert made.stats().copy_launches == 0


def test_without_drafts_now_and_before_no_checkpoint_costs_a_write() -> None:
    """However little the host knows: the state itself is the checkpoint."""
    made = manager("replay", 1, steps_in_flight=3)
    run(made, exact([0], [4], [0]), 1)
    run(made, exact([4], [4], [3]), 4)
    assert not run(made, between([5], [8], [1], [0]), 1).skipped
    assert run(made, between([6], [9], [1], [0]), 1).skipped


@pytest.mark.parametrize("draft", [3, 2], ids=["repeated", "packed"])
def test_results_that_came_in_rule_out_boundaries_stored_before(draft: int) -> None:
    """The last step began when 4 .. 7 tokens were known. Now it is 11: the state has at least 8 of
    them, so that boundary has been stored."""
    made = manager("replay", 1)
    run(made, exact([0], [3], [0]), 1)
    run(made, exact([3], [4], [3]), 4)
    run(made, between([4], [7], [4], [3]), 4)
    uploads = made.stats().uploads
    assert made.begin_step(exact([11], [draft + 1], [draft])).skipped
    assert (made.stats().uploads == uploads) == (draft == 3)


# Columns of the replay layout


def test_a_state_beside_drafts_holds_no_checkpoints_column() -> None:
    """It is in the live column, although the step ended on a boundary, and a row beside it did so
    without drafts."""
    made = manager("replay", 2)
    run(made, exact([0, 0], [7, 7], [0, 0]), 1, 1)
    run(made, exact([7, 7], [4, 1], [3, 0]), 1, 1)
    demand = made.block_demand(exact([8, 8], [4, 4], [3, 3]))
    assert demand.kept.tolist() == [-1, 0]


def test_a_state_in_a_boundarys_column_is_held_beside_the_next_boundarys() -> None:
    made = manager("replay", 1)
    run(made, exact([0], [BLOCK], [0]), 1)
    demand = made.block_demand(exact([BLOCK], [BLOCK], [0]))
    assert (demand.first.tolist(), demand.last.tolist()) == ([0], [1])


# Last checkpoints


def test_a_last_checkpoint_is_never_the_former_tenants() -> None:
    """Whose queued step ends on a boundary, and writes it into blocks that are its own."""
    made = manager("replay", 1)
    run(made, exact([0], [BLOCK], [0]), 1)
    made.release(0)
    made.admit(0)
    assert made.last_checkpoint(0) is None


def test_a_last_checkpoint_is_not_expected_of_a_step_that_may_never_run() -> None:
    made = manager("replay", 1)
    step = made.begin_step(exact([0], [BLOCK], [0]))
    assert made.last_checkpoint(0) is None
    made.end_step(step, counts(1))
    assert made.last_checkpoint(0) == Checkpoint(slot=0, generation=0, boundary=BLOCK, column=0)


def test_a_last_checkpoint_outlives_steps_that_store_none() -> None:
    made = manager("replay", 1)
    run(made, exact([0], [BLOCK], [0]), 1)
    made.accepted(run(made, exact([BLOCK], [1], [0]), 1))
    assert made.last_checkpoint(0) == Checkpoint(slot=0, generation=0, boundary=BLOCK, column=0)
