"""What attention is launched with: arguments that travel together, launch shapes, and splits.

A *split* is one program's part of a row's context.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs
from hybrid_runtime.kernels.linear.quantize import E4M3


class KVCache(NamedTuple):
    """Keys and values of one layer, in blocks.

    Attributes:
        k: [blocks, block_size, Hkv, D], any strides.
        v: as k.
        block_table: int32 [slots, columns] of physical blocks.
        k_scale: float32 [], above 0; keys are the values in `k` times this. None: 1. Only e4m3
            caches have one.
        v_scale: as k_scale.
    """

    k: Tensor
    v: Tensor
    block_table: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def check(self, k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless new keys and values [..., Hkv, D] fit into the blocks, and scales
        are what they must be."""
        for name, new, cache, scale in (
            ("k", k, self.k, self.k_scale),
            ("v", v, self.v, self.v_scale),
        ):
            if cache.dim() != 4 or cache.shape[2:] != new.shape[-2:]:
                raise ValueError(
                    f"cache.{name} is {tuple(cache.shape)}, must be [blocks, block_size, "
                    f"{new.shape[-2]}, {new.shape[-1]}]"
                )
            if scale is None:
                continue
            if cache.dtype != E4M3 or scale.dtype != torch.float32 or scale.dim():
                raise ValueError(
                    f"cache.{name}_scale is {scale.dtype} {list(scale.shape)} of a cache in "
                    f"{cache.dtype}, must be None, or torch.float32 [] of one in {E4M3}"
                )

    def product_type(self, q: Tensor) -> torch.dtype:
        """What products with q are formed in: a dtype that holds queries, keys and values. The
        values of e4m3 are in all of them."""
        dtype = q.dtype
        for part in (self.k, self.v):
            if part.dtype != E4M3:
                dtype = torch.promote_types(dtype, part.dtype)
        return dtype


class AttentionRows(NamedTuple):
    """The rows of one forward pass.

    Attributes:
        slot: int32 [rows], the row's line of the block table; -1 = padded row.
        cu_seqlens: int32 [rows + 1]; tokens of row i are [cu_seqlens[i], cu_seqlens[i + 1]).
        computed: int32 [rows], tokens cached before this pass = position of the first token.
    """

    slot: Tensor
    cu_seqlens: Tensor
    computed: Tensor


class TokenStrides(NamedTuple):
    """Strides of [tokens, heads, D]."""

    token: int
    head: int
    dim: int


class CacheStrides(NamedTuple):
    """Strides of [blocks, block_size, heads, D]."""

    block: int
    position: int
    head: int
    dim: int


class AttentionShape(NamedTuple):
    """What both attention kernels are compiled for.

    Attributes:
        HEADS: query heads.
        KV_HEADS: key heads.
        D: size of a head.
        BLOCK_SIZE: positions of a cache block.
        TOKENS: tokens of a query tile.
        BLOCK_M: query rows of a tile, `TOKENS` times the query heads of a key head or more.
        BLOCK_N: positions of a tile of keys and values.
        BLOCK_D: D rounded up to a power of two.
    """

    HEADS: tl.constexpr
    KV_HEADS: tl.constexpr
    D: tl.constexpr
    BLOCK_SIZE: tl.constexpr
    TOKENS: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr


@functools.cache
def attention_shape(
    heads: int, kv_heads: int, head_dim: int, block_size: int, tiling: AttentionTiling
) -> AttentionShape:
    """The constants of a launch. Kept, because Triton finds a compiled kernel by their hash."""
    return AttentionShape(
        HEADS=tl.constexpr(heads),
        KV_HEADS=tl.constexpr(kv_heads),
        D=tl.constexpr(head_dim),
        BLOCK_SIZE=tl.constexpr(block_size),
        TOKENS=tl.constexpr(tiling.tokens),
        BLOCK_M=tl.constexpr(tiling.block_m),
        BLOCK_N=tl.constexpr(tiling.block_n),
        BLOCK_D=tl.constexpr(max(triton.next_power_of_2(head_dim), 16)),
    )


class AttentionTiling(NamedTuple):
    """Launch shape.

    Attributes:
        block_m: query rows of a tile.
        tokens: tokens of a tile.
        query_tiles: tiles of the longest row.
        block_n: positions of a tile of keys and values.
        warps: per program.
        stages: tiles of keys and values on their way from memory.
    """

    block_m: int
    tokens: int
    query_tiles: int
    block_n: int
    warps: int
    stages: int


class Splits(NamedTuple):
    """How a row's context is divided among programs.

    Attributes:
        programs: splits per row at most.
        least: positions per split at least.
    """

    programs: int
    least: int = 1


PROGRAMS = 4
"""Programs per multiprocessor that `attention_splits` aims at."""
LONGEST = 2048
"""Positions per split where there are enough rows to fill the GPU without splitting: more would let
one long row among short ones finish late."""
DECODING = 16
"""Tokens of a row up to which it is taken for one that decodes, with at most 15 drafts."""
MAX_SPLITS = 64
MOST_SUMMED = 1 << 16
"""Sums of splits, one for each head and step of a row, where most have no token: a pass whose rows
may be anything up to all its tokens. With more it is not split."""


def attention_tiling(
    group: int, head_dim: int, max_scheduled: int, dtype: torch.dtype
) -> AttentionTiling:
    """Launch shape for `group` query heads per key head; swept on an H200."""
    exact = dtype == torch.float32  # products without matrix units: small tiles
    # Every tile reads the context: few large ones where rows decode, small ones where prompts run,
    # which share a long row's work among more programs.
    wide = head_dim > 128  # not measured: what registers hold
    most = (16 if wide else 32) if exact else 128 if max_scheduled <= DECODING else 64
    if head_dim <= 16:
        most = 32  # Triton 3.6 multiplies 64 x 16 outputs of matrix units wrongly
    most = max(most, triton.next_power_of_2(group))
    block_m = min(max(triton.next_power_of_2(group * max_scheduled), 16), most)
    tokens = block_m // group
    small = exact or block_m <= 32
    block_n = min(max((4096 if small else 8192) // triton.next_power_of_2(head_dim), 16), 64)
    warps, stages = (4, 2) if exact else (2, 5) if block_m <= 32 else (4, 5)
    if wide and block_m == 32:
        warps = 4
    query_tiles = triton.cdiv(max_scheduled, tokens)
    if query_tiles > 1 and not exact:
        stages = 3  # of keys that many programs share, so that two of them fit a multiprocessor
    if block_m > 64:
        warps, stages = 8, 3
    return AttentionTiling(block_m, tokens, query_tiles, block_n, warps, stages)


def attention_splits(
    q: Tensor, kv_heads: int, rows: int, max_scheduled: int, max_context: int
) -> Splits:
    """Enough splits to fill the GPU and not to leave a long row behind, from host bounds only.

    Args:
        q: [tokens, Hq, D].
        kv_heads: key heads.
        rows: rows of the pass.
        max_scheduled: upper bound of tokens per row.
        max_context: upper bound of computed + scheduled.
    """
    steps = max_scheduled * rows
    if steps > 2 * q.shape[0] and q.shape[1] * steps > MOST_SUMMED:
        return Splits(1)
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
