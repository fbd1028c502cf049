"""A step's rows: what they are made from, that they stay as given, and which are refused."""

from __future__ import annotations

import random
from typing import Any, get_args

import numpy as np
import pytest
import torch
from helpers.plain_manager import (
    BLOCK,
    COLUMNS,
    LAYOUT,
    SLOTS,
    K,
    between,
    checkpoint,
    counts,
    exact,
    manager,
    rows,
    run,
    started,
)
from helpers.replay_model import RUNNERS, decode_row, two_running

from hybrid_runtime.state import (
    HybridStateManager,
    StepRows,
    Strategy,
)

layouts = pytest.mark.parametrize("kind", sorted(RUNNERS))


# -- given --------------------------------------------------------------------------------


@pytest.mark.parametrize("steady", [False, True])
def test_arrays_of_the_runner_are_its_own_again(steady: bool) -> None:
    made, slot = started(0, 1, steps_in_flight=2), np.array([0, 1], np.int32)
    low, high, scheduled, draft = (np.array([v] * 2, np.int32) for v in (5, 5, 4, 3))
    for number in range(1 + 3 * steady):
        low[:] = high[:] = 5 + 4 * number
        step = made.begin_step(StepRows(slot, low, high, scheduled, draft))
        for array in (slot, low, high, scheduled, draft):
            array += 1
        made.end_step(step, counts(4, 4))
        assert made.accepted(step).tolist() == [4, 4]
        found = {s.position for s in made.published(step)}
        assert found == ([{8}, set(), {16}, set()][number])
        for array in (slot, low, high, scheduled, draft):
            array -= 1


