"""The rolling-hash model of `hash_model` in the replay layout: a verify pass folds the tokens that
it finds cached into the state that it finds in memory, as kernels.replay's contract says, and
what comes out must be the hash of exactly the right tokens.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from helpers.hash_model import HashRunner
from helpers.hash_request import PRIME, TOKENS, Kept, Open, Request, Row, prefix_hash

from hybrid_runtime.kernels.step.advance_replay import IDLE, ReplaySlots
from hybrid_runtime.state import allowed
from hybrid_runtime.state.replay.flush import FlushInputs
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Checkpoint

POISON = -1000
"""Cached token that nobody wrote."""


class ReplayRunner(HashRunner):
    """Model runner of one live state per request."""

    kind = "replay"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.live = self.tables[0].shape[1] - 1
        self.copies = self.direct = self.written = self.ran = 0
        self.last_stored = self.last_folded = 0

    def admit(self, slot: int, tokens: list[int], hit: Kept | None = None) -> None:
        super().admit(slot, tokens, hit)
        self.records[0][:, slot] = POISON

    def _flush_inputs(self) -> FlushInputs:
        layers, slots = len(self.states), self.manager.max_requests
        self.records = self.layout.allocate_records(layers, slots, self.device)
        params = tuple(p.to(self.device) for p in self.rule.params(layers))
        return FlushInputs(self.records, params)

    def release(self, slot: int) -> None:
        """What its last drafts reached is known, and whole if a queued step stores it."""
        request, block = self.requests[slot], self.layout.block_size
        checkpoint = None if request.dead else self.manager.last_checkpoint(slot)
        passed = range(request.certain + 1, request.computed + 1)
        folded = [(b, self.live) for b in passed if b in request.named]
        if checkpoint is None:
            assert not folded or request.dead or request.in_flight
        elif checkpoint.column == self.live:
            assert [checkpoint[2:]] == folded
            blocks = [group[self.live] for group in request.blocks]
            if self.device == "cpu":
                self.manager.flush([checkpoint])
                self.check(blocks, blocks, 0, request.tokens[: checkpoint.position])
            self.last_folded += 1
        else:
            assert not folded or request.in_flight
            assert checkpoint.column == checkpoint.position // block - 1
            blocks = [group.get(checkpoint.column, -1) for group in request.blocks]
            if min(blocks) >= 0 and request.still_has(checkpoint.column):
                with allowed("the test looks"):
                    self.check(blocks, blocks, 0, request.tokens[: checkpoint.position])
                self.last_stored += bool(request.in_flight)
        super().release(slot)

    def retain(self, slot: int, every: int, positions: tuple[int, ...] = ()) -> None:
        self.requests[slot].rule = every, positions

    def _saves(self, plan: list[Row]) -> tuple[np.ndarray, ...]:
        """The last two positions that each row can store, or those ahead of it."""
        block, pairs = self.layout.block_size, []
        for slot, certain, *_ in plan:
            if slot < 0:
                pairs.append((0, 0))
                continue
            request = self.requests[slot]
            end = request.computed + certain
            ahead = range(request.certain + 1, (self.live + 1) * block)
            wanted = [b for b in ahead if b % block == 0 and request.keeps(b)]
            reached = [b for b in wanted if b <= end]
            request.named = tuple([*reached[-2:], *wanted[len(reached) :]][:2])
            pairs.append((*request.named, 0, 0)[:2])
        save_at = np.array(pairs, np.int32).reshape(-1, 2)
        return save_at, np.where(save_at > 0, save_at // block - 1, -1).astype(np.int32)

    def passes(self, request: Request, certain: int) -> list[int]:
        end = request.computed + certain
        return [b for b in request.named if request.computed < b <= end]

    def _hand_out(self, rows: StepRows) -> None:
        """Own the live column, those that may get a checkpoint, the one that is read, and those
        whose checkpoints may still be filed."""
        for slot, certain in zip(rows.slot.tolist(), rows.certain.tolist(), strict=True):
            if slot < 0:
                continue
            request = self.requests[slot]
            stored = [b for b in request.named if b <= request.computed + certain]
            needed = {self.live} | {b // self.layout.block_size - 1 for b in stored}
            keep = needed | {request.place[0]} | set(self._unread(request))
            for group, blocks in enumerate(request.blocks):
                for column in set(blocks) - keep:
                    self._disown(request, group, column)
                for column in sorted(needed - set(blocks)):
                    self._new(request, group, column)

    def swap(self, slot: int, other: int) -> None:
        """The tokens that its state lacks are folded in as by a pass of its own."""
        old = self.requests[slot]
        assert not old.in_flight
        past = old.computed >= self.layout.block_size  # the checkpoint of column 0 is behind it
        column = 0 if past and old.computed % 2 == 0 else self.live
        new = Request(other, old.tokens, old.computed, old.known)
        new.certain = new.written = old.computed
        new.rule, new.blocks = (self.layout.block_size, ()), [{} for _ in self.tables]
        new.place = column, 0
        history = old.tokens[: old.computed]
        last = torch.tensor(([0, 0, 0] + [t + 1 for t in history])[-3:])
        for group in range(len(self.tables)):
            self._new(new, group, column)
        for layer, (window, ssm) in self.states.items():
            target = new.blocks[self.group_of[layer]][column]
            inputs = self.layout.positions_first(window)[target, :3]
            inputs.copy_(last.to(inputs.dtype)[:, None].expand_as(inputs))
            ssm[target] = prefix_hash(history)
        self.release(slot)
        self._admit(new, column)

    def _may_leave(self, request: Request, certain: int, most: int) -> set[int]:
        end = request.computed + certain
        passed = {*range(request.certain + 1, request.computed + 1), end}
        found = passed & set(request.named)
        assert len(found) < 2
        return found

    def read_oldest(self) -> list[Checkpoint]:
        """What the host knows of states whose results have all been read is what the device has."""
        checkpoints = super().read_oldest()
        table, slots = self.manager._ledger, self.manager._policy.slots
        assert isinstance(slots, ReplaySlots)
        for slot, request in self.requests.items():
            if not request.in_flight and table.holds(slot, request.generation):
                assert table.written[slot] == request.written
                assert table.held[slot] == request.place[0]
                assert not request.stepped or slots.written[slot] == request.written
        return checkpoints

    def knows(self, opened: Open, row: int) -> bool:
        """How many drafts the last step accepted is known exactly only if its rows were."""
        return self.depth == 0 and super().knows(opened, row)

    def may_copy(self, opened: Open, row: int) -> bool:
        _, certain, drafts, _ = opened.plan[row]
        end = opened.starts[row] + certain
        checkpoints, start = opened.checkpoints[row], opened.starts[row]
        return any(b <= start or (drafts and b <= end) for b in checkpoints)

    def _place(
        self, certain: int, drafts: list[int], taken: int, checkpoints: set[int]
    ) -> tuple[int, int]:
        direct = not drafts and certain in checkpoints
        return certain // self.layout.block_size - 1 if direct else self.live, taken

    def forward(self, opened: Open) -> None:
        step, positions = opened.step, self.manager.positions
        replay = positions.replay
        assert replay is not None
        assert step.read_column is replay.read_column
        assert step.read_offset is replay.offset
        assert step.write_column is replay.write_column
        rows = torch.stack(list(replay)).T.tolist()
        idle = list(IDLE)
        for i, request in enumerate(opened.requests):
            if request is None:
                assert rows[i] == idle
            elif self.requests.get(request.slot) is request:
                _, certain, drafts, _ = opened.plan[i]
                flags = step.rows.decodes
                decodes = bool(drafts) if flags is None else bool(flags[i])
                assert flags is None or decodes or not rows[i][2]  # nothing is pending
                self._verify(request, certain, drafts, decodes, opened.checkpoints[i], *rows[i])
        assert all(row == idle for row in rows[len(opened.plan) :])
        opened.ran = True

    def _verify(
        self,
        request: Request,
        certain: int,
        drafts: list[int],
        decodes: bool,
        checkpoints: set[int],
        read: int,
        offset: int,
        pending: int,
        cursor: int,
        write: int,
        writes: int,
        kept: int,
        after: int,
        position: int,
    ) -> None:
        n, block = request.computed, self.layout.block_size
        (rings,) = self.records
        ring = rings[:, request.slot]
        tokens = request.tokens[n : n + certain]
        assert len(tokens) == certain, "the request has no such tokens yet"
        assert (read, offset) == (request.place[0], n - request.certain)
        assert (pending, cursor) == (n - request.written, request.written % self.layout.ring_length)
        assert position == n + certain
        cut = max((b for b in checkpoints if n < b < position), default=0)
        direct = not drafts and position in checkpoints
        assert write == (position // block - 1 if direct else self.live)
        assert offset == 0 or certain == 1
        stored = sorted(checkpoints - {position} if direct else checkpoints)
        assert [kept] == ([b // block - 1 for b in stored] or [-1])
        assert [after] == ([b - n for b in stored] or [0])
        assert kept < 0 or -offset < after <= 0 or after == (cut - n if cut else certain)
        full = pending + certain + len(drafts) > self.layout.ring_tokens
        assert writes == (not decodes or direct or read != self.live or kept >= 0 or full)
        self.copies += kept >= 0
        self.direct += direct
        self.written += writes
        self.ran += 1

        length = self.layout.ring_length
        past = [int(ring[0, (cursor + j) % length]) for j in range(pending)]
        run = [*past, *tokens]
        for layer, (window, ssm) in self.states.items():
            blocks = request.blocks[self.group_of[layer]]
            windows = self.layout.positions_first(window)
            states, before = {0: 1}, [0, 0, 0]
            if read >= 0:
                source = blocks[read]
                self._one(ssm[source], prefix_hash(request.tokens[: request.written]))
                states[0] = int(ssm[source].flatten()[0])
                before = [int(v) for v in windows[source, : 3 + offset, 0].tolist()]
            for j, token in enumerate(run):
                states[j + 1] = (states[j] * 31 + token + 1) % PRIME
            self._one(torch.tensor(float(states[pending])), prefix_hash(request.tokens[:n]))
            # The window holds the drafts' inputs too: what is folded needs no cache of its own.
            seen = before + [t + 1 for t in [*tokens, *drafts]]
            history = [0, 0, 0] + [t + 1 for t in request.tokens[: n + certain]]
            assert seen[: 3 + offset + certain] == history[-3 - offset - certain :]
            if kept >= 0:
                inputs = seen[offset + after : offset + after + 3]
                self._store(ssm, windows, blocks[kept], states[pending + after], inputs)
            value = states[pending + certain] if writes else None
            self._store(ssm, windows, blocks[write], value, seen[offset + certain :])
        first = certain if writes else 0
        for i, token in enumerate([*tokens, *drafts][first:], start=n + first):
            ring[:, i % length] = token
        if writes:
            request.written = n + certain
        request.stepped = True

    def _one(self, state: torch.Tensor, want: int) -> None:
        got = state.float().flatten().tolist()
        assert got == [want] * len(got), (got[0], want)

    def _store(
        self,
        ssm: torch.Tensor,
        windows: torch.Tensor,
        block: int,
        value: int | None,
        inputs: list[int],
    ) -> None:
        if value is not None:
            ssm[block].fill_(value)
        target = windows[block, : len(inputs)]
        target.copy_(torch.tensor(inputs).to(target.dtype)[:, None].expand_as(target))


RUNNERS: dict[str, type[HashRunner]] = {"columns": HashRunner, "replay": ReplayRunner}


def two_running(kind: str, **options: Any) -> HashRunner:
    """Slots 0 and 1 of 4 have read their prompts, of 5 tokens each."""
    runs = RUNNERS[kind](max_requests=4, columns=16, **options)
    for slot in (0, 1):
        runs.admit(slot, list(range(5)))
    runs.step([(0, 5, [], 1), (1, 5, [], 1)])
    return runs


def decode_row(rng: random.Random, slot: int) -> Row:
    """Three drafts, of which any number is accepted."""
    return slot, 1, [rng.randrange(TOKENS) for _ in range(3)], rng.randrange(1, 5)
