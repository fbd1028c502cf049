"""How the replay layout's state update is launched: by which launches, the constants it is compiled
for, and what one program works on, as its functions pass it on.

A program takes one tile of a head's state, of one row of the batch: 16 rows of V by all of K. What
the tiles of a head have in common (`replay_factors`) is more work than a tile itself. With many
tiles a launch before finds it, once a head; with few, each program does, and a launch is saved.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias

import triton
import triton.language as tl

from hybrid_runtime.kernels.replay.ring import MAX_TOKENS, SHORT_RING_TOKENS

Strides = tuple[int, ...]

ROWS = 16
"""Of V, that a tile has: what one warp multiplies at once."""
AT_ONCE = 8
"""Programs of a multiprocessor that run at a time: one warp each, with 255 registers a thread."""


def prepares(num_rows: int, heads: int, value: int, multiprocessors: int) -> bool:
    """Whether a launch before finds what tiles have in common: if not all tiles run at a time.
    num_rows: of the batch. value: V."""
    return num_rows * heads * triton.cdiv(value, ROWS) > AT_ONCE * multiprocessors


class UpdateShape(NamedTuple):
    """What the kernel is compiled for.

    HEADS: Hv.
    GROUP: value heads of a key head, Hv // Hk.
    KEY: K.
    VALUE: V.
    KEY_STRIDE: elements from one column of a state, k, to the next.
    VALUE_STRIDE: likewise rows, v.
    RING: tokens of a slot's ring.
    PENDING: most tokens that are pending, padded.
    TOKENS: most tokens of a row, padded to a power of two.
    QUERIES: the same, as columns of a product.
    ROWS: rows of V per tile.
    PART: columns of K per part, 16 bytes for each of 4 lanes.
    PARTS: parts that make up K.
    SCALE: of queries, K ** -0.5.
    LINE: floats that a head of a row has prepared.
    """

    HEADS: tl.constexpr
    GROUP: tl.constexpr
    KEY: tl.constexpr
    VALUE: tl.constexpr
    KEY_STRIDE: tl.constexpr
    VALUE_STRIDE: tl.constexpr
    RING: tl.constexpr
    PENDING: tl.constexpr
    TOKENS: tl.constexpr
    QUERIES: tl.constexpr
    ROWS: tl.constexpr
    PART: tl.constexpr
    PARTS: tl.constexpr
    SCALE: tl.constexpr
    LINE: tl.constexpr


@functools.cache
def update_shape(
    heads: int,
    key_heads: int,
    key: int,
    value: int,
    matrix_strides: Strides,
    ring: int,
    tokens: int,
    itemsize: int,
) -> UpdateShape:
    """The constants of a launch. Kept, because Triton finds a compiled kernel by their hash.

    matrix_strides: of V and K in a head's state. ring: tokens of a slot's ring. tokens: most of a
    row. itemsize: bytes of a state's element.
    """
    part = 64 // itemsize
    pending = 16 if ring <= SHORT_RING_TOKENS + MAX_TOKENS else 32
    padded = triton.next_power_of_2(tokens)
    queries = 8 if tokens <= 8 else 16
    return UpdateShape(
        HEADS=tl.constexpr(heads),
        GROUP=tl.constexpr(heads // key_heads),
        KEY=tl.constexpr(key),
        VALUE=tl.constexpr(value),
        KEY_STRIDE=tl.constexpr(matrix_strides[1]),
        VALUE_STRIDE=tl.constexpr(matrix_strides[0]),
        RING=tl.constexpr(ring),
        PENDING=tl.constexpr(pending),
        TOKENS=tl.constexpr(padded),
        QUERIES=tl.constexpr(queries),
        ROWS=tl.constexpr(ROWS),
        PART=tl.constexpr(part),
        PARTS=tl.constexpr(triton.cdiv(key, part)),
        SCALE=tl.constexpr(key**-0.5),
        LINE=tl.constexpr(queries * (3 + 2 * padded + 2 * pending) + 2 * (pending + queries + 1)),
    )


class InputStrides(NamedTuple):
    """Strides in elements of q and k `[tokens, Hk, K]`, v `[tokens, Hv, V]`, a and b
    `[tokens, Hv]`."""

    q_token: tl.constexpr
    q_head: tl.constexpr
    q_key: tl.constexpr
    k_token: tl.constexpr
    k_head: tl.constexpr
    k_key: tl.constexpr
    v_token: tl.constexpr
    v_head: tl.constexpr
    v_value: tl.constexpr
    a_token: tl.constexpr
    a_head: tl.constexpr
    b_token: tl.constexpr
    b_head: tl.constexpr


@functools.cache
def input_strides(q: Strides, k: Strides, v: Strides, a: Strides, b: Strides) -> InputStrides:
    """Kept, as `update_shape`."""
    return InputStrides(*(tl.constexpr(stride) for stride in (*q, *k, *v, *a, *b)))


Pointer: TypeAlias = Any
Value: TypeAlias = Any


class Inputs(NamedTuple):
    """Pointers to the program's head at the row's first token."""

    q: Pointer
    k: Pointer
    v: Pointer
    a: Pointer
    b: Pointer
    A_log: Pointer
    dt_bias: Pointer


class Ring(NamedTuple):
    """Pointers to the records of the row's slot, of the program's head."""

    u: Pointer
    k: Pointer
    g: Pointer
    rk: Pointer


class Row(NamedTuple):
    """Counts of the row's tokens.

    scheduled: its own.
    certain: of them, before the drafts.
    pending: of the ring, before them.
    cursor: ring index of the first of those.
    first_recorded: its own from here on go to the ring.
    reads: there is a state to start from; else it is 0.
    """

    scheduled: Value
    certain: Value
    pending: Value
    cursor: Value
    first_recorded: Value
    reads: Value


class Share(NamedTuple):
    """The program's share of the row.

    head: its value head.
    value: first row of V of its tile.
    writes_g: of the programs of a value head, this one writes g to the ring.
    writes_k: of those of a key head, this one writes k.
    """

    head: Value
    value: Value
    writes_g: Value
    writes_k: Value


class Target(NamedTuple):
    """Where a state is stored.

    state: pointer to the program's head in its block.
    after: tokens of the row that are in it; below 0 it lacks as many pending ones.
    key: by which it is rounded stochastically.
    """

    state: Pointer
    after: Value
    key: Value
