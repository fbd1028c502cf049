"""A token for each line of logits, drawn or most likely, without sorting the vocabulary.

Two launches: the largest logit of each part of a line, as of `argmax`; then one program per line
that finds the cut of top-k and top-p (`cut.py`) and draws. If few tokens are left, they are written
out, in order, and the rest of the work is done on them; otherwise one more pass over the line adds
up the weight of each tile, and the draw looks into one of these. Lines have parameters of their
own: a greedy one is done with the first launch, one without top-k and top-p needs no cut.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.sampling.argmax import best_part, largest_parts
from hybrid_runtime.kernels.sampling.cut import LOWEST, search, value, weight
from hybrid_runtime.kernels.sampling.draw import draw_few, draw_line, ties_left, write_out
from hybrid_runtime.kernels.sampling.naive import select_reference
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.kernels.sampling.uniform import draw_uniform, stream_start


class Cut(NamedTuple):
    """What top-k and top-p leave of each line.

    Attributes:
        value: float32 [lines]; tokens with larger logits stay.
        last: int32 [lines], of the tokens with this logit those up to here stay.
        total: float32 [lines], weight of those that stay, over that of the largest logit.
        best: float32 [lines], the largest logit.
    """

    value: Tensor
    last: Tensor
    total: Tensor
    best: Tensor

    @classmethod
    def empty(cls, lines: int, device: torch.device) -> Cut:
        value, total, best = torch.empty((3, lines), dtype=torch.float32, device=device)
        return cls(value, torch.empty(lines, dtype=torch.int32, device=device), total, best)


class SelectTiling(NamedTuple):
    """Sizes of the launch.

    Attributes:
        tile: logits that a program reads at once to find the cut.
        piece: the same afterwards.
        few: tokens left that are written out instead of read again.
        warps: of a program.
    """

    tile: int = 8192
    piece: int = 4096
    few: int = 1024
    warps: int = 8


TILING = SelectTiling()


@triton.jit
def _select_kernel(
    logits, stride, values, indices, few_tokens,
    temperature, top_k, top_p, min_p, param_stride, seed, seed_stride,
    slot, position, num_draft, emits, out, cut_value, cut_last, cut_total, cut_best,
    START: tl.constexpr, WIDTH: tl.constexpr, BY_SLOT: tl.constexpr, VERIFIES: tl.constexpr,
    MARKS: tl.constexpr, KEEPS_CUT: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr,
    PART_WIDTH: tl.constexpr, TILE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    FEW: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per line; WIDTH lines per row, at positions one after another."""
    pdl_wait(PDL)
    i_line = tl.program_id(0)
    i_row = i_line // WIDTH
    i_ahead = i_line % WIDTH
    i_slot = i_row
    if BY_SLOT:
        i_slot = tl.maximum(tl.load(slot + i_row), 0)
    p_line = logits + i_line.to(tl.int64) * stride
    best, token = best_part(values, indices, i_line, V, PARTS, PART_WIDTH)
    if not MARKS:
        token = tl.maximum(token, 0)
    tau = tl.load(temperature + i_slot * param_stride)
    draws = tau > 0
    if VERIFIES:
        # The token behind a draft that was not made is not used.
        draws &= (tl.load(emits + i_row).to(tl.int32) != 0) & (
            i_ahead <= tl.load(num_draft + i_row)
        )

    # Nothing can be drawn where logits are broken.
    draws &= (best > float("-inf")) & (best < float("inf"))

    scale = 1.4426950408889634 / tl.where(draws, tau, 1.0)
    cut = best
    last = token
    total = tl.full((), 1.0, tl.float64)
    if draws:
        k = tl.load(top_k + i_slot * param_stride)
        p = tl.load(top_p + i_slot * param_stride)
        least = tl.load(min_p + i_slot * param_stride)
        at = tl.load(position + i_row).to(tl.int64) + i_ahead
        u = draw_uniform(tl.load(seed + i_slot * seed_stride), at, START)
        key = tl.full((), LOWEST >> SHIFT, tl.int32)
        ties = 0.0
        enough = 0.0
        few = False
        if (k > 0) & (k < V):
            key, above, _, few = search(
                p_line, best, scale, key, 0.0, k.to(tl.float32), False, V, TILE, SHIFT, FEW
            )
            ties = k - above
        if (p < 1) & (few == 0):
            extra = ties * weight(value(key, SHIFT), best, scale)
            floor = key
            key, above, enough, few = search(
                p_line, best, scale, floor, extra, p, True, V, TILE, SHIFT, FEW
            )
            left = ties_left(above, enough, weight(value(key, SHIFT), best, scale))
            ties = tl.where(key == floor, tl.minimum(ties, left), left)
        cut = value(key, SHIFT)
        if few:
            p_few = few_tokens + i_line * FEW
            count = write_out(p_line, p_few, cut, V, PIECE, FEW)
            token, cut, last, total = draw_few(
                p_line, p_few, count, best, scale, k, p, enough, least, u, V, SHIFT, FEW
            )
        else:
            token, last, total = draw_line(
                p_line, cut, ties, best, scale, least, u, V, PIECE, PIECES, KEEPS_CUT
            )
    tl.store(out + i_line, token)
    if KEEPS_CUT:
        tl.store(cut_value + i_line, cut)
        tl.store(cut_last + i_line, last)
        tl.store(cut_total + i_line, total)
        tl.store(cut_best + i_line, best)


SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Low bits that a float32 made of such a number does not use."""


def select_tokens(
    logits: Tensor,
    sampling: SamplingTensors,
    position: Tensor,
    stream: int,
    num_draft: Tensor | None = None,
    emits: Tensor | None = None,
    cut: Cut | None = None,
    marks: bool = False,
    tiling: SelectTiling = TILING,
) -> Tensor:
    """`select_reference` by two launches where Triton runs (and not in fp64).

    num_draft, emits: int32 `[rows]`, given: of a row that emits nothing, and behind its drafts,
        any token will do. cut: gets what the drawn tokens were drawn from (not in the reference).
    """
    rows, width, vocabulary = logits.shape
    if not rows or not runs_triton(logits) or logits.dtype not in SHIFTS:
        return select_reference(logits, sampling, position, stream, marks)
    lines = logits.flatten(0, 1)
    if lines.stride(1) != 1:
        lines = lines.contiguous()
    values, indices = largest_parts(lines)
    out = torch.empty((rows, width), dtype=torch.int32, device=logits.device)
    few = torch.empty((rows * width, tiling.few), dtype=torch.int32, device=logits.device)
    param_stride = sampling.temperature.stride(0)
    assert all(x.stride(0) == param_stride for x in sampling[1:4])
    verifies = num_draft is not None and emits is not None
    _select_kernel[(rows * width,)](
        logits=lines,
        values=values,
        indices=indices,
        stride=lines.stride(0),
        few_tokens=few,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        param_stride=param_stride,
        seed=sampling.seed,
        seed_stride=sampling.seed.stride(0),
        slot=out if sampling.slot is None else sampling.slot,
        position=position,
        num_draft=num_draft if verifies else out,
        emits=emits if verifies else out,
        out=out,
        cut_value=cut.value if cut else out,
        cut_last=cut.last if cut else out,
        cut_total=cut.total if cut else out,
        cut_best=cut.best if cut else out,
        START=stream_start(stream),
        WIDTH=width,
        BY_SLOT=sampling.slot is not None,
        VERIFIES=verifies,
        MARKS=marks,
        KEEPS_CUT=cut is not None,
        V=vocabulary,
        PARTS=values.shape[1],
        PART_WIDTH=triton.next_power_of_2(values.shape[1]),
        TILE=tiling.tile,
        PIECE=tiling.piece,
        PIECES=triton.next_power_of_2(triton.cdiv(vocabulary, tiling.piece)),
        FEW=tiling.few,
        SHIFT=SHIFTS[logits.dtype],
        num_warps=tiling.warps,
        **pdl(logits),
    )
    return out
