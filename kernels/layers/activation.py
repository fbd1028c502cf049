"""What lies between two products: squared ReLU, SwiGLU, and values times the sigmoid of a gate."""

from typing import NamedTuple, overload

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.linear.quantize import Quantizer, Scaled, quantize


def relu2_reference(x: Tensor) -> Tensor:
    """max(x, 0)^2, in x's shape and dtype."""
    return F.relu(x).square()


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of one shape, in up's dtype, formed in fp32 (fp64 for fp64)."""
    acc = torch.promote_types(up.dtype, torch.float32)
    return (F.silu(gate.to(acc)) * up.to(acc)).to(up.dtype)


def sigmoid_gate_reference(x: Tensor, gate: Tensor, added: Tensor | None = None) -> Tensor:
    """x * sigmoid(gate) + added, formed in fp32 (fp64 for fp64).

    Args:
        x: [tokens, heads, D].
        gate: of a shape that can be expanded to x's.
        added: x's shape; None = 0.

    Returns:
        x's shape and dtype.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    y = x.to(acc) * torch.sigmoid(gate.to(acc))
    return (y if added is None else y + added.to(acc)).to(x.dtype)


@triton.jit(do_not_specialize=["tiles"])
def _relu2_kernel(x, out, size, tiles, x_line, x_dim, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program per line and BLOCK of its `size` elements, `tiles` of which a line has."""
    pdl_wait(PDL)
    i_line = (tl.program_id(0) // tiles).to(tl.int64)
    o_d = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < size
    b_x = tl.load(x + i_line * x_line + o_d * x_dim, mask=m_d, other=0.0).to(tl.float32)
    b_x = tl.where(b_x < 0, 0.0, b_x)  # unlike a maximum, keeps NaN
    tl.store(out + i_line * size + o_d, (b_x * b_x).to(out.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["tiles"])
def _swiglu_kernel(
    gate, up, out, size, tiles, gate_line, up_line, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Programs as of `_relu2_kernel`."""
    pdl_wait(PDL)
    i_line = (tl.program_id(0) // tiles).to(tl.int64)
    o_d = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_d = o_d < size
    b_gate = tl.load(gate + i_line * gate_line + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_up = tl.load(up + i_line * up_line + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_y = b_gate / (1 + tl.exp(-b_gate)) * b_up
    tl.store(out + i_line * size + o_d, b_y.to(out.dtype.element_ty), mask=m_d)


class GateStrides(NamedTuple):
    """Strides of [tokens, heads, D], of which 0 stands for all alike."""

    token: int
    head: int
    dim: int


@triton.jit
def _sigmoid_gate_kernel(
    x,
    gate,
    added,
    out,
    gate_stride,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token and BLOCK of its SIZE elements, of heads of D."""
    pdl_wait(PDL)
    i_token = tl.program_id(0).to(tl.int64)
    o_i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_i = o_i < SIZE
    p_gate = gate + i_token * gate_stride.token
    o_gate = o_i // D * gate_stride.head + o_i % D * gate_stride.dim
    b_gate = tl.load(p_gate + o_gate, mask=m_i, other=0.0).to(tl.float32)
    b_y = tl.load(x + i_token * SIZE + o_i, mask=m_i, other=0.0).to(tl.float32)
    b_y = b_y / (1 + tl.exp(-b_gate))
    if added is not None:
        b_y += tl.load(added + i_token * SIZE + o_i, mask=m_i, other=0.0).to(tl.float32)
    tl.store(out + i_token * SIZE + o_i, b_y.to(out.dtype.element_ty), mask=m_i)


@overload
def relu2(x: Tensor, quantizer: None = None) -> Tensor: ...
@overload
def relu2(x: Tensor, quantizer: Quantizer | None) -> Tensor | Scaled: ...
def relu2(x: Tensor, quantizer: Quantizer | None = None) -> Tensor | Scaled:
    """`relu2_reference` by one launch where Triton runs (and not in fp64).

    Args:
        x: [..., size] with any strides; copied first unless one stride leads from line to line.
        quantizer: the result in 8 bits, as `quantize_reference` of it; None = as it is.

    Returns:
        x's shape and dtype, dense; or as of `quantize_reference`.
    """
    if quantizer is not None:
        return quantize(x, quantizer, relu2=True)
    if not runs_triton(x) or x.dtype == torch.float64:
        return relu2_reference(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        flat = x.reshape(1, -1) if x.is_contiguous() else x.reshape(-1, x.shape[-1])
        lines, size = flat.shape
        block = min(triton.next_power_of_2(size), 4096)
        tiles = triton.cdiv(size, block)
        _relu2_kernel[(lines * tiles,)](
            x=flat,
            out=out,
            size=size,
            tiles=tiles,
            x_line=flat.stride(0),
            x_dim=flat.stride(1),
            BLOCK=block,
            num_warps=max(block // 512, 1),
            **pdl(x),
        )
    return out


@overload
def swiglu(gate: Tensor, up: Tensor, quantizer: None = None) -> Tensor: ...
@overload
def swiglu(gate: Tensor, up: Tensor, quantizer: Quantizer | None) -> Tensor | Scaled: ...
def swiglu(gate: Tensor, up: Tensor, quantizer: Quantizer | None = None) -> Tensor | Scaled:
    """`swiglu_reference` by one launch where Triton runs (and not in fp64).

    Args:
        gate: [lines, size] with dense lines.
        up: likewise.
        quantizer: the result in 8 bits, as `quantize_reference` of it; None = as it is.

    Returns:
        [lines, size] in up's dtype, dense; or as of `quantize_reference`.

    Raises:
        ValueError: the shapes differ, or lines are not dense.
    """
    if gate.shape != up.shape or up.dim() != 2 or gate.stride(1) != 1 or up.stride(1) != 1:
        raise ValueError(
            f"gate is {list(gate.shape)} with strides {gate.stride()} and up {list(up.shape)} with "
            f"{up.stride()}, must be [lines, size] with dense lines both"
        )
    if quantizer is not None:
        return quantize(up, quantizer, gate=gate)
    if not runs_triton(up) or up.dtype == torch.float64:
        return swiglu_reference(gate, up)
    out, (lines, size) = torch.empty(up.shape, dtype=up.dtype, device=up.device), up.shape
    if lines:
        block = min(triton.next_power_of_2(size), 2048)
        tiles = triton.cdiv(size, block)
        _swiglu_kernel[(lines * tiles,)](
            gate=gate,
            up=up,
            out=out,
            size=size,
            tiles=tiles,
            gate_line=gate.stride(0),
            up_line=up.stride(0),
            BLOCK=block,
            num_warps=max(block // 512, 1),
            **pdl(up),
        )
    return out


def sigmoid_gate(x: Tensor, gate: Tensor, added: Tensor | None = None) -> Tensor:
    """`sigmoid_gate_reference` by one launch where Triton runs (and not in fp64)."""
    if not runs_triton(x) or x.dtype == torch.float64:
        return sigmoid_gate_reference(x, gate, added)
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        size = heads * dim
        block = min(triton.next_power_of_2(size), 1024)
        _sigmoid_gate_kernel[(tokens, triton.cdiv(size, block))](
            x=x.contiguous(),
            gate=gate,
            added=None if added is None else added.contiguous(),
            out=out,
            gate_stride=GateStrides(*gate.expand(x.shape).stride()),
            SIZE=size,
            D=dim,
            BLOCK=block,
            num_warps=max(block // 256, 1),
            **pdl(x),
        )
    return out
