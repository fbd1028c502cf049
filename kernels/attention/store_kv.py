"""Write new keys and values into their cache blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait


def store_kv_reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    computed: Tensor,
) -> None:
    """Store token i of a row at position ``computed + i`` of the row's block table.

    Args:
        k: [tokens, Hkv, D], rows one after another.
        v: [tokens, Hkv, D].
        k_cache: [blocks, block_size, Hkv, D], changed in place, converted to its own dtype.
        v_cache: as k_cache.
        block_table: int32 [slots, columns] of physical blocks.
        slot: int32 [rows]; -1 = padded row, its tokens are dropped.
        cu_seqlens: int32 [rows + 1]; tokens outside [cu_seqlens[0], cu_seqlens[-1]) are dropped.
        computed: int32 [rows], position of the row's first token.

    Raises:
        ValueError: the caches do not have the shape of the keys and values.
    """
    _check_caches(k, v, k_cache, v_cache)
    block_size = k_cache.shape[1]
    token = torch.arange(k.shape[0], device=k.device)
    row = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
    inside = (row >= 0) & (row < slot.shape[0])
    token, row = token[inside], row[inside]
    used = slot[row] >= 0
    token, row = token[used], row[used]
    position = computed[row].long() + token - cu_seqlens[row].long()
    block = block_table[slot[row].long(), position // block_size].long()
    k_cache[block, position % block_size] = k[token].to(k_cache.dtype)
    v_cache[block, position % block_size] = v[token].to(v_cache.dtype)


def _check_caches(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    for name, new, cache in (("k_cache", k, k_cache), ("v_cache", v, v_cache)):
        if cache.dim() != 4 or cache.shape[2:] != new.shape[1:]:
            raise ValueError(
                f"{name} is {tuple(cache.shape)}, must be [blocks, block_size, "
                f"{new.shape[1]}, {new.shape[2]}]"
            )


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["block_table", "slot", "cu_seqlens", "computed"],
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
    rows,
    k_stride_token,
    k_stride_head,
    k_stride_dim,
    v_stride_token,
    v_stride_head,
    v_stride_dim,
    k_cache_stride_block,
    k_cache_stride_position,
    k_cache_stride_head,
    k_cache_stride_dim,
    v_cache_stride_block,
    v_cache_stride_position,
    v_cache_stride_head,
    v_cache_stride_dim,
    table_stride,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    token = tl.program_id(0)
    index = tl.arange(0, ROWS)
    starts = tl.load(cu_seqlens + index, mask=index <= rows, other=2147483647)
    row = tl.sum((starts <= token).to(tl.int32), axis=0) - 1
    owned = (row >= 0) & (row < rows)
    here = tl.load(slot + row, mask=owned, other=-1)
    if here < 0:
        return
    position = tl.load(computed + row) + token - tl.load(cu_seqlens + row)
    table = block_table + here.to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    within = (position % BLOCK_SIZE).to(tl.int64)
    at = token.to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < KV_HEADS) & (d < D)
    new = tl.load(k + at * k_stride_token + head * k_stride_head + d * k_stride_dim, mask=inside)
    to = k_cache + block * k_cache_stride_block + within * k_cache_stride_position
    to += head * k_cache_stride_head + d * k_cache_stride_dim
    tl.store(to, new.to(k_cache.dtype.element_ty), mask=inside)
    new = tl.load(v + at * v_stride_token + head * v_stride_head + d * v_stride_dim, mask=inside)
    to = v_cache + block * v_cache_stride_block + within * v_cache_stride_position
    to += head * v_cache_stride_head + d * v_cache_stride_dim
    tl.store(to, new.to(v_cache.dtype.element_ty), mask=inside)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    computed: Tensor,
) -> None:
    """`store_kv_reference` by one launch where Triton runs."""
    if not runs_triton(k):
        store_kv_reference(k, v, k_cache, v_cache, block_table, slot, cu_seqlens, computed)
        return
    _check_caches(k, v, k_cache, v_cache)
    tokens, kv_heads, size = k.shape
    rows = slot.shape[0]
    if tokens == 0 or rows == 0:
        return
    _store_kv_kernel[(tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        block_table,
        slot,
        cu_seqlens,
        computed,
        rows,
        *k.stride(),
        *v.stride(),
        *k_cache.stride(),
        *v_cache.stride(),
        block_table.stride(0),
        KV_HEADS=kv_heads,
        D=size,
        BLOCK_SIZE=k_cache.shape[1],
        ROWS=triton.next_power_of_2(rows + 1),
        BLOCK_H=triton.next_power_of_2(kv_heads),
        BLOCK_D=triton.next_power_of_2(size),
        num_warps=4,
        **pdl(k),
    )
