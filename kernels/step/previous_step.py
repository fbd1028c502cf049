"""What a slot's previous step left behind, now that its accepted count is known.

Both layouts keep three exact counts per slot: `computed`, tokens; `held`, the column of the state
(-1 = none, zero state; `DEAD`); and `ahead`, how many of the accepted drafts the state of that
column does not hold yet: an offset to read at (columns layout), inputs to fold (replay layout).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.constant import Constant
from hybrid_runtime.kernels.step.entry import (
    ADMIT,
    ADMIT_COLUMN,
    ADMIT_COMPUTED,
    CERTAIN,
    COLUMN,
    DEAD,
    PLACED_DRAFT,
    PREVIOUS,
    RESETS,
    SLOT,
)

LINES = Constant(128)
"""Entries per program of the bookkeeping launches."""


def finish_reference(
    line: Tensor,
    computed: Tensor,
    held: Tensor,
    ahead: Tensor,
    previous: Tensor,
    accepted: Tensor,
    resets_offset: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Exact counts of each line's slot before the new step, int64 `[lines]` each.

    line: int64 `[lines, ENTRY_FIELDS]`.
    computed, held, ahead: int32 `[slots]`, as they were before the previous step.
    previous: int32 `[4, rows]`, `placed` of the previous step.
    accepted: int32 `[rows]` of it; a = 0 counts as 1, or makes a row with drafts `DEAD`; a < 0:
        -a tokens were accepted, and the row is `DEAD`, because its text has ended. A dead row's
        `computed` stays: a runner may place keys by it, and must not by less.
    resets_offset: the columns layout's rule: `ahead` is 0 after a step that accepts all drafts
        and whose RESETS is set.
    """
    slot = line[:, SLOT].clamp(min=0)
    finishes = line[:, PREVIOUS] >= 0
    row = line[:, PREVIOUS].clamp(min=0)
    certain, column, draft, resets = previous[:, row].long()
    count = accepted[row].long()
    emitted = torch.minimum(count.abs(), draft + 1).clamp(min=1)
    dead = (count < 0) | ((count == 0) & (draft > 0)) | (column < 0)
    after = emitted - 1
    if resets_offset:
        after = torch.where((resets > 0) & (emitted == draft + 1), 0, after)
    admitted = line[:, ADMIT] > 0

    def newest(old: Tensor, finished: Tensor, new: Tensor | int) -> Tensor:
        return torch.where(admitted, new, torch.where(finishes, finished, old[slot].long()))

    ran = torch.where(column < 0, computed[slot].long(), certain + emitted - 1)
    return (
        newest(computed, ran, line[:, ADMIT_COMPUTED]),
        newest(held, torch.where(dead, DEAD, column), line[:, ADMIT_COLUMN]),
        newest(ahead, after, 0),
    )


@triton.jit
def finish(
    p_entry,
    here,
    slot,
    slot_computed,
    slot_held,
    slot_ahead,
    previous,
    previous_stride,
    accepted,
    RESETS_OFFSET: tl.constexpr,
):
    """`finish_reference` of the entries at `p_entry`, where `here`."""
    row = tl.load(p_entry + PREVIOUS, mask=here, other=-1)
    admitted = tl.load(p_entry + ADMIT, mask=here, other=0) > 0
    known = (slot >= 0) & (row < 0) & ~admitted
    computed = tl.load(slot_computed + slot, mask=(slot >= 0) & ~admitted, other=0)
    held = tl.load(slot_held + slot, mask=known, other=-1)
    ahead = tl.load(slot_ahead + slot, mask=known, other=0)

    finishes = row >= 0
    certain = tl.load(previous + CERTAIN * previous_stride + row, mask=finishes, other=0)
    column = tl.load(previous + COLUMN * previous_stride + row, mask=finishes, other=-1)
    draft = tl.load(previous + PLACED_DRAFT * previous_stride + row, mask=finishes, other=0)
    count = tl.load(accepted + row, mask=finishes, other=1)
    emitted = tl.maximum(tl.minimum(tl.abs(count), draft + 1), 1)
    dead = (count < 0) | ((count == 0) & (draft > 0)) | (column < 0)
    after = emitted - 1
    if RESETS_OFFSET:
        resets = tl.load(previous + RESETS * previous_stride + row, mask=finishes, other=0)
        after = tl.where((resets > 0) & (emitted == draft + 1), 0, after)
    computed = tl.where(finishes & (column >= 0), certain + emitted - 1, computed)
    held = tl.where(finishes, tl.where(dead, DEAD, column), held)
    ahead = tl.where(finishes, after, ahead)

    computed = tl.where(admitted, tl.load(p_entry + ADMIT_COMPUTED, mask=here, other=0), computed)
    held = tl.where(admitted, tl.load(p_entry + ADMIT_COLUMN, mask=here, other=-1), held)
    return computed, held, tl.where(admitted, 0, ahead)
