"""With `debug=True` the mistakes of a runner that lose hits or give wrong text are errors."""

from __future__ import annotations

import pytest
import torch
from helpers.plain_manager import (
    COLUMNS,
    K,
    begin,
    checkpoint,
    counts,
    exact,
    rows,
    run,
    started,
)
from helpers.replay_model import RUNNERS, two_running

from hybrid_runtime.state import (
    HybridStateManager,
    StepRows,
)

layouts = pytest.mark.parametrize("kind", sorted(RUNNERS))


@layouts
@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("steady", [False, True])
def test_a_count_off_by_one_is_named_before_anything_changes(
    kind: str, off: int, steady: bool
) -> None:
    made, n = started(0, 1, kind=kind, debug=True), 5
    for _ in range(3 * steady):
        run(made, exact([n, n], 4, 3), 2)
        n += 2
    made._in_flight.make_room(0)  # results that were on their way may arrive meanwhile
    before = checkpoint(made)
    for _ in range(30):  # refusals use nothing up
        with pytest.raises(ValueError, match=r"rows\.computed_min") as error:
            made.begin_step(StepRows.exact([0, 1], [n, n + off], [4, 4], [3, 3]))
    step = 1 + 3 * steady
    assert f"[1] is {n + off}..{n + off} (slot 1, generation 0, step {step})" in str(error.value)
    assert str(error.value).endswith(f"it must include the exact count, {n}")
    assert checkpoint(made) == before
    run(made, exact([n, n], 4, 3), 1)


@layouts
def test_a_count_that_a_caller_wrote_is_named(kind: str) -> None:
    """With results in flight too, of which only bounds are known."""
    made = started(0, 1, kind=kind, debug=True, steps_in_flight=2)
    run(made, exact([5], 4, 3), 4)
    with torch.inference_mode():
        made.computed[1] = 4
    with pytest.raises(
        ValueError, match=r"manager\.computed\[1\] is 4 .*a caller wrote.* must be 5\.\.5"
    ):
        made.begin_step(StepRows.exact([0, 1], [9, 5], [4, 4], [3, 3]))
    with torch.inference_mode():
        made.computed[1] = 5
    run(made, exact([9, 5], 4, 3), 1)


@layouts
def test_a_chunk_that_loses_a_boundary_is_named_and_counted(kind: str) -> None:
    made = started(0, 1, kind=kind, debug=True)
    message = (
        r"rows.scheduled\[0\] is 13 \(slot 0, generation 0, step 1\), which passes the wanted "
        r"position 16 and ends on 18; it must end on 16"
    )
    with pytest.raises(ValueError, match=message):
        run(made, exact([5], 13, 0), 0)
    assert made.stats().lost_checkpoints == 0
    run(made, exact([5], 11, 0), 0)  # ends on 16
    if kind == "columns":
        made.retain(0, 0)
    made.end_step(made.begin_step(exact([16], 13, 0)), counts(0))  # nobody wants 24

    plain = started(0, 1, kind=kind)
    for _ in range(2):
        run(plain, exact([5, 5], 13, 0), 0)
        for slot in (0, 1):
            plain.release(slot)
            plain.admit(slot, 5, COLUMNS - 1 if kind == "replay" else 0)
    assert plain.stats().lost_checkpoints == 4
    padded = plain.begin_step(StepRows.exact([-1], [5], [13], [0]))
    plain.end_step(padded, torch.ones(1, dtype=torch.int32))
    assert plain.stats().lost_checkpoints == 4


@layouts
def test_a_chunk_may_pass_one_boundary_if_kernels_cut_it(kind: str) -> None:
    made = started(0, 1, kind=kind, debug=True, prompt_cuts=True)
    message = r"passes the wanted position 8 and ends on 17; it must end on 8, or pass no wanted"
    with pytest.raises(ValueError, match=message):
        run(made, exact([5], 12, 0), 0)
    run(made, exact([5], 11, 0), 0)  # leaves 8 and ends on 16
    step = begin(made, StepRows.exact([0], [16], [10], [0]))
    made.end_step(step, torch.zeros(1, dtype=torch.int32))
    assert [s.position for s in made.published(step)] == [24]
    assert made.stats().lost_checkpoints == 0


