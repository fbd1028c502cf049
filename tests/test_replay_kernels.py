"""The replay layout: its references against the columns layout, its kernels against them.

As in test_state_kernels: kernels run on a GPU where there is one, else in a process of their own
with Triton's interpreter on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_runtime.kernels.causal_conv import causal_conv_reference
from hybrid_runtime.kernels.replay import (
    Records,
    Replay,
    Rounding,
    replay_update_reference,
    round_state,
    rounding_key,
)
from hybrid_runtime.kernels.replay_launch import CHUNK, SHAPES, spread
from hybrid_runtime.kernels.replay_materialise import (
    replay_materialise,
    replay_materialise_reference,
)
from hybrid_runtime.kernels.replay_update import replay_update
from hybrid_runtime.kernels.replay_window import replay_window_reference, replay_window_update
from hybrid_runtime.kernels.ssm import ssm_update_reference
from hybrid_runtime.kernels.state_table import StateTable

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"
kernels = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="runs in the interpreter's process")
plain = pytest.mark.skipif(INTERPRETED, reason="runs no kernel")
SEEDS = range(5 if CUDA else 1)
ROUNDS = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels run in this process")
def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def noise(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


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

    def records(self, generator: torch.Generator, slots: int) -> Records:
        shape = (self.heads, self.dim, self.state)
        records = Records.allocate(1, slots, self.drafts, shape, self.groups, self.x, DEVICE)
        for part in records[:2]:
            part.copy_(noise(generator, *part.shape, dtype=self.x))
        records.dt.copy_(torch.rand(records.dt.shape, generator=generator, device=DEVICE))
        return records.layer(0)


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
        self.replay = Replay(*columns[2:8])
        self.position = columns[0] * 7 + 100
        self.arguments: dict[str, Any] = {
            "block_table": self.table,
            "slot": columns[8],
            "row_start": start,
            "draft": columns[1],
            "replay": self.replay,
            "max_scheduled": tokens,
        }
        live = (columns[8] >= 0) & (self.replay.write_column >= 0)
        owner = torch.repeat_interleave(torch.arange(len(rows), device=DEVICE), columns[0].long())
        self.owned = torch.cat([live[owner], torch.zeros(3, dtype=torch.bool, device=DEVICE)])
        self.active = [r for r in rows if r[0] > 0 and r[5] >= 0 and r[8] >= 0]


# In the interpreter time goes by programs and the operations of each: small models, heads least.
SSMS = [
    Ssm(),
    Ssm(x=torch.float32),
    *(Ssm(x=torch.float32, drafts=d, tokens=d + 1) for d in (0, 2, 4)),
    Ssm(drafts=7, tokens=8, heads=1, groups=1),
    Ssm(drafts=1, tokens=6),
    Ssm(drafts=5, tokens=2),
    Ssm(groups=1, pad=3),
    Ssm(heads=4),
    Ssm(heads=1, groups=1, dim=22),
    Ssm(heads=1, groups=1, state=128),
    Ssm(dim=5, state=12),
    Ssm(dim=5, state=50, states=torch.float16),
    Ssm(states=torch.float16, groups=1, pad=5, skew=1),
    Ssm(x=torch.float32, limits=(0.3, 0.9)),
    Ssm(states=torch.float16, rounding=True),
    Ssm(states=torch.bfloat16, rounding=True),
    Ssm(x=torch.float16, states=torch.float16),
    Ssm(x=torch.float32, states=torch.bfloat16),
    Ssm(states=torch.float16, drafts=7, tokens=8, heads=1, groups=1),
    Ssm(states=torch.float16, drafts=6, tokens=10, heads=1, groups=1),
    Ssm(states=torch.float16, drafts=0, tokens=1),
    Ssm(states=torch.bfloat16, drafts=2, tokens=6, heads=4),
    Ssm(states=torch.float16, heads=2, groups=1, state=128, rounding=True),
    Ssm(states=torch.float16, heads=1, groups=1, dim=40, state=40),
    Ssm(states=torch.bfloat16, groups=1, limits=(0.1, 1e6), far=2e6),
]
if CUDA:
    big: dict[str, Any] = {"heads": 128, "groups": 8, "dim": 64, "state": 128}
    SSMS += [
        Ssm(**big),
        Ssm(**big, states=torch.float16),
        Ssm(**big, states=torch.float16, rounding=True),
        Ssm(heads=64, groups=8, dim=40, state=80, states=torch.float16),
        Ssm(**big, states=torch.bfloat16, drafts=5, tokens=6),
        Ssm(**big, x=torch.float32, drafts=7, tokens=8),
        Ssm(heads=128, groups=8, dim=80, state=128),
        Ssm(heads=64, groups=8, dim=64, state=128, drafts=0, tokens=1, pad=32),
    ]


@kernels
@pytest.mark.parametrize("shape", SSMS, ids=str)
def test_replay_update(shape: Ssm) -> None:
    for seed in SEEDS:
        rows = Rows(shape.drafts, shape.tokens, seed)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        size = shape.heads * shape.dim * shape.state
        flat = torch.full(
            (shape.skew + rows.blocks * (size + shape.pad),),
            float("nan"),
            dtype=shape.states,
            device=DEVICE,
        )
        pages = flat[shape.skew :].view(rows.blocks, -1)
        states = pages[:, :size].unflatten(1, (shape.heads, shape.dim, shape.state))
        records = shape.records(generator, rows.slots)
        for _, _, read, fold, turn, _, _, _, slot in rows.active:
            used = fold if read >= 0 else 0
            for part in records:  # what no accepted guess has written is never looked at
                part[turn, slot, used:] = float("nan")
                part[1 - turn, slot] = float("nan")
            if read >= 0:
                states[rows.table[slot, read]] = noise(
                    generator, shape.heads, shape.dim, shape.state, dtype=shape.states
                )
        before = flat.clone(), Records(*(part.clone() for part in records))
        arguments: dict[str, Any] = {
            **shape.inputs(generator, rows.tokens),
            **shape.vectors(generator, torch.float32),
            **rows.arguments,
        }
        if shape.rounding:
            seeds = torch.arange(len(rows.position), device=DEVICE).int() - 5
            arguments["rounding"] = Rounding(seeds, rows.position, 3)
        y = replay_update(states=states, records=records, **arguments)
        after, mine = flat.clone(), Records(*(part.clone() for part in records))
        flat.copy_(before[0])
        for part, old in zip(records, before[1], strict=True):
            part.copy_(old)
        y_reference = replay_update_reference(states=states, records=records, **arguments)
        assert y.dtype == y_reference.dtype
        assert not y[~rows.owned].any()
        error = (y.float() - y_reference.float()).abs().max() / y_reference.float().abs().max()
        assert error <= ROUNDS[shape.x]
        tolerance = ROUNDS[shape.states] * (2 if shape.rounding else 1)
        written = {int(rows.table[r[8], r[5]]) for r in rows.active}
        written |= {int(rows.table[r[8], r[6]]) for r in rows.active if r[6] >= 0}
        got = after[shape.skew :].view(rows.blocks, -1)[:, :size].unflatten(1, states.shape[1:])
        for block in written:
            want = states[block].float()
            assert want.isfinite().all()
            assert (got[block].float() - want).abs().max() <= tolerance * want.abs().max()
            if shape.rounding:
                assert (got[block] == states[block]).float().mean() > 0.99
            # Nothing else changed: put the reference's states over ours and compare all bytes.
            got[block] = states[block]
        assert same_bytes(after, flat)
        assert same_bytes(mine.x, records.x)
        assert same_bytes(mine.B, records.B)
        torch.testing.assert_close(mine.dt, records.dt, rtol=2e-6, atol=0, equal_nan=True)


@kernels
@pytest.mark.parametrize("states", [torch.float16, torch.bfloat16], ids=str)
def test_queries_of_any_size(states: torch.dtype) -> None:
    """Outputs without D are linear in C, so a power of two passes through, far from fp16's range
    too, where products with an fp16 state have to bring C first."""
    shape = Ssm(states=states, state=32, heads=1, groups=1, drafts=2, tokens=3)
    rows = Rows(shape.drafts, shape.tokens, 0)
    generator = torch.Generator(DEVICE).manual_seed(0)
    arguments = shape.inputs(generator, rows.tokens) | shape.vectors(generator, torch.float32)
    arguments |= rows.arguments | {"D": torch.zeros(shape.heads, device=DEVICE)}
    pool = noise(generator, rows.blocks, shape.heads, shape.dim, shape.state, dtype=states)
    records = shape.records(generator, rows.slots)
    generator = torch.Generator(DEVICE).manual_seed(1)
    power = torch.randint(-60, 60, (rows.tokens,), generator=generator, device=DEVICE)
    scale = torch.exp2(power.float())[:, None, None]
    tiny = torch.tensor(2.0**-118, device=DEVICE)
    outputs = []
    for factor in (scale**0, scale, tiny, tiny * 0):
        C = (arguments["C"].float() * factor).to(shape.x)
        copies = Records(*(part.clone() for part in records))
        outputs.append(
            replay_update(states=pool.clone(), records=copies, **(arguments | {"C": C})).float()
        )
    assert outputs[0].any()
    assert torch.equal(outputs[0] * scale, outputs[1])
    # What guesses add to each other loses digits that small.
    torch.testing.assert_close(outputs[2] / tiny, outputs[0], rtol=0.05, atol=0.05)
    assert not outputs[3].any()


@plain
def test_few_rows_are_spread_over_more_programs() -> None:
    shape = SHAPES[4]
    assert spread(shape, 64, 32 * 128, 900) == shape
    assert spread(shape, 64, 4 * 128, 900) == shape._replace(run=2)
    assert spread(shape, 64, 128, 900) == shape._replace(run=1, tile=8)
    assert spread(shape, 64, 1, 900) == shape._replace(run=1, tile=8)
    assert spread(CHUNK, 64, 1, 900) == CHUNK._replace(run=1, tile=16)


@kernels
@pytest.mark.parametrize("states", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_guesses_that_are_not_finite_leave_the_state_alone(states: torch.dtype) -> None:
    shape = Ssm(states=states, drafts=2)
    rows = Rows(2, 3, 0)
    generator = torch.Generator(DEVICE).manual_seed(0)
    inputs = shape.inputs(generator, rows.tokens)
    rest = shape.vectors(generator, torch.float32) | rows.arguments
    pool = noise(generator, rows.blocks, shape.heads, shape.dim, shape.state, dtype=states)
    records = shape.records(generator, rows.slots)
    spoilt = {name: part.clone() for name, part in inputs.items()}
    for end, draft in zip(rows.arguments["row_start"][1:], rows.arguments["draft"], strict=True):
        for part in spoilt.values():
            part[end - draft : end] = float("nan")
    after = []
    for given in (inputs, spoilt):
        after.append(pool.clone())
        copies = Records(*(part.clone() for part in records))
        replay_update(states=after[-1], records=copies, **given, **rest)
    assert not same_bytes(after[0], pool)
    assert same_bytes(*after)


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
        self.records = shape.records(self.generator, slots)
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
        rows: dict[str, Any] = {
            "slot": slot, "row_start": starts, "draft": drafts, "max_scheduled": shape.tokens,
        }  # fmt: skip
        inputs = shape.inputs(self.generator, int(starts[-1])) | self.vectors
        before = self.columns.clone()
        wide = ssm_update_reference(
            **inputs, **rows, states=self.columns, block_table=self.wide_table,
            read_column=ints(*reads), read_offset=fold, write_column=zero,
        )  # fmt: skip
        replay = Replay(ints(*reads), fold, turn, zero, ints(*snapshot), ints(*after))
        y = update(
            **inputs, **rows, states=self.states, records=self.records, block_table=self.table,
            replay=replay,
        )  # fmt: skip
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


@plain
@pytest.mark.parametrize("drafts", range(6))
def test_reference_follows_the_columns_layout(drafts: int) -> None:
    shape = Ssm(x=torch.float64, states=torch.float64, drafts=drafts, tokens=drafts + 2)
    snapshots = 0
    for seed in range(4):
        history = History(shape, slots=4, seed=seed, block=drafts + 3)
        for _ in range(25):
            y, wide = history.step(replay_update_reference)
            torch.testing.assert_close(y, wide, rtol=1e-11, atol=1e-11)
            snapshots += history.check(1e-12)
    assert snapshots > 20


@plain
def test_error_of_fp32_stays_small_over_many_tokens() -> None:
    shape = Ssm(x=torch.float32, heads=8, groups=2)
    history = History(shape, slots=2, seed=0, block=1 << 30)
    for _ in range(800):
        history.step(replay_update_reference)
    history.check(5e-6)
    assert min(history.certain) > 1000


@kernels
@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_kernel_follows_the_columns_layout(drafts: int) -> None:
    shape = Ssm(x=torch.float32, drafts=drafts, tokens=drafts + 1, heads=1, groups=1)
    history = History(shape, slots=4, seed=drafts, block=drafts + 2)
    snapshots = 0
    for _ in range(40 if CUDA else 15):
        y, wide = history.step(replay_update)
        assert (y - wide).abs().max() <= 1e-5 * wide.abs().max()
        snapshots += history.check(1e-5)
    assert snapshots > 5


@dataclass(frozen=True)
class Window:
    """One configuration of the convolution; each below changes one thing of the base."""

    x: torch.dtype = torch.bfloat16
    window: torch.dtype = torch.bfloat16
    layout: str = "SD"
    drafts: int = 3
    tokens: int = 4
    channels: int = 40
    taps: int = 4


WINDOWS = [
    Window(),
    Window(x=torch.float32, window=torch.float32),
    Window(layout="DS"),
    Window(window=torch.float32),
    Window(drafts=0, tokens=1),
    Window(drafts=5, tokens=6),
    Window(tokens=8),
    Window(taps=2),
    Window(taps=1),
    Window(channels=300, layout="DS"),
]


@kernels
@pytest.mark.parametrize("shape", WINDOWS, ids=str)
def test_replay_window(shape: Window) -> None:
    for seed in SEEDS:
        rows = Rows(shape.drafts, shape.tokens, seed)
        generator = torch.Generator(DEVICE).manual_seed(seed)
        history, channels = shape.taps - 1, shape.channels
        length = history + shape.drafts
        windows = torch.full((rows.blocks, length, channels), float("nan"), device=DEVICE)
        windows = windows.to(shape.window)
        if shape.layout == "DS":
            windows = windows.mT.contiguous().mT
        for _, _, read, fold, _, _, _, _, slot in rows.active:
            if read >= 0:
                old = noise(generator, history + fold, channels, dtype=shape.window)
                windows[rows.table[slot, read], : history + fold] = old
        x = noise(generator, rows.tokens, channels + 8, dtype=shape.x)[:, 8:]
        weight = noise(generator, channels, shape.taps, dtype=shape.x)
        before = windows.clone()
        y = replay_window_update(x, weight, None, windows, **rows.arguments)
        after = windows.clone()
        windows.copy_(before)
        want = replay_window_reference(x, weight, None, windows, **rows.arguments)
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2}[shape.x]
        torch.testing.assert_close(y, want, rtol=tolerance, atol=tolerance)
        assert same_bytes(after, windows)


@plain
@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_window_reference_keeps_the_last_inputs(drafts: int) -> None:
    """Against lists of all inputs: the window at every step, and every boundary's."""
    pick = torch.Generator().manual_seed(drafts)
    taps, channels, block = 4, 2, drafts + 2

    def below(high: int) -> int:
        return int(torch.randint(high, (1,), generator=pick))

    windows = torch.full((2, taps - 1 + drafts, channels), float("nan"), dtype=torch.float64)
    table, weight = ints([1, 0]).cpu(), torch.rand(channels, taps, generator=pick).double()
    inputs = torch.zeros(taps - 1, channels, dtype=torch.float64)  # zeros before the first token
    fold, certain, saved = 0, 0, 0
    for _ in range(40):
        draft = below(drafts + 1)
        count = 1 + below(2)
        running = certain + fold + count
        boundary = running // block * block
        crosses = boundary > certain
        x = torch.rand(count + draft, channels, generator=pick).double()
        values = [0 if certain else -1, fold, 0, 0, 1 if crosses else -1, boundary - certain]
        replay = Replay(*(torch.tensor([v], dtype=torch.int32) for v in values))
        row: dict[str, Any] = {
            "slot": torch.zeros(1, dtype=torch.int32),
            "row_start": torch.tensor([0, count + draft], dtype=torch.int32),
            "draft": torch.tensor([draft], dtype=torch.int32),
            "max_scheduled": drafts + 2,
        }
        history = inputs[: taps - 1 + certain + fold]
        y = replay_window_reference(x, weight, None, windows, table, replay=replay, **row)
        inputs = torch.cat([history, x])
        want = causal_conv_reference(
            inputs[certain + fold :], weight, None, torch.zeros(1, taps - 1, channels).double(),
            table * 0, row["slot"], row["row_start"] + ints(0, taps - 1).cpu(), row["draft"] * 0,
            row["slot"] - 1, row["slot"], row["slot"], taps + drafts + 2,
        )  # fmt: skip
        torch.testing.assert_close(y, want[taps - 1 :])
        assert torch.equal(windows[1, : taps - 1 + draft], inputs[running:])
        if crosses:
            saved += 1
            assert torch.equal(windows[0, : taps - 1], inputs[boundary : boundary + taps - 1])
        certain, fold = running, below(draft + 1)
    assert saved > 5


