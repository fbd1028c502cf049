"""A model whose state is exactly checkable: its SSM state is a rolling hash of all tokens consumed,
its convolution window the last tokens themselves. Any stale, mixed or misplaced state is a wrong
integer. `HashRunner` drives one manager with it, as a model runner would.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.counted_blocks import CountedBlocks
from helpers.hash_cuts import cut_of, leave_cut, loses
from helpers.hash_request import TOKENS, Kept, Open, Request, Row, assert_state, prefix_hash
from helpers.toy_recurrences import HashRule

from hybrid_runtime.kernels.conv.spec import ConvLayout
from hybrid_runtime.state.layout import LayoutKind, StateLayout
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.replay.flush import FlushInputs
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Checkpoint, Step


class HashRunner:
    """Model runner around one `HybridStateManager`, with block pools, for `groups` cache groups.
    own_all: requests own every column from admission on, and the manager is not asked."""

    kind: LayoutKind = "columns"

    def __init__(
        self,
        *,
        block_size: int = 8,
        num_draft: int = 3,
        ring_tokens: int = 15,
        max_requests: int = 4,
        strategy: str = "auto",
        in_place: bool = False,
        prompt_cuts: bool = False,
        depth: int = 0,
        conv_layout: ConvLayout = "SD",
        conv_dtype: torch.dtype = torch.float32,
        ssm_dtype: torch.dtype = torch.float32,
        groups: int = 1,
        layers: int | None = None,
        columns: int = 24,
        channels: int = 2,
        ssm_shape: tuple[int, int, int] = (1, 2, 4),
        device: str = "cpu",
        num_blocks: int | None = None,
        own_all: bool = False,
        debug: bool = True,
        says_decodes: bool = False,
    ) -> None:
        self.rule = HashRule(channels, ssm_shape, conv_dtype, ssm_dtype, conv_layout)
        self.layout = StateLayout(
            self.rule.recurrence, num_draft, block_size, self.kind, ring_tokens
        )
        self.depth, self.num_draft, self.device, self.debug = depth, num_draft, device, debug
        self.own_all, self.prompt_cuts, self.says_decodes = own_all, prompt_cuts, says_decodes
        self.cuts = 0
        self.manager = HybridStateManager(
            self.layout, max_requests, num_draft, device,
            strategy=strategy,  # type: ignore[arg-type]
            in_place=in_place, prompt_cuts=prompt_cuts, steps_in_flight=depth, debug=debug,
        )  # fmt: skip
        each = columns if own_all else num_draft + 6
        count = num_blocks or groups * max_requests * each + 64
        layers = groups if layers is None else layers
        self.states = {i: self.layout.allocate(count, device) for i in range(layers)}
        self.tables = [
            torch.full((max_requests, columns), -1, dtype=torch.int32, device=device)
            for _ in range(groups)
        ]
        self.group_of = {i: i % groups for i in range(layers)}
        self.manager.bind(self.states, self.tables, self.group_of, self._flush_inputs())
        self.pool = CountedBlocks(self.manager, count)
        self.requests: dict[int, Request] = {}
        self.kept: list[Kept] = []
        self.outstanding: list[Open] = []
        self.recent: list[Checkpoint] = []  # published by steps that were read meanwhile

    def _flush_inputs(self) -> FlushInputs | None:
        return None

    # -- requests and blocks ---------------------------------------------------------------------

    def state_bytes(self) -> list[torch.Tensor]:
        """Copies of all bytes of the states, padding included."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.manager.device)
        storages = [pair[0].untyped_storage() for pair in self.states.values()]
        return [torch.empty_like(empty).set_(s).clone() for s in storages]  # type: ignore[call-overload]

    def admit(self, slot: int, tokens: list[int], hit: Kept | None = None) -> None:
        request = Request(slot, list(tokens), blocks=[{} for _ in self.tables])
        request.rule = self.layout.block_size, ()
        column = None
        if hit is not None:
            assert tokens[: len(hit.tokens)] == hit.tokens
            request.computed = request.known = len(hit.tokens)
            request.certain = request.written = len(hit.tokens)
            column = len(hit.tokens) // self.layout.block_size - 1
            request.place = column, 0
            for group, block in enumerate(hit.blocks):
                self.pool.share(block)
                self._own(request, group, column, block)
        self._admit(request, column)

    def _admit(self, request: Request, column: int | None) -> None:
        request.generation = self.manager.admit(request.slot, request.computed, column)
        self.requests[request.slot] = request
        if self.own_all:
            for group, blocks in enumerate(request.blocks):
                for free in range(self.tables[group].shape[1]):
                    if free not in blocks:
                        self._new(request, group, free)

    def release(self, slot: int) -> None:
        self.manager.release(slot)
        self._forget_blocks(self.requests.pop(slot))

    def _forget_blocks(self, request: Request) -> None:
        for group in range(len(self.tables)):
            for column in list(request.blocks[group]):
                self._disown(request, group, column)

    def retain(self, slot: int, every: int, positions: tuple[int, ...] = ()) -> None:
        self.manager.retain(slot, every, positions)
        self.requests[slot].rule = every, positions

    def swap(self, slot: int, other: int) -> None:
        """Preempt a request whose results have all been read: its one state goes to blocks of its
        own, and the request goes on from there in another slot."""
        old = self.requests[slot]
        assert not old.in_flight
        column, offset = old.place
        new = Request(other, old.tokens, old.computed, old.known)
        new.rule, new.blocks = (self.layout.block_size, ()), [{} for _ in self.tables]
        new.place = column, 0
        for group in range(len(self.tables)):
            self._new(new, group, column)
        for layer, (window, ssm) in self.states.items():
            group = self.group_of[layer]
            source, target = old.blocks[group], new.blocks[group][column]
            inputs = self.layout.positions_first(window)
            inputs[target, :3] = inputs[source[column], offset : offset + 3]
            ssm[target] = ssm[source[column + offset]]
        self.release(slot)
        self._admit(new, column)

    def forget(self, kept: Kept) -> None:
        self.kept.remove(kept)
        for block in kept.blocks:
            self.pool.put(block)

    def _own(self, request: Request, group: int, column: int, block: int) -> None:
        request.blocks[group][column] = block
        self.tables[group][request.slot, column : column + 1] = block

    def _new(self, request: Request, group: int, column: int) -> None:
        request.taken[column] += 1
        self._own(request, group, column, self.pool.new())

    def _disown(self, request: Request, group: int, column: int) -> None:
        self.tables[group][request.slot, column : column + 1] = -1
        self.pool.put(request.blocks[group].pop(column))

    def _hand_out(self, rows: StepRows) -> None:
        """Own exactly what the manager demands, and the checkpoints that may still be filed."""
        demand = self.manager.block_demand(rows)
        for slot, first, fresh, last, kept in zip(rows.slot, *demand, strict=True):
            if slot < 0:
                assert (first, fresh, last, kept) == (0, 0, -1, -1)
                continue
            request = self.requests[int(slot)]
            needed = {int(c) for c in range(fresh, last + 1)}
            keep = needed | {*range(first, kept + 1)} | set(self._unread(request))
            for group, blocks in enumerate(request.blocks):
                for column in set(blocks) - keep:
                    self._disown(request, group, column)
                for column in sorted(needed - set(blocks)):
                    self._new(request, group, column)

    def _unread(self, request: Request) -> list[int]:
        """Columns of checkpoints that results on their way may publish: not to be freed before."""
        return [
            boundary // self.layout.block_size - 1
            for opened in self.outstanding
            for owner, checkpoints in zip(opened.requests, opened.checkpoints, strict=True)
            if owner is request
            for boundary in checkpoints
        ]

    # -- one step --------------------------------------------------------------------------------

    def bounds(self, slot: int) -> tuple[int, int]:
        """What the host knows of a request's computed tokens: (at least, at most)."""
        request = self.requests[slot]
        least = request.known + sum(low for _, low in request.in_flight)
        return least, request.known + sum(high for high, _ in request.in_flight)

    def step(self, plan: list[Row], slack: list[tuple[int, int]] | None = None) -> Step:
        """Begin, run and end a step, and read what is due."""
        opened = self.begin(plan, slack=slack)
        self.forward(opened)
        self.end(opened)
        while len(self.outstanding) > self.depth:
            self.recent += self.read_oldest()
        return opened.step

    def begin(
        self,
        plan: list[Row],
        decodes: list[bool] | None = None,
        slack: list[tuple[int, int]] | None = None,
    ) -> Open:
        """slack: by how much each row's bounds are lower and higher than the host could tell."""
        spans = [self.bounds(slot) if slot >= 0 else (0, 0) for slot, *_ in plan]
        if slack is not None:
            spans = [
                (max(low - below, 0), high + above)
                for (low, high), (below, above) in zip(spans, slack, strict=True)
            ]
        fields = [
            [slot for slot, *_ in plan],
            [low for low, _ in spans],
            [high for _, high in spans],
            [certain + len(drafts) for _, certain, drafts, _ in plan],
            [len(drafts) for _, _, drafts, _ in plan],
        ]
        arrays = [np.array(field, np.int32) for field in fields]
        if self.says_decodes:
            decodes = [self.decodes(row) for row in plan]
        flags = None if decodes is None else np.array(decodes, bool)
        rows = StepRows(*arrays, flags, *self._saves(plan))
        for array in arrays:  # which this runner uses again
            array.fill(-77)
        if not self.own_all:
            self._hand_out(rows)
        lost = sum(loses(self, row) for row in plan)
        if lost and self.debug:
            with pytest.raises(ValueError, match="which passes the wanted position"):
                self.manager.begin_step(rows)
        self.manager.debug, before = self.debug and not lost, self.manager.stats().lost_checkpoints
        step = self.manager.begin_step(rows)
        # Told from the bounds, which are those of `bounds` unless they have slack.
        assert slack or self.manager.stats().lost_checkpoints == before + lost
        self.manager.debug = self.debug
        requests = [self.requests[slot] if slot >= 0 else None for slot, *_ in plan]
        opened = Open(step, plan, requests, [], [])
        for request, (_, certain, drafts, accepted) in zip(requests, plan, strict=True):
            if request is None:
                opened.starts.append(0)
                opened.checkpoints.append(set())
                continue
            most = certain + len(drafts) if accepted or drafts else certain
            request.in_flight.append((most, certain))
            opened.starts.append(request.computed)
            cut = cut_of(self, request, certain, drafts)
            self.cuts += cut > 0
            opened.checkpoints.append(self._may_leave(request, certain, most) | ({cut} - {0}))
        self.outstanding.append(opened)
        return opened

    def _saves(self, plan: list[Row]) -> tuple[np.ndarray, ...]:
        """`save_at` and `save_to` of the rows, if the layout has them."""
        return ()

    def passes(self, request: Request, certain: int) -> list[int]:
        """Wanted positions that so many more tokens reach or pass."""
        return request.passes(certain, self.layout.block_size)

    def decodes(self, row: Row) -> bool:
        """Drafts, or the last token that there is."""
        slot, certain, drafts, _ = row
        if slot < 0:
            return False
        request = self.requests[slot]
        return bool(drafts) or (certain == 1 and request.computed + 1 == len(request.tokens))

    def _may_leave(self, request: Request, certain: int, most: int) -> set[int]:
        """Boundaries whose checkpoints may come of a step that computes `certain..most` tokens."""
        reached = range(request.computed + certain, request.computed + most + 1)
        block = self.layout.block_size
        return {b for b in reached if b % block == 0 and request.keeps(b)}

    def knows(self, opened: Open, row: int) -> bool:
        """Whether the host knew exactly what `may_copy` depends on."""
        rows = opened.step.rows
        return bool(rows.computed_min[row] == rows.computed_max[row])

    def may_copy(self, opened: Open, row: int) -> bool:
        """Whether some count makes this step copy a state in this row."""
        return bool(opened.plan[row][2]) and bool(opened.checkpoints[row])

    def forward(self, opened: Open) -> None:
        """Run the rows whose requests are still there; before the next step begins."""
        step = opened.step
        places = torch.stack([step.read_column, step.read_offset, step.write_column]).tolist()
        cuts = step.positions.cuts
        inside = np.zeros((0, 0)) if cuts is None else torch.stack(list(cuts)).cpu().numpy()
        for i, (request, (_, certain, drafts, _)) in enumerate(
            zip(opened.requests, opened.plan, strict=True)
        ):
            if request is None:
                assert (places[0][i], places[2][i]) == (-1, -1)
                assert cuts is None or [*inside[:, i]] == [0, -1]
            elif self.requests.get(request.slot) is request:
                if step.rows.decodes is not None and not step.rows.decodes[i]:
                    assert places[1][i] == 0
                self._forward(request, certain, drafts, *(p[i] for p in places))
                if cuts is not None:
                    leave_cut(self, request, certain, opened.checkpoints[i], *inside[:, i])
        assert all(row == -1 for place in places for row in place[len(opened.plan) :])
        opened.ran = True

    def end(self, opened: Open) -> None:
        """Accept what was planned; rows whose requests have gone get a count all the same."""
        counts = torch.zeros(len(opened.plan), dtype=torch.int32, device=self.device)
        for i, (*_, accepted) in enumerate(opened.plan):
            counts[i : i + 1] = accepted
        rows = list(zip(opened.requests, opened.plan, opened.checkpoints, strict=True))
        mine = [(s, d, a) for r, (s, _, d, a), _ in rows if r and self.requests.get(s) is r]
        live = [s for s, d, a in mine if d and not a and self.manager.holds(s)]
        if live and self.debug:
            with pytest.raises(ValueError, match="0 with drafts means"):
                self.manager.end_step(opened.step, counts)
        self.manager.debug = self.debug and not live
        self.manager.end_step(opened.step, counts)
        self.manager.debug = self.debug
        for request, (_, certain, drafts, accepted), checkpoints in rows:
            if request is None or self.requests.get(request.slot) is not request:
                continue
            request.dead = not accepted and bool(drafts)
            taken = drafts[: max(accepted, 1) - 1]
            request.place = self._place(request.computed + certain, drafts, len(taken), checkpoints)
            request.certain = request.computed + certain
            if accepted:
                emitted = [*taken, (sum(taken) + 7 * request.computed) % TOKENS]
                request.tokens[request.computed + certain :] = emitted
            request.computed += certain + len(taken)

    def _place(
        self, certain: int, drafts: list[int], taken: int, checkpoints: set[int]
    ) -> tuple[int, int]:
        """Column and offset at which the state lies after a step."""
        end = certain + len(drafts)
        home = bool(drafts) and taken == len(drafts) and end in checkpoints
        return -(-end // self.layout.block_size) - 1, 0 if home else taken

    def abandon(self, opened: Open) -> None:
        """The forward pass failed: the step's requests end, nobody else notices."""
        self.manager.abandon(opened.step)
        opened.abandoned = True
        self._shed()
        for request in opened.requests:
            if request is not None and self.requests.get(request.slot) is request:
                self._forget_blocks(self.requests.pop(request.slot))

    def _shed(self) -> None:
        """An abandoned step counts as outstanding while an older one does."""
        while self.outstanding and self.outstanding[0].abandoned:
            self.outstanding.pop(0)

    def read_oldest(self) -> list[Checkpoint]:
        """Let the host see the oldest outstanding result; checks and returns its checkpoints."""
        opened = self.outstanding.pop(0)
        self._shed()
        accepted = self.manager.accepted(opened.step)
        want = set()
        for i, (request, (slot, certain, drafts, count)) in enumerate(
            zip(opened.requests, opened.plan, strict=True)
        ):
            if request is None:
                continue
            assert accepted[i] == count
            request.in_flight.pop(0)
            request.known += certain + max(count, 1) - 1
            if self.requests.get(slot) is not request:
                continue
            if request.dead and (count or not drafts):
                continue  # a later step killed it, which strategies learn sooner or later
            if request.dead:
                self._forget_blocks(self.requests.pop(slot))
                continue
            last = opened.starts[i] + certain + max(count, 1) - 1
            want |= {(slot, request.generation, b) for b in opened.checkpoints[i] if b <= last}
        checkpoints = self.manager.published(opened.step)
        checkpoints = [s for s in checkpoints if not self.requests[s.slot].dead]
        found = {checkpoint[:3] for checkpoint in checkpoints}
        assert found == want, (self.manager.strategy, found, want)
        for checkpoint in checkpoints:
            request = self.requests[checkpoint.slot]
            tokens = request.tokens[: checkpoint.position]
            blocks = [group[checkpoint.column] for group in request.blocks]
            self.check(blocks, blocks, 0, tokens)
            request.published[checkpoint.column] = request.taken[checkpoint.column]
        return checkpoints

    def keep(self, checkpoint: Checkpoint) -> None:
        """Pin a checkpoint's blocks, so that later requests can start from it."""
        request = self.requests[checkpoint.slot]
        blocks = [group[checkpoint.column] for group in request.blocks]
        for block in blocks:
            self.pool.share(block)
        self.kept.append(Kept(request.tokens[: checkpoint.position], blocks))

    def check(self, windows: list[int], states: list[int], offset: int, tokens: list[int]) -> None:
        """The state in these blocks (per group) is that of exactly `tokens`."""
        for layer, (window, ssm) in self.states.items():
            group = self.group_of[layer]
            inputs = self.layout.positions_first(window)[windows[group], offset : offset + 3]
            assert_state(inputs, ssm[states[group]], tokens)

    def _forward(
        self, request: Request, certain: int, drafts: list[int], read: int, offset: int, write: int
    ) -> None:
        n = request.computed
        tokens = [*request.tokens[n : n + certain], *drafts]
        assert len(tokens) == certain + len(drafts), "the request has no such tokens yet"
        assert write == -(-(n + len(tokens)) // self.layout.block_size) - 1
        assert (read < 0) == (n == 0)
        assert read in (-1, write) or not self.manager.in_place
        blocks = request.blocks
        if read >= 0:
            windows = [group[read] for group in blocks]
            states = [group[read + offset] for group in blocks]
            self.check(windows, states, offset, request.tokens[:n])
        history = request.tokens[:n] + tokens
        padded = [0, 0, 0] + [t + 1 for t in history]
        keep = padded[len(padded) - 3 - len(drafts) :]
        for layer, (window, ssm) in self.states.items():
            group = blocks[self.group_of[layer]]
            target = self.layout.positions_first(window)[group[write], : len(keep)]
            target.copy_(torch.tensor(keep).to(target.dtype)[:, None].expand_as(target))
            for j in range(len(drafts) + 1):
                ssm[group[write + j]].fill_(prefix_hash(history[: n + certain + j]))
