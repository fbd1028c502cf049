"""Inputs of a step's forward pass: the position of each row, and the tokens it runs.

The host knows which rows run and how many tokens each; how far each sequence has come, and its
drafts, only the device knows. One launch makes the model's inputs from both, in buffers whose
addresses never change. K is the most drafts of a row; a row may have fewer, none included: the
first of those that were proposed.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.step.direct_launch import DirectLaunch
from hybrid_runtime.kernels.step.entry import DRAFT, ENTRY_FIELDS, SCHEDULED, SLOT


class StepInputs(NamedTuple):
    """Rows of one step, int32 throughout.

    slot: `[rows]`, -1 = padded row.
    cu_seqlens: `[rows + 1]`, row i owns tokens `[cu_seqlens[i], cu_seqlens[i + 1])`.
    computed: `[rows]`, tokens computed before the step, the position of the row's first token.
    num_draft: `[rows]`, drafts at the row's end, 0 .. K.
    certain: `[rows]`, computed + scheduled - num_draft.
    emits: `[rows]`, 1 where the row reaches the end of what is known of its sequence, so that its
        step brings a new token; 0 for an unfinished prefill chunk and for padding.
    tokens: `[T]`, token ids.
    drafts: `[rows, K]`, the drafts among the tokens; -1 behind a row's last one.
    verify: `[rows, K + 1]`, index of the token by whose logits draft j is verified, then of the one
        whose logits give the bonus token; repeated behind it.
    """

    slot: Tensor
    cu_seqlens: Tensor
    computed: Tensor
    num_draft: Tensor
    certain: Tensor
    emits: Tensor
    tokens: Tensor
    drafts: Tensor
    verify: Tensor

    @classmethod
    def empty(cls, rows: int, tokens: int, num_draft: int, device: torch.device) -> StepInputs:
        """Buffers for so many rows and tokens."""

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            slot=ints(rows),
            cu_seqlens=ints(rows + 1),
            computed=ints(rows),
            num_draft=ints(rows),
            certain=ints(rows),
            emits=ints(rows),
            tokens=ints(tokens),
            drafts=ints(rows, num_draft),
            verify=ints(rows, num_draft + 1),
        )

    def first(self, rows: int, tokens: int) -> StepInputs:
        """Views of the first so many rows and tokens."""
        return StepInputs(
            slot=self.slot[:rows],
            cu_seqlens=self.cu_seqlens[: rows + 1],
            computed=self.computed[:rows],
            num_draft=self.num_draft[:rows],
            certain=self.certain[:rows],
            emits=self.emits[:rows],
            tokens=self.tokens[:tokens],
            drafts=self.drafts[:rows],
            verify=self.verify[:rows],
        )


def prepare_inputs_reference(
    entries: Tensor,
    num_rows: int,
    computed: Tensor,
    history: Tensor,
    drafts: Tensor,
    length: Tensor,
    out: StepInputs,
    max_scheduled: int,
    pad: int,
) -> None:
    """Fill `out` from the step's entries; its rows beyond `num_rows` are padding, like those whose
    slot is -1, which have the tokens that they are scheduled to run.

    Args:
        entries: int32 `[lines, ENTRY_FIELDS]`, rows first.
        num_rows: rows of the step, at most those of `out`.
        computed: int32 `[slots]`, exact tokens computed.
        history: int32 `[slots + 1, length]`, tokens of each sequence.
        drafts: int32 `[slots + 1, K]`, proposed for each sequence, -1 where there is none.
        length: int32 `[slots + 1]`, any stride, tokens known.
        out: written whole; a draft of -1 is run as token 0 (any valid id: it is never accepted).
        max_scheduled: host upper bound of tokens per row.
        pad: tokens of a row beyond `num_rows`.
    """
    rows, num_draft = out.slot.shape[0], drafts.shape[1]
    line = entries[:num_rows].long()
    slot = line.new_full((rows,), -1)
    slot[:num_rows] = line[:, SLOT]
    scheduled, draft = line.new_full((rows,), pad), line.new_zeros(rows)
    scheduled[:num_rows] = line[:, SCHEDULED]
    draft[:num_rows] = torch.where(line[:, SLOT] >= 0, line[:, DRAFT], 0)
    live, at = slot >= 0, slot.clamp(min=0)
    start = torch.zeros(rows + 1, dtype=torch.int64, device=entries.device)
    torch.cumsum(scheduled, 0, out=start[1:])
    n = torch.where(live, computed[at].long(), 0)
    certain = torch.where(live, n + scheduled - draft, 0)

    token = torch.arange(out.tokens.shape[0], device=entries.device)
    row = torch.searchsorted(start[1:], token, right=True).clamp(max=max(rows - 1, 0))
    inside = (token < start[-1]) & live[row] if rows else token < 0
    position = n[row] + token - start[row]
    known = inside & (position < certain[row])
    tokens = history[at[row], torch.where(known, position, 0)]
    if num_draft:
        ahead = torch.where(inside & ~known, position - certain[row], 0)
        tokens = torch.where(known, tokens, drafts[at[row], ahead])
    step = torch.arange(num_draft + 1, device=entries.device)
    made = live[:, None] & (step[:-1] < draft[:, None])
    verify = (start[1:] - 1 - draft)[:, None] + torch.minimum(step, draft[:, None])
    for target, value in zip(
        out,
        (
            slot,
            start,
            n,
            draft,
            certain,
            live & (certain >= length[at]),
            torch.where(inside, tokens.clamp(min=0), 0),
            torch.where(made, drafts[at], -1),
            verify.clamp(min=0),
        ),
        strict=True,
    ):
        target.copy_(value)


@triton.jit(
    do_not_specialize=[
        "num_rows", "rows", "pad", "num_tokens", "history_stride", "draft_stride", "length_stride",
    ],
    do_not_specialize_on_alignment=[
        "entries", "slot_computed", "history", "drafts", "length", "slot", "cu_seqlens", "computed",
        "num_draft", "certain", "emits", "tokens", "step_drafts", "verify",
    ],
)  # fmt: skip
def _prepare_inputs_kernel(
    entries,
    num_rows,
    rows,
    pad,
    num_tokens,
    slot_computed,
    history,
    history_stride,
    drafts,
    draft_stride,
    length,
    length_stride,
    slot,
    cu_seqlens,
    computed,
    num_draft,
    certain,
    emits,
    tokens,
    step_drafts,
    verify,
    NUM_DRAFT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_tile = tl.program_id(1)
    o_row = tl.arange(0, ROWS)
    listed = o_row < num_rows
    p_entries = entries + o_row * ENTRY_FIELDS
    counts = tl.load(p_entries + SCHEDULED, mask=listed, other=0)
    counts = tl.where(listed, counts, pad)
    start = tl.sum(tl.where(o_row < i_row, counts, 0), axis=0)
    scheduled = tl.sum(tl.where(o_row == i_row, counts, 0), axis=0)

    p_entry = entries + i_row * ENTRY_FIELDS
    i_slot = tl.load(p_entry + SLOT, mask=i_row < num_rows, other=-1)
    live = i_slot >= 0
    d = tl.load(p_entry + DRAFT, mask=live, other=0)
    n = tl.load(slot_computed + i_slot, mask=live, other=0)
    end = tl.where(live, n + scheduled - d, 0)  # of what is certain
    p_drafts = drafts + i_slot.to(tl.int64) * draft_stride
    if i_tile == 0:
        known = tl.load(length + i_slot * length_stride, mask=live, other=0)
        tl.store(slot + i_row, i_slot)
        tl.store(cu_seqlens + i_row, start)
        tl.store(cu_seqlens + rows, start + scheduled, mask=i_row == rows - 1)
        tl.store(computed + i_row, n)
        tl.store(num_draft + i_row, d)
        tl.store(certain + i_row, end)
        tl.store(emits + i_row, (live & (end >= known)).to(tl.int32))
        o_draft = tl.arange(0, WIDTH)
        b_verify = tl.maximum(start + scheduled - 1 - d + tl.minimum(o_draft, d), 0)
        tl.store(verify + i_row * (NUM_DRAFT + 1) + o_draft, b_verify, mask=o_draft <= NUM_DRAFT)
        if NUM_DRAFT > 0:
            b_drafts = tl.load(p_drafts + o_draft, mask=o_draft < d, other=-1)
            tl.store(step_drafts + i_row * NUM_DRAFT + o_draft, b_drafts, mask=o_draft < NUM_DRAFT)

    o_token = i_tile * TILE + tl.arange(0, TILE)
    inside = o_token < scheduled
    is_known = inside & live & (n + o_token < end)
    is_draft = inside & live & (n + o_token >= end)
    p_history = history + i_slot.to(tl.int64) * history_stride
    b_tokens = tl.load(p_history + n + o_token, mask=is_known, other=0)
    if NUM_DRAFT > 0:
        b_tokens += tl.load(p_drafts + (n + o_token - end), mask=is_draft, other=0)
    tl.store(tokens + start + o_token, tl.maximum(b_tokens, 0), mask=inside)
    # Tokens behind the last row run through the model as well and need a valid id.
    if (i_row == rows - 1) & (i_tile == tl.num_programs(1) - 1):
        o_behind = start + scheduled + tl.arange(0, TILE)
        while tl.min(o_behind, axis=0) < num_tokens:
            tl.store(tokens + o_behind, tl.zeros_like(o_behind), mask=o_behind < num_tokens)
            o_behind += TILE


TILE = 128
"""Tokens per program."""
_launch = DirectLaunch(_prepare_inputs_kernel)


def prepare_inputs(
    entries: Tensor,
    num_rows: int,
    computed: Tensor,
    history: Tensor,
    drafts: Tensor,
    length: Tensor,
    out: StepInputs,
    max_scheduled: int,
    pad: int,
) -> None:
    """`prepare_inputs_reference` by one launch where Triton runs."""
    rows = out.slot.shape[0]
    if not rows or not runs_triton(entries):
        prepare_inputs_reference(
            entries, num_rows, computed, history, drafts, length, out, max_scheduled, pad
        )
        return
    arguments = (
        entries,
        num_rows,
        rows,
        pad,
        out.tokens.shape[0],
        computed,
        history,
        history.stride(0),
        drafts,
        drafts.stride(0),
        length,
        length.stride(0),
        *out,
    )
    grid = (rows, -(-max(max_scheduled, pad, 1) // TILE), 1)  # triton.cdiv is slow on the host
    _launch(grid, arguments, _constants(drafts.shape[1], rows))


@functools.cache
def _constants(num_draft: int, rows: int) -> tuple[int, int, int, int]:
    """NUM_DRAFT, WIDTH, ROWS and TILE."""
    return num_draft, triton.next_power_of_2(num_draft + 1), triton.next_power_of_2(rows), TILE
