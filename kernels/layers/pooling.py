"""Hidden states of a row's tokens added up, over as many steps as its prompt takes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.varlen import gather_rows

ENTRY_FIELDS = 6
ROW, FIRST, LAST, SLOT, BEFORE, RESULT = range(ENTRY_FIELDS)
"""Words of an entry. ROW: of the step. FIRST, LAST: tokens of that row, counted from its start, the
last one not included. SLOT: line of the sums. BEFORE: tokens that earlier steps have added; 0
begins a new sum. RESULT: line of the output, -1 while tokens are still to come."""


def pooling_reference(
    hidden: Tensor, cu_seqlens: Tensor, entries: Tensor, sums: Tensor, out: Tensor, most: int
) -> None:
    """Mean over tokens that may arrive in several steps; the sum of an entry is taken by itself,
    in the order of its tokens, so it does not depend on the other rows of the step.

    Args:
        hidden: float `[tokens, size]`.
        cu_seqlens: int32 `[rows + 1]`, first token of each row.
        entries: int32 `[n, ENTRY_FIELDS]`, LAST > FIRST, at most one entry per slot and result.
        sums: float32 `[slots, size]`; an unfinished entry leaves its sum there.
        out: float32 `[results, size]`; a finished one its mean here.
        most: host upper bound of LAST - FIRST.
    """
    row, first, last, slot, before, result = entries.long().unbind(1)
    token = first[:, None] + torch.arange(most, device=hidden.device)
    valid = token < last[:, None]
    index = torch.where(valid, cu_seqlens.long()[row, None] + token, 0)
    total = gather_rows(hidden.float(), index, valid).sum(1)
    total += torch.where(before[:, None] > 0, sums[slot], 0)
    done = result >= 0
    sums[slot[~done]] = total[~done]
    out[result[done]] = (total / (before + last - first)[:, None])[done]


@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "entries"])
def _pooling_kernel(
    hidden,
    hidden_stride,
    cu_seqlens,
    entries,
    sums,
    out,
    FIELDS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    entry = entries + tl.program_id(0) * FIELDS
    start = tl.load(cu_seqlens + tl.load(entry)).to(tl.int64)
    token = tl.load(entry + 1)
    last = tl.load(entry + 2)
    slot = tl.load(entry + 3).to(tl.int64)
    before = tl.load(entry + 4)
    result = tl.load(entry + 5).to(tl.int64)
    count = before + last - token
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    total = tl.load(sums + slot * SIZE + at, mask=inside & (before > 0), other=0.0)
    while token < last:
        line = token + tl.arange(0, TOKENS)
        there = (line < last)[:, None] & inside[None, :]
        where = hidden + (start + line)[:, None] * hidden_stride + at[None, :]
        total += tl.sum(tl.load(where, mask=there, other=0.0).to(tl.float32), axis=0)
        token += TOKENS
    tl.store(sums + slot * SIZE + at, total, mask=inside & (result < 0))
    tl.store(out + result * SIZE + at, total / count, mask=inside & (result >= 0))


TILE = 128
"""Elements of a hidden state per program."""
TOKENS = 32
"""Tokens that a program reads at once."""


def pooling(
    hidden: Tensor, cu_seqlens: Tensor, entries: Tensor, sums: Tensor, out: Tensor, most: int
) -> None:
    """`pooling_reference` by one launch where Triton runs."""
    if not runs_triton(hidden):
        pooling_reference(hidden, cu_seqlens, entries, sums, out, most)
        return
    size = hidden.shape[1]
    _pooling_kernel[(entries.shape[0], triton.cdiv(size, TILE))](
        hidden,
        hidden.stride(0),
        cu_seqlens,
        entries,
        sums,
        out,
        FIELDS=ENTRY_FIELDS,
        SIZE=size,
        TOKENS=TOKENS,
        TILE=TILE,
        num_warps=4,
    )
