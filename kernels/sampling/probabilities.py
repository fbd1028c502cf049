"""Tokens of each line of logits with the whole distribution they were drawn from."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.sampling.cut import read, weight
from hybrid_runtime.kernels.sampling.naive import probabilities_reference, select_reference
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.kernels.sampling.select import SHIFTS, TILING, Cut, SelectTiling, select_tokens


@triton.jit
def _probabilities_kernel(
    logits, stride, token, cut_value, cut_last, cut_total, best, temperature, min_p, param_stride,
    slot, out, WIDTH: tl.constexpr, BY_SLOT: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per line and TILE of it."""
    pdl_wait(PDL)
    i_line = tl.program_id(0)
    i_slot = i_line // WIDTH
    if BY_SLOT:
        i_slot = tl.maximum(tl.load(slot + i_slot), 0)
    o_v = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tau = tl.load(temperature + i_slot * param_stride)
    largest = tl.load(best + i_line)
    p_out = out + i_line.to(tl.int64) * V + o_v
    if (tau > 0) & (largest > float("-inf")) & (largest < float("inf")):
        b_x = read(logits + i_line.to(tl.int64) * stride, o_v, V, TILE)
        b_w = weight(b_x, largest, 1.4426950408889634 / tau)
        cut = tl.load(cut_value + i_line)
        m_kept = (b_x > cut) | ((b_x == cut) & (o_v <= tl.load(cut_last + i_line)))
        m_kept &= b_w >= tl.load(min_p + i_slot * param_stride)
        b_p = tl.where(m_kept, b_w / tl.load(cut_total + i_line), 0.0)
        tl.store(p_out, b_p, mask=o_v < V)
    else:
        b_p = (o_v == tl.load(token + i_line)).to(tl.float32)
        tl.store(p_out, b_p, mask=o_v < V)


TILE = 4096
"""Logits per program."""


def select_with_probabilities(
    logits: Tensor,
    sampling: SamplingTensors,
    position: Tensor,
    stream: int,
    marks: bool = False,
    tiling: SelectTiling = TILING,
) -> tuple[Tensor, Tensor]:
    """`select_reference` and `probabilities_reference`, by three launches where Triton runs."""
    rows, width, vocabulary = logits.shape
    if not rows or not runs_triton(logits) or logits.dtype not in SHIFTS:
        return (
            select_reference(logits, sampling, position, stream, marks),
            probabilities_reference(logits, sampling),
        )
    lines = rows * width
    cut = Cut.empty(lines, logits.device)
    tokens = select_tokens(logits, sampling, position, stream, cut=cut, marks=marks, tiling=tiling)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    logits = logits.flatten(0, 1)
    _probabilities_kernel[(lines, triton.cdiv(vocabulary, TILE))](
        logits=logits,
        stride=logits.stride(0),
        token=tokens,
        cut_value=cut.value,
        cut_last=cut.last,
        cut_total=cut.total,
        best=cut.best,
        temperature=sampling.temperature,
        min_p=sampling.min_p,
        param_stride=sampling.temperature.stride(0),
        slot=tokens if sampling.slot is None else sampling.slot,
        out=out,
        WIDTH=width,
        BY_SLOT=sampling.slot is not None,
        V=vocabulary,
        TILE=TILE,
        num_warps=8,
        **pdl(logits),
    )
    return tokens, out
