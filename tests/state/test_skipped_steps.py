"""Steps that launch, copy or write nothing: when, and that no state suffers."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.plain_manager import (
    BLOCK,
    SLOTS,
    between,
    counts,
    exact,
    manager,
    rows,
    run,
    started,
)

from hybrid_runtime.state import (
    HybridStateManager,
    Step,
    StepRows,
    Strategy,
)

STRATEGIES = get_args(Strategy)


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
    assert [(s.slot, s.position) for s in made.published(step)] == [(1, 16)]


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


def test_a_fresh_request_moves_nothing_before_its_first_step() -> None:
    made = manager(0, 1, in_place=True)
    run(made, exact([0, 0], [5, 20], [0, 0]), 1, 1)
    assert made.stats().copy_launches == 0


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


def test_without_drafts_now_and_before_no_checkpoint_costs_a_write() -> None:
    """However little the host knows: the state itself is the checkpoint."""
    made = manager(0, kind="replay", steps_in_flight=3)
    run(made, exact([0], [4], [0]), 1)
    run(made, exact([4], [4], [3]), 4)
    assert not run(made, between([5], [8], [1], [0]), 1).skipped
    assert run(made, between([6], [9], [1], [0]), 1).skipped


def test_what_padded_rows_name_is_wanted_by_nobody() -> None:
    made = started(0, kind="replay")
    saves = {"save_at": [[6, 0], [0, 0]], "save_to": [[0, -1], [-1, -1]]}
    assert made.begin_step(replace(rows(slot=[-1, 0]), **saves)).skipped


@pytest.mark.parametrize("draft", [3, 2], ids=["repeated", "packed"])
def test_results_that_came_in_rule_out_boundaries_stored_before(draft: int) -> None:
    """The last step began when 4 .. 7 tokens were known. Now it is 11: the state has at least 8 of
    them, so that boundary has been stored."""
    made = manager(0, kind="replay")
    for given, accepted in (
        (exact([0], [3], [0]), 1),
        (exact([3], [4], [3]), 4),
        (between([4], [7], [4], [3]), 4),
        (exact([11], [draft + 1], [draft]), 1),
    ):
        uploads = made.stats().uploads
        step = run(made, replace(given, save_at=[[8, 0]], save_to=[[0, -1]]), accepted)
    assert step.skipped
    assert (made.stats().uploads == uploads) == (draft == 3)
