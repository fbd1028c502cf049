"""Pairs of a token and one of its experts, sorted by expert and cut into tiles.

The host knows only how many tiles there can be at most, so nobody waits for the device: a launch
over the tiles has a program for each that is possible, and those without pairs end at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait

MAX_RANKED = 8192
"""Pairs that are sorted by comparing each with every other in one launch; torch sorts more."""


class Groups(NamedTuple):
    """Pair ``t * top_k + i`` is token t with its i-th expert.

    Attributes:
        order: int32 [pairs], pairs by expert, those of an expert ascending.
        tiles: int32 [3, max_tiles]: expert, first and last (exclusive) position in `order` of
            each tile, by expert; behind the last tile the expert is -1 and the rest undefined.
    """

    order: Tensor
    tiles: Tensor


def max_tiles(pairs: int, count: int, block_m: int) -> int:
    """Most tiles of `block_m` pairs of one of `count` experts that so many pairs can need."""
    touched = min(pairs, count)
    return touched + (pairs - touched) // block_m


def align_block_size_reference(experts: Tensor, count: int, block_m: int) -> Groups:
    """Sort pairs by expert and cut each expert's into tiles.

    Args:
        experts: integer [T, top_k], each 0 to count - 1.
        count: experts there are.
        block_m: pairs per tile; an expert's last tile may have fewer.
    """
    flat = experts.flatten()
    sizes = flat.bincount(minlength=count)
    parts = (sizes + block_m - 1) // block_m
    owner = torch.arange(count, device=flat.device).repeat_interleave(parts)
    within = torch.arange(owner.shape[0], device=flat.device) - (parts.cumsum(0) - parts)[owner]
    ends = sizes.cumsum(0)
    first = (ends - sizes)[owner] + within * block_m
    tiles = flat.new_full((3, max_tiles(flat.shape[0], count, block_m)), -1, dtype=torch.int32)
    tiles[:, : owner.shape[0]] = torch.stack([owner, first, (first + block_m).minimum(ends[owner])])
    return Groups(flat.argsort(stable=True).int(), tiles)


@triton.jit(do_not_specialize=["pairs", "bound"])
def _group_kernel(
    experts,
    order,
    tiles,
    pairs,
    bound,
    BLOCK_M: tl.constexpr,
    BINS: tl.constexpr,
    COUNTED: tl.constexpr,
    RANKED: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0 lists the tiles, each other program places LINES pairs in the order."""
    pdl_wait(PDL)
    if tl.program_id(0) == 0:
        expert = tl.arange(0, BINS)
        sizes = tl.zeros((BINS,), tl.int32)
        at = 0
        while at < pairs:
            pair = at + tl.arange(0, COUNTED)
            seen = tl.load(experts + pair, mask=pair < pairs, other=0).to(tl.int32)
            sizes += tl.histogram(seen, BINS, mask=pair < pairs)
            at += COUNTED
        ends = tl.cumsum(sizes, axis=0)
        parts = (sizes + BLOCK_M - 1) // BLOCK_M
        part_ends = tl.cumsum(parts, axis=0)
        most = tl.max(parts, axis=0)
        part = 0
        while part < most:
            here = tiles + part_ends - parts + part
            first = ends - sizes + part * BLOCK_M
            exists = part < parts
            tl.store(here, expert, mask=exists)
            tl.store(here + bound, first, mask=exists)
            tl.store(here + 2 * bound, tl.minimum(first + BLOCK_M, ends), mask=exists)
            part += 1
        unused = tl.sum(parts, axis=0)
        while unused < bound:
            tile = unused + expert
            tl.store(tiles + tile, tl.full((BINS,), -1, tl.int32), mask=tile < bound)
            unused += BINS
    else:
        # A pair's place is the number of smaller keys: all pairs at once, and no atomics.
        line = (tl.program_id(0) - 1) * LINES + tl.arange(0, LINES)
        own = tl.load(experts + line, mask=line < pairs, other=0).to(tl.int32) * pairs + line
        smaller = tl.zeros((LINES, RANKED), tl.int32)
        at = 0
        while at < pairs:
            pair = at + tl.arange(0, RANKED)
            key = tl.load(experts + pair, mask=pair < pairs, other=0).to(tl.int32) * pairs + pair
            key = tl.where(pair < pairs, key, 0x7FFFFFFF)
            smaller += (key[None, :] < own[:, None]).to(tl.int32)
            at += RANKED
        tl.store(order + tl.sum(smaller, axis=1), line, mask=line < pairs)


def align_block_size(experts: Tensor, count: int, block_m: int) -> Groups:
    """`align_block_size_reference` where Triton runs by one launch (more than `MAX_RANKED` pairs: a
    sort by torch and one launch), without waiting for the device."""
    if not runs_triton(experts):
        return align_block_size_reference(experts, count, block_m)
    flat = experts.flatten()
    pairs = flat.shape[0]
    bound = max_tiles(pairs, count, block_m)
    tiles = torch.empty((3, bound), dtype=torch.int32, device=flat.device)
    ranked = pairs <= MAX_RANKED and count * pairs < 1 << 31
    if ranked:
        order = torch.empty(pairs, dtype=torch.int32, device=flat.device)
    else:
        narrow = flat.to(torch.int16) if count <= 1 << 15 else flat  # fewer digits to sort by
        order = narrow.sort(stable=True)[1].int()
    if pairs:
        _group_kernel[(1 + (triton.cdiv(pairs, 32) if ranked else 0),)](
            flat,
            order,
            tiles,
            pairs,
            bound,
            BLOCK_M=block_m,
            BINS=max(triton.next_power_of_2(count), 16),
            COUNTED=min(max(triton.next_power_of_2(pairs), 128), 1024),
            RANKED=128,
            LINES=32,
            num_warps=4,
            **pdl(flat),
        )
    return Groups(order, tiles)
