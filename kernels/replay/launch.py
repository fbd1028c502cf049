"""Launch shapes of the replay layout's state update, and the constants it is compiled for."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl

Strides = tuple[int, ...]

ROWS = 16
"""Rows of a head's state per program, a program being one warp."""
STAGES = 2
"""Heads whose state is on its way or in use at a time."""
RUNS = (1, 2, 4, 8)
"""Heads that a program takes one after another; few choices, since each is compiled. A number that
is only known at run time makes the loop slower."""
START = 1
"""What a program does before its first head takes about as long as so many heads."""
REGISTERS = {4: (255, 255), 2: (168, 255)}
"""Of a thread, at most, by bytes of a state's element: with rows of up to 8 tokens, and of more. A
multiprocessor holds 8 programs with 255 of them, 12 with 168, which is better only where the loop
over heads keeps everything it needs."""
REGISTER_FILE = 64 << 10
"""Registers of a multiprocessor."""


def registers(run: int, itemsize: int, tokens: int) -> int:
    """Of a thread, at most. The state of a single head waits in registers."""
    return 255 if run == 1 else REGISTERS[itemsize][tokens > 8]


@functools.cache
def heads_per_program(
    tiles: int, heads: int, itemsize: int, tokens: int, multiprocessors: int
) -> int:
    """The one of RUNS by which all programs are done first.

    tiles: of all heads of all rows. heads: of a group; a run divides it. itemsize: bytes of a
    state's element. tokens: most of a row.
    """

    def duration(run: int) -> float:
        each = 32 * triton.cdiv(registers(run, itemsize, tokens), 8) * 8
        at_once = REGISTER_FILE // each * multiprocessors
        return max(1.0, tiles / run / at_once) * (run + START)

    # In fp32 rows of more than 8 tokens leave no registers for the state of a single head.
    least = 2 if itemsize == 4 and tokens > 8 else 1
    fitting = [run for run in RUNS if heads % run == 0 and run >= least]
    return min(fitting, key=duration, default=1)


class UpdateShape(NamedTuple):
    """What the kernel is compiled for.

    HEADS: H.
    HEADS_PER_GROUP: H // G.
    DIM: P.
    STATE: N.
    RING: tokens of a slot's ring in the window cache.
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
    QUERIES: tl.constexpr
    RUN: tl.constexpr
    ROWS: tl.constexpr
    PART: tl.constexpr
    PARTS: tl.constexpr
    STAGES: tl.constexpr


@functools.cache
def update_shape(
    heads: int, groups: int, dim: int, state: int, ring: int, tokens: int, itemsize: int, run: int
) -> UpdateShape:
    """The constants of a launch. Kept, because Triton finds a compiled kernel by their hash.

    ring: tokens of the window cache's rings. tokens: most of a row. itemsize: bytes of a state's
    element. run: heads per program.
    """
    part = 64 // itemsize
    return UpdateShape(
        HEADS=tl.constexpr(heads),
        HEADS_PER_GROUP=tl.constexpr(heads // groups),
        DIM=tl.constexpr(dim),
        STATE=tl.constexpr(state),
        RING=tl.constexpr(ring),
        QUERIES=tl.constexpr(8 if tokens <= 8 else 16),
        RUN=tl.constexpr(run),
        ROWS=tl.constexpr(ROWS),
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
