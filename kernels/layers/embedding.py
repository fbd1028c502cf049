"""Embedding lookup. torch's kernel reads the lines of a few tokens one after another."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait


def embedding_reference(tokens: Tensor, weight: Tensor) -> Tensor:
    """The token's line of the table.

    Args:
        tokens: int32 or int64 `[...]`, each 0 to V - 1.
        weight: `[V, size]`.

    Returns:
        `[..., size]` in the weight's dtype.
    """
    return F.embedding(tokens, weight)


@triton.jit
def _embedding_kernel(
    tokens,
    weight,
    out,
    weight_line,
    V: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token and BLOCK of its line."""
    pdl_wait(PDL)
    i_out = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + i_out).to(tl.int64)
    m_d = (token >= 0) & (token < V) & (o_d < SIZE)
    b_line = tl.load(weight + token * weight_line + o_d, mask=m_d, other=0.0)
    tl.store(out + i_out * SIZE + o_d, b_line, mask=o_d < SIZE)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """`embedding_reference` by one launch where Triton runs; a token outside the table, for which
    the reference raises, gets zeros there."""
    if not runs_triton(weight) or weight.stride(1) != 1:
        return embedding_reference(tokens, weight)
    vocabulary, size = weight.shape
    out = torch.empty((*tokens.shape, size), dtype=weight.dtype, device=weight.device)
    if out.numel():
        block = min(triton.next_power_of_2(size), 1024)
        _embedding_kernel[(tokens.numel(), triton.cdiv(size, block))](
            tokens=tokens.contiguous(),
            weight=weight,
            out=out,
            weight_line=weight.stride(0),
            V=vocabulary,
            SIZE=size,
            BLOCK=block,
            num_warps=max(block // 256, 1),
            **pdl(weight),
        )
    return out
