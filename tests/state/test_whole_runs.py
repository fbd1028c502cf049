"""Steps that end late, out of turn or never, and requests that come and go around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.hash_request import Open, Row
from helpers.toy_recurrences import HASH

from hybrid_runtime.device.sync import Waits, wait
from hybrid_runtime.state import (
    HybridStateManager,
    StateLayout,
    StepRows,
    Strategy,
    allowed,
    sync_guard,
)

K, SLOTS, BLOCK = 3, 4, 8
STRATEGIES = get_args(Strategy)
LAYOUT = StateLayout(HASH.recurrence, K, BLOCK)


def manager(**options: Any) -> HybridStateManager:
    made = HybridStateManager(LAYOUT, SLOTS, K, "cpu", **options)
    table = torch.arange(SLOTS * 12, dtype=torch.int32).view(SLOTS, 12)
    made.bind({0: LAYOUT.allocate(SLOTS * 12, "cpu")}, table)
    return made


def ones(n: int = 1) -> torch.Tensor:
    return torch.ones(n, dtype=torch.int32)


def pools(runs: HashRunner) -> list[torch.Tensor]:
    """Copies of all state bytes, padding included."""
    storages = [pair[0].untyped_storage() for pair in runs.states.values()]
    empty = torch.empty(0, dtype=torch.uint8)
    return [torch.empty_like(empty).set_(s).clone() for s in storages]  # type: ignore[call-overload]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# Ends and failures out of turn


def test_ending_older_steps_leaves_the_youngest_ones_positions() -> None:
    """Positions are valid until the next `begin_step`, whatever ends before the forward pass."""
    made = manager(steps_in_flight=2)
    steps = []
    for slot in range(3):
        made.admit(slot)
        steps.append(made.begin_step(StepRows.exact([slot], [0], [5], [0])))
    made.end_step(steps[0], ones())
    made.end_step(steps[1], ones())
    assert steps[2].write_column.tolist() == [0, -1, -1, -1]


@pytest.mark.parametrize("readback", [True, False])
def test_abandoned_steps_do_not_push_older_results_out(readback: bool) -> None:
    """Buffers go round by step number: those of a result on its way must not come round again."""
    made = manager(steps_in_flight=1, readback=readback)
    made.admit(0)
    first = made.begin_step(StepRows.exact([0], [0], [8], [0]))
    made.end_step(first, ones())
    for _ in range(30):
        made.admit(1)
        made.abandon(made.begin_step(StepRows.exact([1], [0], [5], [0])))
        if not readback:
            made.resolve(first, np.array([1]))
    made.admit(2)
    made.end_step(made.begin_step(StepRows.exact([2], [0], [5], [0])), ones())
    assert made.accepted(first).tolist() == [1]
    assert [s.boundary for s in made.published(first)] == [8]


@pytest.mark.parametrize("strategy", ["blocking", "defer"])
def test_host_strategies_refuse_to_end_out_of_turn_and_change_nothing(strategy: Any) -> None:
    made = manager(strategy=strategy, steps_in_flight=2)
    for slot in range(2):
        made.admit(slot)
        made.end_step(made.begin_step(StepRows.exact([slot], [0], [5], [0])), ones())
    older = made.begin_step(StepRows.exact([0], [5], [4], [3]))
    younger = made.begin_step(StepRows.exact([1], [5], [4], [3]))
    four = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"step is 3; step 2 must end first"):
        made.end_step(younger, four)
    assert not younger.ended
    made.end_step(older, ones())
    made.end_step(younger, four)
    assert [s.boundary for s in made.published(younger)] == [8]
    assert made.published(older) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_without_rows_are_steps(strategy: Any) -> None:
    made = manager(strategy=strategy)
    for _ in range(4):
        step = made.begin_step(StepRows.exact([], [], [], []))
        assert step.write_column.tolist() == [-1] * SLOTS
        made.end_step(step, ones(0))
        assert made.published(step) == []


def test_guards_with_equal_counts_are_told_apart() -> None:
    with sync_guard() as outer:
        with sync_guard() as inner, allowed("nothing"):
            pass
        wait(None, Waits(), "counts")
    assert (outer.count, inner.count) == (1, 0)


@pytest.mark.parametrize("late", range(9))
@pytest.mark.parametrize("strategy", ["always", "auto"])
@pytest.mark.parametrize("in_place", [False, True])
def test_postprocessing_any_number_of_steps_late(strategy: Any, late: int, in_place: bool) -> None:
    """As on a stage of a pipeline: between a step's forward pass and its counts lie `late` steps of
    other slots. The states are those of a run that is never late."""
    found = []
    for delay in (0, late):
        runs = HashRunner(
            max_requests=9,
            depth=8,
            strategy=strategy,
            in_place=in_place,
            columns=12,
            own_all=True,
            layers=1,
        )
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
        found.append(pools(runs))
    assert same(*found)


# Requests that come and go


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
    before = pools(runs)
    runs.end(opened)
    assert same(before, pools(runs)) == (point in ("begun", "run"))
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
def test_a_step_of_padded_rows_changes_no_byte(strategy: Any) -> None:
    """A dummy run among live requests, whose rows hold adversarial leftovers (#49757, #41841)."""
    runs = HashRunner(strategy=strategy, in_place=True)
    for slot in range(SLOTS):
        runs.admit(slot, list(range(6 + slot)))
    runs.step([(slot, 6 + slot, [], 1) for slot in range(SLOTS)])
    runs.step([(slot, 1, [1, 2, 3], 2) for slot in range(SLOTS)])
    before = pools(runs)
    made = runs.manager
    leftovers = StepRows(
        np.full(4, -1, np.int32),
        *(
            np.array(v, np.int32)
            for v in ([5, 0, 99, 7], [9, 0, 99, 7], [4, 1, 8, 2], [3, 0, 1, 1])
        ),
    )
    step = made.begin_step(leftovers)
    assert step.skipped
    made.end_step(step, torch.tensor([4, 0, 9, 2], dtype=torch.int32))
    assert made.published(step) == []
    assert same(before, pools(runs))
    runs.step([(slot, 1, [1, 2, 3], 4) for slot in range(SLOTS)])


def test_row_order_changes_nothing() -> None:
    found = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]):
        runs = HashRunner(own_all=True, columns=12)
        for slot in range(SLOTS):
            runs.admit(slot, list(range(3 + slot)))
        runs.step([(slot, 3 + slot, [], 1) for slot in order])
        for i in range(12):
            runs.step([(s, 1, [s] * ((i + s) % 4), 1 + i % ((i + s) % 4 + 1)) for s in order])
        found.append(pools(runs))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_strategies_differ_in_launches_and_waits_only() -> None:
    stats = {}
    for strategy in STRATEGIES:
        runs = HashRunner(strategy=strategy)
        for slot in range(SLOTS):
            runs.admit(slot, list(range(3 + slot)))
        runs.step([(slot, 3 + slot, [], 1) for slot in range(SLOTS)])
        for i in range(20):
            runs.step([(s, 1, [1, 2, 3], 1 + (i + s) % 4) for s in range(SLOTS)])
        stats[strategy] = runs.manager.stats()
    for name in ("steps", "skipped", "candidate_rows", "rows_copied", "bytes_copied", "readbacks"):
        values = {s: getattr(stats[s], name) for s in STRATEGIES}
        assert len(set(values.values())) == 1, (name, values)
        assert values["auto"] > 0
    launches = [stats[s].copy_launches for s in ("auto", "always")]
    assert launches == [stats["auto"].steps - stats["auto"].skipped, stats["always"].steps]
    assert stats["defer"].copy_launches <= stats["auto"].copy_launches


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("garbage", [0.0, float("nan"), 77.0])
def test_what_a_block_held_before_does_not_matter(garbage: float, in_place: bool) -> None:
    """Blocks that are not zeroed when they are handed out: nothing unwritten is ever read."""

    class Careless(HashRunner):
        def _new(self, request: Any, group: int, column: int) -> None:
            super()._new(request, group, column)
            self.pool.fill(request.blocks[group][column], garbage)

    runs = Careless(in_place=in_place)
    runs.admit(0, list(range(30)))
    for certain in (8, 3, 5, 13, 1):
        runs.step([(0, certain, [], int(certain == 1))])
    for i in range(20):
        runs.step([(0, 1, [1, 2, 3], 1 + i % 4)])
    assert runs.manager.stats().rows_copied


