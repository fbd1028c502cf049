"""Causal attention over block tables for rows of any length.

The kernel is made for verify and draft rows. All query heads of a key head times the row's tokens
are one tile, so a key is read once for all of them; longer rows take several tiles. A row's context
is divided among several programs (splits), whose results a second small kernel sums, so that few
rows with long contexts occupy the whole GPU. A row short enough for one split is done after the
first kernel.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from einops import einsum, rearrange
from torch import Tensor

from hybrid_runtime.kernels.attention.launch import (
    AttentionRows,
    CacheStrides,
    KVCache,
    Splits,
    TokenStrides,
    attention_scratch,
    attention_shape,
    attention_splits,
    attention_tiling,
)
from hybrid_runtime.kernels.attention.reduce import divide_context, reduce_splits
from hybrid_runtime.kernels.attention.tile import attend
from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.outputs import check_out
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.common.types import operand_type
from hybrid_runtime.kernels.common.varlen import gather_rows, row_tokens, scatter_rows
from hybrid_runtime.kernels.common.zero_fill import zero_dense


def paged_attention_reference(
    q: Tensor,
    cache: KVCache,
    rows: AttentionRows,
    max_scheduled: int,
    max_context: int,
    scale: float,
) -> Tensor:
    """softmax(scale q k^T) v for token i of a row over positions 0 .. computed + i.

    The row's own keys and values must already be in the cache. Query head h uses key head
    ``h // (Hq // Hkv)``. Prefill and decode rows may be mixed. What lies in the cache beyond a
    row's context is never used, whatever it is (NaN included). In e4m3 caches keys and values are
    the stored ones times their scales.

    Args:
        q: [tokens, Hq, D].
        cache: keys and values.
        rows: whose tokens they are.
        max_scheduled: upper bound of tokens per row.
        max_context: upper bound of computed + scheduled.
        scale: factor of the scores, usually D ** -0.5.

    Returns:
        [tokens, Hq, D] in q's dtype, 0 for padded rows. Scores and sums in fp32 (fp64 for fp64).

    Raises:
        ValueError: query heads are no multiple of key heads.
    """
    kv_heads, block_size = cache.k.shape[2], cache.k.shape[1]
    _check_heads(q.shape[1], kv_heads)
    acc = torch.promote_types(q.dtype, torch.float32)
    slot, cu_seqlens, computed = rows
    active = slot >= 0
    index, valid = row_tokens(cu_seqlens, max_scheduled, q.shape[0], active)
    queries = gather_rows(q, index, valid).to(acc)
    queries = rearrange(queries, "row token (kv group) d -> row token kv group d", kv=kv_heads)

    context = min(max_context, cache.block_table.shape[1] * block_size)
    position = torch.arange(context, device=q.device)
    length = computed.long() + (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    inside = active[:, None] & (position < length[:, None])
    table = cache.block_table[torch.where(active, slot, 0).long()].long()
    block = torch.where(inside, table[:, position // block_size], 0)
    keys = cache.k[block, position % block_size].to(acc)
    values = cache.v[block, position % block_size].to(acc)
    values = torch.where(inside[:, :, None, None], values, values.new_zeros(()))

    scores = einsum(
        queries, keys, "row token kv group d, row pos kv d -> row kv group token pos"
    )  # fmt: skip
    last_seen = computed.long()[:, None] + torch.arange(max_scheduled, device=q.device)
    visible = (position <= last_seen[..., None]) & inside[:, None] & valid[..., None]
    visible = rearrange(visible, "row token pos -> row 1 1 token pos")
    if cache.k_scale is not None:
        scores = scores * cache.k_scale
    weights = torch.softmax((scores * scale).masked_fill(~visible, float("-inf")), dim=-1)
    # A token that sees nothing (padding) has NaN for weights.
    weights = torch.where(visible, weights, weights.new_zeros(()))
    y = einsum(
        weights, values, "row kv group token pos, row pos kv d -> row token kv group d"
    )  # fmt: skip
    if cache.v_scale is not None:
        y = y * cache.v_scale
    y = rearrange(y, "row token kv group d -> row token (kv group) d")
    return scatter_rows(y.to(q.dtype), index, valid, q.shape[0])


def _check_heads(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, must be a multiple of the cache's {kv_heads}")


@triton.jit(
    do_not_specialize=["tokens", "limit", "least"],
    do_not_specialize_on_alignment=[
        "block_table",
        "slot",
        "cu_seqlens",
        "computed",
        "k_scale",
        "v_scale",
    ],
)
def _attention_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    slot,
    cu_seqlens,
    computed,
    k_scale,
    v_scale,
    out,
    partial,
    partial_lse,
    tokens,
    limit,
    least,
    scale,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    shape,
    dot_type: tl.constexpr,
    SPLIT: tl.constexpr,
    TRIPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per key head and query tile, row, and split. `scale` includes log2(e)."""
    pdl_wait(PDL, False)
    HEADS: tl.constexpr = shape.HEADS
    KV_HEADS: tl.constexpr = shape.KV_HEADS
    D: tl.constexpr = shape.D
    TOKENS: tl.constexpr = shape.TOKENS
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    GROUP: tl.constexpr = HEADS // KV_HEADS
    i_kv = tl.program_id(0) % KV_HEADS
    # The last tokens of a prompt see most: their programs start first, and none of them ends late.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS * TOKENS
    i_row = tl.program_id(1)
    i_split = tl.program_id(2)
    i_slot = tl.load(slot + i_row)
    begin = tl.load(cu_seqlens + i_row)
    end = tl.load(cu_seqlens + i_row + 1)
    if (tl.program_id(0) == 0) & (i_split == 0):  # zero the outputs of tokens without a row
        if i_row == 0:
            zero_dense(out, 0, begin, HEADS * D, 1024)
        if i_row == tl.num_programs(1) - 1:
            zero_dense(out, end, tokens, HEADS * D, 1024)
        if i_slot < 0:
            zero_dense(out, begin, end, HEADS * D, 1024)
    scheduled = end - begin
    start = tl.load(computed + i_row)
    context, share, used = divide_context(
        start, scheduled, first, limit, least, tl.num_programs(2), TOKENS, BLOCK_N
    )
    if (i_slot < 0) | (first >= scheduled) | (i_split >= used):
        return

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_t = first + o_m // GROUP
    o_h = i_kv * GROUP + o_m % GROUP
    m_m = (o_m < TOKENS * GROUP) & (o_t < scheduled)
    m_q = m_m[:, None] & (o_d < D)[None, :]
    o_token = (begin + o_t).to(tl.int64)
    p_q = q + (o_token * q_stride.token + o_h * q_stride.head)[:, None]
    b_q = tl.load(p_q + o_d[None, :] * q_stride.dim, mask=m_q, other=0.0)
    b_q = b_q.to(dot_type)

    p_table = block_table + i_slot.to(tl.int64) * table_stride
    p_k = k_cache + tl.cast(i_kv, tl.int64) * k_stride.head
    p_v = v_cache + tl.cast(i_kv, tl.int64) * v_stride.head
    o_seen = start + o_t
    origin = i_split * share * BLOCK_N
    bound = tl.minimum(context, origin + share * BLOCK_N)
    whole = tl.maximum(tl.minimum(start + first + 1, bound) - origin, 0) // BLOCK_N
    if k_scale is not None:
        scale *= tl.load(k_scale)
    b_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # Tiles that every token sees whole need no masks. Triton 3.6's interpreter has no loops of
    # run-time length; there TRIPS bounds them.
    for i_tile in range(TRIPS if TRIPS > 0 else whole):
        if TRIPS == 0 or i_tile < whole:
            b_max, b_sum, b_acc = attend(
                b_q, b_max, b_sum, b_acc, origin + i_tile * BLOCK_N, bound, o_seen, scale, p_table,
                p_k, p_v, k_stride, v_stride, dot_type, shape, False,
            )  # fmt: skip
    for i_tile in range(TRIPS if TRIPS > 0 else tl.cdiv(bound - origin, BLOCK_N) - whole):
        b_max, b_sum, b_acc = attend(
            b_q, b_max, b_sum, b_acc, origin + (whole + i_tile) * BLOCK_N, bound, o_seen, scale,
            p_table, p_k, p_v, k_stride, v_stride, dot_type, shape, True,
        )  # fmt: skip

    b_acc = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None]
    if v_scale is not None:
        b_acc *= tl.load(v_scale)
    line = o_token * HEADS + o_h
    if SPLIT:
        if used > 1:
            line += tl.cast(i_split, tl.int64) * tokens * HEADS
            tl.store(partial + line[:, None] * D + o_d[None, :], b_acc, mask=m_q)
            tl.store(partial_lse + line, b_max + tl.log2(b_sum), mask=m_m)
        else:
            b_out = b_acc.to(out.dtype.element_ty)
            tl.store(out + line[:, None] * D + o_d[None, :], b_out, mask=m_q)
    else:
        b_out = b_acc.to(out.dtype.element_ty)
        tl.store(out + line[:, None] * D + o_d[None, :], b_out, mask=m_q)


