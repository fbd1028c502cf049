"""Products of activations and a weight in 8 bits (e4m3), each with its scales.

Few tokens are bound by reading the weight: a Triton kernel whose programs stream it. Many are bound
by arithmetic, which is cuBLASLt's (`torch._scaled_mm`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.linear.quantize import Scaled

FEW_TOKENS, FEW_TOKENS_OF_LINES, FEW_TOKENS_OF_PARTS = 16, 64, 128
"""Up to so many the weight is streamed: with a scale per matrix, with a scale per line, for which
the library is slower, and with these where the inputs are divided. Measured on an H200."""
_ALIGNED = 16
"""What `torch._scaled_mm` needs both sizes to be multiples of."""
_NARROW = 16384
"""Outputs; matrices with fewer have too few tiles to occupy a GPU, and are divided along their
inputs where the caller adds up anyway."""


def fp8_product_reference(
    x: Scaled, weight: Scaled, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``x @ weight.T + bias``: sums in fp32, times x's scale, times the weight's, rounded once.

    Args:
        x: of `[T, size]`.
        weight: of `[outputs, size]`.
        dtype: of the result.
        bias: `[outputs]`.

    Returns:
        `[T, outputs]`.
    """
    _check(x, weight)
    y = x.values.float() @ weight.values.float().T
    y = y * (x.scale[:, None] if x.scale.dim() else x.scale) * weight.scale
    return (y if bias is None else y + bias.float()).to(dtype)


def _check(x: Scaled, weight: Scaled) -> None:
    for name, of in (("x", x), ("weight", weight)):
        if of.values.dim() != 2 or of.scale.shape not in ((), of.values.shape[:1]):
            raise ValueError(
                f"{name}'s values are {list(of.values.shape)} and its scale is "
                f"{list(of.scale.shape)}; they must be [lines, size], and [] or [lines]"
            )
    if x.values.shape[1] != weight.values.shape[1]:
        raise ValueError(
            f"x is {list(x.values.shape)}; it must be [T, {weight.values.shape[1]}] for a weight "
            f"{list(weight.values.shape)}"
        )


