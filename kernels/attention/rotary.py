"""Queries and keys as attention takes them: each head's norm, then its rotation by the token's
position (Su et al. 2021, "RoFormer", with Llama's halves)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.attention.launch import AttentionRows, TokenStrides
from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait


class Rotary(NamedTuple):
    """A rotary position embedding.

    size: elements of a head that are turned, the first ones: i and i + size / 2 together, by
        position * theta ** (-2 i / size).
    theta: see there.
    """

    size: int
    theta: float

    def frequencies(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[size / 2]`, angle per position; made once."""
        return _frequencies(self, device, dtype)


@functools.cache
def _frequencies(rotary: Rotary, device: torch.device, dtype: torch.dtype) -> Tensor:
    exponent = torch.arange(0, rotary.size, 2, dtype=dtype) / rotary.size
    return (1.0 / rotary.theta**exponent).to(device)


class HeadNorm(NamedTuple):
    """Root-mean-square norms of heads.

    q: `[D]`, weights of queries, as what they differ from 1 by; k: of keys.
    eps: added to the mean square.
    """

    q: Tensor
    k: Tensor
    eps: float


def rotate_heads_reference(
    q: Tensor, k: Tensor, rotary: Rotary, rows: AttentionRows, norm: HeadNorm | None = None
) -> tuple[Tensor, Tensor]:
    """Queries and keys after norm and rotation, formed in fp32 (fp64 for fp64).

    Args:
        q: [tokens, Hq, D].
        k: [tokens, Hkv, D].
        rotary: of at most D elements.
        rows: whose tokens they are; token i of a row is at position computed + i. Tokens of no row
            are at any.
        norm: None = none.

    Returns:
        Tensors of the shapes and dtypes of q and k.
    """
    token = torch.arange(q.shape[0], device=q.device)
    row = torch.searchsorted(rows.cu_seqlens.long(), token, right=True) - 1
    row = row.clamp(0, rows.computed.shape[0] - 1)
    position = rows.computed[row].long() + token - rows.cu_seqlens[row].long()
    acc = torch.promote_types(q.dtype, torch.float32)
    angle = position[:, None].to(acc) * rotary.frequencies(q.device, acc)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    turned = []
    for heads, weight in ((q, norm and norm.q), (k, norm and norm.k)):
        x = heads.to(acc)
        if norm is not None and weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
            x = x * (1 + weight.to(acc))
        low, high, rest = x.split(
            [rotary.size // 2, rotary.size // 2, x.shape[-1] - rotary.size], dim=-1
        )
        x = torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)
        turned.append(x.to(heads.dtype))
    return turned[0], turned[1]


@triton.jit
def _rotate_head(
    p_x,
    dim_stride,
    weight,
    p_out,
    frequencies,
    position,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One head: norm if there is a weight, rotation of its first 2 * HALF elements."""
    o_d = tl.arange(0, BLOCK_D)
    o_h = tl.arange(0, BLOCK_H)
    m_h = o_h < HALF
    b_low = tl.load(p_x + o_h * dim_stride, mask=m_h, other=0.0).to(tl.float32)
    b_high = tl.load(p_x + (HALF + o_h) * dim_stride, mask=m_h, other=0.0).to(tl.float32)
    if (weight is not None) | (2 * HALF < D):
        b_x = tl.load(p_x + o_d * dim_stride, mask=o_d < D, other=0.0).to(tl.float32)
        if weight is not None:
            factor = 1 / tl.sqrt(tl.sum(b_x * b_x, axis=0) / D + eps)
            b_x *= factor * (1 + tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32))
            b_low *= factor * (1 + tl.load(weight + o_h, mask=m_h, other=0.0).to(tl.float32))
            b_weight = tl.load(weight + HALF + o_h, mask=m_h, other=0.0).to(tl.float32)
            b_high *= factor * (1 + b_weight)
        m_rest = (o_d >= 2 * HALF) & (o_d < D)
        tl.store(p_out + o_d, b_x.to(p_out.dtype.element_ty), mask=m_rest)
    b_angle = position.to(tl.float32) * tl.load(frequencies + o_h, mask=m_h, other=0.0)
    b_cos = tl.cos(b_angle)
    b_sin = tl.sin(b_angle)
    b_turned = b_low * b_cos - b_high * b_sin
    tl.store(p_out + o_h, b_turned.to(p_out.dtype.element_ty), mask=m_h)
    b_turned = b_high * b_cos + b_low * b_sin
    tl.store(p_out + HALF + o_h, b_turned.to(p_out.dtype.element_ty), mask=m_h)


@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["cu_seqlens", "computed"]
)
def _rotate_heads_kernel(
    q,
    k,
    q_weight,
    k_weight,
    q_out,
    k_out,
    frequencies,
    cu_seqlens,
    computed,
    num_rows,
    eps,
    q_stride,
    k_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token and head, of queries first; its row is the last one that starts at or
    before the token."""
    pdl_wait(PDL)
    i_token = tl.program_id(0)
    i_head = tl.program_id(1)
    o_row = tl.arange(0, ROWS)
    b_start = tl.load(cu_seqlens + o_row, mask=o_row <= num_rows, other=2147483647)
    i_row = tl.sum((b_start <= i_token).to(tl.int32), axis=0) - 1
    owned = (i_row >= 0) & (i_row < num_rows)
    position = tl.load(computed + i_row, mask=owned, other=0)
    position += i_token - tl.load(cu_seqlens + i_row, mask=owned, other=0)
    token = i_token.to(tl.int64)
    if i_head < HEADS:
        _rotate_head(
            q + token * q_stride.token + i_head * q_stride.head, q_stride.dim, q_weight,
            q_out + (token * HEADS + i_head) * D, frequencies, position, eps,
            D, HALF, BLOCK_D, BLOCK_H,
        )  # fmt: skip
    else:
        i_kv = i_head - HEADS
        _rotate_head(
            k + token * k_stride.token + i_kv * k_stride.head, k_stride.dim, k_weight,
            k_out + (token * KV_HEADS + i_kv) * D, frequencies, position, eps,
            D, HALF, BLOCK_D, BLOCK_H,
        )  # fmt: skip


def rotate_heads(
    q: Tensor, k: Tensor, rotary: Rotary, rows: AttentionRows, norm: HeadNorm | None = None
) -> tuple[Tensor, Tensor]:
    """`rotate_heads_reference` by one launch where Triton runs (and not in fp64), dense."""
    if not runs_triton(q) or q.dtype == torch.float64:
        return rotate_heads_reference(q, k, rotary, rows, norm)
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    num_rows = rows.computed.shape[0]
    if tokens:
        _rotate_heads_kernel[(tokens, heads + kv_heads)](
            q=q,
            k=k,
            q_weight=None if norm is None else norm.q,
            k_weight=None if norm is None else norm.k,
            q_out=q_out,
            k_out=k_out,
            frequencies=rotary.frequencies(q.device),
            cu_seqlens=rows.cu_seqlens,
            computed=rows.computed,
            num_rows=num_rows,
            eps=0.0 if norm is None else norm.eps,
            q_stride=TokenStrides(*q.stride()),
            k_stride=TokenStrides(*k.stride()),
            HEADS=heads,
            KV_HEADS=kv_heads,
            D=dim,
            HALF=rotary.size // 2,
            ROWS=triton.next_power_of_2(num_rows + 1),
            BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_H=triton.next_power_of_2(rotary.size // 2),
            num_warps=1,
            **pdl(q),
        )
    return q_out, k_out
