"""The most likely token of each line of logits, whose vocabulary is too wide for one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait


def count_broken(logits: Tensor) -> Tensor:
    """How many logits of each line are NaN or infinite, int64 `[...]`. -inf forbids a token and is
    not counted, unless all are."""
    broken = (~(logits < float("inf"))).sum(-1)
    return torch.where((logits == float("-inf")).all(-1), logits.shape[-1], broken)


def argmax_reference(logits: Tensor, out: Tensor, marks: bool = False) -> Tensor:
    """Index of the largest of each line's logits, the lowest one at ties.

    Args:
        logits: float `[lines, V]`.
        out: int32 `[lines]`, any stride; written and returned.
        marks: lines with broken logits get -1 minus their count (see `count_broken`), otherwise
            any token.
    """
    best = logits.argmax(-1)
    if marks:
        broken = count_broken(logits)
        best = torch.where(broken > 0, -1 - broken, best)
    out.copy_(best)
    return out


@triton.jit
def _part_kernel(
    logits,
    values,
    indices,
    stride,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Best logit and its index of TILE logits, or infinity and -1 minus the count of broken ones if
    there are any; one program per line and part of it."""
    pdl_wait(PDL)
    i_line = tl.program_id(0)
    i_part = tl.program_id(1)
    o_v = i_part * TILE + tl.arange(0, TILE)
    p_logits = logits + i_line.to(tl.int64) * stride + o_v
    b_value = tl.load(p_logits, mask=o_v < V, other=float("-inf")).to(tl.float32)
    # Not less than infinity: infinity and NaN.
    broken = tl.sum(tl.where(b_value < float("inf"), 0, 1), axis=0)
    best = tl.max(b_value, axis=0)
    # A part of nothing but -inf still names a valid token.
    first = tl.min(tl.where((b_value == best) & (o_v < V), o_v, V - 1), axis=0)
    tl.store(values + i_line * PARTS + i_part, tl.where(broken > 0, float("inf"), best))
    tl.store(indices + i_line * PARTS + i_part, tl.where(broken > 0, -1 - broken, first))


@triton.jit
def best_part(values, indices, i_line, V: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """A line's largest logit and its index; that is -1 minus the count of broken logits if there
    are any, and the logit then not finite."""
    o_part = tl.arange(0, WIDTH)
    m_part = o_part < PARTS
    b_value = tl.load(values + i_line * PARTS + o_part, mask=m_part, other=float("-inf"))
    b_index = tl.load(indices + i_line * PARTS + o_part, mask=m_part, other=2147483647)
    best = tl.max(b_value, axis=0)
    broken = tl.sum(tl.where(b_index < 0, -1 - b_index, 0), axis=0)
    broken = tl.where(best > float("-inf"), broken, V)
    # Parts are in the order of their tokens, so the lowest index is in the first best part.
    first = tl.min(tl.where(b_value == best, b_index, 2147483647), axis=0)
    return best, tl.where(broken > 0, -1 - broken, first)


@triton.jit
def _whole_kernel(
    values,
    indices,
    out,
    out_stride,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    MARKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Index of a line's largest logit; one program per line."""
    pdl_wait(PDL)
    i_line = tl.program_id(0)
    _, first = best_part(values, indices, i_line, V, PARTS, WIDTH)
    if not MARKS:
        first = tl.maximum(first, 0)
    tl.store(out + i_line * out_stride, first)


TILE = 4096
"""Logits per program."""


def largest_parts(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each part of each line, float32 `[lines, parts]`, and its index, for
    `best_part`."""
    lines, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, TILE)
    values = torch.empty((lines, parts), dtype=torch.float32, device=logits.device)
    indices = torch.empty((lines, parts), dtype=torch.int32, device=logits.device)
    if lines:
        _part_kernel[(lines, parts)](
            logits=logits,
            values=values,
            indices=indices,
            stride=logits.stride(0),
            V=vocabulary,
            PARTS=parts,
            TILE=TILE,
            num_warps=8,
            **pdl(logits),
        )
    return values, indices


def argmax(logits: Tensor, out: Tensor | None = None, marks: bool = False) -> Tensor:
    """`argmax_reference` by two launches where Triton runs (and not in fp64). `out` None: allocated
    here."""
    lines = logits.shape[0]
    if out is None:
        out = torch.empty(lines, dtype=torch.int32, device=logits.device)
    if not runs_triton(logits) or logits.dtype == torch.float64 or logits.stride(1) != 1:
        return argmax_reference(logits, out, marks)
    values, indices = largest_parts(logits)
    if lines:
        _whole_kernel[(lines,)](
            values=values,
            indices=indices,
            out=out,
            out_stride=out.stride(0),
            V=logits.shape[1],
            PARTS=values.shape[1],
            WIDTH=triton.next_power_of_2(values.shape[1]),
            MARKS=marks,
            num_warps=1,
            **pdl(logits),
        )
    return out
