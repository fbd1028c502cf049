"""Activations and weights in 8 bits (e4m3), with the scales that give them back.

What makes a product's input quantises it on the way, where it can: norms, squared ReLU and SwiGLU
take a `Quantizer`. The launch here is for inputs that something else makes.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
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


class Scaled(NamedTuple):
    """Numbers in 8 bits.

    values: e4m3 `[lines, size]`, contiguous.
    scale: float32 `[]` or `[lines]`; the numbers are the values times this.
    """

    values: Tensor
    scale: Tensor


class Quantizer(NamedTuple):
    """How numbers become `Scaled`.

    scale: float32 `[]`, above 0, of all lines; None: each line has its own, by its largest number.
    """

    scale: Tensor | None = None


def quantize_reference(x: Tensor, quantizer: Quantizer) -> Scaled:
    """x in e4m3. With a scale: multiplied in fp32 by 1 / scale, cut off at ±448, rounded once. With
    a scale for each line: `quantize_lines_reference`.

    Args:
        x: float `[..., size]`.

    Returns:
        Values `[lines, size]` and their scale; NaN stays NaN.
    """
    lines = x.reshape(-1, x.shape[-1])
    if quantizer.scale is None:
        return Scaled(*quantize_lines_reference(lines))
    values = (lines.float() * quantizer.scale.reciprocal()).clamp(-LARGEST, LARGEST).to(E4M3)
    return Scaled(values, quantizer.scale)


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


@triton.jit
def line_factor(largest):
    """What a line whose largest number this is gets multiplied by; 1 / it is the line's scale."""
    return _LARGEST * tl.div_rn(1.0, tl.maximum(largest, _SMALLEST))


@triton.jit
def cut_off(b_x):
    """Numbers that e4m3 has, but for rounding; NaN stays NaN."""
    return tl.clamp(b_x, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["tiles"])
def _quantize_kernel(
    x,
    gate,
    scale,
    values,
    size,
    tiles,
    x_line,
    gate_line,
    LINES: tl.constexpr,
    RELU2: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per line and BLOCK of its `size` elements, `tiles` of which a line has. LINES:
    `scale` is written, one of each line, which is a tile."""
    pdl_wait(PDL)
    i_line = (tl.program_id(0) // tiles).to(tl.int64)
    o_k = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    m_k = o_k < size
    b_x = tl.load(x + i_line * x_line + o_k, mask=m_k, other=0.0).to(tl.float32)
    if RELU2:  # rounded as `relu2` rounds
        b_x = tl.where(b_x < 0, 0.0, b_x)
        b_x = (b_x * b_x).to(x.dtype.element_ty).to(tl.float32)
    if gate is not None:  # as `swiglu`
        b_gate = tl.load(gate + i_line * gate_line + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_x = b_gate / (1 + tl.exp(-b_gate)) * b_x
        b_x = b_x.to(x.dtype.element_ty).to(tl.float32)
    if LINES:
        factor = line_factor(tl.max(tl.abs(b_x), axis=0))
        tl.store(scale + i_line, tl.div_rn(1.0, factor))
        b_x *= factor
    else:
        b_x = cut_off(b_x * tl.div_rn(1.0, tl.load(scale)))
    tl.store(values + i_line * size + o_k, b_x.to(values.dtype.element_ty), mask=m_k)


def quantize(
    x: Tensor, quantizer: Quantizer, relu2: bool = False, gate: Tensor | None = None
) -> Scaled:
    """`quantize_reference` by one launch where Triton runs. relu2: of max(x, 0)^2 in x's dtype.
    gate: of silu(gate) * x likewise, both `[lines, size]` with dense lines."""
    if not runs_triton(x) or x.dtype == torch.float64:
        if gate is not None:
            x = (F.silu(gate.float()) * x.float()).to(x.dtype)
        return quantize_reference(F.relu(x).square() if relu2 else x, quantizer)
    x = x.reshape(-1, x.shape[-1])
    x, (lines, size) = x if x.stride(1) == 1 else x.contiguous(), x.shape
    values = torch.empty((lines, size), dtype=E4M3, device=x.device)
    scale, each, block = quantizer.scale, False, triton.next_power_of_2(size)
    if scale is None:
        scale, each = torch.empty(lines, dtype=torch.float32, device=x.device), True
    else:
        block = min(block, 4096)
    tiles = triton.cdiv(size, block)
    if lines:
        _quantize_kernel[(lines * tiles,)](
            x=x,
            gate=gate,
            scale=scale,
            values=values,
            size=size,
            tiles=tiles,
            x_line=x.stride(0),
            gate_line=0 if gate is None else gate.stride(0),
            LINES=each,
            RELU2=relu2,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
            **pdl(x),
        )
    return Scaled(values, scale)