def test_rows_cannot_be_changed() -> None:
    given = np.arange(6, dtype=np.int32)
    made = StepRows(given[::2], given[:3], given[:3], given[:3], given[:3])
    given[:] = -7
    assert made.slot.tolist() == [0, 2, 4]
    for name in ("slot", "computed_min", "computed_max", "scheduled", "draft"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(made, name)[0] = 1
        with pytest.raises(AttributeError):
            setattr(made, name, given)


def test_lists_and_other_integers_are_converted() -> None:
    anything: Any = StepRows
    made = anything([0, 1], (5, 5), np.array([5, 6]), torch.tensor([4, 4]), np.uint8([3, 3]))
    assert not made.exact_counts
    for name in ("slot", "computed_min", "computed_max", "scheduled", "draft"):
        assert getattr(made, name).dtype == np.int32
    assert StepRows.exact(range(2), [5, 5], [4, 4], [3, 3]).exact_counts
    assert StepRows.exact([], [], [], []).slot.dtype == np.int32


@layouts
@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_a_step_without_rows_is_a_step(kind: str, strategy: str) -> None:
    runs, rng = two_running(kind, depth=1, strategy=strategy), random.Random(2)
    nothing = StepRows.exact([], [], [], [])
    for _ in range(4):
        runs.step([decode_row(rng, 0), decode_row(rng, 1)])
        runs.read_oldest()
        step = runs.manager.begin_step(nothing)
        assert step.write_column.tolist() == [-1] * 4
        runs.manager.end_step(step, counts())
        assert runs.manager.published(step) == []


def test_counts_follow_rows_not_slots() -> None:
    made = started(0, 1, 2)
    step = made.begin_step(rows(slot=[2, 0]))
    made.end_step(step, counts(1, 3, 99, 99))
    made.accepted(step)
    assert made._ledger.computed[:3].tolist() == [8, 5, 6]


def test_padded_rows_may_stand_anywhere_and_outnumber_the_slots() -> None:
    """A runner that pads its steps to few sizes gets what it would get without."""
    plain, padded = manager(), manager(max_rows=SLOTS + 5)
    at = [0, 1, 4, SLOTS + 4]  # where the rows stand among padded ones
    found: dict[str, list[Any]] = {"plain": [], "padded": []}
    for made in (plain, padded):
        for slot in range(4):
            made.admit(slot)
    computed = np.zeros(4, np.int32)
    for scheduled, draft, accepted in (
        ([5, 8, 3, 6], [0, 0, 0, 0], [1, 1, 1, 0]),
        ([4, 4, 2, 1], [3, 3, 1, 0], [4, 1, 2, 1]),
        ([4, 4, 4, 4], [3, 3, 3, 3], [4, 4, 1, 2]),
        ([4, 4, 4, 4], [3, 3, 3, 3], [1, 2, 3, 4]),
    ):
        fields = np.array([[0, 1, 2, 3], computed, computed, scheduled, draft], np.int32)
        wide = np.zeros((5, SLOTS + 5), np.int32)
        wide[0], wide[3] = -1, 4
        wide[:, at] = fields
        got = np.zeros(SLOTS + 5, np.int32)
        got[at] = accepted
        for name, made, rows_, given in (
            ("plain", plain, fields, np.array(accepted)),
            ("padded", padded, wide, got),
        ):
            step = made.begin_step(StepRows(*rows_))
            chosen = list(range(4)) if made is plain else at
            positions = torch.stack(list(step.positions[:3]))
            idle = [i for i in range(made.positions.read_column.shape[0]) if i not in chosen]
            assert (positions[:, idle] == -1).all()
            made.end_step(step, torch.tensor(given, dtype=torch.int32))
            checkpoints = made.published(step)
            found[name].append((positions[:, chosen].tolist(), checkpoints))
        computed += np.array(scheduled) - draft + np.maximum(accepted, 1) - 1
    assert found["plain"] == found["padded"]
    assert any(checkpoints for _, checkpoints in found["plain"])
    with pytest.raises(ValueError, match=r"at most max_rows"):
        plain.begin_step(StepRows(*wide))


# -- refused --------------------------------------------------------------------------------


BAD_FIELDS: list[tuple[Any, str]] = [
    ([[5, 5]], r"has shape \(1, 2\); it must be \[2\] like rows.slot"),
    (np.full((2, 1), 5, np.int32), r"has shape \(2, 1\)"),
    (np.full(5, 5, np.int32), r"has shape \(5,\)"),
    (np.int32(5), r"has shape \(\)"),
    (None, "is object"),
    ([5.0, 5.0], "is float64"),
    ([True, False], "is bool"),
    (["5", "5"], "is <U1"),
    ([5, [5]], r"is \[5, \[5\]\]"),
    ([5, 2**31], ".*range of int32"),
    ([5, -(2**31) - 1], ".*range of int32"),
]


@pytest.mark.parametrize("name", ["computed_min", "computed_max", "scheduled", "draft"])
@pytest.mark.parametrize(("value", "message"), BAD_FIELDS, ids=[m for _, m in BAD_FIELDS])
def test_bad_fields_are_named_where_they_are_given(name: str, value: Any, message: str) -> None:
    fields: dict[str, Any] = {"slot": [0, 1], "computed_min": [5, 5], "computed_max": [5, 5]}
    fields |= {"scheduled": [4, 4], "draft": [3, 3], name: value}
    with pytest.raises(ValueError, match=rf"rows\.{name} {message}"):
        StepRows(**fields)


@pytest.mark.parametrize("flags", [[True], [1, 0], [[True, False]]])
def test_bad_flags_are_named(flags: Any) -> None:
    fields: Any = [0, 1], [5, 5], [5, 5], [4, 4], [3, 3], flags
    with pytest.raises(ValueError, match=r"rows\.decodes is .*must be bool \[2\]"):
        StepRows(*fields)


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
    before = checkpoint(made)
    with pytest.raises(ValueError, match=message):
        made.begin_step(rows(**changes))
    assert checkpoint(made) == before
    ok = {"computed_min": [computed] * 2, "computed_max": [computed] * 2}
    made.end_step(made.begin_step(rows(**ok)), counts(4, 1))


@layouts
@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("name", ["computed", "scheduled"])
def test_positions_beyond_int32_are_refused(kind: str, steady: bool, name: str) -> None:
    runs, rng = two_running(kind), random.Random(5)
    for _ in range(3 * steady):
        runs.step([decode_row(rng, 0), decode_row(rng, 1)])
    for far in (2**30, 2**31 - 1):
        low, high = [20, 20], [20, far if name == "computed" else 20]
        scheduled = [4, far if name == "scheduled" else 4]
        with pytest.raises(ValueError, match=rf"rows\.(computed_max|{name})"):
            runs.manager.begin_step(
                StepRows(*map(np.int32, ([0, 1], low, high, scheduled, [3, 3])))
            )
        with pytest.raises(ValueError, match=rf"rows\.(computed_max|{name})"):
            runs.manager.begin_step(StepRows.exact([0, 1], high, scheduled, [3, 3]))
    runs.step([decode_row(rng, 0), decode_row(rng, 1)])


def test_steady_decode_ends_where_the_table_does() -> None:
    """A draft needs its column even in a row that has none, whether or not lines are sent."""
    made = manager(0)
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
    made = manager(0)
    run(made, exact([0], [3], [0]), 1)
    run(made, exact([3], [4], [3]), 1)
    run(made, between([4], [7], [4], [3]), 4)
    with pytest.raises(ValueError, match=r"rows.scheduled\[0\] is 9; it must be draft \+ 1"):
        made.begin_step(between([5], [11], [9], [3]))


def test_the_last_column_is_used_and_none_beyond() -> None:
    """The narrowest group's table counts, and drafts need their columns too."""
    made = HybridStateManager(LAYOUT, 1, K, "cpu")
    tables = [torch.zeros(1, width, dtype=torch.int32) for width in (9, 6)]
    states = {i: LAYOUT.allocate(4, "cpu") for i in range(2)}
    made.bind(states, tables, {0: 0, 1: 1})
    made.admit(0)
    last = 6 - K  # columns that may run
    with pytest.raises(ValueError, match=r"computed_max \+ rows.scheduled\[0\] is 25"):
        made.begin_step(StepRows.exact([0], [0], [last * BLOCK + 1], [0]))
    step = made.begin_step(StepRows.exact([0], [0], [last * BLOCK], [0]))
    assert step.write_column.tolist() == [last - 1]
    with pytest.raises(ValueError, match="bound already"):
        made.bind(states, tables)


@layouts
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("mixed", [False, True])
def test_refusals_leave_steps_in_flight_as_they_are(kind: str, depth: int, mixed: bool) -> None:
    runs, rng, live = two_running(kind, depth=depth, debug=False), random.Random(1), {0, 1, 2}
    runs.admit(2, list(range(93)))
    for number in range(12):
        plan = [decode_row(rng, 0), decode_row(rng, 1)]
        if mixed:  # whole lines each time: a prompt runs beside
            plan.insert(number % 3, (2, BLOCK if number else 4, [], 0))
        opened = runs.begin(plan)
        runs.forward(opened)
        for slot in sorted(live) * 4:
            with pytest.raises(ValueError, match=r"rows\.slot|outstanding"):
                runs.manager.begin_step(StepRows.exact([slot, 3], [9, 9], [4, 1], [3, 0]))
        runs.end(opened)
        for slot in sorted(live) * 4:
            with pytest.raises(ValueError, match=r"rows\.slot|outstanding"):
                runs.manager.begin_step(StepRows.exact([slot, 3], [9, 9], [4, 1], [3, 0]))
        while len(runs.outstanding) > depth:
            runs.read_oldest()  # checks what is published
    while runs.outstanding:
        runs.read_oldest()