def materialised(
    shape: Ssm, layers: int, seed: int
) -> tuple[StateTable, Records, Tensor, dict[str, Any]]:
    """States, records and rows for a materialise launch; rows 0, 1, .. fold 0, 1, .. records."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    slots, taps = shape.drafts + 5, 3
    table = torch.randperm(2 * slots, generator=torch.Generator().manual_seed(seed))
    table = table.view(slots, 2).int().to(DEVICE)
    inner = (shape.heads, shape.dim, shape.state)
    states = [noise(generator, 2 * slots, *inner, dtype=shape.states) for _ in range(layers)]
    windows = [noise(generator, 2 * slots, taps + shape.drafts, 20, dtype=shape.x) for _ in states]
    every = [shape.records(generator, slots) for _ in states]
    records = Records(*(torch.stack(parts) for parts in zip(*every, strict=True)))
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed)).int().to(DEVICE)
    fold = torch.arange(slots, device=DEVICE).int() % (shape.drafts + 1)
    for i in range(slots):
        for part in records:
            part[:, i % 2, order[i].long(), int(fold[i]) :] = float("nan")
            part[:, 1 - i % 2, order[i].long()] = float("nan")
    ones = torch.ones(slots, dtype=torch.int32, device=DEVICE)
    read, write = ones * 0, torch.arange(slots, device=DEVICE).int() % 2
    read[-1], write[-2] = -1, -1
    replay = Replay(read, fold, torch.arange(slots, device=DEVICE).int() % 2, write, ones, ones)
    order[-3] = -1
    A_log = torch.rand(layers, shape.heads, generator=generator, device=DEVICE)
    state_table = StateTable.build(windows, states, [table] * layers, taps)
    return state_table, records, A_log, {"slot": order, "replay": replay}


MATERIALISED = [
    Ssm(),
    Ssm(states=torch.float16),
    Ssm(states=torch.bfloat16, dim=5, state=12),
    Ssm(drafts=0),
    Ssm(drafts=7, heads=1, groups=1, dim=40),
    Ssm(states=torch.float16, rounding=True),
]
if CUDA:
    MATERIALISED += [Ssm(**big), Ssm(**big, states=torch.float16)]


@kernels
@pytest.mark.parametrize("shape", MATERIALISED, ids=str)
def test_materialise(shape: Ssm) -> None:
    for seed in SEEDS:
        table, records, A_log, rows = materialised(shape, layers=2, seed=seed)
        count = len(rows["slot"])
        chosen = [i for i in range(count) if i != 2]
        listed = ints(*chosen[::-1], -1)
        if shape.rounding:
            position = torch.arange(count, device=DEVICE).int()
            rows["rounding"] = Rounding(position * 9 - 4, position + 70, 5)
        before = [t.clone() for t in (*table.windows, *table.ssm)]
        replay_materialise(table, records, A_log, listed, **rows)
        after = [t.clone() for t in (*table.windows, *table.ssm)]
        for tensor, old in zip((*table.windows, *table.ssm), before, strict=True):
            tensor.copy_(old)
        replay_materialise_reference(table, records, A_log, listed, **rows)
        for layer in range(2):
            assert same_bytes(after[layer], table.windows[layer])
            got, want = after[2 + layer], table.ssm[layer]
            assert want.isfinite().all()
            # A row that is already whole stays as it is, and so does all that was not listed.
            unchanged = (want == before[2 + layer]).flatten(1).all(1)
            assert torch.equal(got[unchanged], want[unchanged])
            tolerance = ROUNDS[shape.states] * (2 if shape.rounding else 1)
            assert (got.float() - want.float()).abs().max() <= tolerance * want.abs().max()
            assert not unchanged.all()


@plain
def test_materialise_reference_is_the_next_fold() -> None:
    """After any step, the materialised state is what the columns layout holds."""
    shape = Ssm(x=torch.float64, states=torch.float64)
    history = History(shape, slots=4, seed=3, block=1 << 30)
    for _ in range(30):
        history.step(replay_update_reference)
        everyone = torch.arange(4, dtype=torch.int32, device=DEVICE)
        held = ints(*(0 if n else -1 for n in history.certain))
        replay = Replay(
            held, ints(*history.fold), ints(*history.turn), everyone * 0 + 1, held, held
        )
        window = torch.zeros(8, 3 + shape.drafts, 2, device=DEVICE)
        table = StateTable.build([window], [history.states], [history.table], 3)
        stacked = Records(*(part[None] for part in history.records))
        A_log = history.vectors["A_log"][None]
        replay_materialise_reference(table, stacked, A_log, everyone, everyone, replay)
        for slot in range(4):
            if history.certain[slot]:
                want = history.columns[history.wide_table[slot, history.fold[slot]].long()]
                torch.testing.assert_close(history.live(1)[slot], want, rtol=1e-12, atol=1e-12)


@plain
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_right_on_average(dtype: torch.dtype) -> None:
    state = torch.tensor([1.0003, -0.7071, 2e-5, 300.2, 0.0, 3e-8], device=DEVICE)
    state = state.view(1, 1, 1, -1)
    keys = rounding_key(torch.arange(20000, device=DEVICE), 2, torch.arange(20000, device=DEVICE))
    rounded = round_state(state.expand(20000, -1, -1, -1), dtype, keys)
    digits = 10 if dtype == torch.float16 else 7
    unit = torch.exp2(torch.floor(torch.log2(state.abs().clamp(min=1e-30)))) * 2.0**-digits
    if dtype == torch.float16:
        unit = unit.clamp(min=2.0**-24)
    assert ((rounded.double() - state).abs() <= unit * 1.0001).all()
    assert ((rounded.double().mean(0) - state[0]).abs() <= 0.02 * unit[0]).all()
    assert (rounded[0] == round_state(state, dtype, keys[:1])[0]).all()
    assert (rounded[:, 0, 0, 0].unique().numel()) == 2


@kernels
def test_wrong_shapes_are_refused() -> None:
    shape = Ssm()
    rows = Rows(3, 4, 0)
    generator = torch.Generator(DEVICE).manual_seed(0)
    arguments = shape.inputs(generator, rows.tokens) | shape.vectors(generator, torch.float32)
    records = shape.records(generator, rows.slots)
    states = torch.zeros(rows.blocks, 2, 8, 16, device=DEVICE)
    for name, bad in {
        "states is": {"states": states[..., :12]},
        "states has strides": {"states": states.mT.contiguous().mT},
        "records.x is": {"records": records._replace(x=records.x[..., :4])},
        "records.B is torch.float32": {"records": records._replace(B=records.B.float())},
        "x has 2 heads": {"B": torch.zeros(rows.tokens, 3, 16, device=DEVICE)},
        "C is torch.float64": {"C": arguments["C"].double()},
    }.items():
        call: dict[str, Any] = {**arguments, **rows.arguments, "states": states}
        with pytest.raises(ValueError, match=name):
            replay_update(**(call | {"records": records} | bad))


@kernels
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_rows(tokens: int) -> None:
    shape = Ssm()
    generator = torch.Generator(DEVICE).manual_seed(0)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    y = replay_update(
        **shape.inputs(generator, tokens),
        **shape.vectors(generator, torch.float32),
        states=torch.zeros(1, 2, 8, 16, device=DEVICE),
        records=shape.records(generator, 2),
        block_table=none.view(0, 1),
        slot=none,
        row_start=ints(0),
        draft=none,
        replay=Replay(*[none] * 6),
        max_scheduled=4,
    )
    assert y.shape == (tokens, 2, 8)
    assert not y.any()


@pytest.mark.gpu
def test_nothing_waits_and_the_graph_replays() -> None:
    shape = Ssm(heads=4, groups=1, dim=16, state=32)
    rows = Rows(3, 4, 0)
    generator = torch.Generator(DEVICE).manual_seed(0)
    arguments = shape.inputs(generator, rows.tokens) | shape.vectors(generator, torch.float32)
    states = noise(generator, rows.blocks, 4, 16, 32, dtype=torch.float32)
    windows = noise(generator, rows.blocks, 6, 64, dtype=torch.bfloat16)
    records = shape.records(generator, rows.slots)
    x = arguments["x"].flatten(1)
    weight = noise(generator, 64, 4, dtype=torch.bfloat16)
    kept = [states, windows, *records]

    def run() -> tuple[Tensor, Tensor]:
        y = replay_window_update(x, weight, None, windows, **rows.arguments)
        return y, replay_update(**arguments, **rows.arguments, states=states, records=records)

    def reset() -> None:
        for tensor, value in zip(kept, held, strict=True):
            tensor.copy_(value)

    held = [t.clone() for t in kept]
    run()
    reset()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        want = [t.clone() for t in (*run(), *kept)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    reset()
    graph.replay()
    for got, expected in zip((*out, *kept), want, strict=True):
        assert same_bytes(got, expected)


@pytest.mark.gpu
def test_block_strides_beyond_32_bits() -> None:
    far = (1 << 30) + 4096
    pool = torch.zeros(3 * far + 8192, dtype=torch.float16, device="cuda")
    states = pool.as_strided((4, 2, 8, 16), (far, 128, 16, 1))
    shape = Ssm()
    generator = torch.Generator(DEVICE).manual_seed(0)
    states.copy_(noise(generator, 4, 2, 8, 16, dtype=torch.float16))
    near, records = states.clone(), shape.records(generator, 1)
    rows: dict[str, Any] = {
        "block_table": ints([3, 1, 2, 0]), "slot": ints(0), "row_start": ints(0, 4),
        "draft": ints(2), "max_scheduled": 4,
        "replay": Replay(ints(0), ints(2), ints(1), ints(0), ints(2), ints(1)),
    }  # fmt: skip
    inputs = shape.inputs(generator, 4) | shape.vectors(generator, torch.float32)
    other = Records(*(part.clone() for part in records))
    y = replay_update(**inputs, **rows, states=states, records=records)
    z = replay_update_reference(**inputs, **rows, states=near, records=other)
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(states.clone(), near, rtol=1e-3, atol=1e-3)
