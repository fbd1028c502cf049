"""Inputs of a step's forward pass: where each row stands, and the tokens it runs.

The host says who runs and how much; how far each sequence has come, and what it guessed last, only
the device knows. One launch makes the model's inputs from both, in buffers that never move.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.step.entry import DRAFT, ENTRY_FIELDS, SCHEDULED, SLOT


class StepInputs(NamedTuple):
    """Rows of one step, int32 throughout.

    slot: `[rows]`, -1 = padded row.
    cu_seqlens: `[rows + 1]`, row i owns tokens `[cu_seqlens[i], cu_seqlens[i + 1])`.
    computed: `[rows]`, tokens before the step = position of the row's first token.
    draft: `[rows]`, guesses at the row's end.
    certain: `[rows]`, computed + scheduled - draft.
    emits: `[rows]`, 1 where the row reaches the end of what is known of its sequence, so that its
        step brings a new token; 0 for an unfinished prefill chunk and for padding.
    tokens: `[T]`.
    guesses: `[rows, K]`, the drafts among the tokens, -1 where there is none.
    verify: `[rows * (K + 1)]`, index of the token after which draft j is judged (repeated once a
        row has no more).
    """

    slot: Tensor
    cu_seqlens: Tensor
    computed: Tensor
    draft: Tensor
    certain: Tensor
    emits: Tensor
    tokens: Tensor
    guesses: Tensor
    verify: Tensor

    @classmethod
    def empty(cls, rows: int, tokens: int, num_draft: int, device: torch.device) -> StepInputs:
        """Buffers for so many rows and tokens."""

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            slot=ints(rows),
            cu_seqlens=ints(rows + 1),
            computed=ints(rows),
            draft=ints(rows),
            certain=ints(rows),
            emits=ints(rows),
            tokens=ints(tokens),
            guesses=ints(rows * num_draft).view(rows, num_draft),
            verify=ints(rows * (num_draft + 1)),
        )

    def first(self, rows: int, tokens: int) -> StepInputs:
        """Views of the first so many rows and tokens."""
        width = self.verify.shape[0] // self.slot.shape[0]
        return StepInputs(
            slot=self.slot[:rows],
            cu_seqlens=self.cu_seqlens[: rows + 1],
            computed=self.computed[:rows],
            draft=self.draft[:rows],
            certain=self.certain[:rows],
            emits=self.emits[:rows],
            tokens=self.tokens[:tokens],
            guesses=self.guesses[:rows],
            verify=self.verify[: rows * width],
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
    """Fill `out` from the step's entries; its rows beyond `num_rows` are padding.

    Args:
        entries: int32 `[lines, ENTRY_FIELDS]`, rows first.
        num_rows: rows of the step, at most those of `out`.
        computed: int32 `[slots]`, exact tokens computed.
        history: int32 `[slots + 1, length]`, tokens of each sequence.
        drafts: int32 `[slots + 1, K]`, its guesses, -1 where there is none.
        length: int32 `[slots + 1]`, any stride, tokens known.
        out: written whole; a guess of -1 is run as token 0 (any valid id: it is never accepted).
        max_scheduled: host upper bound of tokens per row.
        pad: tokens of a padded row.
    """
    rows, num_draft = out.slot.shape[0], drafts.shape[1]
    line = entries[:num_rows].long()
    slot = line.new_full((rows,), -1)
    slot[:num_rows] = line[:, SLOT]
    scheduled, draft = line.new_full((rows,), pad), line.new_zeros(rows)
    scheduled[:num_rows] = torch.where(line[:, SLOT] >= 0, line[:, SCHEDULED], 0)
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
        guess = torch.where(inside & ~known, position - certain[row], 0)
        tokens = torch.where(known, tokens, drafts[at[row], guess])
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
            verify.clamp(min=0).flatten(),
        ),
        strict=True,
    ):
        target.copy_(value)


@triton.jit(
    do_not_specialize=["num_rows", "rows", "pad", "tokens"],
    do_not_specialize_on_alignment=[
        "slot_computed", "history", "drafts", "length", "slot", "cu_seqlens", "computed", "draft",
        "certain", "emits", "out", "guesses_made", "verify",
    ],
)  # fmt: skip
def _prepare_inputs_kernel(
    entries,
    num_rows,
    rows,
    pad,
    tokens,
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
    draft,
    certain,
    emits,
    out,
    guesses_made,
    verify,
    NUM_DRAFT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.program_id(1)
    index = tl.arange(0, ROWS)
    listed = index < num_rows
    entry = entries + index * ENTRY_FIELDS
    owned = tl.load(entry + SLOT, mask=listed, other=-1) >= 0
    counts = tl.load(entry + SCHEDULED, mask=listed & owned, other=0)
    counts = tl.where(listed, counts, pad)
    start = tl.sum(tl.where(index < row, counts, 0), axis=0)
    scheduled = tl.sum(tl.where(index == row, counts, 0), axis=0)

    mine = entries + row * ENTRY_FIELDS
    at = tl.load(mine + SLOT, mask=row < num_rows, other=-1)
    live = at >= 0
    guesses = tl.load(mine + DRAFT, mask=live, other=0)
    n = tl.load(slot_computed + at, mask=live, other=0)
    final = tl.where(live, n + scheduled - guesses, 0)
    if tile == 0:
        known = tl.load(length + at * length_stride, mask=live, other=0)
        tl.store(slot + row, at)
        tl.store(cu_seqlens + row, start)
        tl.store(cu_seqlens + rows, start + scheduled, mask=row == rows - 1)
        tl.store(computed + row, n)
        tl.store(draft + row, guesses)
        tl.store(certain + row, final)
        tl.store(emits + row, (live & (final >= known)).to(tl.int32))
        j = tl.arange(0, WIDTH)
        judged = tl.maximum(start + scheduled - 1 - guesses + tl.minimum(j, guesses), 0)
        tl.store(verify + row * (NUM_DRAFT + 1) + j, judged, mask=j <= NUM_DRAFT)
        if NUM_DRAFT > 0:
            made = tl.load(drafts + at.to(tl.int64) * draft_stride + j, mask=j < guesses, other=-1)
            tl.store(guesses_made + row * NUM_DRAFT + j, made, mask=j < NUM_DRAFT)

    i = tile * TILE + tl.arange(0, TILE)
    inside = i < scheduled
    certainly = inside & live & (n + i < final)
    guessed = inside & live & (n + i >= final)
    text = history + at.to(tl.int64) * history_stride
    token = tl.load(text + n + i, mask=certainly, other=0)
    if NUM_DRAFT > 0:
        guess = drafts + at.to(tl.int64) * draft_stride + (n + i - final)
        token += tl.load(guess, mask=guessed, other=0)
    tl.store(out + start + i, tl.maximum(token, 0), mask=inside)
    # Tokens behind the last row run through the model as well and need a valid id.
    if (row == rows - 1) & (tile == tl.num_programs(1) - 1):
        behind = start + scheduled + tl.arange(0, TILE)
        while tl.min(behind, axis=0) < tokens:
            tl.store(out + behind, tl.zeros_like(behind), mask=behind < tokens)
            behind += TILE


TILE = 128
"""Tokens per program."""


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
    num_draft = drafts.shape[1]
    _prepare_inputs_kernel[(rows, triton.cdiv(max(max_scheduled, pad, 1), TILE))](
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
        out.slot,
        out.cu_seqlens,
        out.computed,
        out.draft,
        out.certain,
        out.emits,
        out.tokens,
        out.guesses,
        out.verify,
        NUM_DRAFT=num_draft,
        WIDTH=triton.next_power_of_2(num_draft + 1),
        ROWS=triton.next_power_of_2(rows),
        TILE=TILE,
        num_warps=4,
    )
