"""Positions and columns of checkpoints that no row may name, and what is the other layout's."""

from dataclasses import replace
from typing import Any

import pytest
from helpers.plain_manager import between, checkpoint, exact, manager, rows, run, started

from hybrid_runtime.state import StepRows


def test_a_replayed_request_must_not_start_where_a_later_checkpoint_goes() -> None:
    """Nor go on from there: a row that ends on a position leaves its state in that column."""
    made = manager(kind="replay")
    made.admit(0, 8, 2)
    column = 2
    for at in (16, 24):
        given = StepRows.exact([0], [at - 8], [8], [0], None, [[at, 0]], [[column, -1]])
        with pytest.raises(ValueError, match=r"^rows.save_to\[0\] is .*no column that may hold"):
            made.begin_step(given)
        column = 5 - column
        run(made, replace(given, save_to=[[column, -1]]), 1)


def test_a_column_that_may_hold_the_state_takes_no_other_position() -> None:
    """The last row has ended on 9 if all drafts before it were accepted."""
    made, named = manager(0, kind="replay", steps_in_flight=2), ([[0, 9]], [[-1, 2]])
    run(made, exact([0], [4], [0]), 1)
    run(made, exact([4], [4], [3]), 4)
    run(made, replace(between([5], [8], [1], [0]), save_at=named[0], save_to=named[1]), 1)
    following = replace(between([6], [9], [1], [0]), save_at=[[13, 0]], save_to=[[2, -1]])
    with pytest.raises(ValueError, match=r"^rows.save_to\[0\] is .*no column that may hold"):
        made.begin_step(following)
    made.begin_step(replace(between([6], [9], [4], [3]), save_at=named[0], save_to=named[1]))


@pytest.mark.parametrize(("prompt_cuts", "stored"), [(False, [12]), (True, range(5, 13))])
def test_what_a_row_cannot_store_may_be_named_anywhere(prompt_cuts: bool, stored: Any) -> None:
    """From 4 tokens on to 12, the state of the 4 in a column that is named for another position."""
    refused = []
    for at in range(1, 15):
        made = manager(kind="replay", prompt_cuts=prompt_cuts)
        made.admit(0, 4, 0)
        try:
            made.begin_step(StepRows.exact([0], [4], [8], [0], None, [[at, 0]], [[0, -1]]))
        except ValueError:
            refused.append(at)
    assert refused == [*stored, 13, 14]


@pytest.mark.parametrize(
    ("save_at", "save_to", "message"),
    [
        ([8, -1], [0, 1], r"save_at\[0\] is \[ 8 -1\]; it must be at least 0"),
        ([8, 11], [0, 1], r"save_at\[0\] is \[ 8 11\]; it must be two positions more than 3"),
        ([8, 16], [1, 1], r"save_to\[0\] is \[1 1\]; it must be two different columns"),
        ([8, 0], [-1, -1], r"save_to\[0\] is \[-1 -1\]; it must be in 0\.\.10"),
        ([8, 0], [11, -1], r"save_to\[0\] is \[11 -1\]; it must be in 0\.\.10"),
    ],
)
def test_wrong_places_of_checkpoints_are_refused(
    save_at: list[int], save_to: list[int], message: str
) -> None:
    made = manager(0, kind="replay")
    before = checkpoint(made)
    with pytest.raises(ValueError, match=rf"^rows\.{message}"):
        made.begin_step(StepRows.exact([0], [0], [8], [0], None, [save_at], [save_to]))
    assert checkpoint(made) == before


def test_each_layout_refuses_what_is_the_others() -> None:
    columns, replay = started(0), started(0, kind="replay")
    with pytest.raises(ValueError, match=r"^rows.save_at is .*None in the columns layout"):
        columns.begin_step(StepRows.exact([0], [5], [4], [3], None, [[8, 0]], [[0, -1]]))
    with pytest.raises(ValueError, match=r"^retain\(\) is of the columns layout"):
        replay.retain(0, 8)
    with pytest.raises(ValueError, match=r"^block_demand\(\) is of the columns layout"):
        replay.block_demand(rows())
    with pytest.raises(ValueError, match=r"^rows\.save_to is object \(\); it must be int32"):
        StepRows.exact([0], [5], [4], [3], save_at=[[8, 0]])
    with pytest.raises(ValueError, match=r"^rows\.save_at has shape \(2,\); .* \[1, 2\]"):
        StepRows.exact([0], [5], [4], [3], save_at=[8, 0], save_to=[0, -1])