@pytest.mark.parametrize("k", [0, 1, 2, 8])
@pytest.mark.parametrize("conv_layout", ["SD", "DS"])
@pytest.mark.parametrize("in_place", [False, True])
def test_any_number_of_drafts(k: int, conv_layout: str, in_place: bool) -> None:
    runs = HashRunner(
        num_draft=k,
        block_size=k + 1 + k % 2,
        conv_layout=conv_layout,
        in_place=in_place,
        columns=90,
    )
    runs.admit(0, [1, 2, 3])
    runs.step([(0, 3, [], 1)])
    for i in range(40):
        d = k if i % 3 else i % (k + 1)
        runs.step([(0, 1, [i] * d, 1 + i % (d + 1))])


def test_a_prefix_deep_in_the_table_is_resumed_in_every_group() -> None:
    """The column of a hit follows from the state's block size, in each group's own table."""
    runs = HashRunner(groups=3, layers=3, columns=40, max_requests=3)
    runs.admit(0, list(range(200)))
    for _ in range(25):
        runs.step([(0, 8, [], 0)])
        for checkpoint in runs.recent:
            runs.keep(checkpoint)
        runs.recent.clear()
    for slot, kept in ((1, runs.kept[23]), (2, runs.kept[0])):
        runs.admit(slot, [*kept.tokens, 1, 2, 3], kept)
    runs.step([(2, 3, [], 1), (1, 3, [], 1)])
    for _ in range(12):
        runs.step([(1, 1, [1, 2, 3], 3), (2, 1, [1, 2, 3], 2)])


def run(act: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


def test_the_last_column_is_used_and_none_beyond() -> None:
    """The narrowest group's table counts, and drafts need their columns too."""
    made = HybridStateManager(LAYOUT, 1, K, "cpu")
    tables = [torch.zeros(1, width, dtype=torch.int32) for width in (9, 6)]
    states = {i: LAYOUT.allocate(4, "cpu") for i in range(2)}
    made.bind(states, tables, {0: 0, 1: 1})
    made.admit(0)
    last = 6 - K  # columns that may run
    run(
        lambda: made.begin_step(StepRows.exact([0], [0], [last * BLOCK + 1], [0])),
        r"computed_max \+ rows.scheduled\[0\] is 25",
    )
    step = made.begin_step(StepRows.exact([0], [0], [last * BLOCK], [0]))
    assert step.write_column.tolist() == [last - 1]
    run(lambda: made.bind(states, tables), "bound already")


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
