"""Append the tokens of a step to their sequences, and make the inputs of the drafter's passes.

One launch after acceptance. The drafter's first pass covers the step's own positions, each with the
token that follows it; its further passes run one token a row, behind the new end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.step.prepare_inputs import StepInputs

MAX_ENDS = 8
"""Most tokens of one sequence that can end it here; a power of two."""


class TextEnds(NamedTuple):
    """Where texts end as far as tokens tell, int32 by slot, with any stride between slots.

    most: `[slots + 1]`, tokens of the longest text.
    tokens: `[slots + 1, MAX_ENDS]`, dense; those that end a text when they are emitted, -1: none.
    bits: `[slots + 1, words]`, dense; more of them, bit `t % 32` of word `t // 32` of token t.
    """

    most: Tensor
    tokens: Tensor
    bits: Tensor


class DraftInputs(NamedTuple):
    """Inputs of the drafter's passes, int32 throughout.

    tokens: `[T]`, the token after each of the step's tokens.
    last: `[rows]`, index of the row's last accepted token; 0 in padded rows.
    slot: `[rows]`, -1 in rows that emitted nothing: those in the middle of their prompt have no
        token to go on from.
    computed: `[K, rows]`, position of the one token per row that pass 0, 1, ... drafts from: `last`
        in pass 0, then the token that the row runs.
    """

    tokens: Tensor
    last: Tensor
    slot: Tensor
    computed: Tensor

    @classmethod
    def empty(cls, rows: int, tokens: int, num_draft: int, device: torch.device) -> DraftInputs:
        """Buffers for so many rows, tokens and drafts."""
        size = (tokens,), (rows,), (rows,), (num_draft, rows)
        return cls(*(torch.zeros(s, dtype=torch.int32, device=device) for s in size))

    def first(self, rows: int, tokens: int) -> DraftInputs:
        """Views of the first so many rows and tokens."""
        return DraftInputs(
            self.tokens[:tokens], self.last[:rows], self.slot[:rows], self.computed[:, :rows]
        )


def commit_tokens_reference(
    inputs: StepInputs,
    tokens: Tensor,
    num_accepted: Tensor,
    history: Tensor,
    length: Tensor,
    ends: TextEnds,
    emitted: Tensor,
    counts: Tensor,
    out: DraftInputs,
    max_scheduled: int,
) -> None:
    """Append a step's tokens to their sequences and prepare the drafter's passes.

    Args:
        inputs: the step's rows.
        tokens: int32 `[rows, d + 1]`, what each row emits, then -1; d is at most K. A negative one
            that is emitted marks broken logits: the host ends the request, the history takes 0.
        num_accepted: int32 `[rows]`, how many: 0 in rows that emit none.
        history: int32 `[slots + 1, length]`, appended to behind `length` tokens; its last row is
            a spare one.
        length: int32 `[slots + 1]`, any stride, raised by the count.
        ends: of the sequences.
        emitted: int32 `[rows, K + 2]`, gets the tokens and, last, their count: what the host reads.
            The count is negative where a text has ended among the tokens.
        counts: int32 `[rows]`, gets the same counts: what the next step's placement reads.
        out: written whole. Position p of the drafter sees token p + 1, so with n' tokens computed
            the first pass covers positions up to n' - 1, and pass i = 1, 2, ... runs n' + i - 1.
        max_scheduled: host upper bound of tokens per row.
    """
    rows, num_tokens = tokens.shape
    at, count = inputs.slot.long().clamp(min=0), num_accepted.long()
    emits = (inputs.emits > 0) & (inputs.slot >= 0)
    count = torch.where(emits, count, 0)
    step = torch.arange(num_tokens, device=tokens.device)
    spare = history.shape[0] - 1  # takes what rows that emit less would write
    live = step < count[:, None]
    known = length[at].long()
    stops = (tokens[:, :, None] == ends.tokens[at, None]) & live[:, :, None]
    word = ends.bits[at[:, None], tokens.clamp(min=0).long() // 32]
    listed = live & (tokens >= 0) & ((word >> tokens.clamp(min=0) % 32) & 1 > 0)
    ended = stops.flatten(1).any(1) | listed.any(1) | (known + count >= ends.most[at])
    where = torch.where(live, known[:, None] + step, 0)
    history[torch.where(live, at[:, None], spare), where] = tokens.clamp(min=0)
    length.index_add_(0, at, count.to(length.dtype))
    emitted.fill_(-1)
    emitted[:, :num_tokens] = torch.where(live, tokens, -1)
    counts.copy_(torch.where(ended, -count, count))
    emitted[:, -1] = counts

    start = inputs.cu_seqlens.long()
    token = torch.arange(inputs.tokens.shape[0], device=tokens.device)
    row = torch.searchsorted(start[1:], token, right=True).clamp(max=max(rows - 1, 0))
    position = inputs.computed.long()[row] + token - start[row] + 1
    inside = (token < start[-1]) & (inputs.slot[row] >= 0) & (position < length[at[row]])
    following = history[at[row], torch.where(inside, position, 0)]
    out.tokens.copy_(torch.where(inside, following.clamp(min=0), 0))
    final = inputs.certain.long() + count.clamp(min=1) - 1
    last = start[:-1] + final - 1 - inputs.computed
    out.last.copy_(torch.where(inputs.slot >= 0, last, 0).clamp(min=0))
    out.slot.copy_(torch.where(emits, inputs.slot, -1))
    ahead = torch.arange(out.computed.shape[0], device=tokens.device)
    out.computed.copy_(torch.where(inputs.slot >= 0, final - 1 + ahead[:, None], 0))


@triton.jit(
    do_not_specialize=["accepted_stride", "rows", "num_tokens"],
    do_not_specialize_on_alignment=[
        "slot", "cu_seqlens", "computed", "certain", "emits", "accepted", "num_accepted", "history",
        "length", "most", "ends", "end_bits", "emitted", "counts", "tokens", "last", "draft_slot",
        "draft_computed",
    ],
)  # fmt: skip
def _commit_tokens_kernel(
    slot,
    cu_seqlens,
    computed,
    certain,
    emits,
    accepted,
    accepted_stride,
    num_accepted,
    history,
    history_stride,
    length,
    length_stride,
    most,
    most_stride,
    ends,
    ends_stride,
    end_bits,
    bits_stride,
    emitted,
    counts,
    tokens,
    last,
    draft_slot,
    draft_computed,
    draft_stride,
    rows,
    num_tokens,
    NUM_DRAFT: tl.constexpr,
    WIDTH: tl.constexpr,
    ENDS: tl.constexpr,
    TILE: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_tile = tl.program_id(1)
    i_slot = tl.load(slot + i_row)
    start = tl.load(cu_seqlens + i_row)
    scheduled = tl.load(cu_seqlens + i_row + 1) - start
    n = tl.load(computed + i_row)
    live = i_slot >= 0
    count = tl.load(num_accepted + i_row)
    samples = live & (tl.load(emits + i_row) > 0)
    count = tl.where(samples, count, 0)
    end = tl.load(certain + i_row) + tl.maximum(count, 1) - 1  # tokens computed after the step
    p_history = history + i_slot.to(tl.int64) * history_stride
    p_accepted = accepted + i_row * accepted_stride
    if i_tile == 0:
        o_out = tl.arange(0, WIDTH)
        b_accepted = tl.load(p_accepted + o_out, mask=o_out < count, other=-1)
        known = tl.load(length + i_slot * length_stride, mask=live, other=0)
        tl.store(p_history + known + o_out, tl.maximum(b_accepted, 0), mask=o_out < count)
        tl.store(length + i_slot * length_stride, known + count, mask=live)
        o_end = tl.arange(0, ENDS)
        b_ends = tl.load(ends + i_slot * ends_stride + o_end, mask=live & (o_end >= 0), other=-1)
        stops = (b_accepted[:, None] == b_ends[None, :]) & (o_out < count)[:, None]
        ended = tl.max(tl.max(stops.to(tl.int32), axis=1), axis=0) > 0
        real = live & (o_out < count) & (b_accepted >= 0)
        p_bits = end_bits + i_slot.to(tl.int64) * bits_stride + (b_accepted >> 5)
        b_word = tl.load(p_bits, mask=real, other=0)
        ended |= tl.max((b_word >> (b_accepted & 31)) & 1, axis=0) > 0
        ended |= known + count >= tl.load(most + i_slot * most_stride, mask=live, other=0)
        b_count = tl.where(ended, -count, count)
        tl.store(counts + i_row, b_count)
        b_emitted = tl.where(o_out == NUM_DRAFT + 1, b_count, b_accepted)
        p_emitted = emitted + i_row * (NUM_DRAFT + 2)
        tl.store(p_emitted + o_out, b_emitted, mask=o_out < NUM_DRAFT + 2)
        tl.store(last + i_row, tl.where(live, tl.maximum(start + end - 1 - n, 0), 0))
        tl.store(draft_slot + i_row, tl.where(samples, i_slot, -1))
        if NUM_DRAFT > 0:
            position = tl.where(live, end - 1 + o_out, 0)
            p_computed = draft_computed + o_out * draft_stride + i_row
            tl.store(p_computed, position, mask=o_out < NUM_DRAFT)

    # What this launch appends is taken from `accepted`: other programs of the row may not have
    # stored it yet.
    o_token = i_tile * TILE + tl.arange(0, TILE)
    inside = o_token < scheduled
    fresh = n + o_token + 1 - tl.load(certain + i_row)
    is_old = inside & live & ((fresh < 0) | ~samples)
    b_tokens = tl.load(p_history + n + o_token + 1, mask=is_old, other=0)
    is_new = inside & samples & (fresh >= 0) & (fresh < count)
    b_tokens += tl.load(p_accepted + fresh, mask=is_new, other=0)
    tl.store(tokens + start + o_token, tl.maximum(b_tokens, 0), mask=inside)
    if (i_row == rows - 1) & (i_tile == tl.num_programs(1) - 1):
        o_behind = start + scheduled + tl.arange(0, TILE)
        while tl.min(o_behind, axis=0) < num_tokens:
            tl.store(tokens + o_behind, tl.zeros_like(o_behind), mask=o_behind < num_tokens)
            o_behind += TILE


TILE = 128
"""Tokens per program."""


def commit_tokens(
    inputs: StepInputs,
    tokens: Tensor,
    num_accepted: Tensor,
    history: Tensor,
    length: Tensor,
    ends: TextEnds,
    emitted: Tensor,
    counts: Tensor,
    out: DraftInputs,
    max_scheduled: int,
) -> None:
    """`commit_tokens_reference` by one launch where Triton runs."""
    rows = tokens.shape[0]
    if not rows or not runs_triton(tokens):
        commit_tokens_reference(
            inputs, tokens, num_accepted, history, length, ends, emitted, counts, out,
            max_scheduled,
        )  # fmt: skip
        return
    num_draft = out.computed.shape[0]
    _commit_tokens_kernel[(rows, triton.cdiv(max(max_scheduled, 1), TILE))](
        slot=inputs.slot,
        cu_seqlens=inputs.cu_seqlens,
        computed=inputs.computed,
        certain=inputs.certain,
        emits=inputs.emits,
        accepted=tokens,
        accepted_stride=tokens.stride(0),
        num_accepted=num_accepted,
        history=history,
        history_stride=history.stride(0),
        length=length,
        length_stride=length.stride(0),
        most=ends.most,
        most_stride=ends.most.stride(0),
        ends=ends.tokens,
        ends_stride=ends.tokens.stride(0),
        end_bits=ends.bits,
        bits_stride=ends.bits.stride(0),
        emitted=emitted,
        counts=counts,
        tokens=out.tokens,
        last=out.last,
        draft_slot=out.slot,
        draft_computed=out.computed,
        draft_stride=out.computed.stride(0),
        rows=rows,
        num_tokens=inputs.tokens.shape[0],
        NUM_DRAFT=num_draft,
        WIDTH=triton.next_power_of_2(num_draft + 2),
        ENDS=MAX_ENDS,
        TILE=TILE,
        num_warps=4,
    )
