"""The state kernels against their references."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.interpreter import CUDA, kernels
from helpers.tensors import DEVICE
from helpers.tensors import noise as normal

from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.state_copy import (
    postcopy,
    postcopy_reference,
    precopy,
    precopy_reference,
)
from hybrid_runtime.kernels.step.state_table import StateTable


@dataclass(frozen=True)
class Shape:
    """One configuration; each test row below changes one thing of the base."""

    window: torch.dtype = torch.bfloat16
    ssm: torch.dtype = torch.float32
    layout: str = "SD"
    channels: int = 24
    state: tuple[int, int, int] = (2, 4, 8)
    layers: int = 2
    groups: int = 1
    rows: int = 5
    draft: int = 3
    pad: int = 0  # extra elements behind each block's SSM state: a padded page
    skew: int = 0  # elements by which the SSM pool starts off its allocation


BASE = Shape()
SHAPES = [
    BASE,
    Shape(layout="DS"),
    Shape(window=torch.float32),
    Shape(window=torch.float16, ssm=torch.bfloat16),
    Shape(ssm=torch.float16),
    Shape(layers=6, groups=3),
    Shape(rows=17),
    Shape(draft=1),
    Shape(draft=5),
    Shape(channels=5),
    Shape(pad=7),
    Shape(ssm=torch.bfloat16, pad=3, skew=1),
    Shape(skew=1),
]
if CUDA:
    SHAPES += [
        Shape(rows=64, state=(128, 64, 128), channels=10240),
        Shape(rows=64, state=(128, 64, 128), channels=10240, layout="DS", ssm=torch.float16),
    ]
BLOCK = 16


class Pools:
    """State of `shape` with random bytes, its block tables, and a step for every row."""

    def __init__(self, shape: Shape, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        self.columns = 3 + shape.draft
        blocks = shape.rows * self.columns * shape.groups + 1
        noise = partial(normal, generator)
        length = 3 + shape.draft
        self.conv_states, self.matrices = [], []
        size = shape.state[0] * shape.state[1] * shape.state[2]
        for _ in range(shape.layers):
            if shape.layout == "SD":
                self.conv_states.append(noise(blocks, length, shape.channels, dtype=shape.window))
            else:
                window = noise(blocks, shape.channels, length, dtype=shape.window)
                self.conv_states.append(window.transpose(1, 2))
            flat = noise(shape.skew + blocks * (size + shape.pad), dtype=shape.ssm)
            pages = flat[shape.skew :].view(blocks, size + shape.pad)[:, :size]
            self.matrices.append(pages.unflatten(1, shape.state))
        order = torch.randperm(blocks - 1, generator=generator, device=DEVICE).int() + 1
        tables = order.view(shape.groups, shape.rows, self.columns)
        self.tables = [tables[g].contiguous() for g in range(shape.groups)]
        chosen = [self.tables[i % shape.groups] for i in range(shape.layers)]
        self.table = StateTable.build(self.conv_states, self.matrices, chosen, 3)

    def bytes(self) -> list[torch.Tensor]:
        parts = (*self.conv_states, *self.matrices)
        return [t.contiguous().view(torch.uint8).clone() for t in parts]


def step_of(shape: Shape, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Entries, placement and counts in which about half of the rows cross a boundary."""
    generator = torch.Generator().manual_seed(seed)
    rows, d = shape.rows, shape.draft
    entries = torch.zeros(rows, fields.ENTRY_FIELDS, dtype=torch.int32)
    entries[:, fields.SLOT] = torch.randperm(rows, generator=generator).int()
    entries[:, fields.EVERY] = BLOCK
    placed = torch.zeros(4, rows, dtype=torch.int32)
    certain = torch.randint(BLOCK - d, 2 * BLOCK + 1, (rows,), generator=generator).int()
    placed[fields.CERTAIN] = certain
    placed[fields.COLUMN] = (certain + d - 1) // BLOCK
    placed[fields.PLACED_DRAFT] = d
    accepted = torch.randint(0, d + 2, (rows,), generator=generator).int()
    if rows > 4:
        entries[1, fields.SLOT] = -1  # padded or gone
        placed[fields.COLUMN, 2] = -1  # dead
        entries[3, fields.EVERY] = 0
        entries[4, fields.EVERY], entries[4, fields.SECOND] = 0, 2 * BLOCK
    return entries.to(DEVICE), placed.to(DEVICE), accepted.to(DEVICE)


def same(mine: Pools, theirs: Pools) -> None:
    for a, b in zip(mine.bytes(), theirs.bytes(), strict=True):
        assert torch.equal(a, b)


@kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("listed", [False, True])
def test_postcopy(shape: Shape, listed: bool) -> None:
    moved = 0
    for seed in range(20 if CUDA else 2):
        mine, theirs = Pools(shape, seed), Pools(shape, seed)
        before = mine.bytes()
        entries, placed, accepted = step_of(shape, seed)
        count = shape.rows
        if listed:
            chosen = torch.arange(0, shape.rows, 2, device=DEVICE).int().flip(0)
            entries[: len(chosen), fields.CANDIDATE] = chosen
            count = len(chosen)
        held = [t.clone() for t in (entries, placed, accepted)]
        postcopy(mine.table, entries, placed, accepted, count, not listed, BLOCK)
        postcopy_reference(theirs.table, entries, placed, accepted, count, not listed, BLOCK)
        same(mine, theirs)
        # No array that is read is written: programs of one launch could race for it (#50432).
        for now, then in zip((entries, placed, accepted), held, strict=True):
            assert torch.equal(now, then)
        moved += any(not torch.equal(a, b) for a, b in zip(mine.bytes(), before, strict=True))
    assert moved


@kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_precopy_with_every_offset_and_every_distance(shape: Shape) -> None:
    """Source column one below, equal to and one above the target; conv_states shift in place."""
    cases = [(1, offset, target) for offset in range(shape.draft + 1) for target in (0, 1, 2, -1)]
    for start in range(0, len(cases), shape.rows):
        batch = cases[start : start + shape.rows]
        moves = torch.zeros(3, shape.rows, dtype=torch.int32)
        moves[2] = -1
        moves[:, : len(batch)] = torch.tensor(batch, dtype=torch.int32).T
        entries = torch.zeros(shape.rows, fields.ENTRY_FIELDS, dtype=torch.int32)
        entries[:, fields.SLOT] = torch.arange(shape.rows)
        entries[:, fields.PRECANDIDATE] = torch.arange(shape.rows)
        entries, moves = entries.to(DEVICE), moves.to(DEVICE)
        for _ in range(20 if CUDA else 1):
            mine, theirs = Pools(shape, start), Pools(shape, start)
            precopy(mine.table, entries, moves, len(batch))
            precopy_reference(theirs.table, entries, moves, len(batch))
            same(mine, theirs)


RUNS: list[dict[str, Any]] = [
    {},
    {"in_place": True},
    {"conv_layout": "DS", "in_place": True, "conv_dtype": torch.bfloat16},
    {"strategy": "always", "groups": 3, "layers": 3, "ssm_dtype": torch.float16},
    {"strategy": "defer", "depth": 2},
    {"strategy": "blocking", "depth": 1, "in_place": True},
]


@kernels
@pytest.mark.parametrize("options", RUNS, ids=str)
def test_a_run_of_mixed_steps(options: dict[str, Any]) -> None:
    """The rolling-hash model through the kernels: `advance` included, every state checked."""
    runs = HashRunner(block_size=8, num_draft=3, device=DEVICE, **options)
    for slot in range(3):
        runs.admit(slot, list(range(3 + 4 * slot)))
    runs.step([(0, 3, [], 1), (1, 7, [], 1), (-1, 1, [], 1), (2, 6, [], 0)])
    runs.step([(2, 5, [], 1), (0, 1, [1, 2, 3], 4)])
    for i in range(60 if CUDA else 5):
        runs.step(
            [
                (slot, 1, [1, 2, 3][: (i + slot) % 4], 1 + i % ((i + slot) % 4 + 1))
                for slot in (1, 2, 0)
            ]
        )
        if i % 20 == 2:
            runs.release(1)
            runs.admit(1, [5, 6, 7, 8])
            runs.step([(1, 4, [], 1)])
        if len(runs.requests[0].tokens) > 110:
            runs.release(0)
            runs.admit(0, [5])


@pytest.mark.gpu
def test_block_strides_beyond_32_bits() -> None:
    """Slot times stride passes 2**31 bytes at block 3 (#35275)."""
    far = (1 << 30) + 4096
    pool = torch.zeros(4 * far // 4, dtype=torch.float32, device="cuda")
    ssm = pool.as_strided((4, 2, 4, 8), (far // 4, 32, 8, 1))
    conv_states = pool[64:].as_strided((4, 6, 24), (far // 4, 24, 1))
    ssm.copy_(torch.randn_like(ssm))
    conv_states.copy_(torch.randn_like(conv_states))
    table = torch.tensor([[0, 3, 1, 2]], dtype=torch.int32, device="cuda")
    states = StateTable.build([conv_states], [ssm], [table], 3)
    entries = torch.zeros(1, fields.ENTRY_FIELDS, dtype=torch.int32, device="cuda")
    moves = torch.tensor([[1], [0], [3]], dtype=torch.int32, device="cuda")
    want, inputs = ssm[3].clone(), conv_states[3, :3].clone()
    precopy(states, entries, moves, 1)
    assert torch.equal(ssm[2], want)
    assert torch.equal(conv_states[2, :3], inputs)
    assert ssm[2].any()
