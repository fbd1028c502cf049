"""Results that come late, out of turn or never, and requests that left meanwhile."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.hash_request import Open, Row
from helpers.plain_manager import (
    BLOCK,
    COLUMNS,
    between,
    checkpoint,
    counts,
    exact,
    manager,
    rows,
    run,
    started,
)
from helpers.replay_model import RUNNERS
from helpers.tensors import all_equal

from hybrid_runtime.state import (
    Checkpoint,
    StepRows,
    Strategy,
)

STRATEGIES = get_args(Strategy)
layouts = pytest.mark.parametrize("kind", sorted(RUNNERS))


# -- rows whose requests have left ------------------------------------------------------------


def test_a_late_result_cannot_reach_the_slots_next_tenant() -> None:
    """Finish and admit between the end of a step and the arrival of its counts (#51571)."""
    made = started(0, 1, steps_in_flight=2)
    step = made.begin_step(rows())
    made.end_step(step, counts(4, 4))
    made.release(0)
    assert made.admit(0) == 1
    following = made.begin_step(
        StepRows(*(np.array(v, np.int32) for v in ([1, 0], [6, 0], [9, 0], [4, 3], [3, 0])))
    )
    made.end_step(following, counts(2, 1))
    assert made.accepted(step).tolist() == [4, 4]
    assert [s.slot for s in made.published(step)] == [1]
    assert made._ledger.computed[:2].tolist() == [0, 9]
    made.accepted(following)
    assert made._ledger.computed[:2].tolist() == [3, 11]
    assert made.computed[:2].tolist() == [0, 9]


def test_a_late_result_says_nothing_of_the_next_tenants_state() -> None:
    """Which has 13 tokens. Had the step of 5 been booked for it, 8 would have to be folded in."""
    made = manager(0, kind="replay", debug=True)
    step = run(made, exact([0], [5], [0]), 1)
    made.release(0)
    made.admit(0, computed=13, hit_column=COLUMNS - 1)
    made.accepted(step)
    run(made, exact([13], [4], [3]), 1)
    assert made.positions.replay is not None
    assert made.positions.replay.pending[0] == 0


def test_results_of_a_former_tenant_change_nothing_of_the_next() -> None:
    """Which starts from a state in its live column, and need not write it soon."""
    made = manager(0, kind="replay")
    step = run(made, exact([0], [5], [0]), 1)
    made.release(0)
    made.admit(0, BLOCK, COLUMNS - 1)
    made.accepted(step)
    table = made._ledger
    assert (table.computed[0], table.certain[0], table.written[0]) == (BLOCK,) * 3
    assert table.held[0] == COLUMNS - 1


@pytest.mark.parametrize("kind", ["columns", "replay"])
def test_a_row_killed_in_flight_does_not_end_the_slots_next_tenant(kind: str) -> None:
    made = started(0, kind=kind)
    step = run(made, exact([5], [4], [3]), 0)
    made.release(0)
    made.admit(0)
    assert made.accepted(step).tolist() == [0]
    assert made.holds(0)


def test_counts_that_were_folded_between_two_ends_are_not_folded_again() -> None:
    made = manager(steps_in_flight=2)
    steps = []
    for slot, length in ((0, 5), (1, 6)):
        made.admit(slot)
        steps.append(made.begin_step(StepRows.exact([slot], [0], [length], [0])))
    for step in steps:
        made.end_step(step, counts(1))
    made.begin_step(StepRows.exact([0, 1], [5, 6], [4, 4], [3, 3]))
    assert made.computed[:2].tolist() == [5, 6]


@pytest.mark.parametrize("point", ["begun", "run", "ended", "begun again"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_aborted_write_is_never_published(point: str, strategy: Any) -> None:
    """Abort between schedule and write, and retry in the same slot (#56525): no checkpoint of the
    first try may be found, nor may its bytes reach the second."""
    runs = HashRunner(strategy=strategy, depth=2)
    runs.admit(0, list(range(5)))
    runs.step([(0, 5, [], 1)])
    opened = runs.begin([(0, 1, [1, 2, 3], 4)])  # 5 + 4 tokens: passes 8

    def abort_and_retry(now: str) -> None:
        if now == point:
            runs.release(0)
            runs.admit(0, [9] * 6)

    abort_and_retry("begun")
    runs.forward(opened)
    abort_and_retry("run")
    before = runs.state_bytes()
    runs.end(opened)
    assert all_equal(before, runs.state_bytes()) == (point in ("begun", "run"))
    abort_and_retry("ended")
    if point == "begun again":
        again = runs.begin([(0, 1, [], 1)])
        runs.forward(again)
        abort_and_retry("begun again")
        runs.end(again)
    later = runs.begin([(0, 6, [], 1)])
    assert runs.manager.published(opened.step) == []
    runs.forward(later)
    runs.end(later)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_that_left_takes_no_copy_from_those_that_stay(strategy: str) -> None:
    """The row behind still gets its checkpoint, and the slot's next tenant none of the bytes."""
    runs = HashRunner(max_requests=2, strategy=strategy, own_all=True, columns=12)
    for slot in (0, 1):
        runs.admit(slot, list(range(5)))
    runs.step([(0, 5, [], 1), (1, 5, [], 1)])
    opened = runs.begin([(slot, 1, [1, 2, 3], 4) for slot in (0, 1)])  # both pass a boundary
    runs.forward(opened)
    runs.release(0)
    runs.admit(0, [9] * 6)
    for column, block in runs.requests[0].blocks[0].items():
        runs.pool.fill(block, column)
    owned = list(runs.requests[0].blocks[0].values())

    def contents() -> list[torch.Tensor]:
        return [part[owned].clone() for pair in runs.states.values() for part in pair]

    before = contents()
    runs.end(opened)
    (checkpoint,) = runs.read_oldest()  # and checks its bytes
    assert (checkpoint.slot, checkpoint.position) == (1, 8)
    assert all_equal(contents(), before)


@pytest.mark.parametrize("strategy", ["auto", "defer"])
def test_nothing_is_launched_or_waited_for_when_all_candidates_have_left(
    strategy: Strategy,
) -> None:
    made = manager(0, 1, strategy=strategy)
    run(made, exact([0, 0], [5, 1], [0, 0]), 1, 1)
    step = made.begin_step(exact([5, 1], [4, 4], [3, 3]))
    assert step.candidates.tolist() == [0]
    made.release(0)
    launches, waits = made.stats().copy_launches, made.stats().waits
    made.end_step(step, counts(4, 4))
    assert (made.stats().copy_launches, made.stats().waits) == (launches, waits)


def test_counts_of_rows_without_requests_are_those_of_the_sampler() -> None:
    made = started(0, 1)
    step = made.begin_step(rows())
    made.end_step(step, counts(77, 2))
    made.release(0)
    assert made.accepted(step).tolist() == [77, 2]
    given_up = made.begin_step(StepRows.exact([1], [7], [1], [0]))
    made.abandon(given_up)
    assert made.accepted(given_up).tolist() == [0]


# -- counts of 0 ------------------------------------------------------------


def test_zero_accepted_with_drafts_kills_the_row_and_no_other() -> None:
    made = started(0, 1)
    step = made.begin_step(rows())
    made.end_step(step, counts(0, 4))
    assert [s.slot for s in made.published(step)] == [1]
    with pytest.raises(ValueError, match="holds no request"):
        made.release(0)
    following = made.begin_step(rows(slot=[-1, 1], computed_min=[0, 9], computed_max=[0, 9]))
    assert following.write_column[:2].tolist() == [-1, 1]


@layouts
def test_a_dead_row_stays_dead_over_several_steps(kind: str) -> None:
    """Though its next steps, placed nowhere, end with counts as if it ran."""
    made = manager(0, 1, kind=kind, steps_in_flight=3)
    run(made, exact([0, 0], [5, 5], [0, 0]), 1, 1)
    run(made, exact([5, 5], [4, 4], [3, 3]), 0, 1)
    for n in (6, 7, 8):
        step = run(made, between([n, n], [n + 3, n + 3], [4, 4], [3, 3]), 1, 1)
        assert step.write_column[0] == step.read_column[0] == -1
        assert step.write_column[1] >= 0


def test_a_dead_row_ends_when_the_host_reads_it_whatever_the_strategy() -> None:
    for strategy in STRATEGIES:
        runs = HashRunner(strategy=strategy, depth=2)
        for slot in (0, 1):
            runs.admit(slot, [1, 2, 3])
        runs.step([(0, 3, [], 1), (1, 3, [], 1)])
        runs.step([(0, 1, [1, 2, 3], 0), (1, 1, [1, 2, 3], 4)])
        while runs.outstanding:
            runs.read_oldest()
        assert list(runs.requests) == [1]
        runs.admit(0, [4, 5])
        runs.step([(1, 1, [1, 2, 3], 4), (0, 2, [], 1)])
        for _ in range(5):
            runs.step([(0, 1, [1, 2, 3], 4), (1, 1, [], 1)])


# -- steps that end late, out of turn or never ----------------------------------------


def test_ending_older_steps_leaves_the_youngest_ones_positions() -> None:
    """Positions are valid until the next `begin_step`, whatever ends before the forward pass."""
    made = manager(steps_in_flight=2)
    steps = []
    for slot in range(3):
        made.admit(slot)
        steps.append(made.begin_step(StepRows.exact([slot], [0], [5], [0])))
    made.end_step(steps[0], counts(1))
    made.end_step(steps[1], counts(1))
    assert steps[2].write_column.tolist() == [0, -1, -1, -1]


@pytest.mark.parametrize("readback", [True, False])
def test_abandoned_steps_do_not_push_older_results_out(readback: bool) -> None:
    """Buffers go round by step number: those of a result on its way must not come round again."""
    made = manager(steps_in_flight=1, readback=readback)
    made.admit(0)
    first = made.begin_step(StepRows.exact([0], [0], [8], [0]))
    made.end_step(first, counts(1))
    for _ in range(30):
        made.admit(1)
        made.abandon(made.begin_step(StepRows.exact([1], [0], [5], [0])))
        if not readback:
            made.resolve(first, np.array([1]))
    made.admit(2)
    made.end_step(made.begin_step(StepRows.exact([2], [0], [5], [0])), counts(1))
    assert made.accepted(first).tolist() == [1]
    assert [s.position for s in made.published(first)] == [8]


def test_a_steps_places_are_kept_until_its_counts_are_folded_in() -> None:
    """Also when it ends last: as many steps as may be outstanding have begun since."""
    for depth in (0, 1, 2):
        made = manager(*range(depth + 2), steps_in_flight=depth)
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


def test_an_abandoned_step_releases_its_rows_only() -> None:
    made = started(0, 1, 2)
    step = made.begin_step(rows())
    made.abandon(step)
    with pytest.raises(ValueError, match="holds no request"):
        made.release(0)
    following = made.begin_step(StepRows.exact([2], [5], [4], [3]))
    assert following.read_column[0] == 0
    made.end_step(following, counts(2))
    assert made.accepted(following).tolist() == [2]
    assert made.published(step) == []


def test_reset_forgets_requests_and_steps_wherever_they_were() -> None:
    made, fresh = started(0, 1, 2), started(0, 1)
    step = made.begin_step(rows())
    made.end_step(step, counts(2, 1))
    made.begin_step(rows(slot=[2, -1]))
    made.reset()
    assert not any(made.holds(slot) for slot in range(3))
    with pytest.raises(ValueError, match="is not outstanding"):
        made.accepted(step)
    for slot in (0, 1):
        assert made.admit(slot) == 1  # as after a release
    read = made.begin_step(StepRows.exact([0, 1], [0, 0], [5, 5], [0, 0]))
    made.end_step(read, counts(1, 1))
    placed, wanted = made.begin_step(rows()), fresh.begin_step(rows())
    for field in ("read_column", "read_offset", "write_column"):
        assert torch.equal(getattr(placed, field)[:2], getattr(wanted, field)[:2])
    made.end_step(placed, counts(2, 1))
    assert made.accepted(placed).tolist() == [2, 1]
    assert made._ledger.computed[:2].tolist() == [7, 6]


def test_counts_may_be_handed_in() -> None:
    made = started(0, 1, readback=False)
    with pytest.raises(ValueError, match="readback is False"):
        made.accepted(made._in_flight._open[0])
    made.resolve(made._in_flight._open[0], np.array([1, 1]))
    step = made.begin_step(rows())
    made.end_step(step, counts(4, 2))
    made.resolve(step, np.array([4, 2]))
    assert [s.position for s in made.published(step)] == [8]
    assert made.stats().readbacks == 0


@layouts
def test_what_is_prepared_changes_nothing_and_holds_until_another_call(kind: Any) -> None:
    made = started(0, 1, prompt=8, kind=kind, readback=False)
    step, ones = made._in_flight._open[0], np.ones(2, np.int32)
    before = checkpoint(made)
    settle = made.prepare_settle(step)
    with pytest.raises(ValueError, match=r"num_accepted\[1\] is 2"):
        settle(np.array([1, 2], np.int32))
    assert checkpoint(made) == before
    made.release(0)
    before = checkpoint(made)
    with pytest.raises(ValueError, match=r"step is 0; no other call"):
        settle(ones)
    assert checkpoint(made) == before
    settle = made.prepare_settle(step)
    settle(ones)
    assert made.published(step) == [Checkpoint(1, 0, 8, 0)]
    with pytest.raises(ValueError, match=r"step is 0; no other call"):
        settle(ones)
    made.prepare_settle(step)(ones)  # it has settled: nothing happens


@layouts
@pytest.mark.parametrize("late", [1, 3])
def test_steps_may_end_late_and_out_of_turn(kind: str, late: int) -> None:
    """As on a stage of a pipeline: other slots' steps begin before a step's counts exist."""
    runs = RUNNERS[kind](max_requests=6, depth=8, columns=20, own_all=True, layers=1)
    for slot in range(6):
        runs.admit(slot, list(range(1 + slot)))
    waiting = []
    for number in range(60):
        slot = number % 6
        row: Row = (slot, 1 + slot, [], 1) if number < 6 else (slot, 1, [5, 6, 7], 1 + number % 4)
        waiting.append(runs.begin([row]))
        runs.forward(waiting[-1])
        if len(waiting) > late:
            runs.end(waiting.pop(number % 2))
        while len(runs.outstanding) > 8 and runs.outstanding[0].step.ended:
            runs.read_oldest()
    for opened in waiting:
        runs.end(opened)
    while runs.outstanding:
        runs.read_oldest()
    assert runs.manager.stats().rows_copied


@pytest.mark.parametrize(
    ("late", "options"), [(1, {}), (8, {}), (8, {"strategy": "always"}), (8, {"in_place": True})]
)
def test_postprocessing_any_number_of_steps_late(late: int, options: dict[str, Any]) -> None:
    """As on a stage of a pipeline: between a step's forward pass and its counts lie `late` steps of
    other slots. The states are those of a run that is never late."""
    found = []
    for delay in (0, late):
        runs = HashRunner(max_requests=9, depth=8, columns=12, own_all=True, layers=1, **options)
        for slot in range(9):
            runs.admit(slot, list(range(1 + slot)))
        waiting: list[Open] = []
        for number in range(45):
            slot = number % 9
            first = number < 9
            row: Row = (slot, 1 + slot, [], 1) if first else (slot, 1, [5, 6, 7], 1 + number % 4)
            waiting.append(runs.begin([row]))
            if len(waiting) > delay:  # before the youngest step runs
                runs.forward(waiting[-1])
                runs.end(waiting.pop(0))
            else:
                runs.forward(waiting[-1])
            while len(runs.outstanding) > 8 and runs.outstanding[0].step.ended:
                runs.read_oldest()
        for opened in waiting:
            runs.end(opened)
        while runs.outstanding:
            runs.read_oldest()
        found.append(runs.state_bytes())
    assert all_equal(*found)
