"""Which row's tokens a program works on, when rows of any length are cut into tiles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_tile(start, part, SIZE: tl.constexpr):
    """Where the tiles of a part begin that starts at token `start`, in tiles of SIZE tokens.

    With floor(a) + ceil(b) <= floor(a + b) + 1 the tiles of a part end before the next one's begin,
    and all of them lie below `tile_bound`: no part has to know the lengths of those before it.
    """
    return start // SIZE + part


@triton.jit
def part_start(cu_seqlens, cut, part, mask):
    """First token of a part: without `cut` a part is a row, otherwise rows have two parts, the
    tokens before the cut (none where it is 0) and those from there on."""
    if cut is None:
        start = tl.load(cu_seqlens + part, mask=mask, other=0)
    else:
        start = tl.load(cu_seqlens + part // 2, mask=mask, other=0)
        start += tl.load(cut + part // 2, mask=mask & (part % 2 == 1), other=0)
    return start


@triton.jit
def part_of_tile(cu_seqlens, cut, rows, tile, SIZE: tl.constexpr):
    """The part that owns a tile, and the tile's number in it (which the part may not reach); -1 for
    the part when none begins that early."""
    parts = rows
    if cut is not None:
        parts = rows * 2
    lane = tl.arange(0, 128)
    base = rows * 0
    found = rows * 0
    while base < parts:
        part = base + lane
        start = part_start(cu_seqlens, cut, part, part < parts)
        begun = (first_tile(start, part, SIZE) <= tile) & (part < parts)
        found += tl.sum(begun.to(tl.int32), axis=0)
        base += 128
    part = found - 1
    start = part_start(cu_seqlens, cut, part, part >= 0)
    return part, tile - first_tile(start, part, SIZE)


@triton.jit
def tokens_of_tile(cu_seqlens, cut, rows, tile, SIZE: tl.constexpr):
    """A tile's row, -1 if it has none, its first token, and how many tokens of the row's part there
    are from there on (none if that is not positive)."""
    part, number = part_of_tile(cu_seqlens, cut, rows, tile, SIZE)
    here = part >= 0
    start = part_start(cu_seqlens, cut, part, here) + number * SIZE
    left = part_start(cu_seqlens, cut, part + 1, here) - start
    if cut is not None:
        part = tl.where(here, part // 2, -1)
    return part, start, left


def tile_bound(tokens: int, parts: int, size: int) -> int:
    """Tiles of `size` tokens that parts of so many tokens in all can have."""
    return tokens // size + parts
