"""How a row's context is divided into splits, and the sum of the splits' results."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.attention.launch import AttentionRows, AttentionShape, Splits
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait


@triton.jit
def divide_context(
    start, scheduled, first, limit, least, splits, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Positions that the query tile of tokens [first, first + TOKENS) sees, and their division:
    tiles of BLOCK_N positions per split, and splits that have any."""
    context = tl.minimum(start + tl.minimum(scheduled, first + TOKENS), limit)
    tiles = tl.cdiv(context, BLOCK_N)
    share = tl.maximum(tl.cdiv(tiles, splits), tl.cdiv(least, BLOCK_N))
    return context, share, tl.cdiv(tiles, share)


@triton.jit(
    do_not_specialize=["tokens", "limit", "least"],
    do_not_specialize_on_alignment=["slot", "cu_seqlens", "computed"],
)
def _reduce_kernel(
    partial,
    partial_lse,
    slot,
    cu_seqlens,
    computed,
    out,
    tokens,
    limit,
    least,
    shape,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per query head, EACH steps of a row, and row."""
    pdl_wait(PDL)
    D: tl.constexpr = shape.D
    i_h = tl.program_id(0)
    low = tl.program_id(1) * EACH  # a query tile's steps are a multiple of EACH
    i_row = tl.program_id(2)
    begin = tl.load(cu_seqlens + i_row)
    scheduled = tl.load(cu_seqlens + i_row + 1) - begin
    start = tl.load(computed + i_row)
    first = low // shape.TOKENS * shape.TOKENS
    _, _, used = divide_context(
        start, scheduled, first, limit, least, SPLITS, shape.TOKENS, shape.BLOCK_N
    )
    if (tl.load(slot + i_row) < 0) | (low >= scheduled) | (used <= 1):
        return
    o_s = tl.arange(0, BLOCK_S)
    o_d = tl.arange(0, shape.BLOCK_D)
    for i in tl.static_range(EACH):
        if low + i < scheduled:
            line = (begin + low + i).to(tl.int64) * shape.HEADS + i_h
            lines = o_s.to(tl.int64) * tokens * shape.HEADS + line
            b_lse = tl.load(partial_lse + lines, mask=o_s < used, other=float("-inf"))
            b_weight = tl.exp2(b_lse - tl.max(b_lse, axis=0))
            b_weight = b_weight / tl.sum(b_weight, axis=0)
            m_part = (o_s < used)[:, None] & (o_d < D)[None, :]
            b_part = tl.load(partial + lines[:, None] * D + o_d[None, :], mask=m_part, other=0.0)
            b_out = tl.sum(b_part * b_weight[:, None], axis=0).to(out.dtype.element_ty)
            tl.store(out + line * D + o_d, b_out, mask=o_d < D)


FEW_PROGRAMS = 4096
"""Up to so many programs each sums one step. More of them, of which most find nothing to sum, take
longer to start than four steps in turn."""


def reduce_splits(
    partial: Tensor,
    partial_lse: Tensor,
    rows: AttentionRows,
    out: Tensor,
    max_scheduled: int,
    limit: int,
    splits: Splits,
    shape: AttentionShape,
) -> None:
    """Sum the results of rows that have several splits; others are left as they are.

    Args:
        partial: fp32 [splits, tokens, Hq, D], each split's softmax(scale q k^T) v.
        partial_lse: fp32 [splits, tokens, Hq], log2 of each split's sum of 2^score.
        rows: as the attention kernel's.
        out: [tokens, Hq, D], dense.
        max_scheduled: upper bound of tokens per row.
        limit: upper bound of positions, as the attention kernel's.
        splits: as the attention kernel's.
        shape: as the attention kernel's.
    """
    tokens, heads, _ = out.shape
    block_s = triton.next_power_of_2(splits.programs)
    num_rows = rows.slot.shape[0]
    many = heads * max_scheduled * num_rows > FEW_PROGRAMS
    each = math.gcd(shape.TOKENS.value, 4) if many else 1
    _reduce_kernel[(heads, triton.cdiv(max_scheduled, each), num_rows)](
        partial=partial,
        partial_lse=partial_lse,
        slot=rows.slot,
        cu_seqlens=rows.cu_seqlens,
        computed=rows.computed,
        out=out,
        tokens=tokens,
        limit=limit,
        least=splits.least,
        shape=shape,
        SPLITS=splits.programs,
        BLOCK_S=block_s,
        EACH=each,
        # At most 64 values a thread.
        num_warps=min(max(block_s * shape.BLOCK_D.value // 2048, 1), 8),
        **pdl(out),
    )
