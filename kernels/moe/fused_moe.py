"""Routed experts: down(relu2(up(x))) of each token's experts, weighted and summed.

Decode and verify are bound by reading the matrices of the experts that some token has: each is
read once, by programs that take all of an expert's tokens as one tile. In prefill an expert has
several tiles, one after another, which find its matrices in the L2 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.layers.activation import relu2_reference
from hybrid_runtime.kernels.moe.align_block_size import Groups, align_block_size


def fused_moe_reference(
    x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """Weighted sum over each token's experts of ``down[e] @ relu2(up[e] @ x)``.

    Args:
        x: [T, size].
        weights: [T, top_k], usually fp32.
        experts: integer [T, top_k], each 0 to count - 1.
        up: [count, inner, size] in x's dtype.
        down: [count, size, inner] in x's dtype.

    Returns:
        [T, size] in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    _check(x, weights, experts, up, down)
    (tokens, size), count, top_k = x.shape, up.shape[0], experts.shape[1]
    chosen = experts.flatten()
    if len(chosen) <= count:
        # So few pairs that gathering their matrices is cheaper than visiting every expert.
        lines = x[:, None].expand(tokens, top_k, size).reshape(len(chosen), size, 1)
        inner = relu2_reference(up.index_select(0, chosen) @ lines)
        outputs = down.index_select(0, chosen) @ inner
    else:
        order = chosen.argsort(stable=True)
        sizes = chosen.bincount(minlength=count).tolist()
        parts = [
            F.linear(relu2_reference(F.linear(rows, up[i])), down[i])
            for i, rows in enumerate(x.index_select(0, order // top_k).split(sizes))
            if rows.shape[0]
        ]
        outputs = x.new_empty((len(chosen), size)).index_copy_(0, order, torch.cat(parts))
    return (outputs.view(tokens, top_k, size) * weights[..., None]).sum(1).to(x.dtype)


def _check(x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor) -> None:
    count, inner, size = up.shape
    if x.dim() != 2 or x.shape[1] != size:
        raise ValueError(f"x is {tuple(x.shape)}, must be [T, {size}] for up {tuple(up.shape)}")
    if tuple(down.shape) != (count, size, inner):
        raise ValueError(f"down is {tuple(down.shape)}, must be {(count, size, inner)}")
    if experts.dim() != 2 or experts.shape[0] != x.shape[0] or weights.shape != experts.shape:
        raise ValueError(
            f"weights is {tuple(weights.shape)} and experts {tuple(experts.shape)}, must both be "
            f"[{x.shape[0]}, top_k]"
        )
    if not x.dtype == up.dtype == down.dtype:
        raise ValueError(f"up is {up.dtype} and down {down.dtype}, must be x's {x.dtype}")


@triton.jit(do_not_specialize=["bound"], do_not_specialize_on_alignment=["order", "tiles"])
def _product_kernel(
    x,
    matrices,
    order,
    tiles,
    out,
    bound,
    x_line,
    x_dim,
    matrix_expert,
    matrix_row,
    matrix_dim,
    dot_type: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    SQUARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = matrices[expert of pair] @ x[pair // SHARED], then perhaps relu2; one program per
    tile and BLOCK_N rows of the matrix."""
    pdl_wait(PDL, False)
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile)
    if expert < 0:
        return
    place = tl.load(tiles + bound + tile) + tl.arange(0, BLOCK_M)
    inside = place < tl.load(tiles + 2 * bound + tile)
    pair = tl.load(order + place, mask=inside, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    line = (pair // SHARED).to(tl.int64) * x_line
    row = expert.to(tl.int64) * matrix_expert + n.to(tl.int64) * matrix_row
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for trip in range((SIZE + BLOCK_K - 1) // BLOCK_K):
        at = trip * BLOCK_K + k
        wanted = inside[:, None]
        if SIZE % BLOCK_K != 0:
            wanted = wanted & (at < SIZE)[None, :]
        left = tl.load(x + line[:, None] + at[None, :] * x_dim, mask=wanted, other=0.0)
        # A constant where it is always true, so that it costs nothing.
        if (SIZE % BLOCK_K == 0) & (ROWS % BLOCK_N == 0):
            exists = tl.full((BLOCK_N, BLOCK_K), True, tl.int1)
        elif SIZE % BLOCK_K == 0:
            exists = tl.broadcast_to((n < ROWS)[:, None], (BLOCK_N, BLOCK_K))
        else:
            exists = (n < ROWS)[:, None] & (at < SIZE)[None, :]
        right = matrices + row[:, None] + at[None, :] * matrix_dim
        right = tl.load(right, mask=exists, other=0.0)
        acc = tl.dot(left.to(dot_type), tl.trans(right.to(dot_type)), acc, input_precision="ieee")
    if SQUARED:
        acc = tl.where(acc < 0, 0.0, acc)  # unlike a maximum, keeps NaN
        acc = acc * acc
    written = out + pair.to(tl.int64)[:, None] * ROWS + n[None, :]
    tl.store(written, acc.to(out.dtype.element_ty), mask=inside[:, None] & (n < ROWS)[None, :])


@triton.jit
def _sum_kernel(
    outputs,
    weights,
    out,
    weights_token,
    weights_choice,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token] = sum over its pairs of weight * output, always in the same order."""
    pdl_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        weight = tl.load(weights + token * weights_token + i * weights_choice).to(tl.float32)
        line = outputs + (token * TOP_K + i) * SIZE
        total += weight * tl.load(line + n, mask=n < SIZE, other=0.0)
    tl.store(out + token * SIZE + n, total.to(out.dtype.element_ty), mask=n < SIZE)


class Tiling(NamedTuple):
    """Launch shape of the products: pairs, matrix rows and matrix columns of a tile."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def moe_tiling(pairs: int, count: int, dtype: torch.dtype) -> Tiling:
    """Launch shape by the pairs that an expert has on average."""
    mean = pairs / count
    if dtype == torch.float32:  # products without matrix units
        return Tiling(16, 64, 32, 4, 3) if mean <= 12 else Tiling(64, 64, 32, 4, 3)
    if mean <= 8:
        return Tiling(16, 64, 128, 4, 4)
    if mean <= 24:
        return Tiling(32, 64, 128, 4, 4)
    if mean <= 80:
        return Tiling(64, 128, 64, 4, 4)
    return Tiling(128, 128, 64, 8, 3)


def fused_moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    up: Tensor,
    down: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """`fused_moe_reference` where Triton runs (and not in fp64) by four launches, none of which
    the host waits for: pairs into tiles, the two products, the sum.

    Between the products values have x's dtype, outputs of the pairs are summed in fp32. The same
    tokens give the same bytes whatever the order of their pairs in a tile.

    Args:
        tiling: launch shape; None = `moe_tiling`.

    Raises:
        ValueError: as the reference.
    """
    if not runs_triton(x) or x.dtype == torch.float64:
        return fused_moe_reference(x, weights, experts, up, down)
    _check(x, weights, experts, up, down)
    (tokens, size), (count, inner, _), top_k = x.shape, up.shape, experts.shape[1]
    pairs = tokens * top_k
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out.zero_()
    if tiling is None:
        tiling = moe_tiling(pairs, count, x.dtype)
    groups = align_block_size(experts, count, tiling.block_m)
    between = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    outputs = torch.empty((pairs, size), dtype=torch.float32, device=x.device)
    _product(x, up, groups, between, top_k, True, tiling)
    _product(between, down, groups, outputs, 1, False, tiling)
    block = min(triton.next_power_of_2(size), 512)
    _sum_kernel[(tokens, triton.cdiv(size, block))](
        outputs,
        weights,
        out,
        *weights.stride(),
        SIZE=size,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=max(block // 128, 1),
        **pdl(x),
    )
    return out


def _product(
    x: Tensor,
    matrices: Tensor,
    groups: Groups,
    out: Tensor,
    shared: int,
    squared: bool,
    tiling: Tiling,
) -> None:
    """out [pairs, rows]: line `pair // shared` of x times the matrix of the pair's expert."""
    bound, rows = groups.tiles.shape[1], matrices.shape[1]
    # Tiles of an expert follow each other, so that the later ones find its matrix in the L2 cache.
    _product_kernel[(triton.cdiv(rows, tiling.block_n), bound)](
        x,
        matrices,
        groups.order,
        groups.tiles,
        out,
        bound,
        *x.stride(),
        *matrices.stride(),
        # The interpreter multiplies bf16 as if its bits were integers.
        dot_type=_TYPES[x.dtype] if x.is_cuda else tl.float32,
        ROWS=rows,
        SIZE=matrices.shape[2],
        SHARED=shared,
        SQUARED=squared,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **pdl(x),
    )


_TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
