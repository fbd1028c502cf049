"""Root-mean-square norms: plain, after adding to a residual, and gated by groups (Mamba-2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import CACHE_LINE, pdl, pdl_wait, prefetch


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (fp64 for fp64).

    Args:
        x: [..., size].
        weight: [size].
        eps: added to the mean square.

    Returns:
        x's shape in the weight's dtype.
    """
    return gated_rms_norm_reference(x, None, weight, 1, eps)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of ``x + residual``, and that sum.

    Args:
        x: the residual's shape, or `[parts, ...]` of it: its sum over the first dimension is added.
        residual: [..., size].
        weight: [size].
        eps: added to the mean square.

    Returns:
        The norm of the sum in the weight's dtype, and the sum: taken in fp32 (fp64 for fp64), and
        rounded once to the dtype that torch would give it.
    """
    acc = torch.promote_types(x.dtype, torch.promote_types(residual.dtype, torch.float32))
    added = x.to(acc).sum(0) if x.dim() > residual.dim() else x.to(acc)
    total = (added + residual).to(torch.promote_types(x.dtype, residual.dtype))
    return rms_norm_reference(total, weight, eps), total


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor | None, weight: Tensor, groups: int, eps: float
) -> Tensor:
    """The norm of ``x * silu(gate)``, each of `groups` slices of the last dimension by itself.

    Args:
        x: [..., size], size a multiple of groups.
        gate: x's shape; None = no factor.
        weight: [size].
        groups: slices of equal size.
        eps: added to the mean square.

    Returns:
        x's shape in the weight's dtype.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    y = x.to(acc)
    if gate is not None:
        y = y * F.silu(gate.to(acc))
    y = y.unflatten(-1, (groups, -1))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (weight.to(acc) * y.flatten(-2)).to(weight.dtype)


@triton.jit
def _norm_kernel(
    x,
    other,
    weight,
    out,
    total,
    eps,
    part_stride,
    x_stride,
    other_stride,
    PARTS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    LINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """`other` is the residual or the gate; one program per token and group."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = index < SIZE
    # Weights come from memory each step, everything else from the L2 cache. One program asks: many
    # that ask for the same lines hold each other up.
    if token == 0:
        line = tl.minimum(tl.arange(0, (BLOCK + LINE - 1) // LINE) * LINE, SIZE - 1)
        prefetch(weight + tl.program_id(1) * SIZE + line, PDL)
    pdl_wait(PDL)
    index += tl.program_id(1) * SIZE
    scale = tl.load(weight + index, mask=inside, other=0.0)
    y = tl.load(x + token * x_stride + index, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        at = x + part * part_stride + token * x_stride + index
        y += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        y += tl.load(other + token * other_stride + index, mask=inside, other=0.0).to(tl.float32)
        added = y.to(total.dtype.element_ty)
        tl.store(total + token * (GROUPS * SIZE) + index, added, mask=inside)
        y = added.to(tl.float32)
    if GATED:
        gate = tl.load(other + token * other_stride + index, mask=inside, other=0.0)
        gate = gate.to(tl.float32)
        y = y * (gate / (1 + tl.exp(-gate)))
    y = y * (1 / tl.sqrt(tl.sum(y * y, axis=0) / SIZE + eps))
    y = scale.to(tl.float32) * y
    tl.store(out + token * (GROUPS * SIZE) + index, y.to(out.dtype.element_ty), mask=inside)


def _launch(
    x: Tensor, residual: Tensor | None, gate: Tensor | None, weight: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    parts = x if residual is not None and x.dim() > residual.dim() else x[None]
    shape, size = parts.shape[1:], x.shape[-1]
    other = residual if residual is not None else gate
    if other is not None and other.shape != shape:
        raise ValueError(
            f"{'gate' if residual is None else 'residual'} is {tuple(other.shape)}, must have "
            f"x's shape {tuple(shape)}"
        )
    if weight.shape != (size,) or size % groups:
        raise ValueError(
            f"weight is {tuple(weight.shape)}, must be [{size}], a multiple of {groups} groups"
        )
    flat = _lines(parts)
    out = torch.empty(shape, dtype=weight.dtype, device=x.device)
    total = out
    if residual is not None:
        total = torch.empty(
            shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device
        )
    added = flat if other is None else _lines(other[None])
    block = triton.next_power_of_2(size // groups)
    if x.numel():
        _norm_kernel[(flat.shape[1], groups)](
            flat,
            added,
            weight.contiguous(),
            out,
            total,
            eps,
            flat.stride(0),
            flat.stride(1),
            added.stride(1),
            PARTS=len(parts),
            RESIDUAL=residual is not None,
            GATED=gate is not None,
            SIZE=size // groups,
            GROUPS=groups,
            BLOCK=block,
            LINE=CACHE_LINE // weight.element_size(),
            num_warps=min(max(block // 512, 1), 16),
            **pdl(x),
        )
    return out, total


def _lines(parts: Tensor) -> Tensor:
    """[parts, lines, size] with dense lines, of the same memory where it can be."""
    lines = parts.reshape(len(parts), -1, parts.shape[-1])
    return lines if lines.stride(2) == 1 else lines.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_reference` by one launch where Triton runs (and not in fp64)."""
    if _runs_triton(x, weight):
        return _launch(x, None, None, weight, 1, eps)[0]
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_reference` by one launch where Triton runs (and not in fp64)."""
    if _runs_triton(x, residual, weight):
        return _launch(x, residual, None, weight, 1, eps)
    return add_rms_norm_reference(x, residual, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """`gated_rms_norm_reference` by one launch where Triton runs (and not in fp64)."""
    if _runs_triton(x, gate, weight):
        return _launch(x, None, gate, weight, groups, eps)[0]
    return gated_rms_norm_reference(x, gate, weight, groups, eps)


def _runs_triton(*tensors: Tensor) -> bool:
    return runs_triton(tensors[0]) and all(t.dtype != torch.float64 for t in tensors)
