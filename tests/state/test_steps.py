"""What a careless runner does is refused by name, or changes nothing: each case was once silent."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.hash_request import TOKENS
from helpers.plain_manager import LAYOUT, SLOTS, checkpoint, counts, rows, started
from helpers.replay_model import RUNNERS

from hybrid_runtime.state import HybridStateManager, StepRows
from hybrid_runtime.state.step import Checkpoint

K, BLOCK = 3, 8
layouts = pytest.mark.parametrize("kind", sorted(RUNNERS))


def runner(kind: str, **options: Any) -> HashRunner:
    """Slots 0 and 1 have read their prompts, of 5 tokens each."""
    runs = RUNNERS[kind](num_draft=K, max_requests=4, block_size=BLOCK, columns=16, **options)
    for slot in (0, 1):
        runs.admit(slot, list(range(5)))
    runs.step([(0, 5, [], 1), (1, 5, [], 1)])
    return runs


def decode(rng: random.Random, slot: int) -> tuple[int, int, list[int], int]:
    return slot, 1, [rng.randrange(TOKENS) for _ in range(K)], rng.randrange(1, K + 2)


# -- refused steps --------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("mixed", [False, True])
def test_refusals_leave_steps_in_flight_as_they_are(kind: str, depth: int, mixed: bool) -> None:
    runs, rng, live = runner(kind, depth=depth, debug=False), random.Random(1), {0, 1, 2}
    runs.admit(2, list(range(93)))
    for number in range(12):
        plan = [decode(rng, 0), decode(rng, 1)]
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


@layouts
def test_a_step_without_rows_is_a_step(kind: str) -> None:
    runs, rng = runner(kind, depth=1), random.Random(2)
    nothing = StepRows.exact([], [], [], [])
    for _ in range(4):
        runs.step([decode(rng, 0), decode(rng, 1)])
        runs.read_oldest()
        step = runs.manager.begin_step(nothing)
        runs.manager.end_step(step, counts())
        assert runs.manager.published(step) == []


# -- rows -----------------------------------------------------------------------------------------


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
        found = {s.boundary for s in made.published(step)}
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


@layouts
@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("name", ["computed", "scheduled"])
def test_positions_beyond_int32_are_refused(kind: str, steady: bool, name: str) -> None:
    runs, rng = runner(kind), random.Random(5)
    for _ in range(3 * steady):
        runs.step([decode(rng, 0), decode(rng, 1)])
    for far in (2**30, 2**31 - 1):
        low, high = [20, 20], [20, far if name == "computed" else 20]
        scheduled = [4, far if name == "scheduled" else 4]
        with pytest.raises(ValueError, match=rf"rows\.(computed_max|{name})"):
            runs.manager.begin_step(
                StepRows(*map(np.int32, ([0, 1], low, high, scheduled, [3, 3])))
            )
        with pytest.raises(ValueError, match=rf"rows\.(computed_max|{name})"):
            runs.manager.begin_step(StepRows.exact([0, 1], high, scheduled, [3, 3]))
    runs.step([decode(rng, 0), decode(rng, 1)])


# -- requests and checkpoints ----------------------------------------------------------------------


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


def test_a_replayed_request_must_not_start_where_a_later_checkpoint_goes() -> None:
    made = runner("replay").manager
    live = 15
    for computed, column in ((6, 0), (8, 1), (13, 1), (13, 4)):
        with pytest.raises(ValueError, match=rf"hit_column is {column} with computed={computed}"):
            made.admit(2, computed, column)
    assert not made.holds(2)
    for computed, column in ((6, live), (8, 0), (13, 0), (13, live), (24, 1), (24, 2)):
        made.admit(2, computed, column)
        made.release(2)


def with_last_checkpoint() -> tuple[HashRunner, Checkpoint]:
    """A replayed request whose last step accepted the drafts around a boundary."""
    runs = runner("replay")
    runs.step([(0, 1, [1, 2, 3], 4)])
    checkpoint = runs.manager.last_checkpoint(0)
    assert checkpoint == (0, 0, 8, 15)
    return runs, checkpoint


def test_a_stale_checkpoint_is_refused() -> None:
    runs, checkpoint = with_last_checkpoint()
    made = runs.manager
    runs.release(0)
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is .*left the slot"):
        made.flush([checkpoint])
    runs.admit(0, list(range(5)))
    runs.step([(0, 5, [], 1)])
    runs.step([(0, 1, [1, 2, 3], 4)])
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is .*left the slot"):
        made.flush([checkpoint])
    assert made.stats().flush_launches == 1  # before the release
    runs.step([decode(random.Random(4), 0)])  # checks the state


def test_a_checkpoint_is_flushed_at_once_and_once() -> None:
    runs, checkpoint = with_last_checkpoint()
    made = runs.manager
    bad: Any
    for bad in (
        [checkpoint, checkpoint],
        [checkpoint._replace(boundary=9)],  # the live block would hold one token too many
        [checkpoint._replace(boundary=16)],
        [checkpoint._replace(column=0)],  # it would not be stored at all
        [checkpoint._replace(slot=9)],
        [tuple(checkpoint)],
        checkpoint,
        None,
    ):
        with pytest.raises(ValueError, match=r"checkpoints\[\d\] is|slot is 9|checkpoints is None"):
            made.flush(bad)
    opened = runs.begin([decode(random.Random(4), 0)])
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is .*must be what last_checkpoint"):
        made.flush([checkpoint])
    runs.forward(opened)
    runs.end(opened)
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is .*must be what last_checkpoint"):
        made.flush([checkpoint])
    runs.read_oldest()
    assert made.stats().flush_launches == 0


def test_no_step_follows_a_flush() -> None:
    runs, checkpoint = with_last_checkpoint()
    made = runs.manager
    made.flush([checkpoint])
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is .*must be what last_checkpoint"):
        made.flush([checkpoint])
    with pytest.raises(ValueError, match=r"rows.slot\[0\] is 0; .* not flushed; release it"):
        made.begin_step(StepRows.exact([0], [9], [4], [3]))
    runs.manager.release(0)
    made.admit(0)
    runs.step([decode(random.Random(4), 1)])


@pytest.mark.parametrize("stored", [False, True])
def test_a_queued_step_keeps_the_rule_that_it_began_with(stored: bool) -> None:
    runs = runner("replay", depth=1)
    runs.step([(0, 1, [1, 2, 3], 4)])
    runs.read_oldest()
    runs.retain(0, BLOCK if stored else 0)
    opened = runs.begin([(0, 1, [1, 2, 3], 1)])  # folds the drafts and stores their boundary
    runs.forward(opened)
    runs.end(opened)
    runs.manager.retain(0, 0 if stored else BLOCK)
    assert runs.manager.last_checkpoint(0) == ((0, 0, 8, 0) if stored else None)


def test_a_checkpoint_of_a_layout_that_flushes_none_is_refused() -> None:
    made = started(0)
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is .*must be what last_checkpoint"):
        made.flush([Checkpoint(0, 0, 8, 0)])


# -- steps and counts -----------------------------------------------------------------------------


def test_counts_of_rows_without_requests_are_those_of_the_sampler() -> None:
    made = started(0, 1)
    step = made.begin_step(rows())
    made.end_step(step, counts(77, 2))
    made.release(0)
    assert made.accepted(step).tolist() == [77, 2]
    given_up = made.begin_step(StepRows.exact([1], [7], [1], [0]))
    made.abandon(given_up)
    assert made.accepted(given_up).tolist() == [0]


@layouts
def test_computed_is_read_only(kind: Any) -> None:
    """And neither is its memory copied, nor its reader kept from computing with it."""
    made = started(0, 1, layout=replace(LAYOUT, kind=kind))
    computed, begin = made.computed, made._policy.slots.computed
    for write in (computed.zero_, lambda: computed[:1].fill_(3), lambda: computed.add_(1)):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            write()
    made.begin_step(rows())
    assert (computed[:2] + 1).tolist() == [6, 6]
    assert made.computed.data_ptr() == computed.data_ptr() == begin.data_ptr()


@pytest.mark.parametrize("bad", [[4, 1], np.array([4, 1], np.int32), None])
def test_counts_are_a_tensor(bad: Any) -> None:
    made = started(0, 1)
    step = made.begin_step(rows())
    with pytest.raises(ValueError, match="num_accepted is a"):
        made.end_step(step, bad)
    made.end_step(step, counts(4, 1))


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
    assert [s.boundary for s in made.published(step)] == [8]


@layouts
def test_what_is_prepared_changes_nothing_and_holds_until_another_call(kind: Any) -> None:
    made = started(0, 1, prompt=8, layout=replace(LAYOUT, kind=kind), readback=False)
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
        assert [s.boundary for s in made.published(step)] == [8]
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
@pytest.mark.parametrize("bad", [0, -1, 5])
def test_debug_names_a_count_that_ends_a_request(kind: str, bad: int) -> None:
    made = runner(kind, own_all=True).manager
    assert made.debug
    step = made.begin_step(StepRows.exact([1, 0], [5, 5], [4, 4], [3, 3]))
    at = rf"num_accepted\[1\] is {bad} \(slot 0, generation 0, step 1\); it must be in 1\.\.4"
    with pytest.raises(ValueError, match=at):
        made.end_step(step, counts(1, bad))
    assert made.holds(0)
    made.end_step(step, counts(1, 4))
    assert made.accepted(step).tolist() == [1, 4]


def test_debug_lets_rows_without_requests_be() -> None:
    made: HybridStateManager = started(0, 1, debug=True)
    step = made.begin_step(rows(slot=[0, -1]))
    made.end_step(step, counts(1, 77))
    step = made.begin_step(rows(computed_min=[6, 5], computed_max=[6, 5]))
    made.release(0)
    made.end_step(step, counts(0, 4))
    assert made.published(step) == [(1, 0, 8, 0)]
