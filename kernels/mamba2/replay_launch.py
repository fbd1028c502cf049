"""How the replay layout's state update is launched: by which tiles, the constants it is compiled
for, and what one program works on, as its functions pass it on.

A program takes some heads of a group in turn, of one row of the batch, and of each a tile of its
state: some rows of P by all of N.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias

import triton
import triton.language as tl

from hybrid_runtime.kernels.replay.ring import MAX_TOKENS, SHORT_RING_TOKENS

Strides = tuple[int, ...]

STAGES = 2
"""Heads whose state is on its way or in use at a time."""
AT_ONCE = 8
"""Programs of a multiprocessor: each is one warp, with 255 registers a thread."""
RUNS = (1, 2, 4, 8)
"""Heads that a program takes one after another; few choices, since each is compiled. A number that
is only known at run time makes the loop slower."""
COSTS = {16: (1.0, 2.0), 32: (1.75, 1.5)}
"""By the rows of a tile: what a head takes, and all that comes before the first one, in the time of
a head of 16 rows. What heads share is found once a tile, so that 32 rows are cheaper than twice 16.
Fitted to an H200's times of all tiles; only their order counts."""


class Tile(NamedTuple):
    """What a program works on.

    rows: of a head's state.
    run: heads, one after another.
    """

    rows: int
    run: int


@functools.cache
def choose_tile(
    num_rows: int,
    heads: int,
    heads_per_group: int,
    dim: int,
    itemsize: int,
    tokens: int,
    multiprocessors: int,
) -> Tile:
    """The tile by which all programs are done first.

    num_rows: of the batch. itemsize: bytes of a state's element. tokens: most of a row.
    """
    sizes = [16, 32] if itemsize == 2 and dim % 32 == 0 else [16]
    # With more than 8 tokens there are no registers left for a whole tile of fp32.
    least = 2 if itemsize == 4 and tokens > 8 else 1
    runs = [run for run in RUNS if heads_per_group % run == 0 and run >= least] or [1]

    def duration(tile: Tile) -> float:
        programs = num_rows * heads // tile.run * triton.cdiv(dim, tile.rows)
        turns = programs / (AT_ONCE * multiprocessors)
        head, start = COSTS[tile.rows]
        # The last programs of several turns start late, by up to one turn.
        return (turns + 1 if turns > 1 else 1.75) * (tile.run * head + start)

    return min((Tile(rows, run) for rows in sizes for run in runs), key=duration)


class UpdateShape(NamedTuple):
    """What the kernel is compiled for.

    HEADS: H.
    HEADS_PER_GROUP: H // G.
    DIM: P.
    STATE: N.
    RING: tokens of a slot's ring.
    POSITIONS: most tokens that are pending and a row's own, or that are folded.
    QUERIES: most tokens of a row, padded.
    RUN: heads per program.
    ROWS: rows of P per program.
    PART: columns of N per part, 16 bytes for each of 4 lanes.
    PARTS: parts that make up N.
    STAGES: of the loop over heads.
    """

    HEADS: tl.constexpr
    HEADS_PER_GROUP: tl.constexpr
    DIM: tl.constexpr
    STATE: tl.constexpr
    RING: tl.constexpr
    POSITIONS: tl.constexpr
    QUERIES: tl.constexpr
    RUN: tl.constexpr
    ROWS: tl.constexpr
    PART: tl.constexpr
    PARTS: tl.constexpr
    STAGES: tl.constexpr


@functools.cache
def update_shape(
    heads: int, groups: int, dim: int, state: int, ring: int, tokens: int, itemsize: int, tile: Tile
) -> UpdateShape:
    """The constants of a launch. Kept, because Triton finds a compiled kernel by their hash.

    ring: tokens of a slot's ring. tokens: most of a row. itemsize: bytes of a state's element.
    """
    part = 64 // itemsize
    return UpdateShape(
        HEADS=tl.constexpr(heads),
        HEADS_PER_GROUP=tl.constexpr(heads // groups),
        DIM=tl.constexpr(dim),
        STATE=tl.constexpr(state),
        RING=tl.constexpr(ring),
        POSITIONS=tl.constexpr(16 if ring <= SHORT_RING_TOKENS + MAX_TOKENS else 32),
        QUERIES=tl.constexpr(8 if tokens <= 8 else 16),
        RUN=tl.constexpr(tile.run),
        ROWS=tl.constexpr(tile.rows),
        PART=tl.constexpr(part),
        PARTS=tl.constexpr(triton.cdiv(state, part)),
        STAGES=tl.constexpr(STAGES),
    )


class InputStrides(NamedTuple):
    """Strides in elements of x `[tokens, H, P]`, dt `[tokens, H]`, B and C `[tokens, G, N]`."""

    x_token: tl.constexpr
    x_head: tl.constexpr
    x_dim: tl.constexpr
    dt_token: tl.constexpr
    dt_head: tl.constexpr
    B_token: tl.constexpr
    B_group: tl.constexpr
    B_state: tl.constexpr
    C_token: tl.constexpr
    C_group: tl.constexpr
    C_state: tl.constexpr


@functools.cache
def input_strides(x: Strides, dt: Strides, B: Strides, C: Strides) -> InputStrides:
    """Kept, as `update_shape`."""
    return InputStrides(*(tl.constexpr(stride) for stride in (*x, *dt, *B, *C)))


Pointer: TypeAlias = Any
Value: TypeAlias = Any


class Inputs(NamedTuple):
    """Pointers to the row's first token, and in B and C to the program's group."""

    x: Pointer
    dt: Pointer
    A_log: Pointer
    B: Pointer
    C: Pointer
    D: Pointer
    dt_bias: Pointer


class Ring(NamedTuple):
    """Pointers to the records of the row's slot, in B to those of the program's group."""

    x: Pointer
    B: Pointer
    dt: Pointer


class Row(NamedTuple):
    """Counts of the row's tokens.

    scheduled: its own.
    pending: of the ring, before them.
    cursor: ring index of the first of those.
    unfolded: pending ones that are not in the state that is read, all or none.
    tokens_folded: of the unfolded and then of its own, in the state that is written.
    own_folded: its own among them.
    first_recorded_token: its own from here on go to the ring.
    first_output_token: its own from here on have outputs here.
    reads: there is a state to start from; else it is 0.
    """

    scheduled: Value
    pending: Value
    cursor: Value
    unfolded: Value
    tokens_folded: Value
    own_folded: Value
    first_recorded_token: Value
    first_output_token: Value
    reads: Value


class Share(NamedTuple):
    """The program's share of the row.

    head: first of its heads.
    p: first row of its tile.
    writes_dt: of the programs that share a time step, this one writes it to the ring.
    writes_B: likewise B.
    """

    head: Value
    p: Value
    writes_dt: Value
    writes_B: Value


class Clamp(NamedTuple):
    """Bounds of the time step."""

    low: Value
    high: Value
