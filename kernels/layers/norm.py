"""Root-mean-square norms: plain, after adding to a residual, and gated by groups (before the norm
in Mamba-2, behind it in Gated DeltaNet).

With a `Quantizer` the norm comes in 8 bits, as its product takes it: `quantize_reference` of what
the reference here gives.
"""

from typing import overload

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from einops import rearrange
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import CACHE_LINE, pdl, pdl_wait, prefetch
from hybrid_runtime.kernels.linear.quantize import (
    E4M3,
    Quantizer,
    Scaled,
    cut_off,
    line_factor,
    quantize_reference,
)


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, centred: bool = False
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (fp64 for fp64).

    Args:
        x: [..., size].
        weight: [size].
        eps: added to the mean square.
        out: where the norm goes, perhaps columns of something wider; None = allocated here.
        centred: weights are kept as what they differ from 1 by, as Qwen's are.

    Returns:
        x's shape in the weight's dtype.

    Raises:
        ValueError: out has another shape or dtype, or lines that are not dense.
    """
    _check_out(out, x, weight)
    acc = torch.promote_types(x.dtype, torch.float32)
    y = x.to(acc)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = ((weight.to(acc) + int(centred)) * y).to(weight.dtype)
    return y if out is None else out.copy_(y)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, centred: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and that sum.

    Args:
        x: the residual's shape, or `[parts, ...]` of it: its sum over the first dimension is added.
        residual: [..., size].
        weight: [size].
        eps: added to the mean square.
        centred: as of `rms_norm_reference`.

    Returns:
        The norm of the sum in the weight's dtype, and the sum: taken in fp32 (fp64 for fp64), and
        rounded once to the dtype that torch would give it.
    """
    acc = torch.promote_types(x.dtype, torch.promote_types(residual.dtype, torch.float32))
    added = x.to(acc).sum(0) if x.dim() > residual.dim() else x.to(acc)
    total = (added + residual).to(torch.promote_types(x.dtype, residual.dtype))
    return rms_norm_reference(total, weight, eps, centred=centred), total


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float, norm_first: bool = False
) -> Tensor:
    """The norm of ``x * silu(gate)``, each of `groups` slices of the last dimension by itself; with
    `norm_first` the norm of x, times ``silu(gate)``.

    Args:
        x: [..., size], size a multiple of groups.
        gate: x's shape.
        weight: [size]; with `norm_first` [size // groups], the same for all groups.
        groups: slices of equal size.
        eps: added to the mean square.

    Returns:
        x's shape in the weight's dtype.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    y, factor = x.to(acc), F.silu(gate.to(acc))
    if not norm_first:
        y = y * factor
    y = rearrange(y, "... (group d) -> ... group d", group=groups)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y * weight.to(acc).view(-1, y.shape[-1])
    y = rearrange(y, "... group d -> ... (group d)")
    return (y * factor if norm_first else y).to(weight.dtype)


@triton.jit
def _norm_kernel(
    x,
    other,
    weight,
    out,
    total,
    scale,
    eps,
    part_stride,
    x_stride,
    other_stride,
    out_stride,
    PARTS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    CENTRED: tl.constexpr,
    LINES: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK: tl.constexpr,
    LINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token and HELD groups. `other` is the residual or the gate; `total`, the sum
    with the residual, is written only if there is one. NORM_FIRST: the gate comes behind the norm,
    and all groups have one weight. CENTRED: of weights 1 is left out. With `scale` the norm is
    quantised: by the number there, or, with LINES, each token by a number of its own, which goes
    there."""
    i_token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (HELD * SIZE)
    o_g = tl.arange(0, BLOCK_G)[:, None]
    o_i = tl.arange(0, BLOCK)[None, :]
    m_i = o_i < SIZE
    if BLOCK_G > HELD:
        m_i = m_i & (o_g < HELD)
    # Weights come from memory each step, everything else from the L2 cache. One program asks: many
    # that ask for the same lines hold each other up.
    if i_token == 0:
        if NORM_FIRST:
            o_line = tl.arange(0, (BLOCK + LINE - 1) // LINE) * LINE
            prefetch(weight + tl.minimum(o_line, SIZE - 1), PDL)
        else:
            o_line = tl.arange(0, (BLOCK_G * BLOCK + LINE - 1) // LINE) * LINE
            prefetch(weight + first + tl.minimum(o_line, HELD * SIZE - 1), PDL)
    pdl_wait(PDL)
    o_d = first + o_g * SIZE + o_i
    if NORM_FIRST:
        b_weight = tl.load(weight + o_i, mask=o_i < SIZE, other=0.0)
    else:
        b_weight = tl.load(weight + o_d, mask=m_i, other=0.0)
    b_y = tl.load(x + i_token * x_stride + o_d, mask=m_i, other=0.0).to(tl.float32)
    for i_part in tl.static_range(1, PARTS):
        p_part = x + i_part * part_stride + i_token * x_stride + o_d
        b_y += tl.load(p_part, mask=m_i, other=0.0).to(tl.float32)
    p_other = other + i_token * other_stride + o_d
    if RESIDUAL:
        b_y += tl.load(p_other, mask=m_i, other=0.0).to(tl.float32)
        b_total = b_y.to(total.dtype.element_ty)
        tl.store(total + i_token * (GROUPS * SIZE) + o_d, b_total, mask=m_i)
        b_y = b_total.to(tl.float32)
    if GATED:
        b_gate = tl.load(p_other, mask=m_i, other=0.0).to(tl.float32)
        b_factor = b_gate / (1 + tl.exp(-b_gate))
        if not NORM_FIRST:
            b_y = b_y * b_factor
    b_y = b_y * (1 / tl.sqrt(tl.sum(b_y * b_y, axis=1) / SIZE + eps))[:, None]
    b_weight = b_weight.to(tl.float32)
    if CENTRED:
        b_weight += 1
    b_y = b_weight * b_y
    if NORM_FIRST:
        b_y *= b_factor
    if scale is not None:
        b_y = b_y.to(weight.dtype.element_ty).to(tl.float32)
        if LINES:
            factor = line_factor(tl.max(tl.max(tl.abs(b_y), axis=1), axis=0))
            tl.store(scale + i_token, tl.div_rn(1.0, factor))
            b_y *= factor
        else:
            b_y = cut_off(b_y * tl.div_rn(1.0, tl.load(scale)))
    tl.store(out + i_token * out_stride + o_d, b_y.to(out.dtype.element_ty), mask=m_i)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    groups: int,
    eps: float,
    quantizer: Quantizer | None = None,
    out: Tensor | None = None,
    centred: bool = False,
    norm_first: bool = False,
) -> tuple[Tensor | Scaled, Tensor]:
    """The norm, and the sum with the residual (the norm again where there is none)."""
    parts = x if residual is not None and x.dim() > residual.dim() else x[None]
    _check(parts.shape[1:], residual, gate, weight, groups, norm_first)
    shape, size = parts.shape[1:], x.shape[-1]
    flat = _lines(parts)
    tokens, scale, lines = flat.shape[1], None, False
    if quantizer is not None:
        scale, lines = quantizer.scale, quantizer.scale is None
        if scale is None:
            scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
        out = torch.empty((tokens, size), dtype=E4M3, device=x.device)
    elif out is None:
        out = torch.empty(shape, dtype=weight.dtype, device=x.device)
    total = out
    other = flat
    if residual is not None:
        dtype = torch.promote_types(x.dtype, residual.dtype)
        total = torch.empty(shape, dtype=dtype, device=x.device)
        other = _lines(residual[None])
    elif gate is not None:
        other = _lines(gate[None])
    held = groups if lines else 1  # what its own scale needs, a program sees whole
    block, block_g = triton.next_power_of_2(size // groups), triton.next_power_of_2(held)
    if x.numel():
        _norm_kernel[(tokens, groups // held)](
            x=flat,
            other=other,
            weight=weight.contiguous(),
            out=out,
            total=total,
            scale=scale,
            eps=eps,
            part_stride=flat.stride(0),
            x_stride=flat.stride(1),
            other_stride=other.stride(1),
            out_stride=_lines(out[None]).stride(1),
            PARTS=len(parts),
            RESIDUAL=residual is not None,
            GATED=gate is not None,
            NORM_FIRST=norm_first,
            CENTRED=centred,
            LINES=lines,
            SIZE=size // groups,
            GROUPS=groups,
            HELD=held,
            BLOCK_G=block_g,
            BLOCK=block,
            LINE=CACHE_LINE // weight.element_size(),
            num_warps=min(max(block_g * block // 512, 1), 16),
            **pdl(x),
        )
    return out if scale is None else Scaled(out, scale), total


def _check(
    shape: torch.Size,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor,
    groups: int,
    norm_first: bool,
) -> None:
    for name, other in (("residual", residual), ("gate", gate)):
        if other is not None and other.shape != shape:
            raise ValueError(f"{name} is {tuple(other.shape)}, must have x's shape {tuple(shape)}")
    size = shape[-1]
    must = size // groups if norm_first else size
    if weight.shape != (must,) or size % groups:
        raise ValueError(
            f"weight is {tuple(weight.shape)} for lines of {size}, must be [{must}], and they a "
            f"multiple of {groups} groups"
        )


def _check_out(out: Tensor | None, x: Tensor, weight: Tensor) -> None:
    if out is None:
        return
    if out.shape != x.shape or out.dtype != weight.dtype or out.dim() > 2 or out.stride(-1) != 1:
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} with strides {out.stride()}, must be "
            f"{weight.dtype} {list(x.shape)} of at most 2 dimensions, with dense lines"
        )


def _lines(parts: Tensor) -> Tensor:
    """[parts, lines, size] with dense lines, of the same memory where it can be."""
    lines = parts.reshape(len(parts), -1, parts.shape[-1])
    return lines if lines.stride(2) == 1 else lines.contiguous()


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    quantizer: None = None,
    out: Tensor | None = None,
    centred: bool = False,
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    quantizer: Quantizer | None,
    out: None = None,
    centred: bool = False,
) -> Tensor | Scaled: ...
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    quantizer: Quantizer | None = None,
    out: Tensor | None = None,
    centred: bool = False,
) -> Tensor | Scaled:
    """`rms_norm_reference` by one launch where Triton runs (and not in fp64)."""
    if _runs_triton(x, weight):
        _check_out(out, x, weight)
        return _launch(x, None, None, weight, 1, eps, quantizer, out, centred)[0]
    return _quantized(rms_norm_reference(x, weight, eps, out, centred), quantizer)


@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    quantizer: None = None,
    centred: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    quantizer: Quantizer | None,
    centred: bool = False,
) -> tuple[Tensor | Scaled, Tensor]: ...
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    quantizer: Quantizer | None = None,
    centred: bool = False,
) -> tuple[Tensor | Scaled, Tensor]:
    """`add_rms_norm_reference` by one launch where Triton runs (and not in fp64)."""
    if _runs_triton(x, residual, weight):
        return _launch(x, residual, None, weight, 1, eps, quantizer, centred=centred)
    y, total = add_rms_norm_reference(x, residual, weight, eps, centred)
    return _quantized(y, quantizer), total


@overload
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    groups: int,
    eps: float,
    quantizer: None = None,
    norm_first: bool = False,
) -> Tensor: ...
@overload
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    groups: int,
    eps: float,
    quantizer: Quantizer | None,
    norm_first: bool = False,
) -> Tensor | Scaled: ...
def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    groups: int,
    eps: float,
    quantizer: Quantizer | None = None,
    norm_first: bool = False,
) -> Tensor | Scaled:
    """`gated_rms_norm_reference` by one launch where Triton runs (and not in fp64)."""
    if _runs_triton(x, gate, weight):
        launched = _launch(x, None, gate, weight, groups, eps, quantizer, norm_first=norm_first)
        return launched[0]
    y = gated_rms_norm_reference(x, gate, weight, groups, eps, norm_first)
    return _quantized(y, quantizer)


def _quantized(y: Tensor, quantizer: Quantizer | None) -> Tensor | Scaled:
    return y if quantizer is None else quantize_reference(y, quantizer)


def _runs_triton(*tensors: Tensor) -> bool:
    return runs_triton(tensors[0]) and all(t.dtype != torch.float64 for t in tensors)
