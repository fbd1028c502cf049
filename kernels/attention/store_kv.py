"""Store new keys and values in their cache blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.attention.launch import (
    AttentionRows,
    CacheStrides,
    KVCache,
    TokenStrides,
)
from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.linear.quantize import E4M3, Quantizer, cut_off, quantize_reference


def store_kv_reference(k: Tensor, v: Tensor, cache: KVCache, rows: AttentionRows) -> None:
    """Store token i of a row at position ``computed + i`` of the row's block table.

    Args:
        k: [tokens, Hkv, D].
        v: [tokens, Hkv, D].
        cache: changed in place; values are converted to its dtypes, to e4m3 by
            `quantize_reference` with its scales.
        rows: whose tokens they are; those of padded rows and of no row are dropped.

    Raises:
        ValueError: the cache does not have the shape of the keys and values, or wrong scales.
    """
    cache.check(k, v)
    slot, cu_seqlens, computed = rows
    block_size = cache.k.shape[1]
    token = torch.arange(k.shape[0], device=k.device)
    row = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
    inside = (row >= 0) & (row < slot.shape[0])
    token, row = token[inside], row[inside]
    active = slot[row] >= 0
    token, row = token[active], row[active]
    position = computed[row].long() + token - cu_seqlens[row].long()
    block = cache.block_table[slot[row].long(), position // block_size].long()
    cache.k[block, position % block_size] = _stored(k[token], cache.k.dtype, cache.k_scale)
    cache.v[block, position % block_size] = _stored(v[token], cache.v.dtype, cache.v_scale)


def _stored(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    if dtype != E4M3:
        return x.to(dtype)
    one = torch.ones((), device=x.device) if scale is None else scale
    return quantize_reference(x, Quantizer(one)).values.view(x.shape)


@triton.jit
def _narrowed(b_x, scale, dtype: tl.constexpr):
    """As `quantize_reference` does where `dtype` is e4m3."""
    if dtype == tl.float8e4nv:
        b_x = b_x.to(tl.float32)
        if scale is not None:
            b_x *= tl.div_rn(1.0, tl.load(scale))
        b_x = cut_off(b_x)
    return b_x.to(dtype)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "block_table",
        "slot",
        "cu_seqlens",
        "computed",
        "k_scale",
        "v_scale",
    ],
)
def _store_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    block_table,
    slot,
    cu_seqlens,
    computed,
    k_scale,
    v_scale,
    num_rows,
    k_stride,
    v_stride,
    k_cache_stride,
    v_cache_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token; its row is the last one that starts at or before it."""
    pdl_wait(PDL)
    i_token = tl.program_id(0)
    o_row = tl.arange(0, ROWS)
    b_start = tl.load(cu_seqlens + o_row, mask=o_row <= num_rows, other=2147483647)
    i_row = tl.sum((b_start <= i_token).to(tl.int32), axis=0) - 1
    owned = (i_row >= 0) & (i_row < num_rows)
    i_slot = tl.load(slot + i_row, mask=owned, other=-1)
    if i_slot < 0:
        return
    position = tl.load(computed + i_row) + i_token - tl.load(cu_seqlens + i_row)
    p_table = block_table + i_slot.to(tl.int64) * table_stride
    i_block = tl.load(p_table + position // BLOCK_SIZE).to(tl.int64)
    within = (position % BLOCK_SIZE).to(tl.int64)
    token = i_token.to(tl.int64)
    o_h = tl.arange(0, BLOCK_H)[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    m_hd = (o_h < KV_HEADS) & (o_d < D)
    p_k = k + token * k_stride.token + o_h * k_stride.head + o_d * k_stride.dim
    b_k = tl.load(p_k, mask=m_hd)
    p_k = k_cache + i_block * k_cache_stride.block + within * k_cache_stride.position
    p_k += o_h * k_cache_stride.head + o_d * k_cache_stride.dim
    tl.store(p_k, _narrowed(b_k, k_scale, k_cache.dtype.element_ty), mask=m_hd)
    p_v = v + token * v_stride.token + o_h * v_stride.head + o_d * v_stride.dim
    b_v = tl.load(p_v, mask=m_hd)
    p_v = v_cache + i_block * v_cache_stride.block + within * v_cache_stride.position
    p_v += o_h * v_cache_stride.head + o_d * v_cache_stride.dim
    tl.store(p_v, _narrowed(b_v, v_scale, v_cache.dtype.element_ty), mask=m_hd)


def store_kv(k: Tensor, v: Tensor, cache: KVCache, rows: AttentionRows) -> None:
    """`store_kv_reference` by one launch where Triton runs."""
    if not runs_triton(k):
        store_kv_reference(k, v, cache, rows)
        return
    cache.check(k, v)
    tokens, kv_heads, head_dim = k.shape
    num_rows = rows.slot.shape[0]
    if tokens == 0 or num_rows == 0:
        return
    _store_kv_kernel[(tokens,)](
        k=k,
        v=v,
        k_cache=cache.k,
        v_cache=cache.v,
        block_table=cache.block_table,
        slot=rows.slot,
        cu_seqlens=rows.cu_seqlens,
        computed=rows.computed,
        k_scale=cache.k_scale,
        v_scale=cache.v_scale,
        num_rows=num_rows,
        k_stride=TokenStrides(*k.stride()),
        v_stride=TokenStrides(*v.stride()),
        k_cache_stride=CacheStrides(*cache.k.stride()),
        v_cache_stride=CacheStrides(*cache.v.stride()),
        table_stride=cache.block_table.stride(0),
        KV_HEADS=kv_heads,
        D=head_dim,
        BLOCK_SIZE=cache.k.shape[1],
        ROWS=triton.next_power_of_2(num_rows + 1),
        BLOCK_H=triton.next_power_of_2(kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
        **pdl(k),
    )
