"""Causal attention over block tables for rows of any length.

The kernel is made for verify and draft rows. All query heads of a key head times the row's tokens
are one tile, so a key is read once for all of them; longer rows take several tiles. A row's context
is divided among several programs and a second small kernel adds up their results, so that few rows
with long contexts occupy the whole GPU; a row short enough for one program needs no second kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.attention.launch import (
    Splits,
    attention_scratch,
    attention_splits,
    attention_tiling,
)
from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.common.varlen import gather_rows, row_tokens, scatter_rows


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    computed: Tensor,
    max_scheduled: int,
    max_context: int,
    scale: float,
) -> Tensor:
    """softmax(scale q k^T) v for token i of a row over positions 0 .. computed + i.

    The row's own keys and values must already be in the cache. Query head h uses key head
    ``h // (Hq // Hkv)``. Prefill and decode rows may be mixed. What lies in the cache beyond a
    row's context is never used, whatever it is (NaN included).

    Args:
        q: [tokens, Hq, D].
        k_cache: [blocks, block_size, Hkv, D].
        v_cache: [blocks, block_size, Hkv, D].
        block_table: int32 [slots, columns] of physical blocks.
        slot: int32 [rows]; -1 = padded row.
        cu_seqlens: int32 [rows + 1].
        computed: int32 [rows], position of the row's first token.
        max_scheduled: upper bound of tokens per row.
        max_context: upper bound of computed + scheduled.
        scale: factor of the scores, usually D ** -0.5.

    Returns:
        [tokens, Hq, D] in q's dtype, 0 for padded rows. Scores and sums in fp32 (fp64 for fp64).

    Raises:
        ValueError: query heads are no multiple of key heads.
    """
    heads, kv_heads = q.shape[1], k_cache.shape[2]
    _check_heads(heads, kv_heads)
    acc = torch.promote_types(q.dtype, torch.float32)
    block_size = k_cache.shape[1]
    active = slot >= 0
    index, valid = row_tokens(cu_seqlens, max_scheduled, q.shape[0], active)
    queries = gather_rows(q, index, valid).to(acc).unflatten(2, (kv_heads, heads // kv_heads))

    context = min(max_context, block_table.shape[1] * block_size)
    position = torch.arange(context, device=q.device)
    length = computed.long() + (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    inside = active[:, None] & (position < length[:, None])
    table = block_table[torch.where(active, slot, 0).long()].long()
    block = torch.where(inside, table[:, position // block_size], 0)
    keys = k_cache[block, position % block_size].to(acc)
    values = v_cache[block, position % block_size].to(acc)
    values = torch.where(inside[:, :, None, None], values, values.new_zeros(()))

    scores = torch.einsum("rskgd,rckd->rkgsc", queries, keys) * scale
    step = torch.arange(max_scheduled, device=q.device)
    visible = position <= (computed.long()[:, None] + step)[..., None]
    visible = (visible & inside[:, None] & valid[..., None])[:, None, None]
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    # A row of nothing but -inf (padding) softmaxes to NaN.
    weights = torch.where(visible, weights, weights.new_zeros(()))
    y = torch.einsum("rkgsc,rckd->rskgd", weights, values).flatten(2, 3)
    return scatter_rows(y.to(q.dtype), index, valid, q.shape[0])


def _check_heads(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, must be a multiple of k_cache's {kv_heads}")


@triton.jit
def _partition(
    start, scheduled, first, limit, least, splits, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Context of the query tile whose first token is `first`, and how it is divided: so many tiles
    of positions for each program, and programs that have any."""
    context = tl.minimum(start + tl.minimum(scheduled, first + TOKENS), limit)
    tiles = tl.cdiv(context, BLOCK_N)
    share = tl.maximum(tl.cdiv(tiles, splits), tl.cdiv(least, BLOCK_N))
    return context, share, tl.cdiv(tiles, share)


@triton.jit
def _zero(out, first, last, D: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr):
    index = tl.arange(0, TILE)
    at = tl.cast(first, tl.int64) * (HEADS * D)
    end = tl.cast(last, tl.int64) * (HEADS * D)
    while at < end:
        tl.store(out + at + index, tl.zeros((TILE,), out.dtype.element_ty), mask=at + index < end)
        at += TILE


