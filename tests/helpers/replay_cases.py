"""What tests of the replay layout's kernels share: shapes with random inputs, rows of every kind,
and many steps of it beside the columns layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.interpreter import CUDA, INTERPRETED
from helpers.tensors import DEVICE, ints, noise
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.mamba.naive import selective_state_update_reference
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.replay.window_cache import WindowCache
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions

plain = pytest.mark.skipif(INTERPRETED, reason="runs no kernel")
SEEDS = range(5 if CUDA else 1)
BIG: dict[str, Any] = {"heads": 128, "groups": 8, "dim": 64, "state": 128}
ROUNDS = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Ssm:
    """One configuration; each below changes one thing of the base."""

    x: torch.dtype = torch.bfloat16
    states: torch.dtype = torch.float32
    drafts: int = 3
    tokens: int = 4
    heads: int = 2
    groups: int = 2
    dim: int = 8
    state: int = 16
    pad: int = 0  # elements behind each block's state, and behind each head's x
    skew: int = 0  # elements by which the pool starts off its allocation
    limits: tuple[float, float] = (0.0, float("inf"))
    rounding: bool = False
    far: float = 0.0  # added to every third token's time step, so that it erases the state

    def vectors(self, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "A_log": torch.log(1 + 7 * torch.rand(self.heads, generator=generator, device=DEVICE)),
            "D": noise(generator, self.heads, dtype=dtype),
            "dt_bias": noise(generator, self.heads, dtype=dtype),
            "dt_min": self.limits[0],
            "dt_max": self.limits[1],
        }

    def inputs(self, generator: torch.Generator, tokens: int) -> dict[str, Tensor]:
        """Of views of one tensor, as a model has them."""
        sizes = [
            self.heads * (self.dim + self.pad),
            self.groups * self.state,
            self.groups * self.state,
            5,
        ]
        mixed = noise(generator, tokens, sum(sizes) + self.heads, dtype=self.x)
        x, B, C, _, dt = mixed.split([*sizes, self.heads], dim=1)
        group = (self.groups, self.state)
        x = x.unflatten(1, (self.heads, self.dim + self.pad))[..., : self.dim]
        dt = 3 * dt
        dt[::3] += self.far
        return {"x": x, "dt": dt, "B": B.unflatten(1, group), "C": C.unflatten(1, group)}

    def window_cache(self, generator: torch.Generator, slots: int) -> WindowCache:
        shape = (self.heads, self.dim, self.state)
        window_cache = WindowCache.allocate(
            1, slots, self.drafts, shape, self.groups, self.x, DEVICE
        )
        for part in window_cache[:2]:
            part.copy_(noise(generator, *part.shape, dtype=self.x))
        window_cache.dt.copy_(torch.rand(window_cache.dt.shape, generator=generator, device=DEVICE))
        return window_cache.layer(0)


class Rows:
    """Rows with every number of folded, certain and guessed tokens and every place of a snapshot,
    reading the block they write, another, or none. Behind them padded rows of both kinds with and
    without tokens, an empty row, and tokens that belong to no row. Slots are not in row order.
    """

    def __init__(self, drafts: int, tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def pick(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=generator))

        # scheduled, draft, read, fold, turn, write, snapshot, after
        spec: list[list[int]] = []
        for fold in range(drafts + 1):
            draft = min((fold + 3) % (drafts + 1), tokens - 1)
            spec.append([draft + 1, draft, 0, fold, pick(0, 1), 0, -1, pick(0, 9)])
            draft = pick(0, min(drafts, tokens - 1))
            scheduled = min(draft + pick(1, 2), tokens)
            certain = scheduled - draft
            for after in (pick(0, fold), pick(fold + 1, fold + certain)):
                spec.append([scheduled, draft, 0, fold, pick(0, 1), 0, 2, after])
        draft = min(drafts, tokens - 1)
        spec.append([draft + 1, draft, 1, 0, 1, 0, -1, 0])
        spec.append([draft + 1, draft, -1, drafts, 0, 0, -1, 0])
        spec.append([tokens, draft, -1, drafts, 0, 0, 2, 1])
        spec.append([tokens, 0, 0, min(1, drafts), 0, 0, 2, tokens])
        spec.append([tokens, draft, 0, drafts, 1, 0, -1, 0])
        spec.append([1, 0, 0, 0, 0, 0, -1, 0])
        slots = len(spec)
        table = torch.randperm(3 * slots, generator=generator).int() + 1
        rows = [[*row, slot] for slot, row in enumerate(spec)]
        rows[1:1] = [[tokens, 0, 0, 0, 0, 0, 2, 1, -1], [0, 0, -1, 0, 0, -1, -1, 0, -1]]
        rows += [[1, 0, 0, 0, 0, -1, 2, 0, 0], [0, 0, 0, 0, 0, 0, 2, 0, 1]]
        order = torch.randperm(len(rows), generator=generator).tolist()
        rows = [rows[i] for i in order]
        columns = torch.tensor(rows).int().T.contiguous().to(DEVICE)
        start = torch.cat([ints(0), columns[0].cumsum(0).int()])
        self.slots, self.blocks, self.tokens = slots, 3 * slots + 1, int(start[-1]) + 3
        self.table = table.view(slots, 3).to(DEVICE)
        positions = ReplayPositions(*columns[2:8], certain=columns[0] * 7 + 100)
        self.rows = ReplayRows(self.table, columns[8], start, columns[1], positions)
        self.arguments: dict[str, Any] = {"rows": self.rows, "max_scheduled": tokens}
        live = (columns[8] >= 0) & (positions.write_column >= 0)
        owner = torch.repeat_interleave(torch.arange(len(rows), device=DEVICE), columns[0].long())
        self.owned = torch.cat([live[owner], torch.zeros(3, dtype=torch.bool, device=DEVICE)])
        self.active = [r for r in rows if r[0] > 0 and r[5] >= 0 and r[8] >= 0]


# In the interpreter time goes by programs and the operations of each: small models, heads least.


class History:
    """Steps with random acceptance in the replay layout, beside them the columns layout.

    Each slot has a live block (column 0) and a snapshot's (column 1); in the columns layout a
    block for each guess. A boundary lies after every `block` tokens.
    """

    def __init__(self, shape: Ssm, slots: int, seed: int, block: int) -> None:
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        self.pick = torch.Generator().manual_seed(seed)
        self.shape, self.slots, self.block = shape, slots, block
        inner = (shape.heads, shape.dim, shape.state)
        self.states = torch.full((2 * slots, *inner), float("nan"), device=DEVICE).to(shape.states)
        wide = slots * (shape.drafts + 1)
        self.columns = torch.full((wide, *inner), float("nan"), device=DEVICE).to(shape.states)
        order = torch.randperm(2 * slots, generator=self.pick)
        self.table = order.view(slots, 2).int().to(DEVICE)
        self.wide_table = torch.arange(wide, device=DEVICE).int().view(slots, -1)
        self.window_cache = shape.window_cache(self.generator, slots)
        fine = torch.promote_types(shape.x, torch.float32)
        self.vectors = shape.vectors(self.generator, fine)
        self.fold, self.turn = [0] * slots, [0] * slots
        self.certain = [0] * slots  # tokens in the live state
        self.snapshots: dict[int, tuple[int, Tensor]] = {}

    def below(self, high: int) -> int:
        return int(torch.randint(high, (1,), generator=self.pick))

    def step(self, update: Any) -> tuple[Tensor, Tensor]:
        """One step of some of the slots in any order; outputs of both layouts."""
        shape = self.shape
        slots = torch.randperm(self.slots, generator=self.pick).tolist()
        slots = slots[: 1 + self.below(self.slots)]
        draft = [self.below(min(shape.drafts, shape.tokens - 1) + 1) for _ in slots]
        # A row has one certain token, or several if no boundary lies inside them.
        scheduled = [d + 1 + self.below(shape.tokens - d) for d in draft]
        reads, snapshot, after = [], [], []
        for i, slot in enumerate(slots):
            final = self.certain[slot] + self.fold[slot]
            running = final + scheduled[i] - draft[i]
            boundary = running // self.block * self.block
            crosses = boundary > self.certain[slot]
            snapshot.append(1 if crosses else -1)
            after.append(boundary - self.certain[slot])
            reads.append(0 if self.certain[slot] else -1)
        starts = torch.tensor([0, *scheduled]).cumsum(0).int().to(DEVICE)
        slot, drafts, zero = ints(*slots), ints(*draft), ints(*[0] * len(slots))
        fold = ints(*(self.fold[s] for s in slots))
        turn = ints(*(self.turn[s] for s in slots))
        inputs = shape.inputs(self.generator, int(starts[-1])) | self.vectors
        before = self.columns.clone()
        wide_rows = StateRows(self.wide_table, slot, starts, drafts, ints(*reads), fold, zero)
        wide = selective_state_update_reference(
            **inputs, states=self.columns, rows=wide_rows, max_scheduled=shape.tokens
        )
        positions = ReplayPositions(
            read_column=ints(*reads), fold=fold, turn=turn, write_column=zero,
            snapshot_column=ints(*snapshot), snapshot_after=ints(*after), certain=zero,
        )  # fmt: skip
        y = update(
            **inputs,
            states=self.states,
            window_cache=self.window_cache,
            rows=ReplayRows(self.table, slot, starts, drafts, positions),
            max_scheduled=shape.tokens,
        )
        for i, slot_ in enumerate(slots):
            if snapshot[i] > 0:
                passed = after[i] - self.fold[slot_]
                if passed <= 0:  # one of the guesses that were accepted
                    state = before[self.wide_table[slot_, after[i]].long()]
                    self.snapshots[slot_] = (after[i] + self.certain[slot_], state)
                elif passed == scheduled[i] - draft[i]:
                    state = self.columns[self.wide_table[slot_, 0].long()].clone()
                    self.snapshots[slot_] = (after[i] + self.certain[slot_], state)
                else:
                    self.snapshots.pop(slot_, None)
            self.certain[slot_] += self.fold[slot_] + scheduled[i] - draft[i]
            self.fold[slot_] = self.below(draft[i] + 1)
            self.turn[slot_] ^= 1
        return y, wide

    def live(self, which: int = 0) -> Tensor:
        return self.states[self.table[:, which].long()]

    def check(self, tolerance: float) -> int:
        """Live states and snapshots against the columns layout; how many snapshots."""
        for slot in range(self.slots):
            pairs = [(0, self.columns[self.wide_table[slot, 0].long()])]
            if slot in self.snapshots:
                pairs.append((1, self.snapshots[slot][1]))
            for which, want in pairs:
                if self.certain[slot]:
                    got = self.live(which)[slot]
                    error = (got.double() - want.double()).abs().max()
                    assert error <= tolerance * want.double().abs().max()
        return len(self.snapshots)
