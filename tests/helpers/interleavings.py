"""Steps that begin, run, end and are read at any time, in any order and with anything in between.

A state machine over the rolling-hash model of `hash_model`: unlike in `Histories`,
several steps may be open at once, as on a pipeline stage, and end late and out of turn; requests
are aborted, preempted, resumed from a saved state, killed by a count of 0 or lost to a failed
forward pass while their steps are open, and their slots are taken again at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import hypothesis.strategies as st
import torch
from helpers.hash_model import HashRunner
from helpers.hash_request import TOKENS, Open, Row
from helpers.replay_model import RUNNERS
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hybrid_runtime.state import Strategy, sync_guard

SLOTS, BLOCK, COLUMNS, LONGEST = 4, 8, 18, 90
FAST = ("always", "auto")


class Interleavings(RuleBasedStateMachine):
    """One runner per strategy; all do the same and must hold the same bytes."""

    kind = "columns"
    runners: list[HashRunner]

    @initialize(
        num_draft=st.integers(0, 4),
        ring_tokens=st.sampled_from([0, 5, 15, 31]),
        in_place=st.booleans(),
        prompt_cuts=st.booleans(),
        depth=st.sampled_from([0, 1, 2, 4]),
        conv_layout=st.sampled_from(["SD", "DS"]),
        groups=st.integers(1, 3),
        own_all=st.booleans(),
        says_decodes=st.booleans(),
        in_turn=st.booleans(),
        dtypes=st.sampled_from([(torch.float32, torch.float16), (torch.bfloat16, torch.float32)]),
    )
    def start(self, dtypes: tuple[torch.dtype, torch.dtype], in_turn: bool, **options: Any) -> None:
        """Steps may end out of turn where the host need not know what the older ones left."""
        self.in_turn = in_turn
        options |= {"conv_dtype": dtypes[0], "ssm_dtype": dtypes[1], "block_size": BLOCK}
        options |= {"max_requests": SLOTS, "layers": options["groups"], "columns": COLUMNS}
        options["in_place"] &= self.kind == "columns" and not options["prompt_cuts"]
        options["says_decodes"] &= self.kind == "replay"
        runner = RUNNERS[self.kind]
        self.runners = [
            runner(strategy=s, debug=s == "auto", **options)
            for s in (get_args(Strategy) if in_turn else FAST)
        ]
        self.some_tokens = st.lists(st.integers(0, TOKENS - 1), min_size=1, max_size=20)

    @property
    def one(self) -> HashRunner:
        return self.runners[0]

    def free(self) -> list[int]:
        return [s for s in range(SLOTS) if s not in self.one.requests]

    def alive(self) -> list[int]:
        """Requests of which the host knows no end, and the device none either."""
        return sorted(s for s, r in self.one.requests.items() if not r.dead)

    def open(self) -> list[int]:
        """Indices into `outstanding` of steps that have begun and not ended."""
        return [i for i, o in enumerate(self.one.outstanding) if not (o.step.ended or o.abandoned)]

    def idle(self) -> list[int]:
        busy = [r for i in self.open() for r in self.one.outstanding[i].requests]
        return [s for s in self.alive() if self.one.requests[s] not in busy]

    def settled(self) -> list[int]:
        return [s for s in self.idle() if not self.one.requests[s].in_flight]

    def all(self, act: Callable[[HashRunner], object]) -> None:
        """`act` on every runner; none of the fast strategies may wait in it."""
        for runner in self.runners:
            with sync_guard() as waits:
                act(runner)
            assert not waits.count or runner.manager.strategy not in FAST

    # -- requests

    @precondition(lambda self: self.free())
    @rule(data=st.data(), count=st.integers(1, SLOTS))
    def admit(self, data: st.DataObject, count: int) -> None:
        for slot in data.draw(st.permutations(self.free()))[:count]:
            kept = data.draw(st.sampled_from([None, *range(len(self.one.kept))]))
            fresh = data.draw(self.some_tokens)
            for runner in self.runners:
                hit = None if kept is None else runner.kept[kept]
                runner.admit(slot, [*(hit.tokens if hit else []), *fresh], hit)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), again=st.booleans(), fresh=st.data())
    def release(self, data: st.DataObject, again: bool, fresh: st.DataObject) -> None:
        """Finish or abort, whatever its steps are doing; perhaps the slot is taken at once."""
        slot = data.draw(st.sampled_from(self.alive()))
        self.all(lambda runner: runner.release(slot))
        if again:
            tokens = fresh.draw(self.some_tokens)
            self.all(lambda runner: runner.admit(slot, tokens))

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def preempt_and_recompute(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.alive()))
        tokens = list(self.one.requests[slot].tokens)
        self.all(lambda runner: runner.release(slot))
        other = data.draw(st.sampled_from(self.free()))
        self.all(lambda runner: runner.admit(other, tokens))

    @precondition(lambda self: self.settled() and self.free())
    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        """With the state as it is, at any position: not only at a block boundary."""
        slot = data.draw(st.sampled_from(self.settled()))
        other = data.draw(st.sampled_from(self.free()))
        if self.one.requests[slot].computed:
            for runner in self.runners:
                runner.swap(slot, other)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), every=st.integers(0, 2), pins=st.lists(st.integers(1, 6), max_size=2))
    def retain(self, data: st.DataObject, every: int, pins: list[int]) -> None:
        slot = data.draw(st.sampled_from(self.alive()))
        positions = tuple(p * BLOCK for p in pins)
        self.all(lambda runner: runner.retain(slot, every * BLOCK, positions))

    # -- steps

    def can_begin(self) -> bool:
        waiting = self.one.outstanding
        if any(not o.ran and not o.abandoned for o in waiting):
            return False  # positions are those of the youngest step: it has to be run first
        room = len(waiting) <= self.one.depth
        return bool(self.idle()) and (room or waiting[0].step.ended)

    @precondition(can_begin)
    @rule(data=st.data(), run=st.booleans())
    def begin(self, data: st.DataObject, run: bool) -> None:
        self._begin(data, self._slots(data))
        if run:
            self.forward()

    @precondition(can_begin)
    @rule(data=st.data(), count=st.integers(1, 5))
    def steps(self, data: st.DataObject, count: int) -> None:
        """The usual course: the same rows again and again, if they live."""
        slots = self._slots(data)
        for _ in range(count):
            if self.can_begin() and set(slots) - {-1} <= set(self.idle()):
                self._begin(data, slots)
                self.forward()
                while self.ran():
                    self.end_one(self.ran()[-1])

    def _slots(self, data: st.DataObject) -> list[int]:
        chosen = data.draw(st.permutations(self.idle()))
        slots = list(chosen[: data.draw(st.integers(1, len(chosen)))])
        for _ in range(data.draw(st.integers(0, SLOTS - len(slots)))):
            slots.insert(data.draw(st.integers(0, len(slots))), -1)
        return slots

    def _begin(self, data: st.DataObject, slots: list[int]) -> None:
        while len(self.one.outstanding) > self.one.depth:
            if not self.one.outstanding[0].step.ended:
                return
            self.read_one()
        slots = [s for s in slots if s < 0 or s in self.idle()]
        plan = [self._row(data, slot) for slot in slots]
        decodes = None
        if self.one.manager.in_place and data.draw(st.booleans()):
            decodes = [data.draw(st.booleans()) for _ in plan]
        self.all(lambda runner: runner.begin(plan, decodes))
        for runner in self.runners:
            self._sound_and_tight(runner, runner.outstanding[-1])

    def _sound_and_tight(self, runner: HashRunner, opened: Open) -> None:
        """Candidates are the rows that some count would make act; exactly, if bounds are exact."""
        listed = set(opened.step.candidates.tolist())
        for i in range(len(opened.plan)):
            acts = runner.may_copy(opened, i)
            assert i in listed or not acts
            assert acts or i not in listed or not runner.knows(opened, i)

    def _row(self, data: st.DataObject, slot: int) -> Row:
        if slot < 0:
            return -1, data.draw(st.integers(1, 3)), [], 1
        request = self.one.requests[slot]
        left = len(request.tokens) - request.computed
        if left > 1:
            certain = data.draw(st.integers(1, left))
            return slot, certain, [], int(certain == left)
        drafts = data.draw(st.lists(st.integers(0, TOKENS - 1), max_size=self.one.num_draft))
        accepted = data.draw(st.integers(1, len(drafts) + 1))
        if drafts and data.draw(st.integers(0, 30)) == 30:
            accepted = 0
        return slot, 1, drafts, accepted

    @precondition(lambda self: any(not o.ran and not o.abandoned for o in self.one.outstanding))
    @rule()
    def forward(self) -> None:
        for runner in self.runners:
            runner.forward(runner.outstanding[-1])

    def ran(self) -> list[int]:
        """Indices of the steps that may end now."""
        ran = [i for i in self.open() if self.one.outstanding[i].ran]
        return ran if not self.in_turn else [i for i in ran[:1] if i == self.open()[0]]

    @precondition(ran)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.end_one(data.draw(st.sampled_from(self.ran())))

    def end_one(self, index: int) -> None:
        for runner in self.runners:
            opened = runner.outstanding[index]
            before = runner.manager.stats().copy_launches
            with sync_guard() as waits:
                runner.end(opened)
            assert not waits.count or runner.manager.strategy not in FAST
            if opened.step.skipped and runner.manager.strategy != "always":
                assert runner.manager.stats().copy_launches == before
        for slot in self.idle():
            if len(self.one.requests[slot].tokens) > LONGEST:
                self.all(lambda runner, slot=slot: runner.release(slot))  # type: ignore[misc]

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A forward pass fails: its requests are lost."""
        index = data.draw(st.sampled_from(self.open()))
        for runner in self.runners:
            runner.abandon(runner.outstanding[index])

    @precondition(lambda self: self.one.outstanding and self.one.outstanding[0].step.ended)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        for checkpoint in self.read_one():
            request = self.one.requests[checkpoint.slot]
            owned = all(checkpoint.column in group for group in request.blocks)
            if owned and len(self.one.kept) < 5 and data.draw(st.booleans()):
                for runner in self.runners:
                    runner.keep(checkpoint)

    def read_one(self) -> list[Any]:
        found = [runner.read_oldest() for runner in self.runners]
        assert all(f == found[0] for f in found)
        return found[0]

    @precondition(lambda self: self.one.kept)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.one.kept) - 1))
        for runner in self.runners:
            runner.forget(runner.kept[index])

    # -- what must hold after every rule

    @invariant()
    def same_bytes(self) -> None:
        """Whole pools, padding included, are the same; blocks that nobody owns stay poisoned."""
        if not hasattr(self, "runners"):
            return
        for layer, pair in self.one.states.items():
            mine = pool(pair[0])
            for other in self.runners[1:]:
                assert other.pool.users == self.one.pool.users
                assert torch.equal(mine, pool(other.states[layer][0]))
            for component in pair:
                assert component[self.one.pool.free].isnan().all()

    @invariant()
    def kept_checkpoints_are_untouched(self) -> None:
        if hasattr(self, "runners"):
            for kept in self.one.kept:
                self.one.check(kept.blocks, kept.blocks, 0, kept.tokens)

    def teardown(self) -> None:
        if not hasattr(self, "runners"):
            return
        for runner in self.runners:
            for opened in runner.outstanding:
                if not opened.ran and not opened.abandoned:
                    runner.forward(opened)
                if not (opened.step.ended or opened.abandoned):
                    runner.end(opened)
            while runner.outstanding:
                runner.read_oldest()
            for slot in list(runner.requests):
                runner.release(slot)
            for kept in list(runner.kept):
                runner.forget(kept)
            assert len(runner.pool.free) == len(runner.pool.users)  # nothing leaked


def pool(view: torch.Tensor) -> torch.Tensor:
    """All bytes of the allocation behind `view`."""
    empty = torch.empty(0, dtype=torch.uint8, device=view.device)
    return empty.set_(view.untyped_storage())  # type: ignore[call-overload]