@layouts
def test_the_column_of_a_cut_must_be_owned(kind: str) -> None:
    made = started(0, 1, kind=kind, debug=True, prompt_cuts=True)
    made._tables[0][0, 0] = -1
    if kind == "columns":  # the state that is read lies there too
        made._tables[0][0, 0], made._tables[0][0, 1] = 0, -1
        run(made, exact([5], 3, 0), 0)
    n = 8 if kind == "columns" else 5
    with pytest.raises(ValueError, match=r"is -1 .*, which writes that column"):
        run(made, exact([n], 12 if kind == "columns" else 8, 0), 0)


@layouts
def test_unowned_columns_are_named(kind: str) -> None:
    made = started(0, 1, kind=kind, debug=True)
    table = made._tables[0]
    live = COLUMNS - 1 if kind == "replay" else 0
    for column, verb in ((live, "reads"), (live + 2, "writes"))[: 1 if kind == "replay" else 2]:
        was = int(table[1, column])
        table[1, column] = -1
        message = (
            rf"block_tables\[0\]\[1, {column}\] is -1 \(slot 1, generation 0, step 1\), "
            rf"which {verb} that column; it must be a block"
        )
        with pytest.raises(ValueError, match=message):
            run(made, exact([5, 5], 4, 3), 1)
        table[1, column] = was
    run(made, exact([5, 5], 4, 3), 3)


@layouts
def test_a_column_for_a_checkpoint_must_be_owned(kind: str) -> None:
    """Replay stores the state after 8 tokens as it folds them; columns may copy it to column 0."""
    made, accepted = started(0, 1, kind=kind, debug=True), 3 if kind == "replay" else 1
    run(made, exact([5, 5], 4, 3), accepted)
    made._tables[0][0, 0] = -1
    with pytest.raises(ValueError, match=r"\[0, 0\] is -1 .*, which writes that column"):
        run(made, exact([5 + accepted] * 2, 4, 3), 1)


@pytest.mark.parametrize("accepted", range(1, K + 2))
def test_what_an_in_place_step_moves_from_must_be_owned(accepted: int) -> None:
    made = started(0, 1, debug=True, in_place=True)
    run(made, exact([5, 5], 4, 3), accepted)
    n = 5 + accepted
    offset = 0 if n == 9 else accepted - 1
    made._tables[0][1, 1 + offset] = -1
    with pytest.raises(ValueError, match=rf"block_tables\[0\]\[1, {1 + offset}\] is -1"):
        run(made, exact([n, n], 4, 3), 1)


@layouts
@pytest.mark.parametrize("bad", [0, -5, 5])
def test_debug_names_a_count_that_ends_a_request(kind: str, bad: int) -> None:
    made = two_running(kind, own_all=True).manager
    assert made.debug
    step = made.begin_step(StepRows.exact([1, 0], [5, 5], [4, 4], [3, 3]))
    at = rf"num_accepted\[1\] is {bad} \(slot 0, generation 0, step 1\); it must be in 1\.\.4"
    with pytest.raises(ValueError, match=at):
        made.end_step(step, counts(1, bad))
    assert made.holds(0)
    made.end_step(step, counts(1, 4))
    assert made.accepted(step).tolist() == [1, 4]


def test_debug_lets_texts_end_in_the_replay_layout_alone() -> None:
    for kind in ("columns", "replay"):
        made = two_running(kind, own_all=True).manager
        step = made.begin_step(StepRows.exact([1, 0], [5, 5], [4, 4], [3, 3]))
        if kind == "columns":
            with pytest.raises(ValueError, match=r"num_accepted\[1\] is -3"):
                made.end_step(step, counts(1, -3))
            continue
        made.end_step(step, counts(1, -3))
        assert made.accepted(step).tolist() == [1, 3]
        assert [made.has_ended(slot) for slot in (0, 1)] == [True, False]
        made.release(0)
        made.admit(0)
        assert not made.has_ended(0)


def test_debug_lets_rows_without_requests_be() -> None:
    made: HybridStateManager = started(0, 1, debug=True)
    step = made.begin_step(rows(slot=[0, -1]))
    made.end_step(step, counts(1, 77))
    step = made.begin_step(rows(computed_min=[6, 5], computed_max=[6, 5]))
    made.release(0)
    made.end_step(step, counts(0, 4))
    assert made.published(step) == [(1, 0, 8, 0)]
