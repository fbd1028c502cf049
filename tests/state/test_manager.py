"""The manager's interface: what it drops, what it does, what it counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.plain_manager import (
    BLOCK,
    SLOTS,
    K,
    checkpoint,
    counts,
    manager,
    rows,
    started,
)

from hybrid_runtime.state import HybridStateManager, Step, StepRows

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
    assert made._ledger.computed[:2].tolist() == [0, 9]
    made.accepted(following)
    assert made._ledger.computed[:2].tolist() == [3, 11]
    assert made.computed[:2].tolist() == [0, 9]


def test_counts_follow_rows_not_slots() -> None:
    made = started(0, 1, 2)
    step = made.begin_step(rows(slot=[2, 0]))
    made.end_step(step, counts(1, 3, 99, 99))
    made.accepted(step)
    assert made._ledger.computed[:3].tolist() == [8, 5, 6]


def test_a_step_that_has_not_ended_has_no_counts() -> None:
    made = started(0, 1)
    step = made.begin_step(rows())
    with pytest.raises(ValueError, match="has not ended"):
        made.accepted(step)
    with pytest.raises(ValueError, match="a slot whose last step has ended"):
        made.begin_step(rows())


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
    made, waiting = runs.manager, list[Any]()
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
        made.admit(slot)
    read = made.begin_step(StepRows.exact([0, 1], [0, 0], [5, 5], [0, 0]))
    made.end_step(read, counts(1, 1))
    placed, wanted = made.begin_step(rows()), fresh.begin_step(rows())
    for field in ("read_column", "read_offset", "write_column"):
        assert torch.equal(getattr(placed, field)[:2], getattr(wanted, field)[:2])
    made.end_step(placed, counts(2, 1))
    assert made.accepted(placed).tolist() == [2, 1]
    assert made._ledger.computed[:2].tolist() == [7, 6]


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
        runs.pool.fill(block, float("nan"))
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


# what is not this manager's


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
