"""Launch shapes of the replay layout's state update."""

from __future__ import annotations

from typing import NamedTuple

import triton


class Shape(NamedTuple):
    """Of a launch in programs of one warp: rows of a head's state per program, columns per part of
    a tile, heads that a program takes one after another, at most, rows of a chunk, heads whose
    state is on its way or in use at a time, and programs per multiprocessor below which a program
    takes fewer heads, and then fewer rows, at least `least`."""

    tile: int
    low: int
    run: int
    high: int
    stages: int
    programs: int
    least: int


def shape_of(dim: int, state: int, itemsize: int, products: bool = False) -> Shape:
    """The launch for states `[dim, state]` per head; `products`: by `replay_chunk`."""
    if products:
        tile = min(CHUNK.tile, max(triton.next_power_of_2(dim), 16))
        return CHUNK._replace(tile=tile, high=min(CHUNK.high, tile))
    shape = SHAPES[itemsize]
    tile = min(shape.tile, triton.next_power_of_2(dim))
    return shape._replace(
        tile=tile,
        high=min(shape.high, tile),
        low=min(shape.low, triton.next_power_of_2(state)),
    )


def spread(shape: Shape, dim: int, heads: int, programs: int) -> Shape:
    """The launch for states of so many heads in all rows, so that there are `programs` programs if
    that takes no tiles below the least: first with fewer heads each, then with smaller tiles.
    """

    def few(shape: Shape) -> bool:
        return triton.cdiv(dim, shape.tile) * heads // shape.run < programs

    while shape.run > 1 and few(shape):
        shape = shape._replace(run=shape.run // 2)
    while shape.tile > shape.least and few(shape):
        shape = shape._replace(tile=shape.tile // 2, high=min(shape.high, shape.tile // 2))
    return shape


# By the bytes of a state's element, and of `replay_chunk`; swept on an H200 over 1 to 128 rows.
SHAPES = {4: Shape(16, 32, 8, 4, 4, 7, 8), 2: Shape(16, 64, 16, 8, 3, 7, 8)}
CHUNK = Shape(32, 32, 8, 16, 3, 6, 16)
