"""Launch shapes of the replay layout's state update, and the constants it is compiled for."""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl

Strides = tuple[int, ...]


class ReplayTiling(NamedTuple):
    """How a launch divides the states; its programs are of one warp.

    tile: rows of a head's state per program.
    part: columns of a part; a tile is several parts side by side.
    run: heads that a program takes one after another, at most.
    chunk: rows that are in registers at a time.
    stages: heads whose state is on its way or in use at a time.
    programs: per multiprocessor; below that a program takes fewer heads, and then fewer rows.
    least: fewest rows per program.
    """

    tile: int
    part: int
    run: int
    chunk: int
    stages: int
    programs: int
    least: int


# By the bytes of a state's element, and of `chunk_row`; swept on an H200 over 1 to 128 rows.
TILINGS = {4: ReplayTiling(16, 32, 8, 4, 4, 7, 8), 2: ReplayTiling(16, 64, 16, 8, 3, 7, 8)}
PRODUCTS = ReplayTiling(32, 32, 8, 16, 3, 6, 16)


def replay_tiling(dim: int, state: int, itemsize: int, products: bool = False) -> ReplayTiling:
    """For states `[dim, state]` per head; `products`: by matrix products, `chunk_row`."""
    if products:
        tile = min(PRODUCTS.tile, max(triton.next_power_of_2(dim), 16))
        return PRODUCTS._replace(tile=tile, chunk=min(PRODUCTS.chunk, tile))
    tiling = TILINGS[itemsize]
    tile = min(tiling.tile, triton.next_power_of_2(dim))
    return tiling._replace(
        tile=tile,
        chunk=min(tiling.chunk, tile),
        part=min(tiling.part, triton.next_power_of_2(state)),
    )


def spread(tiling: ReplayTiling, dim: int, heads: int, programs: int) -> ReplayTiling:
    """Smaller shares until there are `programs` programs, or shares are the smallest: first with
    fewer heads each, then with smaller tiles. heads: of all rows together."""

    def few(tiling: ReplayTiling) -> bool:
        return triton.cdiv(dim, tiling.tile) * heads // tiling.run < programs

    while tiling.run > 1 and few(tiling):
        tiling = tiling._replace(run=tiling.run // 2)
    while tiling.tile > tiling.least and few(tiling):
        tile = tiling.tile // 2
        tiling = tiling._replace(tile=tile, chunk=min(tiling.chunk, tile))
    return tiling


class ReplayShape(NamedTuple):
    """What the kernel is compiled for.

    HEADS: H.
    HEADS_PER_GROUP: H // G.
    DIM: P.
    STATE: N.
    TOKENS: most tokens of a row in steady decode.
    DRAFTS: K, guesses per slot in the window cache.
    RUN: heads per program.
    TILE: rows of P per program.
    CHUNK: rows of P in registers at a time.
    PART: columns of N per part.
    PARTS: parts that make up N.
    STAGES: of the loop over heads.
    HOLD: B and C of all tokens stay in registers.
    """

    HEADS: tl.constexpr
    HEADS_PER_GROUP: tl.constexpr
    DIM: tl.constexpr
    STATE: tl.constexpr
    TOKENS: tl.constexpr
    DRAFTS: tl.constexpr
    RUN: tl.constexpr
    TILE: tl.constexpr
    CHUNK: tl.constexpr
    PART: tl.constexpr
    PARTS: tl.constexpr
    STAGES: tl.constexpr
    HOLD: tl.constexpr


@functools.cache
def replay_shape(
    heads: int, groups: int, dim: int, state: int, tokens: int, drafts: int, tiling: ReplayTiling
) -> ReplayShape:
    """The constants of a launch. Kept, because Triton finds a compiled kernel by their hash."""
    return ReplayShape(
        HEADS=tl.constexpr(heads),
        HEADS_PER_GROUP=tl.constexpr(heads // groups),
        DIM=tl.constexpr(dim),
        STATE=tl.constexpr(state),
        TOKENS=tl.constexpr(tokens),
        DRAFTS=tl.constexpr(drafts),
        RUN=tl.constexpr(tiling.run),
        TILE=tl.constexpr(tiling.tile),
        CHUNK=tl.constexpr(tiling.chunk),
        PART=tl.constexpr(tiling.part),
        PARTS=tl.constexpr(triton.cdiv(triton.next_power_of_2(state), tiling.part)),
        STAGES=tl.constexpr(tiling.stages),
        HOLD=tl.constexpr(tokens + drafts < 8),
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
    """Kept, as `replay_shape`."""
    return InputStrides(*(tl.constexpr(stride) for stride in (*x, *dt, *B, *C)))
