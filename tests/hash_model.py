"""A model whose state is exactly checkable: its SSM state is a rolling hash of all tokens consumed,
its convolution window the last tokens themselves. Any stale, mixed or misplaced state is a wrong
integer. `HashRunner` drives one manager with it, as a model runner would.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Snapshot, Step

PRIME = 2039  # every hash is an integer below 2**11: exact in float16
TOKENS = 251  # every token is below 2**8: exact in bfloat16


def prefix_hash(tokens: list[int]) -> int:
    value = 1
    for token in tokens:
        value = (value * 31 + token + 1) % PRIME
    return value


@dataclass
class Request:
    """A request with its exact history, and what its host is allowed to know of it."""

    slot: int
    tokens: list[int]  # prompt and everything emitted: the token at position n is fed next
    computed: int = 0
    known: int = 0  # computed tokens as of the last result that the host has read
    generation: int = 0
    blocks: list[dict[int, int]] = field(default_factory=list)  # per group {column: block id}
    in_flight: list[tuple[int, int]] = field(default_factory=list)  # (most, least) advance


@dataclass
class Kept:
    """A published snapshot that holds on to its blocks, one per group."""

    tokens: list[int]
    blocks: list[int]


class HashRunner:
    """Model runner around one `HybridStateManager`, with block pools, for `groups` cache groups."""

    def __init__(
        self,
        *,
        block_size: int = 8,
        num_draft: int = 3,
        max_requests: int = 4,
        strategy: str = "auto",
        in_place: bool = False,
        depth: int = 0,
        conv_layout: str = "SD",
        conv_dtype: torch.dtype = torch.float32,
        ssm_dtype: torch.dtype = torch.float32,
        groups: int = 1,
        layers: int = 2,
        columns: int = 24,
        channels: int = 2,
        ssm_shape: tuple[int, int, int] = (1, 2, 4),
        device: str = "cpu",
        num_blocks: int | None = None,
    ) -> None:
        self.layout = StateLayout(
            conv_channels=channels,
            conv_width=4,
            ssm_shape=ssm_shape,
            num_speculative_tokens=num_draft,
            block_size=block_size,
            conv_dtype=conv_dtype,
            ssm_dtype=ssm_dtype,
            conv_layout=conv_layout,  # type: ignore[arg-type]
        )
        self.depth, self.num_draft, self.device = depth, num_draft, device
        self.manager = HybridStateManager(
            self.layout,
            max_requests,
            num_draft,
            device,
            strategy=strategy,  # type: ignore[arg-type]
            in_place=in_place,
            steps_in_flight=depth,
            debug=True,
        )
        count = num_blocks or groups * max_requests * (num_draft + 6) + 64
        self.states = {i: self.layout.allocate(count, device) for i in range(layers)}
        self.tables = [
            torch.full((max_requests, columns), -1, dtype=torch.int32, device=device)
            for _ in range(groups)
        ]
        self.group_of = {i: i % groups for i in range(layers)}
        self.manager.bind(self.states, self.tables, self.group_of)
        self.free = list(range(count - 1, -1, -1))
        self.users = [0] * count
        self.requests: dict[int, Request] = {}
        self.kept: list[Kept] = []
        self.outstanding: list[tuple[Step, list[Request]]] = []
        self.recent: list[Snapshot] = []  # published by steps that were read meanwhile
        self.counts = torch.zeros(max_requests, dtype=torch.int32, device=device)
        everything = torch.arange(count, device=device)
        self.manager.fill(everything, float("nan"))

    # -- requests and blocks ---------------------------------------------------------------------

    def admit(self, slot: int, tokens: list[int], hit: Kept | None = None) -> None:
        request = Request(slot, list(tokens), blocks=[{} for _ in self.tables])
        column = None
        if hit is not None:
            assert tokens[: len(hit.tokens)] == hit.tokens
            request.computed = request.known = len(hit.tokens)
            column = len(hit.tokens) // self.layout.block_size - 1
            for group, block in enumerate(hit.blocks):
                self._own(request, group, column, block)
        request.generation = self.manager.admit(slot, request.computed, column)
        self.requests[slot] = request

    def release(self, slot: int) -> None:
        request = self.requests.pop(slot)
        self.manager.release(slot)
        for group in range(len(self.tables)):
            for column in list(request.blocks[group]):
                self._disown(request, group, column)

    def forget(self, kept: Kept) -> None:
        self.kept.remove(kept)
        for block in kept.blocks:
            self._put(block)

    def _own(self, request: Request, group: int, column: int, block: int) -> None:
        self.users[block] += 1
        request.blocks[group][column] = block
        self.tables[group][request.slot, column : column + 1] = block

    def _disown(self, request: Request, group: int, column: int) -> None:
        block = request.blocks[group].pop(column)
        self.tables[group][request.slot, column : column + 1] = -1
        self._put(block)

    def _put(self, block: int) -> None:
        self.users[block] -= 1
        if not self.users[block]:
            self.free.append(block)
            self.manager.fill(torch.tensor([block], device=self.device), float("nan"))

    def _hand_out(self, rows: StepRows) -> None:
        first, last = self.manager.columns_needed(rows)
        for slot, low, high in zip(rows.slot, first, last, strict=True):
            if slot < 0:
                continue
            request = self.requests[int(slot)]
            for group, blocks in enumerate(request.blocks):
                for column in [c for c in blocks if c < low]:
                    self._disown(request, group, column)
                for column in range(int(low), int(high) + 1):
                    if column not in blocks:
                        block = self.free.pop()
                        self.manager.fill(torch.tensor([block], device=self.device), 0.0)
                        self._own(request, group, column, block)

    # -- one step --------------------------------------------------------------------------------

    def bounds(self, slot: int) -> tuple[int, int]:
        """What the host knows of a request's computed tokens: (at least, at most)."""
        request = self.requests[slot]
        least = request.known + sum(low for _, low in request.in_flight)
        return least, request.known + sum(high for high, _ in request.in_flight)

    def step(self, plan: list[tuple[int, int, list[int], int]]) -> Step:
        """Run rows (slot, certain tokens, drafts, accepted); accepted 0 = unfinished prefill."""
        spans = [self.bounds(slot) if slot >= 0 else (0, 0) for slot, *_ in plan]
        rows = StepRows(
            np.array([slot for slot, *_ in plan], np.int32),
            np.array([low for low, _ in spans], np.int32),
            np.array([high for _, high in spans], np.int32),
            np.array([certain + len(drafts) for _, certain, drafts, _ in plan], np.int32),
            np.array([len(drafts) for _, _, drafts, _ in plan], np.int32),
        )
        self._hand_out(rows)
        step = self.manager.begin_step(rows)
        places = torch.stack([step.read_column, step.read_offset, step.write_column]).tolist()
        requests = []
        for i, (slot, certain, drafts, accepted) in enumerate(plan):
            if slot < 0:
                assert (places[0][i], places[2][i]) == (-1, -1)
                continue
            request = self.requests[slot]
            requests.append(request)
            self._forward(request, certain, drafts, *(p[i] for p in places))
            self.counts[i : i + 1] = accepted
            most = certain + len(drafts) if accepted else certain
            request.in_flight.append((most, certain))
        self.manager.end_step(step, self.counts)
        for slot, certain, drafts, accepted in plan:
            if slot >= 0:
                request = self.requests[slot]
                taken = drafts[: max(accepted, 1) - 1]
                request.tokens[request.computed + certain :] = (
                    request.tokens[request.computed + certain :]
                    if not accepted
                    else [*taken, (sum(taken) + 7 * request.computed) % TOKENS]
                )
                request.computed += certain + len(taken)
        self.outstanding.append((step, [self.requests[s] for s, *_ in plan if s >= 0]))
        while len(self.outstanding) > self.depth:
            self.recent += self.read_oldest()
        return step

    def read_oldest(self) -> list[Snapshot]:
        """Let the host see the oldest outstanding result; checks and returns its snapshots."""
        step, requests = self.outstanding.pop(0)
        accepted = self.manager.accepted(step)
        live = [i for i in range(len(step.rows)) if step.rows.slot[i] >= 0]
        for i, request in zip(live, requests, strict=True):
            certain = int(step.rows.scheduled[i] - step.rows.draft[i])
            request.known += certain + max(int(accepted[i]), 1) - 1
            request.in_flight.pop(0)
        snapshots = self.manager.published(step)
        for snapshot in snapshots:
            request = self.requests[snapshot.slot]
            assert snapshot.generation == request.generation
            tokens = request.tokens[: snapshot.boundary]
            blocks = [group[snapshot.column] for group in request.blocks]
            self.check(blocks, blocks, 0, tokens)
        return snapshots

    def keep(self, snapshot: Snapshot) -> None:
        """Pin a snapshot's blocks, so that later requests can start from it."""
        request = self.requests[snapshot.slot]
        blocks = [group[snapshot.column] for group in request.blocks]
        for block in blocks:
            self.users[block] += 1
        self.kept.append(Kept(request.tokens[: snapshot.boundary], blocks))

    def check(self, windows: list[int], states: list[int], offset: int, tokens: list[int]) -> None:
        """The state in these blocks (per group) is that of exactly `tokens`."""
        want = prefix_hash(tokens)
        last = ([0, 0, 0] + [t + 1 for t in tokens])[-3:]
        for layer, (window, ssm) in self.states.items():
            group = self.group_of[layer]
            got = ssm[states[group]].float().flatten().tolist()
            assert got == [want] * len(got), (layer, got[0], want)
            inputs = self.layout.positions_first(window)[windows[group], offset : offset + 3]
            assert inputs.float().tolist() == [[t] * inputs.shape[1] for t in last]

    def _forward(
        self, request: Request, certain: int, drafts: list[int], read: int, offset: int, write: int
    ) -> None:
        n = request.computed
        tokens = [*request.tokens[n : n + certain], *drafts]
        assert len(tokens) == certain + len(drafts), "the request has no such tokens yet"
        assert write == -(-(n + len(tokens)) // self.layout.block_size) - 1
        assert (read < 0) == (n == 0)
        blocks = request.blocks
        if read >= 0:
            windows = [group[read] for group in blocks]
            self.check(
                windows, [group[read + offset] for group in blocks], offset, request.tokens[:n]
            )
        history = request.tokens[:n] + tokens
        padded = [0, 0, 0] + [t + 1 for t in history]
        keep = padded[len(padded) - 3 - len(drafts) :]
        for layer, (window, ssm) in self.states.items():
            group = blocks[self.group_of[layer]]
            target = self.layout.positions_first(window)[group[write], : len(keep)]
            target.copy_(torch.tensor(keep).to(target.dtype)[:, None].expand_as(target))
            for j in range(len(drafts) + 1):
                ssm[group[write + j]].fill_(prefix_hash(history[: n + certain + j]))
