"""Illegal calls between legal ones: each is refused by name or harmless, and nobody notices.

The state machine of `helpers.interleavings` drives two runners through the same legal history. One
of them is careless: between its legal calls it makes illegal ones. Both must go on to hold the
same bytes, and each state that a step reads is checked against the tokens it must stand for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.interleavings import BLOCK, COLUMNS, SLOTS, Interleavings
from helpers.replay_model import RUNNERS
from hypothesis import settings
from hypothesis.stateful import initialize, rule

from hybrid_runtime.state import StepRows, Strategy
from hybrid_runtime.state.step import Checkpoint, Step

FAR = 2**31 - 1
LONG = 10**6
"""Tokens that no request gets to, and that it might."""


@contextmanager
def refused(*names: str) -> Iterator[None]:
    """A `ValueError` that begins with one of `names`, or says that it is no time for a step."""
    with pytest.raises(ValueError, match="|".join(rf"^{name}" for name in names)):
        yield


class World:
    """What a careless runner has at hand: the manager, the truth, and steps of the other one."""

    def __init__(
        self,
        runner: HashRunner,
        clean: HashRunner,
        seed: int,
        over: list[Step],
        others: list[Step],
    ) -> None:
        self.runner, self.clean, self.over, self.others = runner, clean, over, others
        self.made, self.rng = runner.manager, random.Random(seed)
        self.live = sorted(s for s in range(SLOTS) if self.made.holds(s))
        self.free = [s for s in range(SLOTS) if s not in self.live]
        self.steps = [o.step for o in runner.outstanding if not o.abandoned]
        self.open = [step for step in self.steps if not step.ended]

    def begin(self, **fields: Any) -> None:
        """A step that must be refused; so may any step while too many are outstanding."""
        with refused(r"rows\.", "rows has", r"\d+ steps are outstanding"):
            self.made.begin_step(StepRows(**({"slot": [-1]} | fields)))


def fields(slot: list[int], n: int = 5, s: int = 1, d: int = 0) -> dict[str, Any]:
    given = {"slot": slot, "computed_min": n, "computed_max": n, "scheduled": s, "draft": d}
    return {k: np.int32(v) if k == "slot" else np.full(len(slot), v) for k, v in given.items()}


def rows_of_no_shape(w: World) -> None:
    good = fields([0, 1])
    name = w.rng.choice(sorted(good))
    bad: list[Any] = [
        [5],
        [5, 5, 5],
        [[5, 5]],
        [[5], [5]],
        5,
        None,
        [0.5, 1],
        ["a", "b"],
        [5, 2**40],
    ]
    with refused(r"rows\."):
        w.made.begin_step(StepRows(**(good | {name: w.rng.choice(bad)})))


def rows_of_no_type(w: World) -> None:
    with refused("rows is a"):
        w.made.begin_step(w.rng.choice([None, [0], fields([0]), w.steps]))


def rows_out_of_range(w: World) -> None:
    slot = w.rng.choice([*w.live, 0])
    k = w.made.num_speculative_tokens
    n = int(w.runner.requests[slot].computed) if slot in w.runner.requests else 0
    cases: list[dict[str, Any]] = [
        fields([slot, slot]),
        fields([SLOTS]),
        fields([-2]),
        fields([FAR]),
        fields([slot], n, k + 2, k + 1),
        fields([slot], n, 1, 1),
        fields([slot], n, 0, 0),
        fields([slot], n, 1, -1),
        fields([slot], n, -3, -4),
        fields([slot], -1),
        fields([slot], FAR),
        fields([slot], 2**30),
        fields([slot], n, FAR),
        # In the replay layout the live column serves any position.
        *([] if w.made.layout.replays else [fields([slot], COLUMNS * BLOCK + 1)]),
        fields([slot]) | {"computed_max": [4]},
        *(
            fields([slot], n) | {"save_at": [at], "save_to": [to]}
            for at, to in (
                ([8], [0]),
                ([8, 9, 10], [0, 1, 2]),
                ([8, -1], [0, 1]),
                ([8, 16], [0, 0]),
                ([8, 8 + k], [0, 1]),
                ([8, 0], [-1, 0]),
                ([8, 0], [COLUMNS - 1, 0]),
            )
        ),
        fields([-1] * (SLOTS + 1)),
    ]
    w.begin(**w.rng.choice(cases))


def rows_without_request(w: World) -> None:
    if w.free:
        slots = [*w.live[:1], w.rng.choice(w.free)]
        for _ in range(w.rng.choice([1, 30])):  # more than there are buffers
            w.begin(**fields(slots))


def rows_of_an_open_step(w: World) -> None:
    busy = {int(s) for step in w.open for s in step.rows.slot} & set(w.live)
    same = [s for s in busy if w.made._ledger.known[s, w.made._ledger.OPEN_STEP] >= 0]
    if same:
        w.begin(**fields([w.rng.choice(same)]))


def rows_changed_in_flight(w: World) -> None:
    if w.steps:
        rows = w.rng.choice(w.steps).rows
        with pytest.raises(ValueError, match="read-only"):
            rows.computed_max[:] = 9


def counts_of_no_kind(w: World) -> None:
    if w.open:
        step = w.rng.choice(w.open)
        n = len(step.rows)
        ones = torch.ones(2 * n + 2, dtype=torch.int32, device=w.made.device)
        bad: list[Any] = [
            ones.float(), ones.long(), ones[: n - 1], ones[:n, None], ones[::2], ones.to("meta"),
            [1] * n, np.ones(n, np.int32), None, 1,
        ]  # fmt: skip
        if w.made.device.type != "cpu":
            bad.append(torch.ones(n, dtype=torch.int32, device="cpu"))
        with refused("num_accepted is"):
            w.made.end_step(step, w.rng.choice(bad))


def an_end_too_many(w: World) -> None:
    ended = [step for step in [*w.steps, *w.over] if step.ended]
    if ended:
        step = w.rng.choice(ended)
        with refused(rf"step is {step.number}, which has ended"):
            w.made.end_step(step, torch.ones(SLOTS, dtype=torch.int32, device=w.made.device))


def a_step_of_nobody(w: World) -> None:
    strange: list[Any] = [*(o.step for o in w.clean.outstanding), *w.others[-2:]]
    step = w.rng.choice([*strange, None, 3, "step"])
    ones = torch.ones(SLOTS, dtype=torch.int32, device=w.made.device)
    calls: list[Callable[[], object]] = [
        lambda: w.made.end_step(step, ones), lambda: w.made.accepted(step),
        lambda: w.made.published(step), lambda: w.made.abandon(step),
        lambda: w.made.resolve(step, np.ones(SLOTS, np.int32)),
    ]  # fmt: skip
    with refused("step is", "readback is True"):
        w.rng.choice(calls)()


def results_too_early(w: World) -> None:
    if w.open:
        step = w.rng.choice(w.open)
        with refused("step is", r"step \d+ has not ended"):
            w.rng.choice([w.made.accepted, w.made.published])(step)


def results_of_ones_own(w: World) -> None:
    if w.steps:
        step = w.rng.choice(w.steps)
        with refused("readback is True"):
            w.made.resolve(step, np.ones(len(step.rows), np.int32))


def a_failure_too_late(w: World) -> None:
    if w.over:
        with refused("step is"):
            w.made.abandon(w.rng.choice(w.over))


def an_admission_too_many(w: World) -> None:
    cases: list[tuple[Any, ...]] = [(s,) for s in w.live]
    cases += [(SLOTS,), (-1,), (None,), (0.0,)]
    if w.free:
        f = w.free[0]
        cases += [
            (f, -1),
            (f, 8),
            (f, 0, 2),
            (f, 8, -1),
            (f, 8, COLUMNS),
            (f, 2.0, 0),
            (f, 2**40, 0),
        ]
        cases += [(f, 8, 2**40), (f, 8, "1")]
    with refused("slot is", "computed is", "hit_column is"):
        w.made.admit(*w.rng.choice(cases))


def a_slot_of_nobody(w: World) -> None:
    slot: Any = w.rng.choice([*w.free, SLOTS, -1, None, 1.5])
    calls: list[Callable[[], object]] = [
        lambda: w.made.release(slot), lambda: w.made.last_checkpoint(slot),
        *([] if w.made.layout.replays else [lambda: w.made.retain(slot, 0)]),
    ]  # fmt: skip
    with refused("slot is"):
        w.rng.choice(calls)()


def a_rule_that_cannot_be(w: World) -> None:
    if w.live and w.made.layout.replays:
        with refused(r"retain\(\) is of the columns layout"):
            w.made.retain(w.rng.choice(w.live), 8)
    elif w.live:
        cases: list[tuple[Any, ...]] = [
            (5,), (-8,), (2**40,), (8.0,), (None,), (8, (8, 16, 24)), (8, (3,)), (8, (2**31,)),
            (8, 8),
        ]  # fmt: skip
        with refused("every is", "positions"):
            w.made.retain(w.rng.choice(w.live), *w.rng.choice(cases))


def a_checkpoint_of_the_past(w: World) -> None:
    slot = w.rng.randrange(SLOTS)
    generation = int(w.made._ledger.generation[slot])
    past = generation - 1 if slot in w.live else generation
    stale = Checkpoint(slot, past, w.rng.randrange(1, 6) * BLOCK, COLUMNS - 1)
    with refused(r"checkpoints\[0\] is"):
        w.made.flush([stale])


def a_checkpoint_that_never_was(w: World) -> None:
    if w.live:
        slot = w.rng.choice(w.live)
        generation = int(w.made._ledger.generation[slot])
        far = LONG + w.rng.randrange(1, 30)  # from what queued steps compute
        invented = Checkpoint(slot, generation, far, COLUMNS - 1)
        known = w.made.last_checkpoint(slot)
        changed = [] if known is None else [known._replace(position=known.position + far)]
        for bad in (invented, *changed, tuple(invented), None):
            with refused(r"checkpoints\[0\] is"):
                w.made.flush([bad])  # type: ignore[list-item]


def another_binding(w: World) -> None:
    with refused("states are bound already"):
        w.made.bind(w.runner.states, w.runner.tables)


def a_demand_of_nonsense(w: World) -> None:
    """Answers nonsense, or refuses; changes nothing."""
    known: Any = w.rng.choice([None, np.zeros(1, np.int32), [1, 2, 3], [1.0, 2.0], 1])
    rows = StepRows(**fields([w.rng.choice([0, 99, -5]), w.rng.randrange(SLOTS)]))
    if known is None and not w.made.layout.replays:
        w.made.block_demand(rows)
    else:
        with refused("known is", r"block_demand\(\) is of the columns"):
            w.made.block_demand(rows, known)


MISUSES = (
    rows_of_no_shape, rows_of_no_type, rows_out_of_range, rows_without_request,
    rows_of_an_open_step, rows_changed_in_flight, counts_of_no_kind, an_end_too_many,
    a_step_of_nobody, results_too_early, results_of_ones_own, a_failure_too_late,
    an_admission_too_many, a_slot_of_nobody, a_rule_that_cannot_be, a_checkpoint_of_the_past,
    a_checkpoint_that_never_was, another_binding, a_demand_of_nonsense,
)  # fmt: skip


class Misuse(Interleavings):
    """The first runner does nothing wrong, the second one all the time."""

    device = "cpu"

    @initialize(
        num_draft=st.integers(0, 4),
        in_place=st.booleans(),
        depth=st.sampled_from([0, 1, 2, 4]),
        strategy=st.sampled_from(get_args(Strategy)),
        debug=st.booleans(),
    )
    def start(self, strategy: str, debug: bool, **options: Any) -> None:  # type: ignore[override]
        self.in_turn = strategy in ("blocking", "defer")
        options |= {"block_size": BLOCK, "max_requests": SLOTS, "layers": 1, "columns": COLUMNS}
        options["in_place"] &= self.kind == "columns"
        options["device"] = self.device
        make = RUNNERS[self.kind]
        self.runners = [make(strategy=strategy, debug=d, **options) for d in (False, debug)]
        self.some_tokens = st.lists(st.integers(0, 99), min_size=1, max_size=20)
        self.over: list[Step] = []
        self.others: list[Step] = []

    @rule(
        misuses=st.lists(st.sampled_from(MISUSES), min_size=1, max_size=6), seed=st.integers(0, 999)
    )
    def misuse(self, misuses: list[Callable[[World], None]], seed: int) -> None:
        clean, careless = self.runners
        for number, act in enumerate(misuses):
            act(World(careless, clean, seed + number, self.over, self.others))

    def read_one(self) -> list[Any]:
        others, step = (runner.outstanding[0].step for runner in self.runners)
        found = super().read_one()
        self.over.append(step)
        self.others.append(others)
        return found


class ReplayMisuse(Misuse):
    kind = "replay"


TestMisuse, TestReplayMisuse = Misuse.TestCase, ReplayMisuse.TestCase
TestMisuse.settings = TestReplayMisuse.settings = settings(max_examples=20, stateful_step_count=40)


class MoreMisuse(Misuse):
    """The same for longer."""


class MoreReplayMisuse(ReplayMisuse):
    """The same for longer."""


TestMoreMisuse = pytest.mark.slow(MoreMisuse.TestCase)
TestMoreReplayMisuse = pytest.mark.slow(MoreReplayMisuse.TestCase)
TestMoreMisuse.settings = TestMoreReplayMisuse.settings = settings(
    max_examples=300, stateful_step_count=60
)


class MisuseOnGpu(Misuse):
    """The same where kernels run, and results are still on their way when they are asked for."""

    device = "cuda"


class ReplayMisuseOnGpu(ReplayMisuse):
    """See `MisuseOnGpu`."""

    device = "cuda"


TestMisuseOnGpu = pytest.mark.gpu(MisuseOnGpu.TestCase)
TestReplayMisuseOnGpu = pytest.mark.gpu(ReplayMisuseOnGpu.TestCase)
# Each check is a round trip there.
TestMisuseOnGpu.settings = TestReplayMisuseOnGpu.settings = settings(
    max_examples=15, stateful_step_count=40
)
