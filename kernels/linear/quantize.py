"""Activations and weights in 8 bits (e4m3), with the scales that give them back.

A launch of its own for now. Its place is in the epilogue of what makes a product's input: the norm,
the gated norm, squared ReLU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of an e4m3 number."""
SMALLEST = 2.0**-100
"""Lines of numbers below are quantised as if this were among them: no factor is infinite."""
_AT_ONCE = 1024
"""Lines that are quantised at a time in torch: no temporary of a weight's size."""

_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST)


def quantize_reference(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in e4m3: multiplied in fp32 by 1 / scale, cut off at ±448, rounded once.

    Args:
        x: float `[..., size]`.
        scale: float32 `[]`, above 0.

    Returns:
        x's shape; NaN stays NaN.
    """
    return (x.float() * scale.reciprocal()).clamp(-LARGEST, LARGEST).to(E4M3)


def quantize_lines_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each line of x in e4m3, its largest number as ±448, with its scale.

    Args:
        x: float `[lines, size]`.

    Returns:
        e4m3 `[lines, size]`, and float32 `[lines]`: x is about the values times this. A line with
        NaN or infinity in it has at least one NaN.
    """
    values = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[0], _AT_ONCE):
        lines = slice(start, start + _AT_ONCE)
        some = x[lines].float()
        factor = LARGEST * some.abs().amax(-1).clamp(min=SMALLEST).reciprocal()
        values[lines], scale[lines] = (some * factor[:, None]).to(E4M3), factor.reciprocal()
    return values, scale


@triton.jit(do_not_specialize=["tiles"])
def _quantize_kernel(x, scale, values, size, tiles, x_line, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program per line and BLOCK of its `size` elements, `tiles` of which a line has."""
    pdl_wait(PDL)
    i_line = (tl.program_id(0) // tiles).to(tl.int64)
    o_k = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    m_k = o_k < size
    b_x = tl.load(x + i_line * x_line + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_x *= tl.div_rn(1.0, tl.load(scale))
    b_x = tl.clamp(b_x, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values + i_line * size + o_k, b_x.to(values.dtype.element_ty), mask=m_k)


@triton.jit
def _quantize_lines_kernel(
    x, values, scale, x_line, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program per line."""
    pdl_wait(PDL)
    i_line = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BLOCK)
    m_k = o_k < SIZE
    b_x = tl.load(x + i_line * x_line + o_k, mask=m_k, other=0.0).to(tl.float32)
    factor = _LARGEST * tl.div_rn(1.0, tl.maximum(tl.max(tl.abs(b_x), axis=0), _SMALLEST))
    tl.store(values + i_line * SIZE + o_k, (b_x * factor).to(values.dtype.element_ty), mask=m_k)
    tl.store(scale + i_line, tl.div_rn(1.0, factor))


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """`quantize_reference` of `[lines, size]` by one launch where Triton runs."""
    if not runs_triton(x):
        return quantize_reference(x, scale)
    x, (lines, size) = _dense_lines(x), x.shape
    values = torch.empty((lines, size), dtype=E4M3, device=x.device)
    block = min(triton.next_power_of_2(size), 4096)
    tiles = triton.cdiv(size, block)
    if lines:
        _quantize_kernel[(lines * tiles,)](
            x=x,
            scale=scale,
            values=values,
            size=size,
            tiles=tiles,
            x_line=x.stride(0),
            BLOCK=block,
            num_warps=max(block // 512, 1),
            **pdl(x),
        )
    return values


def quantize_lines(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_lines_reference` by one launch where Triton runs."""
    if not runs_triton(x):
        return quantize_lines_reference(x)
    x, (lines, size) = _dense_lines(x), x.shape
    values = torch.empty((lines, size), dtype=E4M3, device=x.device)
    scale = torch.empty(lines, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    if lines:
        _quantize_lines_kernel[(lines,)](
            x=x,
            values=values,
            scale=scale,
            x_line=x.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **pdl(x),
        )
    return values, scale


def _dense_lines(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
