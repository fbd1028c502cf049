"""Mean hidden state of a prompt's tokens, summed over as many steps as the prompt takes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.constant import Constant
from hybrid_runtime.kernels.common.varlen import gather_rows

ENTRY_FIELDS = 6
"""Words of an entry, one row's tokens to add in this step:

ROW: row of the step.
FIRST: first token to add, counted from the row's start.
LAST: the one behind the last token to add.
SLOT: line of the sums.
ADDED: tokens that earlier steps have added; 0 begins a new sum.
RESULT: line of the output for the mean; -1 while tokens are still to come.
"""
ROW, FIRST, LAST, SLOT, ADDED, RESULT = (Constant(field) for field in range(ENTRY_FIELDS))


def pooling_reference(
    hidden: Tensor, cu_seqlens: Tensor, entries: Tensor, sums: Tensor, out: Tensor, most: int
) -> None:
    """Mean over tokens that may arrive in several steps. An entry's tokens are summed in order and
    by themselves, so that the result does not depend on the other rows of the step.

    Args:
        hidden: float `[tokens, size]`.
        cu_seqlens: int32 `[rows + 1]`, first token of each row.
        entries: int32 `[n, ENTRY_FIELDS]`, LAST > FIRST, at most one entry per slot and result.
        sums: float32 `[slots, size]`; receives the sums of unfinished entries.
        out: float32 `[results, size]`; receives the means of finished entries.
        most: host upper bound of LAST - FIRST.
    """
    row, first, last, slot, added, result = entries.long().unbind(1)
    token = first[:, None] + torch.arange(most, device=hidden.device)
    valid = token < last[:, None]
    index = torch.where(valid, cu_seqlens.long()[row, None] + token, 0)
    total = gather_rows(hidden.float(), index, valid).sum(1)
    total += torch.where(added[:, None] > 0, sums[slot], 0)
    done = result >= 0
    sums[slot[~done]] = total[~done]
    out[result[done]] = (total / (added + last - first)[:, None])[done]


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
    """One program per entry and TILE of the hidden state, TOKENS tokens at a time."""
    p_entry = entries + tl.program_id(0) * FIELDS
    start = tl.load(cu_seqlens + tl.load(p_entry + ROW)).to(tl.int64)
    token = tl.load(p_entry + FIRST)
    last = tl.load(p_entry + LAST)
    i_slot = tl.load(p_entry + SLOT).to(tl.int64)
    added = tl.load(p_entry + ADDED)
    i_result = tl.load(p_entry + RESULT).to(tl.int64)
    count = added + last - token
    o_d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_d = o_d < SIZE
    b_sum = tl.load(sums + i_slot * SIZE + o_d, mask=m_d & (added > 0), other=0.0)
    while token < last:
        o_t = token + tl.arange(0, TOKENS)
        m_hidden = (o_t < last)[:, None] & m_d[None, :]
        p_hidden = hidden + (start + o_t)[:, None] * hidden_stride + o_d[None, :]
        b_hidden = tl.load(p_hidden, mask=m_hidden, other=0.0).to(tl.float32)
        b_sum += tl.sum(b_hidden, axis=0)
        token += TOKENS
    tl.store(sums + i_slot * SIZE + o_d, b_sum, mask=m_d & (i_result < 0))
    tl.store(out + i_result * SIZE + o_d, b_sum / count, mask=m_d & (i_result >= 0))


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
        hidden=hidden,
        hidden_stride=hidden.stride(0),
        cu_seqlens=cu_seqlens,
        entries=entries,
        sums=sums,
        out=out,
        FIELDS=ENTRY_FIELDS,
        SIZE=size,
        TOKENS=TOKENS,
        TILE=TILE,
        num_warps=4,
    )
