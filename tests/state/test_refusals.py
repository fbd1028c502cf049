"""What the manager refuses, by name, and that a refusal changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plain_manager import (
    COLUMNS,
    LAYOUT,
    SLOTS,
    K,
    checkpoint,
    counts,
    rows,
    started,
    tables,
)

from hybrid_runtime.state import HybridStateManager, StepRows

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


def blocks() -> tuple[torch.Tensor, torch.Tensor]:
    return LAYOUT.allocate(4, "cpu")


BAD_BINDINGS: list[tuple[Callable[[], tuple[Any, Any, Any]], str]] = [
    (lambda: ({}, tables(), None), "states is empty"),
    (lambda: ({0: blocks()[:1]}, tables(), None), r"states\[0\] is .* pair"),
    (lambda: ({3: blocks()[::-1]}, tables(), None), r"states\[3\].conv_state is"),
    (
        lambda: ({0: (blocks()[0].half(), blocks()[1])}, tables(), None),
        "conv_state",
    ),
    (lambda: ({0: blocks()}, tables().long(), None), r"block_tables\[0\] is torch.int64"),
    (lambda: ({0: blocks()}, tables()[:2], None), r"block_tables\[0\] is .*\(2, 12\)"),
    (lambda: ({0: blocks()}, tables().t().contiguous().t(), None), "has strides"),
    (lambda: ({0: blocks()}, tables(), {0: 1}), r"groups\[0\] is 1; it must be in 0..0"),
    (lambda: ({0: blocks()}, tables(), {1: 0}), r"groups\[0\] is -1"),
    (lambda: ({0: blocks()}, tables()[:, :0], None), r"block_tables\[0\] is .*\(4, 0\)"),
    (lambda: ({0: blocks()}, [], None), "block_tables is empty"),
    (lambda: ({0: blocks()}, [None], None), r"block_tables\[0\] is a NoneType"),
    (
        lambda: ({0: (blocks()[0][:0], blocks()[1])}, tables(), None),
        r"states\[0\].conv_state is .*\(0, 6, 1\)",
    ),
    (lambda: ({0: (None, None)}, tables(), None), r"states\[0\].conv_state is a NoneType"),
]


@pytest.mark.parametrize(("make", "message"), BAD_BINDINGS, ids=[m for _, m in BAD_BINDINGS])
def test_bad_bindings_are_refused(make: Callable[[], tuple[Any, Any, Any]], message: str) -> None:
    made = HybridStateManager(LAYOUT, SLOTS, K, "cpu")
    with pytest.raises(ValueError, match=message):
        made.bind(*make())
    with pytest.raises(ValueError, match="not bound"):
        made.begin_step(StepRows.exact([0], [0], [1], [0]))


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
