"""Zero the outputs of tokens that no program computes: those of padded rows, and those before the
first row and behind the last one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def zero_dense(out, first, last, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Tokens first up to last, each of SIZE elements, TILE elements at a time."""
    o = tl.arange(0, TILE)
    at = tl.cast(first, tl.int64) * SIZE
    end = tl.cast(last, tl.int64) * SIZE
    while at < end:
        tl.store(out + at + o, tl.zeros((TILE,), out.dtype.element_ty), mask=at + o < end)
        at += TILE


@triton.jit
def zero_tokens(p_out, mask, first, last, step, STRIDE: tl.constexpr):
    """Tokens first, first + step, ... below last.

    p_out: pointers to the elements of token 0 that this program owns, of which `mask` are real.
    STRIDE: elements from one token to the next.
    """
    zeros = tl.zeros(mask.shape, p_out.dtype.element_ty)
    token = first
    while token < last:
        tl.store(p_out + token.to(tl.int64) * STRIDE, zeros, mask=mask)
        token += step


@triton.jit
def zero_unowned(p_out, mask, i_row, start, end, active, tokens, STRIDE: tl.constexpr):
    """For the program of row i_row of tl.num_programs(1): its own tokens start up to end if it is
    padded (not active), those before it if it is the first row, those behind it if it is the last.

    tokens: of all rows and outside of them. The other arguments are those of `zero_tokens`.
    """
    zero_tokens(p_out, mask, tl.where(i_row == 0, 0, start), start, 1, STRIDE)
    first = tl.where(active, end, start)
    last = tl.where(i_row == tl.num_programs(1) - 1, tokens, end)
    zero_tokens(p_out, mask, first, last, 1, STRIDE)