@triton.jit(do_not_specialize=["tokens"])
def _product_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    X_LINES: tl.constexpr,
    W_LINES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per BLOCK_M tokens, BLOCK_N outputs and part of the inputs; those of the same
    outputs are neighbours, so that the weight is read once. X_LINES, W_LINES: a scale per line."""
    pdl_wait(PDL, RELEASE=False)
    i_n, i_part = tl.program_id(1), tl.program_id(2)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EACH: tl.constexpr = (STEPS + PARTS - 1) // PARTS
    WHOLE: tl.constexpr = K % BLOCK_K == 0 and STEPS % PARTS == 0
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < N
    o_row = tl.where(m_n, o_n, 0)
    o_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < tokens
    o_k = i_part * (EACH * BLOCK_K) + tl.arange(0, BLOCK_K)
    p_w = weight + o_row.to(tl.int64)[:, None] * K + o_k[None, :]
    p_x = x + o_m.to(tl.int64)[None, :] * K + o_k[:, None]
    b_sum = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i_k in range(EACH):
        if WHOLE:
            b_w = tl.load(p_w)
            b_x = tl.load(p_x, mask=m_m[None, :], other=0.0)
        else:
            m_k = o_k < K - i_k * BLOCK_K
            b_w = tl.load(p_w, mask=m_k[None, :], other=0.0)
            b_x = tl.load(p_x, mask=m_m[None, :] & m_k[:, None], other=0.0)
        # The tensor cores' own sums have 14 bits: no more than a tile's are left to them.
        b_sum = tl.dot(b_w, b_x, b_sum, max_num_imprecise_acc=BLOCK_K)
        p_w += BLOCK_K
        p_x += BLOCK_K
    b_x_scale = tl.load(x_scale + (o_m if X_LINES else o_m * 0), mask=m_m, other=0.0)
    b_w_scale = tl.load(weight_scale + (o_row if W_LINES else o_row * 0))
    b_y = b_sum * b_x_scale[None, :] * b_w_scale[:, None]
    if bias is not None:
        b_y += tl.load(bias + o_row).to(tl.float32)[:, None]
    p_out = out + (i_part.to(tl.int64) * tokens + o_m[:, None]) * N + o_n[None, :]
    b_y = tl.trans(b_y).to(out.dtype.element_ty)
    tl.store(p_out, b_y, mask=m_m[:, None] & m_n[None, :])


class ProductTiling(NamedTuple):
    """Launch shape: tokens, outputs and inputs of a tile, warps, pipeline stages, and in how many
    parts the inputs are divided if the caller adds up."""

    block_m: int
    block_n: int
    block_k: int
    warps: int = 4
    stages: int = 4
    parts: int = 1


def product_tiling(tokens: int, outputs: int, may_part: bool) -> ProductTiling:
    """The launch shape for so many tokens and outputs, the fastest found on an H200: at up to 32
    tokens by reading the weight, at more by two operands that a wide tile reads less often. A
    program that has a multiprocessor alone, as in narrow matrices, needs more stages."""
    block_m = min(max(triton.next_power_of_2(tokens), 16), 64)
    narrow = outputs < _NARROW
    if 64 < tokens <= FEW_TOKENS_OF_PARTS and may_part and narrow:
        return ProductTiling(128, 64, 128, stages=6, parts=2)
    if block_m <= 32 and (may_part or not narrow):
        return ProductTiling(block_m, 64, 256, stages=3, parts=4 if narrow else 1)
    if narrow:
        return ProductTiling(block_m, 64, 128, stages=8, parts=2 if may_part else 1)
    return ProductTiling(block_m, 128, 128, stages=4)


def stream_product(
    x: Scaled,
    weight: Scaled,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    tiling: ProductTiling | None = None,
) -> Tensor:
    """`fp8_product_reference` by one Triton launch, for any sizes.

    Args:
        tiling: with parts, the result is left as a sum of so many, each rounded; not with a bias.
            None: the fastest of one part.

    Returns:
        `[T, outputs]`, with parts `[parts, T, outputs]`.
    """
    _check(x, weight)
    (tokens, size), outputs = x.values.shape, weight.values.shape[0]
    tiling = tiling or product_tiling(tokens, outputs, may_part=False)
    parts = tiling.parts
    if parts > 1 and bias is not None:
        raise ValueError(f"parts is {parts} with a bias; it must be 1")
    out = torch.empty((parts, tokens, outputs), dtype=dtype, device=x.values.device)
    if tokens:
        grid = (triton.cdiv(tokens, tiling.block_m), triton.cdiv(outputs, tiling.block_n), parts)
        _product_kernel[grid](
            x=x.values,
            x_scale=x.scale,
            weight=weight.values,
            weight_scale=weight.scale,
            bias=bias,
            out=out,
            tokens=tokens,
            N=outputs,
            K=size,
            PARTS=parts,
            X_LINES=x.scale.dim() > 0,
            W_LINES=weight.scale.dim() > 0,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **pdl(x.values),
        )
    return out if parts > 1 else out[0]


def scaled_mm(
    x: Scaled, weight: Scaled, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor | None:
    """`fp8_product_reference` by cuBLASLt or CUTLASS; None if they do not take these: sizes that 16
    does not divide, scales per line on one side only, or with results that are not bfloat16."""
    lines = x.scale.dim() > 0
    if any(size % _ALIGNED for size in weight.values.shape) or lines != (weight.scale.dim() > 0):
        return None
    if dtype == torch.float32 or (lines and dtype != torch.bfloat16):
        return None
    return torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scale[:, None] if lines else x.scale,
        scale_b=weight.scale[None] if lines else weight.scale,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def fp8_product(
    x: Scaled,
    weight: Scaled,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    may_part: bool = False,
) -> Tensor:
    """`fp8_product_reference` by the faster of two where Triton runs.

    Args:
        may_part: the result may be left as a sum, `[parts, T, outputs]`.
    """
    if not runs_triton(x.values):
        return fp8_product_reference(x, weight, dtype, bias)
    tokens, outputs = x.values.shape[0], weight.values.shape[0]
    may_part = may_part and bias is None
    few = tokens <= FEW_TOKENS
    if x.scale.dim():
        parted = may_part and outputs < _NARROW
        few = tokens <= (FEW_TOKENS_OF_PARTS if parted else FEW_TOKENS_OF_LINES)
    if not few and x.values.is_cuda:
        y = scaled_mm(x, weight, dtype, bias)
        if y is not None:
            return y
    tiling = product_tiling(tokens, outputs, may_part and few)
    return stream_product(x, weight, dtype, bias, tiling)
