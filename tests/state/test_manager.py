"""The manager's interface: what it refuses, what it drops, what it counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.hash_model import HashRunner
from numpy.typing import NDArray

from hybrid_runtime.state import HybridStateManager, StateLayout, Step, StepRows

K, SLOTS, COLUMNS, BLOCK = 3, 4, 12, 8
LAYOUT = StateLayout(2, 4, (1, 1, 4), K, BLOCK)


def manager(**options: Any) -> HybridStateManager:
    made = HybridStateManager(LAYOUT, SLOTS, K, "cpu", **options)
    made.bind({0: LAYOUT.allocate(SLOTS * COLUMNS, "cpu")}, tables())
    return made


def tables() -> torch.Tensor:
    return torch.arange(SLOTS * COLUMNS, dtype=torch.int32).view(SLOTS, COLUMNS)


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def started(*slots: int, prompt: int = 5, **options: Any) -> HybridStateManager:
    """A manager whose `slots` have read their prompts."""
    made = manager(**options)
    for slot in slots:
        made.admit(slot)
    n = len(slots)
    step = made.begin_step(StepRows.exact(slots, [0] * n, [prompt] * n, [0] * n))
    made.end_step(step, counts(*[1] * n))
    return made


def snapshot(made: HybridStateManager) -> list[Any]:
    """Everything that a refused call must leave as it was."""
    slot_table, stats = made._slot_table, made.stats()
    device = [t.clone() for t in (*made._policy.slots, *made._policy.outputs)]
    host: list[NDArray[Any]] = [
        slot_table.live.copy(),
        slot_table.known.copy(),
        slot_table.computed.copy(),
    ]
    return [*(t.tolist() for t in device), *(a.tolist() for a in host), stats.steps, stats.uploads]


# refused input

BAD_MANAGERS = [
    ({"strategy": "never"}, "strategy is 'never'"),
    ({"max_requests": 0}, "max_requests is 0"),
    ({"num_speculative_tokens": 2}, "num_speculative_tokens is 2; it must be the layout's"),
    ({"steps_in_flight": 9}, "steps_in_flight is 9"),
    ({"readback": False, "strategy": "defer"}, "readback is False"),
]


@pytest.mark.parametrize(("options", "message"), BAD_MANAGERS, ids=[m for _, m in BAD_MANAGERS])
def test_bad_managers_are_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"max_requests": SLOTS, "num_speculative_tokens": K, "device": "cpu"} | options
    with pytest.raises(ValueError, match=message):
        HybridStateManager(LAYOUT, **arguments)


def window_and_state() -> tuple[torch.Tensor, torch.Tensor]:
    return LAYOUT.allocate(4, "cpu")


BAD_BINDINGS: list[tuple[Callable[[], tuple[Any, Any, Any]], str]] = [
    (lambda: ({}, tables(), None), "states is empty"),
    (lambda: ({0: window_and_state()[:1]}, tables(), None), r"states\[0\] is .* pair"),
    (lambda: ({3: window_and_state()[::-1]}, tables(), None), r"states\[3\].window is"),
    (
        lambda: ({0: (window_and_state()[0].half(), window_and_state()[1])}, tables(), None),
        "window",
    ),
    (lambda: ({0: window_and_state()}, tables().long(), None), r"block_tables\[0\] is torch.int64"),
    (lambda: ({0: window_and_state()}, tables()[:2], None), r"block_tables\[0\] is .*\(2, 12\)"),
    (lambda: ({0: window_and_state()}, tables().t().contiguous().t(), None), "has strides"),
    (lambda: ({0: window_and_state()}, tables(), {0: 1}), r"groups\[0\] is 1; it must be in 0..0"),
    (lambda: ({0: window_and_state()}, tables(), {1: 0}), r"groups\[0\] is -1"),
]


@pytest.mark.parametrize(("make", "message"), BAD_BINDINGS, ids=[m for _, m in BAD_BINDINGS])
def test_bad_bindings_are_refused(make: Callable[[], tuple[Any, Any, Any]], message: str) -> None:
    made = HybridStateManager(LAYOUT, SLOTS, K, "cpu")
    with pytest.raises(ValueError, match=message):
        made.bind(*make())
    with pytest.raises(ValueError, match="not bound"):
        made.begin_step(StepRows.exact([0], [0], [1], [0]))


def rows(**changes: Any) -> StepRows:
    """A decode step of slots 0 and 1 after 5 tokens each, with changes."""
    fields = {"slot": [0, 1], "computed_min": [5, 5], "computed_max": [5, 5]}
    fields |= {"scheduled": [4, 4], "draft": [3, 3]} | changes
    return StepRows(**{name: np.array(value, np.int32) for name, value in fields.items()})


BAD_ROWS = [
    ({"slot": [0, 0]}, "rows.slot has slot 0 twice"),
    ({"slot": [0, 9]}, r"rows.slot\[1\] is 9; it must be in -1..3"),
    ({"slot": [0, -2]}, r"rows.slot\[1\] is -2"),
    ({"slot": [0, 3]}, r"rows.slot\[1\] is 3; it must be a slot that has been admitted"),
    ({"draft": [3, 4], "scheduled": [4, 5]}, r"rows.draft\[1\] is 4; it must be in 0..3"),
    ({"draft": [-1, 3]}, r"rows.draft\[0\] is -1"),
    ({"scheduled": [4, 3]}, r"rows.draft\[1\] is 3; it must be smaller"),
    (
        {"scheduled": [4, 0], "draft": [3, 0]},
        r"rows.scheduled\[1\] is 0; it must be at least 1|draft",
    ),
    ({"computed_min": [-1, 5]}, r"rows.computed_min\[0\] is -1"),
    ({"computed_max": [5, 4]}, r"rows.computed_max\[1\] is 4; it must be >= computed_min"),
    ({"computed_min": [5, 80], "computed_max": [5, 80]}, "block-table columns"),
    ({"scheduled": [4, 20]}, r"rows.scheduled\[1\] is 20; it must be draft \+ 1"),
    ({"draft": [3]}, r"rows.draft has shape \(1,\)"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ROWS, ids=[m for _, m in BAD_ROWS])
@pytest.mark.parametrize("steady", [False, True])
def test_bad_rows_are_refused_and_change_nothing(
    changes: dict[str, Any], message: str, steady: bool
) -> None:
    made = started(0, 1, steps_in_flight=0)
    computed = 5
    for _ in range(3 * steady):  # the short way of repeated steps must refuse the same
        step = made.begin_step(rows(computed_min=[computed] * 2, computed_max=[computed] * 2))
        made.end_step(step, counts(1, 1))
        computed += 1
    if steady:
        made.block_demand(rows())
    made._in_flight.make_room(0)  # results that were on their way may arrive meanwhile
    before = snapshot(made)
    with pytest.raises(ValueError, match=message):
        made.begin_step(rows(**changes))
    assert snapshot(made) == before
    ok = {"computed_min": [computed] * 2, "computed_max": [computed] * 2}
    made.end_step(made.begin_step(rows(**ok)), counts(4, 1))


BAD_COUNTS = [
    (lambda: torch.ones(2, dtype=torch.int64), "num_accepted is torch.int64"),
    (lambda: torch.ones(1, dtype=torch.int32), r"it must be contiguous int32 \[>= 2\]"),
    (lambda: torch.ones(2, 1, dtype=torch.int32), "num_accepted is"),
    (lambda: torch.ones(8, dtype=torch.int32)[::2], "contiguous"),
]


@pytest.mark.parametrize(("make", "message"), BAD_COUNTS)
def test_bad_counts_are_refused(make: Callable[[], torch.Tensor], message: str) -> None:
    made = started(0, 1)
    step = made.begin_step(rows())
    with pytest.raises(ValueError, match=message):
        made.end_step(step, make())
    made.end_step(step, counts(4, 1))
    with pytest.raises(ValueError, match="a step ends once"):
        made.end_step(step, counts(4, 1))


@pytest.mark.parametrize("bad", [5, -1])
def test_impossible_counts_are_named_when_they_arrive(bad: int) -> None:
    made = started(0, 1)
    step = made.begin_step(rows())
    made.end_step(step, counts(1, bad))
    with pytest.raises(ValueError, match=rf"num_accepted\[1\] is {bad} in step 1"):
        made.accepted(step)


def test_bad_admissions_are_refused() -> None:
    made = started(0)
    for call, message in (
        (lambda: made.admit(0), "slot is 0, which is in use"),
        (lambda: made.admit(SLOTS), f"slot is {SLOTS}; it must be in 0..3"),
        (lambda: made.admit(1, -1), "computed is -1"),
        (lambda: made.admit(1, 8), "hit_column is None with computed=8"),
        (lambda: made.admit(1, 0, 2), "hit_column is 2 with computed=0"),
        (lambda: made.admit(1, 8, -1), "hit_column is -1"),
        (lambda: made.admit(1, 8, COLUMNS), f"hit_column is {COLUMNS}"),
        (lambda: made.release(1), "slot is 1, which holds no request"),
        (lambda: made.retain(0, 5), "every is 5; it must be a multiple of the block size"),
        (lambda: made.retain(0, 8, (8, 16, 24)), "positions has 3 entries"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert made.admit(1) == 0


# results, late and lost


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
    assert made._slot_table.computed[:2].tolist() == [0, 9]
    made.accepted(following)
    assert made._slot_table.computed[:2].tolist() == [3, 11]
    assert made.computed[:2].tolist() == [0, 9]


def test_counts_follow_rows_not_slots() -> None:
    made = started(0, 1, 2)
    step = made.begin_step(rows(slot=[2, 0]))
    made.end_step(step, counts(1, 3, 99, 99))
    made.accepted(step)
    assert made._slot_table.computed[:3].tolist() == [8, 5, 6]


def test_a_step_that_has_not_ended_has_no_counts() -> None:
    made = started(0, 1)
    step = made.begin_step(rows())
    with pytest.raises(ValueError, match="has not ended"):
        made.accepted(step)
    with pytest.raises(ValueError, match="a slot whose last step has ended"):
        made.begin_step(rows())


def test_at_most_so_many_steps_are_outstanding() -> None:
    made = started(0, 1, steps_in_flight=1)
    first = made.begin_step(rows(slot=[0, -1]))
    second = made.begin_step(rows(slot=[1, -1]))
    made.admit(2)
    with pytest.raises(ValueError, match=r"has not ended; at most steps_in_flight \(1\)"):
        made.begin_step(StepRows.exact([2], [0], [3], [0]))
    made.end_step(first, counts(1, 1))
    made.end_step(second, counts(2, 1))
    assert made.accepted(first).tolist() == [1, 1]


@pytest.mark.parametrize("late", range(5))
def test_steps_may_end_late_and_out_of_turn(late: int) -> None:
    """As on a pipeline stage: other slots' steps are begun before this one's counts exist."""
    runs = HashRunner(max_requests=8, depth=8, block_size=4, columns=30)
    made, waiting = runs.manager, []
    made.debug = False  # rows of two certain tokens pass boundaries
    for slot in range(6):
        made.admit(slot)
        runs.tables[0][slot] = torch.arange(30, dtype=torch.int32)
    computed = np.zeros(6, np.int32)
    for number in range(24):
        slot = number % 6
        if len(waiting) > late:
            step, counted = waiting.pop(0)
            made.end_step(step, counted)
            computed[step.rows.slot[0]] += 1 + int(counted[0])
        draft = 3 if computed[slot] else 0
        step = made.begin_step(StepRows.exact([slot], [computed[slot]], [draft + 2], [draft]))
        assert made.computed[slot] == computed[slot]
        end = computed[slot] + draft + 2
        assert step.write_column[0] == -(-end // 4) - 1
        waiting.append((step, counts(1 + number % (draft + 1))))
    for step, counted in waiting:
        made.end_step(step, counted)
    assert made.accepted(waiting[-1][0]) is not None


def test_counts_may_be_handed_in() -> None:
    made = started(0, 1, readback=False)
    with pytest.raises(ValueError, match="readback is False"):
        made.accepted(made._in_flight._open[0])
    made.resolve(made._in_flight._open[0], np.array([1, 1]))
    step = made.begin_step(rows())
    made.end_step(step, counts(4, 2))
    made.resolve(step, np.array([4, 2]))
    assert [s.boundary for s in made.published(step)] == [8]
    assert made.stats().readbacks == 0


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


def test_zero_accepted_with_drafts_kills_the_row_and_no_other() -> None:
    made = started(0, 1)
    step = made.begin_step(rows())
    made.end_step(step, counts(0, 4))
    assert [s.slot for s in made.published(step)] == [1]
    with pytest.raises(ValueError, match="holds no request"):
        made.release(0)
    following = made.begin_step(rows(slot=[-1, 1], computed_min=[0, 9], computed_max=[0, 9]))
    assert following.write_column[:2].tolist() == [-1, 1]


def test_a_dead_row_in_flight_is_never_run_again() -> None:
    """The host does not know yet; the device does, and gives the row no valid column."""
    made = started(0, 1, steps_in_flight=2)
    made.end_step(made.begin_step(rows()), counts(0, 1))
    following = made.begin_step(rows(computed_min=[6, 6], computed_max=[9, 9]))
    assert following.write_column[:2].tolist() == [-1, 1]
    assert following.read_column[:2].tolist() == [-1, 1]


# what is done, and what is not


def launches(made: HybridStateManager, step: Step, accepted: torch.Tensor) -> int:
    before = made.stats().copy_launches
    made.end_step(step, accepted)
    return made.stats().copy_launches - before


def test_a_skipped_step_launches_nothing_under_auto() -> None:
    made = started(0, 1)
    near = made.begin_step(rows(scheduled=[3, 3], draft=[2, 2]))
    assert not near.skipped
    assert launches(made, near, counts(1, 1)) == 1
    far = made.begin_step(
        rows(computed_min=[6, 6], computed_max=[6, 6], draft=[0, 0], scheduled=[1, 1])
    )
    assert far.skipped
    assert launches(made, far, counts(1, 1)) == 0


def test_a_boundary_that_nobody_keeps_needs_no_copy() -> None:
    made = started(0, 1)
    made.retain(0, 0)
    made.retain(1, 0, (16,))
    step = made.begin_step(rows())
    assert step.skipped
    assert launches(made, step, counts(4, 4)) == 0
    assert made.published(step) == []
    made.end_step(made.begin_step(StepRows.exact([1], [9], [5], [0])), counts(1))
    step = made.begin_step(rows(computed_min=[9, 14], computed_max=[9, 14]))
    assert step.candidates.tolist() == [1]
    made.end_step(step, counts(4, 4))
    assert [(s.slot, s.boundary) for s in made.published(step)] == [(1, 16)]


def test_columns_held_are_bounded() -> None:
    """A running request owns its running column, K more, and at most two below (#55450)."""
    runs = HashRunner(num_draft=K, max_requests=1, block_size=BLOCK, columns=40)
    runs.admit(0, list(range(20)))
    runs.step([(0, 8, [], 0)])
    runs.step([(0, 8, [], 0)])
    runs.step([(0, 4, [], 1)])
    for i in range(60):
        runs.step([(0, 1, [1] * (i % (K + 1)), 1 + i % (i % (K + 1) + 1))])
        assert len(runs.requests[0].blocks[0]) <= 2 + 1 + K


def test_nan_in_one_request_stays_there() -> None:
    runs = HashRunner(num_draft=K, max_requests=2, block_size=BLOCK)
    for slot in (0, 1):
        runs.admit(slot, [1, 2, 3])
    runs.step([(0, 3, [], 1), (1, 3, [], 1)])
    for block in runs.requests[0].blocks[0].values():
        runs.manager.fill(torch.tensor([block]), float("nan"))
    for _ in range(20):
        runs.step([(1, 1, [4, 5, 6], 4)])  # the harness checks every state it reads


@pytest.mark.parametrize("length", range(1, K + 4))
def test_short_prompts_are_prefills_whatever_their_length(length: int) -> None:
    """A prompt as long as a verify step is none (#53051); its first decode starts from it."""
    runs = HashRunner(num_draft=K, max_requests=4, block_size=BLOCK)
    for slot in range(3):
        runs.admit(slot, list(range(length)))
    runs.step([(slot, length, [], 1) for slot in range(3)])
    for _ in range(12):
        runs.step([(slot, 1, [7, 8, 9], 1 + slot) for slot in range(3)])


def test_a_fresh_request_may_begin_with_a_verify() -> None:
    runs = HashRunner(num_draft=K, max_requests=2, block_size=BLOCK)
    runs.admit(0, [5])
    runs.step([(0, 1, [1, 2, 3], 3)])
    runs.step([(0, 1, [1, 2, 3], 4)])


@pytest.mark.parametrize("drafts", [(3, 0, 1, 3, 0), (0, 0, 3, 2), (1, 3, 0, 3), (2, 2, 0, 0, 3)])
@pytest.mark.parametrize("in_place", [False, True])
def test_any_order_of_draft_counts(drafts: tuple[int, ...], in_place: bool) -> None:
    """A step without drafts after one with them starts from the accepted state (#52942)."""
    for offset in range(BLOCK):
        runs = HashRunner(num_draft=K, max_requests=1, block_size=BLOCK, in_place=in_place)
        runs.admit(0, list(range(1 + offset)))
        runs.step([(0, 1 + offset, [], 1)])
        for d in drafts * 3:
            for a in {1, d + 1}:
                runs.step([(0, 1, [9] * d, a)])