def paged_attention(
    q: Tensor,
    cache: KVCache,
    rows: AttentionRows,
    max_scheduled: int,
    max_context: int,
    scale: float,
    splits: Splits | None = None,
    scratch: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`paged_attention_reference` by one launch, or two with more than one split, where Triton runs
    (and not in fp64).

    Args:
        splits: how each row's context is divided; None = `attention_splits`.
        scratch: fp32, dense, `attention_scratch` elements or more; None = allocated here.
        out: where the outputs go, contiguous and of q's shape and dtype; None = allocated here.

    Raises:
        ValueError: query heads are no multiple of key heads, `out` does not fit, or scratch is too
            small.
    """
    check_out(out, q)
    dot_type = cache.product_type(q)
    if not runs_triton(q) or dot_type == torch.float64:
        y = paged_attention_reference(q, cache, rows, max_scheduled, max_context, scale)
        return y if out is None else out.copy_(y)
    tokens, heads, head_dim = q.shape
    block_size, kv_heads = cache.k.shape[1:3]
    num_rows = rows.slot.shape[0]
    _check_heads(heads, kv_heads)
    if out is None:
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    if num_rows == 0 or tokens == 0 or max_scheduled == 0:
        return out.zero_()
    tiling = attention_tiling(heads // kv_heads, head_dim, max_scheduled, dot_type)
    if splits is None:
        splits = attention_splits(q, kv_heads, num_rows, max_scheduled, max_context)
    partial, partial_lse = _partials(q, splits, scratch)
    limit = min(max_context, cache.block_table.shape[1] * block_size)
    trips = triton.cdiv(max(triton.cdiv(limit, splits.programs), splits.least), tiling.block_n)
    shape = attention_shape(heads, kv_heads, head_dim, block_size, tiling)
    # Splits come last: the programs that a short row leaves without work start after all others.
    _attention_kernel[(kv_heads * tiling.query_tiles, num_rows, splits.programs)](
        q=q,
        k_cache=cache.k,
        v_cache=cache.v,
        block_table=cache.block_table,
        slot=rows.slot,
        cu_seqlens=rows.cu_seqlens,
        computed=rows.computed,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        out=out,
        partial=partial,
        partial_lse=partial_lse,
        tokens=tokens,
        limit=limit,
        least=splits.least,
        scale=scale * math.log2(math.e),
        q_stride=TokenStrides(*q.stride()),
        k_stride=CacheStrides(*cache.k.stride()),
        v_stride=CacheStrides(*cache.v.stride()),
        table_stride=cache.block_table.stride(0),
        shape=shape,
        dot_type=operand_type(dot_type, q),
        SPLIT=splits.programs > 1,
        TRIPS=0 if q.is_cuda else trips,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **pdl(q),
    )
    if splits.programs > 1:
        reduce_splits(partial, partial_lse, rows, out, max_scheduled, limit, splits, shape)
    return out


def _partials(q: Tensor, splits: Splits, scratch: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scratch cut into what each split stores: its result, and log2 of its sum of 2^score."""
    needed = attention_scratch(q, splits)
    if scratch is None:
        scratch = torch.empty(needed, dtype=torch.float32, device=q.device)
    elif scratch.dtype != torch.float32 or scratch.numel() < needed:
        raise ValueError(
            f"scratch is {scratch.dtype} [{scratch.numel()}], must be float32 [{needed}] or larger"
        )
    lines = needed // (q.shape[2] + 1)
    return scratch[: lines * q.shape[2]], scratch[lines * q.shape[2] : needed]
