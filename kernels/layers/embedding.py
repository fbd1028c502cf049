"""Lines of an embedding table. torch's kernel for a few tokens takes one after another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait


def embedding_reference(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens]: int `[...]` and `[V, size]` to `[..., size]` in the weight's dtype."""
    return F.embedding(tokens, weight)


@triton.jit
def _embedding_kernel(
    tokens, weight, out, weight_line, V: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    line = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + line).to(tl.int64)
    known = (token >= 0) & (token < V) & (index < SIZE)
    value = tl.load(weight + token * weight_line + index, mask=known, other=0.0)
    tl.store(out + line * SIZE + index, value, mask=index < SIZE)


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """`embedding_reference` by one launch where Triton runs; there a token outside the table gives
    0, where the reference raises."""
    if not runs_triton(weight) or weight.stride(1) != 1:
        return embedding_reference(tokens, weight)
    vocabulary, size = weight.shape
    out = torch.empty((*tokens.shape, size), dtype=weight.dtype, device=weight.device)
    if out.numel():
        block = min(triton.next_power_of_2(size), 1024)
        _embedding_kernel[(tokens.numel(), triton.cdiv(size, block))](
            tokens.contiguous(), weight, out, weight.stride(0), V=vocabulary, SIZE=size,
            BLOCK=block, num_warps=max(block // 256, 1), **pdl(weight),
        )  # fmt: skip
    return out