@triton.jit(
    do_not_specialize=["tokens", "limit", "least"],
    do_not_specialize_on_alignment=["block_table", "slot", "cu_seqlens", "computed"],
)
def _attention_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    slot,
    cu_seqlens,
    computed,
    out,
    partial,
    partial_lse,
    tokens,
    limit,
    least,
    scale,
    q_stride_token,
    q_stride_head,
    q_stride_dim,
    k_stride_block,
    k_stride_position,
    k_stride_head,
    k_stride_dim,
    v_stride_block,
    v_stride_position,
    v_stride_head,
    v_stride_dim,
    table_stride,
    dot_type: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TRIPS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL, False)
    group: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    first = tl.program_id(0) // KV_HEADS * TOKENS
    row = tl.program_id(1)
    split = tl.program_id(2)
    here = tl.load(slot + row)
    begin = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    if (tl.program_id(0) == 0) & (split == 0):  # tokens that nobody attends for
        if row == 0:
            _zero(out, 0, begin, D, HEADS, 1024)
        if row == tl.num_programs(1) - 1:
            _zero(out, end, tokens, D, HEADS, 1024)
        if here < 0:
            _zero(out, begin, end, D, HEADS, 1024)
    scheduled = end - begin
    start = tl.load(computed + row)
    context, share, used = _partition(
        start, scheduled, first, limit, least, tl.num_programs(2), TOKENS, BLOCK_N
    )
    if (here < 0) | (first >= scheduled) | (split >= used):
        return

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    step = first + m // group
    head = kv_head * group + m % group
    valid = (m < TOKENS * group) & (step < scheduled)
    token = (begin + step).to(tl.int64)
    stored = valid[:, None] & (d < D)[None, :]
    at = token * q_stride_token + head * q_stride_head
    query = tl.load(q + at[:, None] + d[None, :] * q_stride_dim, mask=stored, other=0.0)
    query = query.to(dot_type)

    table = block_table + here.to(tl.int64) * table_stride
    k_base = k_cache + tl.cast(kv_head, tl.int64) * k_stride_head
    v_base = v_cache + tl.cast(kv_head, tl.int64) * v_stride_head
    n = tl.arange(0, BLOCK_N)
    origin = split * share * BLOCK_N
    bound = tl.minimum(context, origin + share * BLOCK_N)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # Triton 3.6's interpreter has no loops of run-time length; there TRIPS bounds them.
    for trip in range(TRIPS if TRIPS > 0 else tl.cdiv(bound - origin, BLOCK_N)):
        low = origin + trip * BLOCK_N
        position = low + n
        inside = position < bound
        if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies in one block
            block = tl.load(table + low // BLOCK_SIZE, mask=low < bound, other=0).to(tl.int64)
            within = (low % BLOCK_SIZE).to(tl.int64)
            k_at = block * k_stride_block + within * k_stride_position + n * k_stride_position
            v_at = block * v_stride_block + within * v_stride_position + n * v_stride_position
        else:
            block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            within = (position % BLOCK_SIZE).to(tl.int64)
            k_at = block * k_stride_block + within * k_stride_position
            v_at = block * v_stride_block + within * v_stride_position
        read = inside[:, None]
        if D < BLOCK_D:
            read = read & (d < D)[None, :]
        key = tl.load(k_base + k_at[:, None] + d[None, :] * k_stride_dim, mask=read, other=0.0)
        value = tl.load(v_base + v_at[:, None] + d[None, :] * v_stride_dim, mask=read, other=0.0)
        score = tl.dot(query, tl.trans(key.to(dot_type)), input_precision="ieee") * scale
        visible = (position[None, :] <= (start + step)[:, None]) & inside[None, :]
        score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        # No position of this tile or those before is visible to a token: its sums stay 0.
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(score - finite[:, None])
        decay = tl.exp2(top - finite)
        total = total * decay + tl.sum(weight, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weight.to(dot_type), value.to(dot_type), acc, input_precision="ieee")
        top = higher

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    line = token * HEADS + head
    if SPLIT:
        if used > 1:
            line += tl.cast(split, tl.int64) * tokens * HEADS
            tl.store(partial + line[:, None] * D + d[None, :], acc, mask=stored)
            tl.store(partial_lse + line, top + tl.log2(total), mask=valid)
        else:
            result = acc.to(out.dtype.element_ty)
            tl.store(out + line[:, None] * D + d[None, :], result, mask=stored)
    else:
        result = acc.to(out.dtype.element_ty)
        tl.store(out + line[:, None] * D + d[None, :], result, mask=stored)


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
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    head = tl.program_id(0)
    step = tl.program_id(1)
    row = tl.program_id(2)
    begin = tl.load(cu_seqlens + row)
    scheduled = tl.load(cu_seqlens + row + 1) - begin
    first = step // TOKENS * TOKENS
    _, _, used = _partition(
        tl.load(computed + row), scheduled, first, limit, least, SPLITS, TOKENS, BLOCK_N
    )
    if (tl.load(slot + row) < 0) | (step >= scheduled) | (used <= 1):
        return
    split = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    line = (begin + step).to(tl.int64) * HEADS + head
    lines = split.to(tl.int64) * tokens * HEADS + line
    lse = tl.load(partial_lse + lines, mask=split < used, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, axis=0))
    weight = weight / tl.sum(weight, axis=0)
    read = (split < used)[:, None] & (d < D)[None, :]
    parts = tl.load(partial + lines[:, None] * D + d[None, :], mask=read, other=0.0)
    result = tl.sum(parts * weight[:, None], axis=0).to(out.dtype.element_ty)
    tl.store(out + line * D + d, result, mask=d < D)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    computed: Tensor,
    max_scheduled: int,
    max_context: int,
    scale: float,
    splits: Splits | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """`paged_attention_reference` by one launch, or two with more than one split, where Triton runs
    (and not in fp64).

    Args:
        splits: how each row's context is divided; None = `attention_splits`.
        scratch: fp32, dense, `attention_scratch` elements or more; None = allocated here.

    Raises:
        ValueError: query heads are no multiple of key heads, or scratch is too small.
    """
    dot_type = torch.promote_types(q.dtype, torch.promote_types(k_cache.dtype, v_cache.dtype))
    if not runs_triton(q) or dot_type == torch.float64:
        return paged_attention_reference(
            q, k_cache, v_cache, block_table, slot, cu_seqlens, computed, max_scheduled,
            max_context, scale,
        )  # fmt: skip
    tokens, heads, size = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    rows = slot.shape[0]
    _check_heads(heads, kv_heads)
    out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    if rows == 0 or tokens == 0 or max_scheduled == 0:
        return out.zero_()
    tiling = attention_tiling(heads // kv_heads, size, max_scheduled, dot_type)
    if splits is None:
        splits = attention_splits(q, kv_heads, rows, max_scheduled, max_context)
    needed = attention_scratch(q, splits)
    if scratch is None:
        scratch = torch.empty(needed, dtype=torch.float32, device=q.device)
    elif scratch.dtype != torch.float32 or scratch.numel() < needed:
        raise ValueError(
            f"scratch is {scratch.dtype} [{scratch.numel()}], must be float32 [{needed}] or larger"
        )
    partial, lse = scratch[: needed // (size + 1) * size], scratch[needed // (size + 1) * size :]
    limit = min(max_context, block_table.shape[1] * block_size)
    trips = triton.cdiv(max(triton.cdiv(limit, splits.programs), splits.least), tiling.block_n)
    block_d = max(triton.next_power_of_2(size), 16)
    # Splits come last: the programs that a short row leaves without work start after all others.
    _attention_kernel[(kv_heads * tiling.query_tiles, rows, splits.programs)](
        q,
        k_cache,
        v_cache,
        block_table,
        slot,
        cu_seqlens,
        computed,
        out,
        partial,
        lse,
        tokens,
        limit,
        splits.least,
        scale * LOG2_E,
        *q.stride(),
        *k_cache.stride(),
        *v_cache.stride(),
        block_table.stride(0),
        # The interpreter multiplies bf16 as if its bits were integers.
        dot_type=_TYPES[dot_type] if q.is_cuda else tl.float32,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=size,
        BLOCK_SIZE=block_size,
        SPLIT=splits.programs > 1,
        TRIPS=0 if q.is_cuda else trips,
        TOKENS=tiling.tokens,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_D=block_d,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **pdl(q),
    )
    if splits.programs > 1:
        block_s = triton.next_power_of_2(splits.programs)
        _reduce_kernel[(heads, max_scheduled, rows)](
            partial,
            lse,
            slot,
            cu_seqlens,
            computed,
            out,
            tokens,
            limit,
            splits.least,
            HEADS=heads,
            D=size,
            SPLITS=splits.programs,
            TOKENS=tiling.tokens,
            BLOCK_N=tiling.block_n,
            BLOCK_S=block_s,
            BLOCK_D=block_d,
            num_warps=min(max(block_s * block_d // 2048, 1), 8),  # at most 64 values a thread
            **pdl(q),
        )
    return out


LOG2_E = 1.4426950408889634
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
