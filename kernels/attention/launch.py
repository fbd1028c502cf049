"""Launch shapes of paged attention, and among how many programs a context is divided."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs


class Tiling(NamedTuple):
    """Launch shape: query rows of a tile, tokens in it, tiles per row, positions of a tile."""

    block_m: int
    tokens: int
    query_tiles: int
    block_n: int
    warps: int
    stages: int


class Splits(NamedTuple):
    """Among how many programs a row's context is divided at most, and positions that one takes at
    least."""

    programs: int
    least: int = 1


PROGRAMS = 4
"""Programs per multiprocessor that `attention_splits` aims at."""
LONGEST = 2048
"""Positions that one program takes where there are enough rows to fill the GPU without splitting:
more would let one long row among short ones finish late."""
MAX_SPLITS = 64


def attention_tiling(group: int, head_dim: int, max_scheduled: int, dtype: torch.dtype) -> Tiling:
    """Launch shape for `group` query heads per key head; swept on an H200."""
    exact = dtype == torch.float32  # products without matrix units: small tiles
    most = max(32 if exact else 128, triton.next_power_of_2(group))
    block_m = min(max(triton.next_power_of_2(group * max_scheduled), 16), most)
    tokens = block_m // group
    small = exact or block_m <= 32
    block_n = min(max((4096 if small else 8192) // triton.next_power_of_2(head_dim), 16), 64)
    warps, stages = (4, 2) if exact else (2, 5) if block_m <= 32 else (4, 5)
    if block_m > 64:
        warps, stages = 8, 3
    return Tiling(block_m, tokens, triton.cdiv(max_scheduled, tokens), block_n, warps, stages)


def attention_splits(
    q: Tensor, kv_heads: int, rows: int, max_scheduled: int, max_context: int
) -> Splits:
    """Enough to fill the GPU, and not to leave a long row behind, from bounds only."""
    tiling = attention_tiling(q.shape[1] // kv_heads, q.shape[2], max_scheduled, q.dtype)
    programs = max(rows * kv_heads * tiling.query_tiles, 1)
    fill = min(max(num_programs(q, PROGRAMS) // programs, 1), MAX_SPLITS)
    least = max(LONGEST // fill, tiling.block_n)
    count = max(fill, triton.cdiv(max_context, LONGEST))
    return Splits(max(min(count, triton.cdiv(max_context, least), MAX_SPLITS), 1), least)


def attention_scratch(q: Tensor, splits: Splits) -> int:
    """fp32 elements of scratch that `paged_attention` needs for queries like q."""
    return (
        splits.programs * q.shape[0] * q.shape[1] * (q.shape[2] + 1) if splits.programs > 1 else 0
    )
