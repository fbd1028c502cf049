"""How many drafts steps get, on a device whose costs and a drafter whose luck are made up."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.specdecode.draft_length import (
    EXPLORE,
    HYSTERESIS,
    DraftLength,
    Drafts,
    StepCost,
    StepDrafts,
)

SIZES = (1, 8, 64, 256)
QWEN, KIMI = (0.93, 0.80, 0.66, 0.58, 0.44, 0.39, 0.24), (0.84, 0.61, 0.42, 0.35, 0.22, 0.10, 0.24)
WEIGHTS, TOKEN, STATE, PASS = 4e-3, 20e-6, 25e-6, 0.25e-3


Real = Callable[[int, int, int], float]
"""Seconds of a step by rows, drafts verified and drafts proposed."""


def padded(rows: int, drafts: int) -> StepCost:
    """Of a step over padding: weights or arithmetic, whichever is more, and passes of a draft head;
    nothing goes through states."""
    return StepCost(max(WEIGHTS, rows * (drafts + 1) * TOKEN), drafts * PASS)


def real(rows: int, verified: int, proposed: int) -> float:
    """Rows add as much whatever their drafts are."""
    return padded(rows, verified).verify + padded(rows, proposed).propose + rows * STATE


def by_token(rows: int, verified: int, proposed: int) -> float:
    """Most of what a draft costs is what real rows add."""
    return 9e-3 + rows * 30e-6 * (verified + 1) + proposed * PASS


def measured(drafts: DraftLength) -> DraftLength:
    """Where all rows have as many."""
    drafts.measured(
        {(size, Drafts.alike(k)): padded(size, k) for size in SIZES for k in drafts.levels}
    )
    return drafts


def run(
    drafts: DraftLength,
    rows: int,
    steps: int,
    survival: Sequence[float],
    seed: int = 0,
    costs: Real = real,
) -> list[StepDrafts]:
    """Steps of so many rows, whose drafts survive as `survival` says; their plans."""
    luck, plans, slots = np.random.default_rng(seed), [], np.arange(rows)
    for _ in range(steps):
        plan = drafts.plan(slots, prompts=False)
        assert plan.propose in drafts.after(plan.verify)
        drafts.queued(plan)
        number = plan.verify.most
        u = luck.random(rows)[:, None]
        accepted = (u < np.array(survival[:number])).sum(1).astype(np.int32)
        drafts.acceptance.learn(slots, np.full(rows, number), accepted)
        drafts.took(rows, plan.verify, plan.propose, costs(rows, number, plan.propose))
        plans.append(plan)
    return plans


@pytest.mark.parametrize("costs", [real, by_token])
@pytest.mark.parametrize("survival", [QWEN, tuple(sorted(KIMI, reverse=True))])
@pytest.mark.parametrize("rows", SIZES)
def test_the_choice_is_as_good_as_the_best_number_of_drafts(
    rows: int, survival: Sequence[float], costs: Real
) -> None:
    drafts = measured(DraftLength(7, adaptive=True, slots=256))
    plans = run(drafts, rows, 4000 // rows + 300, survival, costs=costs)
    speeds = {k: rows * (1 + sum(survival[:k])) / costs(rows, k, k) for k in drafts.levels}
    settled = plans[len(plans) // 2 :]
    tokens = sum(1 + sum(survival[: plan.verify.mean]) for plan in settled) * rows
    speed = tokens / sum(costs(rows, plan.verify.mean, plan.propose) for plan in settled)
    assert speed >= max(speeds.values()) / HYSTERESIS * 0.99
    assert drafts.chosen in {
        Drafts.alike(k) for k, s in speeds.items() if s > max(speeds.values()) / 1.05
    }


def test_a_load_that_rises_and_falls_changes_the_number() -> None:
    drafts = measured(DraftLength(7, adaptive=True, slots=256))
    chosen = []
    for rows in (1, 256, 1):
        run(drafts, rows, 300, QWEN)
        chosen.append(drafts.chosen.mean)
    assert chosen == [7, 3, 7]


def test_drafts_that_are_never_right_are_given_up_and_tried_again() -> None:
    drafts = DraftLength(7, adaptive=True, slots=256)
    drafts.measured({(8, Drafts.alike(k)): StepCost(1, 0.2 * k) for k in drafts.levels})
    run(drafts, 8, 400, (0.0,) * 7)
    assert drafts.chosen == Drafts.alike(0)
    plans = run(drafts, 8, 3 * EXPLORE, (0.0,) * 7)
    assert sum(plan.verify.most > 0 for plan in plans) == 3
    run(drafts, 8, 40 * EXPLORE, (1.0,) * 7)
    assert drafts.chosen == Drafts.alike(7)


@given(
    st.integers(0, 15),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 300), st.booleans(), st.floats(1e-9, 1)), max_size=60),
)
def test_steps_verify_what_was_proposed(
    most: int, adaptive: bool, steps: list[tuple[int, bool, float]]
) -> None:
    drafts, proposed = DraftLength(most, adaptive, slots=300), 0
    proposed = drafts.beside_prompts
    every = [*map(Drafts.alike, drafts.levels), *drafts.uneven()]
    for number, (rows, prompts, cost) in enumerate(steps):
        slots = np.arange(rows)
        if number > 5:  # anything may become the best
            drafts.measured({(size, one): StepCost(1.0, 0) for size in SIZES for one in every})
            cheap = every[number % len(every)]
            drafts.measured({(size, cheap): StepCost(cost, 0) for size in SIZES})
        plan = drafts.plan(slots, prompts)
        assert drafts.plan(slots, prompts) == plan
        assert plan.verify in every
        assert 0 <= plan.made <= plan.verify.most <= most
        assert plan.propose in drafts.levels
        assert plan.made <= proposed
        if prompts:
            assert plan.verify == Drafts.alike(drafts.beside_prompts)
            assert plan.propose == drafts.beside_prompts
        else:
            assert plan.made == plan.verify.most
            assert plan.propose in drafts.after(plan.verify)
        if not adaptive:
            assert plan.verify == Drafts.alike(most)
            assert plan.propose == most
        drafts.queued(plan)
        proposed = plan.propose
        drafts.acceptance.learn(slots, np.full(rows, plan.made), np.zeros(rows, np.int32))
    assert len(drafts.stats().survival) == most


def test_until_costs_are_measured_the_number_is_the_first_one() -> None:
    for first, chosen in ((None, 7), (3, 3), (4, 3)):
        drafts = DraftLength(7, True, first, slots=256)
        run(drafts, 64, 10, (0.0,) * 7)
        assert drafts.chosen == Drafts.alike(chosen)
        assert not drafts.stats().tokens_per_second


def test_nearly_equal_numbers_do_not_take_turns() -> None:
    drafts = DraftLength(3, adaptive=True, first=1)
    survival = drafts.acceptance.survival()
    even = {k: 1 + survival[:k].sum() for k in drafts.levels}  # equal tokens per second
    for step in range(20):
        lucky = step % 2
        cheap = {k: even[k] * (0.98 if k == 3 * lucky else 1) for k in drafts.levels}
        drafts.measured({(1, Drafts.alike(k)): StepCost(cost, 0) for k, cost in cheap.items()})
        drafts.plan(np.arange(1), prompts=False)
        assert drafts.chosen == Drafts.alike(1)
    drafts.measured({(1, Drafts.alike(3)): StepCost(even[3] * 0.9, 0)})
    drafts.plan(np.arange(1), prompts=False)
    assert drafts.chosen == Drafts.alike(3)


def test_what_a_number_costs_is_learnt_from_steps_that_try_it() -> None:
    """The next larger one and the next smaller one, each once in `EXPLORE` steps."""
    drafts = measured(DraftLength(7, adaptive=True, first=3, slots=256))
    plans = run(drafts, 64, 20 * EXPLORE, QWEN, costs=lambda rows, k, _: 1.0 if k == 3 else 9.0)
    assert drafts.chosen == Drafts.alike(3)
    tried = [plan.verify for plan in plans[10 * EXPLORE :]]
    assert tried.count(Drafts.alike(1)) == tried.count(Drafts.alike(5)) == 10
    run(drafts, 64, 20 * EXPLORE, QWEN, costs=lambda rows, k, _: max(1.0, 3.0 * k - 2))
    assert drafts.chosen == Drafts.alike(1)


def test_a_step_that_was_held_up_changes_nothing() -> None:
    drafts = measured(DraftLength(7, adaptive=True, slots=256))
    run(drafts, 64, 300, QWEN)
    before = drafts.tokens_per_second(np.arange(64))
    drafts.took(64, drafts.chosen, drafts.chosen.most, 5.0)
    assert drafts.tokens_per_second(np.arange(64)) == pytest.approx(before)


def test_drafts_for_the_next_step_are_not_what_a_number_costs() -> None:
    """A step that verifies one and proposes seven tells what one costs."""
    drafts = measured(DraftLength(7, adaptive=True, slots=256))
    before = drafts.tokens_per_second(np.arange(8))
    seven = padded(8, 7).propose
    drafts.took(8, Drafts.alike(1), 7, padded(8, 1).verify + seven)
    assert drafts.tokens_per_second(np.arange(8)) == pytest.approx(before)


def test_a_number_that_was_not_tried_adds_as_much_a_token_as_the_nearest_that_was() -> None:
    """At this size; what other sizes have taken says nothing of it."""
    drafts = measured(DraftLength(7, adaptive=True, slots=256))
    cost = padded(64, 3)
    drafts.took(64, Drafts.alike(3), 3, cost.verify + cost.propose + 8e-3)  # four tokens a row
    drafts.took(8, Drafts.alike(1), 1, 1.0)
    tokens = {k: 64 * (1 + drafts.acceptance.survival()[:k].sum()) for k in drafts.levels}
    assert drafts.tokens_per_second(np.arange(64)) == pytest.approx(
        {Drafts.alike(k): tokens[k] / (sum(padded(64, k)) + 2e-3 * (k + 1)) for k in drafts.levels}
    )


def uneven(rows: int) -> tuple[DraftLength, dict[Drafts, StepCost]]:
    """Costs in which a draft costs a third of what a row costs without."""
    drafts = DraftLength(7, adaptive=True, first=3, slots=rows)
    every = [*map(Drafts.alike, drafts.levels), *drafts.uneven()]
    costs = {one: StepCost(5e-3 + rows * 30e-6 * (3 + one.mean), one.most * PASS) for one in every}
    drafts.measured({(rows, one): cost for one, cost in costs.items()})
    return drafts, costs


@pytest.mark.parametrize(
    ("curves", "gain"),
    [((QWEN, tuple(0.5**j for j in range(1, 8))), 1.05), ((QWEN,), 0.98)],
    ids=["mixed", "equal"],
)
@pytest.mark.parametrize("rows", [64, 128])
def test_drafts_go_where_they_are_accepted(
    rows: int, curves: Sequence[Sequence[float]], gain: float
) -> None:
    """Beside the best number for all rows: more where rows differ, not less where they do not."""
    drafts, costs = uneven(rows)
    luck, slots = np.random.default_rng(0), np.arange(rows)
    survival = np.array([curves[row % len(curves)] for row in range(rows)])
    tokens = seconds = 0.0
    for step in range(600):
        plan = drafts.plan(slots, prompts=False)
        drafts.queued(plan)
        number = np.full(rows, plan.verify.mean, np.int32)
        if plan.verify.most > plan.verify.mean:
            number = drafts.numbers(slots, plan.verify, 7 * rows)
        made = np.arange(7) < number[:, None]
        drafts.acceptance.learn(
            slots, number, ((luck.random(rows)[:, None] < survival) & made).sum(1)
        )
        took = costs[plan.verify].verify + plan.propose * PASS
        drafts.took(rows, plan.verify, plan.propose, took)
        if step >= 100:
            tokens, seconds = tokens + rows + (survival * made).sum(), seconds + took
    alike = {k: sum(costs[Drafts.alike(k)]) for k in drafts.levels}
    best = max((rows + survival[:, :k].sum()) / cost for k, cost in alike.items())
    assert tokens / seconds > gain * best


@given(st.data())
def test_all_drafts_that_there_is_room_for_are_given_out(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 64))
    drafts, _ = uneven(64)
    slots = np.arange(64)
    for _ in range(data.draw(st.integers(0, 5))):
        tried = np.array(data.draw(st.lists(st.integers(0, 7), min_size=64, max_size=64)))
        accepted = np.array(data.draw(st.lists(st.integers(0, 7), min_size=64, max_size=64)))
        drafts.acceptance.learn(slots, tried, accepted)
    size = data.draw(st.sampled_from(drafts.uneven()))
    chosen = np.array(data.draw(st.permutations(range(64))))[:rows]
    limit = data.draw(st.integers(0, 450))
    number = drafts.numbers(chosen, size, limit)
    assert number.shape == (rows,)
    assert ((number >= 0) & (number <= size.most)).all()
    assert number.sum() == min(64 * size.mean, rows * size.most, limit)
    # No draft that was left out survives more often than one that was taken.
    survival = drafts.acceptance.survival(drafts.acceptance.risk(chosen))[:, : size.most]
    taken = np.arange(size.most) < number[:, None]
    assert survival[taken].min(initial=1) >= survival[~taken].max(initial=0)
