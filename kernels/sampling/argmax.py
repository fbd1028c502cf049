"""The most likely token of each position, over a vocabulary too wide for one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait


def argmax_reference(logits: Tensor, out: Tensor) -> Tensor:
    """Index of the largest of each line's logits, the lowest one at ties.

    Args:
        logits: float `[lines, V]`.
        out: int32 `[lines]`, any stride; written and returned.
    """
    out.copy_(logits.argmax(-1))
    return out


@triton.jit
def _part_kernel(
    logits, values, indices, stride, V: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    line = tl.program_id(0)
    part = tl.program_id(1)
    index = part * TILE + tl.arange(0, TILE)
    at = logits + line.to(tl.int64) * stride + index
    value = tl.load(at, mask=index < V, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))  # nothing equals NaN, so no index would
    best = tl.max(value, axis=0)
    # A part of nothing but -inf still names a valid token.
    first = tl.min(tl.where((value == best) & (index < V), index, V - 1), axis=0)
    tl.store(values + line * PARTS + part, best)
    tl.store(indices + line * PARTS + part, first)


@triton.jit
def _whole_kernel(
    values, indices, out, out_stride, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(PDL)
    line = tl.program_id(0)
    part = tl.arange(0, WIDTH)
    value = tl.load(values + line * PARTS + part, mask=part < PARTS, other=float("-inf"))
    index = tl.load(indices + line * PARTS + part, mask=part < PARTS, other=2147483647)
    best = tl.max(value, axis=0)
    # Parts stand in the order of their tokens, so the lowest index is in the first best part.
    tl.store(out + line * out_stride, tl.min(tl.where(value == best, index, 2147483647), axis=0))


TILE = 4096
"""Logits per program."""


def argmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """`argmax_reference` by two launches where Triton runs (and not in fp64); NaN counts as the
    smallest number there. `out` None: allocated here."""
    lines, vocabulary = logits.shape
    if out is None:
        out = torch.empty(lines, dtype=torch.int32, device=logits.device)
    if not runs_triton(logits) or logits.dtype == torch.float64 or logits.stride(1) != 1:
        return argmax_reference(logits, out)
    parts = triton.cdiv(vocabulary, TILE)
    values = torch.empty((lines, parts), dtype=torch.float32, device=logits.device)
    indices = torch.empty((lines, parts), dtype=torch.int32, device=logits.device)
    if lines:
        _part_kernel[(lines, parts)](
            logits, values, indices, logits.stride(0), V=vocabulary, PARTS=parts, TILE=TILE,
            num_warps=8, **pdl(logits),
        )  # fmt: skip
        _whole_kernel[(lines,)](
            values, indices, out, out.stride(0), PARTS=parts,
            WIDTH=triton.next_power_of_2(parts), num_warps=1, **pdl(logits),
        )  # fmt: skip
    return out
