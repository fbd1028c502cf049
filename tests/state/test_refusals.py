"""What the manager refuses, by name, and that a refusal changes nothing; rows: `test_step_rows`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    tables,
)
from helpers.replay_model import RUNNERS
from helpers.toy_recurrences import HASH

from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.mamba2.recurrence import mamba2
from hybrid_runtime.state import (
    HybridStateManager,
    StateLayout,
    StepRows,
)
from hybrid_runtime.state.replay.flush import FlushInputs

REPLAY = StateLayout(HASH.recurrence, K, BLOCK, kind="replay")
layouts = pytest.mark.parametrize("kind", sorted(RUNNERS))

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


def test_unknown_kinds_and_in_place_runners_are_refused() -> None:
    kind: Any = "rows"
    with pytest.raises(ValueError, match="kind is 'rows'; it must be 'columns' or 'replay'"):
        StateLayout(HASH.recurrence, K, BLOCK, kind=kind)
    with pytest.raises(ValueError, match="in_place is True; it must be False in the replay"):
        HybridStateManager(REPLAY, SLOTS, K, "cpu", in_place=True)


@pytest.mark.parametrize("kind", ["columns", "replay"])
def test_more_drafts_than_the_kernels_take_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"num_speculative_tokens is 16; it must be in 0\.\.15"):
        StateLayout(HASH.recurrence, 16, 32, kind=kind)


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


def test_flush_inputs_must_fit_the_layout() -> None:
    made = HybridStateManager(REPLAY, SLOTS, K, "cpu")
    table = torch.zeros(SLOTS, COLUMNS, dtype=torch.int32)
    inputs: Any
    records, params = REPLAY.allocate_records(1, SLOTS, "cpu"), HASH.params(1)
    for inputs, message in (
        (
            FlushInputs((records[0][0],), params),
            r"flush_inputs.records.token is torch.int32 \[4, 19\]; "
            r"it must be torch.int32 \[1, 4, 19\]",
        ),
        (
            FlushInputs(records, HASH.params(2)),
            r"flush_inputs.params.multiplier is torch.float32 \[2, 1\]; "
            r"it must be torch.float32 \[1, 1\]",
        ),
        (FlushInputs(records, (params[0].int(),)), "flush_inputs.params.multiplier is torch.int32"),
        (records, "flush_inputs is a tuple; it must be FlushInputs"),
        (FlushInputs(records[0], params), r"flush_inputs.records is a Tensor; .* \(token\)"),
        (FlushInputs((), params), r"flush_inputs.records is 0 tensors; .* \(token\)"),
        (FlushInputs(records, (None,)), "flush_inputs.params.multiplier is a NoneType"),
        (FlushInputs(records, ()), r"flush_inputs.params is 0 tensors; .* \(multiplier\)"),
        (FlushInputs(records, params, table[0, :2]), r"flush_inputs.seed is torch.int32 \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            made.bind({0: REPLAY.allocate(9, "cpu")}, table, flush_inputs=inputs)
    made.bind({0: REPLAY.allocate(9, "cpu")}, table)
    with pytest.raises(ValueError, match="slot is 2, which holds no request"):
        made.last_checkpoint(2)


@pytest.mark.parametrize("part", ["x", "B", "dt"])
def test_each_record_must_fit_the_layout(part: str) -> None:
    """Of fewer slots, another ring or other numbers, it would be read wrongly when a request ends:
    it is refused when it is bound, and the manager can still be bound to the right one."""
    recurrence = mamba2(1, 1, 4, 1, 4, torch.bfloat16)
    layout = StateLayout(recurrence, K, BLOCK, kind="replay")
    made = HybridStateManager(layout, SLOTS, K, "cpu")
    table = torch.zeros(SLOTS, COLUMNS, dtype=torch.int32)
    records = Records(*layout.allocate_records(1, SLOTS, "cpu"))
    good = getattr(records, part)
    ring = 3
    for bad in (
        good[:, :-1],
        good.narrow(ring, 0, layout.ring_length - 1),
        good.int(),
        good.double(),
        good.to("meta"),
        torch.cat([good, good], ring).narrow(ring, 0, layout.ring_length),
    ):
        inputs = FlushInputs(records._replace(**{part: bad}), (torch.zeros(1, 1),))
        with pytest.raises(ValueError, match=rf"^flush_inputs\.records\.{part} "):
            made.bind({0: layout.allocate(9, "cpu")}, table, flush_inputs=inputs)
    with pytest.raises(ValueError, match=r"not bound"):
        made.begin_step(StepRows.exact([], [], [], []))
    inputs = FlushInputs(records, (torch.zeros(1, 1),))
    made.bind({0: layout.allocate(9, "cpu")}, table, flush_inputs=inputs)


# -- requests --------------------------------------------------------------------------------


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


@pytest.mark.parametrize("bad", [1.0, "1", None, 2**40, -1, SLOTS])
def test_slots_are_integers_in_range(bad: Any) -> None:
    made = started(0)
    calls: list[Callable[[Any], object]] = [
        made.admit,
        made.release,
        made.holds,
        made.last_checkpoint,
        lambda slot: made.retain(slot, 0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"slot is .*must be (an integer )?in 0\.\.3"):
            call(bad)


@pytest.mark.parametrize("bad", [8.0, "8", 2**30, 2**40])
def test_lengths_are_integers_in_range(bad: Any) -> None:
    made = started(0)
    for call, name in (
        (lambda: made.admit(1, bad, 0), "computed"),
        (lambda: made.admit(1, 8, bad), "hit_column"),
        (lambda: made.retain(0, bad), "every"),
        (lambda: made.retain(0, 8, (8, bad)), "positions"),
    ):
        with pytest.raises(ValueError, match=rf"{name} is .*; it must be"):
            call()
    with pytest.raises(ValueError, match="positions is 8"):
        made.retain(0, 8, 8)  # type: ignore[arg-type]
    assert not made.holds(1)
    assert made.admit(1) == 0


# -- steps and counts ---------------------------------------------------------------------------


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


def test_a_step_whose_results_were_read_is_not_abandoned() -> None:
    made = manager(0)
    step = run(made, exact([0], [5], [0]), 1)
    made.accepted(step)
    with pytest.raises(ValueError, match="step is 0, whose results have been read; it is over"):
        made.abandon(step)
    assert made.holds(0)


@pytest.mark.parametrize("call", ["end_step", "accepted", "published", "abandon", "resolve"])
def test_a_step_of_nobody_is_refused(call: str) -> None:
    made, other = started(0, 1), started(0, 1)
    strange = other.begin_step(rows())
    extra: dict[str, Any] = {"end_step": counts(1, 1), "resolve": np.ones(2, np.int32)}
    for bad in (strange, None, 3):
        with pytest.raises(ValueError, match=r"outstanding in this manager|readback is True"):
            getattr(made, call)(bad, *([extra[call]] if call in extra else []))
    assert made.holds(0)
    made.end_step(made.begin_step(rows()), counts(1, 1))


@pytest.mark.parametrize("call", ["end_step", "accepted", "published", "abandon"])
def test_a_settled_step_of_another_manager_is_refused(call: str) -> None:
    made, other = started(0, 1), started(0, 1)
    step = other.begin_step(rows())
    other.end_step(step, counts(2, 2))
    other.accepted(step)
    before = checkpoint(made)
    with pytest.raises(
        ValueError,
        match=r"^step is 1, which (another manager began|has ended)|"
        r"^step is 1, whose results have been read",
    ):
        getattr(made, call)(step, *[counts(2, 2)] * (call == "end_step"))
    assert checkpoint(made) == before
    assert other.published(step) == []


def test_counts_of_a_settled_step_are_not_taken_by_another_manager() -> None:
    made, other = started(0, 1, readback=False), started(0, 1)
    step = other.begin_step(rows())
    other.end_step(step, counts(2, 2))
    other.accepted(step)
    with pytest.raises(ValueError, match=r"^step is 1, which another manager began"):
        made.resolve(step, np.array([2, 2]))


@pytest.mark.parametrize("strategy", ["blocking", "defer"])
def test_host_strategies_refuse_to_end_out_of_turn_and_change_nothing(strategy: Any) -> None:
    made = manager(strategy=strategy, steps_in_flight=2)
    for slot in range(2):
        made.admit(slot)
        made.end_step(made.begin_step(StepRows.exact([slot], [0], [5], [0])), counts(1))
    older = made.begin_step(StepRows.exact([0], [5], [4], [3]))
    younger = made.begin_step(StepRows.exact([1], [5], [4], [3]))
    four = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"step is 3; step 2 must end first"):
        made.end_step(younger, four)
    assert not younger.ended
    made.end_step(older, counts(1))
    made.end_step(younger, four)
    assert [s.position for s in made.published(younger)] == [8]
    assert made.published(older) == []


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


@pytest.mark.parametrize("bad", [[4, 1], np.array([4, 1], np.int32), None])
def test_counts_are_a_tensor(bad: Any) -> None:
    made = started(0, 1)
    step = made.begin_step(rows())
    with pytest.raises(ValueError, match="num_accepted is a"):
        made.end_step(step, bad)
    made.end_step(step, counts(4, 1))


@pytest.mark.parametrize(
    "bad", [[1], [[1], [1]], [1.0, 1.0], [1, 5], [-1, 1], [1, 2**32 + 2], [1, -(2**32) + 4]]
)
def test_counts_that_a_runner_fetched_are_checked(bad: Any) -> None:
    made = started(0, 1, readback=False, steps_in_flight=2)
    made.resolve(made._in_flight._open[0], np.ones(2, np.int32))
    step = made.begin_step(rows())
    made.end_step(step, counts(1, 4))
    with pytest.raises(ValueError, match=r"accepted is|num_accepted\[\d\] is"):
        made.resolve(step, bad)
    made.resolve(step, np.array([1, 4], np.int64))
    assert [s.position for s in made.published(step)] == [8]


@layouts
def test_a_count_beyond_the_drafts_moves_no_further_than_they_reach(kind: str) -> None:
    """And is told when the host sees it."""
    made = manager(0, 1, kind=kind)
    run(made, exact([0, 0], [5, 5], [0, 0]), 1, 1)
    step = run(made, exact([5, 5], [4, 4], [3, 3]), 99, 1)
    following = made.begin_step(between([6, 6], [9, 9], [4, 4], [3, 3]))
    assert made.computed[:2].tolist() == [9, 6]
    assert following.read_offset[:2].max() <= K
    with pytest.raises(ValueError, match=r"num_accepted\[0\] is 99 in step 1; it must be in 0..4"):
        made.accepted(step)


@pytest.mark.parametrize("strategy", ["blocking", "defer", "always", "auto"])
@pytest.mark.parametrize("way_out", ["release", "abandon"])
def test_after_an_impossible_count_the_others_go_on(strategy: Any, way_out: str) -> None:
    made = started(0, 1, 2, strategy=strategy)
    three = StepRows.exact([0, 1, 2], [5] * 3, [4] * 3, [3] * 3)
    step, given = made.begin_step(three), counts(1, 7, 4)

    def end() -> None:
        if not step.ended:
            made.end_step(step, given)
        made.accepted(step)

    for _ in range(3):
        with pytest.raises(ValueError, match=r"num_accepted\[1\] is 7 in step 1"):
            end()
    if way_out == "release":
        made.release(1)
        end()
        assert [s.position for s in made.published(step)] == [8]
        made.end_step(
            made.begin_step(StepRows.exact([0, 2], [6, 9], [4] * 2, [3] * 2)), counts(1, 1)
        )
        assert made.computed.tolist()[::2][:2] == [6, 9]
    else:
        made.abandon(step)
        for slot in (0, 1, 2):
            assert not made.holds(slot)
            made.admit(slot)
        made.end_step(
            made.begin_step(StepRows.exact([0, 2], [0] * 2, [5] * 2, [0] * 2)), counts(1, 1)
        )


@layouts
def test_computed_is_read_only(kind: Any) -> None:
    """And neither is its memory copied, nor its reader kept from computing with it."""
    made = started(0, 1, kind=kind)
    computed, begin = made.computed, made._policy.slots.computed
    for write in (computed.zero_, lambda: computed[:1].fill_(3), lambda: computed.add_(1)):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            write()
    made.begin_step(rows())
    assert (computed[:2] + 1).tolist() == [6, 6]
    assert made.computed.data_ptr() == computed.data_ptr() == begin.data_ptr()
