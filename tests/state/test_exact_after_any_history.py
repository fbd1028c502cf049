"""Any history of requests leaves every state exact, and the same bytes under every strategy.

A rule-based state machine drives four runners (one per strategy) in lock-step with the rolling-hash
model of `hash_model`, which checks each state that a step reads against the tokens it must stand
for, and each published checkpoint against its prefix. Then the same for steps that begin, run, end
and are read at any time, with anything in between: see `helpers.interleavings`.
"""

from __future__ import annotations

from typing import Any, get_args

import hypothesis.strategies as st
import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.hash_request import TOKENS
from helpers.interleavings import Interleavings
from helpers.replay_model import RUNNERS
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hybrid_runtime.state import Strategy

SLOTS, BLOCK, LONGEST = 4, 8, 120
SLACK = st.tuples(st.integers(0, 2 * BLOCK), st.integers(0, 2 * BLOCK))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Histories(RuleBasedStateMachine):
    """Requests come, step, pause, leave and come back; all runners do the same."""

    kind = "columns"
    runners: list[HashRunner]

    @initialize(
        num_draft=st.integers(0, 4),
        ring_tokens=st.sampled_from([0, 5, 15, 31]),
        in_place=st.booleans(),
        depth=st.integers(0, 2),
        says_decodes=st.booleans(),
        conv_layout=st.sampled_from(["SD", "DS"]),
        groups=st.integers(1, 3),
        dtypes=st.sampled_from([(torch.float32, torch.float32), (torch.bfloat16, torch.float16)]),
    )
    def start(self, dtypes: tuple[torch.dtype, torch.dtype], **options: Any) -> None:
        options |= {"conv_dtype": dtypes[0], "ssm_dtype": dtypes[1], "block_size": BLOCK}
        options["in_place"] &= self.kind == "columns"
        options["says_decodes"] &= self.kind == "replay"
        self.runners = [
            RUNNERS[self.kind](
                strategy=s,
                max_requests=SLOTS,
                layers=3,
                columns=28,
                device=DEVICE,
                debug=s == "auto",
                **options,
            )
            for s in get_args(Strategy)
        ]

    @property
    def one(self) -> HashRunner:
        return self.runners[0]

    def free(self) -> list[int]:
        return [s for s in range(SLOTS) if s not in self.one.requests]

    def same_bytes(self) -> None:
        """Blocks that some request or checkpoint owns hold the same bytes in all runners."""
        owned = [b for b, users in enumerate(self.one.pool.users) if users]
        for other in self.runners[1:]:
            assert other.pool.users == self.one.pool.users
            for layer, pair in self.one.states.items():
                for mine, theirs in zip(pair, other.states[layer], strict=True):
                    a, b = mine[owned].contiguous(), theirs[owned].contiguous()
                    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    @precondition(lambda self: self.free())
    @rule(data=st.data(), fresh=st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=30))
    def admit(self, data: st.DataObject, fresh: list[int]) -> None:
        slot = data.draw(st.sampled_from(self.free()))
        kept = data.draw(st.sampled_from([None, *range(len(self.one.kept))]))
        for runner in self.runners:
            hit = None if kept is None else runner.kept[kept]
            runner.admit(slot, [*(hit.tokens if hit else []), *fresh], hit)

    @precondition(lambda self: self.one.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Finish or abort."""
        slot = data.draw(st.sampled_from(sorted(self.one.requests)))
        for runner in self.runners:
            runner.release(slot)

    @precondition(lambda self: self.one.requests and self.free())
    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        """Leave the slot and come back in another, to compute everything again."""
        slot = data.draw(st.sampled_from(sorted(self.one.requests)))
        other = data.draw(st.sampled_from(self.free()))
        for runner in self.runners:
            tokens = runner.requests[slot].tokens
            runner.release(slot)
            runner.admit(other, tokens)

    @precondition(lambda self: self.one.requests)
    @rule(data=st.data(), every=st.integers(0, 2), pins=st.lists(st.integers(1, 6), max_size=2))
    def retain(self, data: st.DataObject, every: int, pins: list[int]) -> None:
        slot = data.draw(st.sampled_from(sorted(self.one.requests)))
        for runner in self.runners:
            runner.retain(slot, every * BLOCK, tuple(p * BLOCK for p in pins))

    @precondition(lambda self: self.one.requests)
    @rule(data=st.data(), steady=st.integers(1, 3), loose=st.booleans())
    def step(self, data: st.DataObject, steady: int, loose: bool) -> None:
        """A few steps of some rows in any order: prefill chunks, drafts or none, padded rows. Each
        owns the columns that the manager names for its bounds, which may be `loose`, and no other.
        """
        slots = data.draw(st.permutations(sorted(self.one.requests)))
        slots = slots[: data.draw(st.integers(1, len(slots)))]
        padding = data.draw(st.integers(0, SLOTS - len(slots)))
        at = data.draw(st.integers(0, len(slots)))
        for _ in range(steady):
            plan = [self._row(data, slot) for slot in slots]
            plan[at:at] = [(-1, 1, [], 1)] * padding
            slack = [data.draw(SLACK) for _ in plan] if loose else None
            for runner in self.runners:
                runner.step(plan, slack)
            self.same_bytes()
            skipped = {r.manager.stats().skipped for r in self.runners}
            assert len(skipped) == 1
        for slot in list(self.one.requests):
            if len(self.one.requests[slot].tokens) > LONGEST:
                for runner in self.runners:
                    runner.release(slot)

    def _row(self, data: st.DataObject, slot: int) -> tuple[int, int, list[int], int]:
        request = self.one.requests[slot]
        left = len(request.tokens) - request.computed
        if left > 1:
            certain = data.draw(st.integers(1, left))
            return slot, certain, [], int(certain == left)
        drafts = data.draw(st.lists(st.integers(0, TOKENS - 1), max_size=self.one.num_draft))
        return slot, 1, drafts, data.draw(st.integers(1, len(drafts) + 1))

    @precondition(lambda self: self.one.outstanding)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """A late result arrives; its checkpoints may be kept for others to start from."""
        found = [runner.read_oldest() for runner in self.runners]
        assert all(f == found[0] for f in found)
        self._keep(data, found[0])

    @precondition(lambda self: self.one.recent)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Keep checkpoints that steps have published since, if their requests still own them."""
        found = [s for s in self.one.recent if self._owned(s)]
        for runner in self.runners:
            runner.recent.clear()
        self._keep(data, found)

    def _owned(self, checkpoint: Any) -> bool:
        request = self.one.requests.get(checkpoint.slot)
        return (
            request is not None
            and request.generation == checkpoint.generation
            and all(checkpoint.column in group for group in request.blocks)
            and request.still_has(checkpoint.column)
        )

    def _keep(self, data: st.DataObject, found: list[Any]) -> None:
        for checkpoint in found:
            if self._owned(checkpoint) and len(self.one.kept) < 6 and data.draw(st.booleans()):
                for runner in self.runners:
                    runner.keep(checkpoint)

    @precondition(lambda self: self.one.kept)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.one.kept) - 1))
        for runner in self.runners:
            runner.forget(runner.kept[index])

    def teardown(self) -> None:
        if not hasattr(self, "runners"):
            return
        for runner in self.runners:
            while runner.outstanding:
                runner.read_oldest()
            for kept in runner.kept:
                runner.check(kept.blocks, kept.blocks, 0, kept.tokens)
            for slot in list(runner.requests):
                runner.release(slot)
            for kept in list(runner.kept):
                runner.forget(kept)
            assert len(runner.pool.free) == len(runner.pool.users)  # nothing leaked


class ReplayHistories(Histories):
    """With a state written in every step, or as late as the shortest or longest ring allows."""

    kind = "replay"


TestHistories = pytest.mark.slow(Histories.TestCase)
TestReplayHistories = pytest.mark.slow(ReplayHistories.TestCase)
# On a GPU each check is a round trip; the kernels under it are what is tested there.
TestHistories.settings = TestReplayHistories.settings = settings(
    max_examples=30 if DEVICE == "cuda" else 200, stateful_step_count=40
)


class ReplayInterleavings(Interleavings):
    kind = "replay"


TestInterleavings = pytest.mark.slow(Interleavings.TestCase)
TestReplayInterleavings = pytest.mark.slow(ReplayInterleavings.TestCase)
TestInterleavings.settings = TestReplayInterleavings.settings = settings(
    max_examples=100, stateful_step_count=40
)
