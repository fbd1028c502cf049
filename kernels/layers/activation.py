"""Squared ReLU."""

from typing import overload

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
