"""`advance` for the replay layout: finish the previous step's counts, place the new one.

A request has one live state, in the last column of its block table; checkpoints go to the other
columns, as each step says: at which positions, and where to. The state is written only now and
then: the inputs of the tokens that it does not hold yet are in the ring of records, and every step
that decodes folds them in on reading.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.step.direct_launch import DirectLaunch
from hybrid_runtime.kernels.step.entry import (
    ADMIT,
    ADMIT_COMPUTED,
    CERTAIN,
    COLUMN,
    DEAD,
    DECODES,
    DRAFT,
    ENTRY_FIELDS,
    FIRST_COLUMN,
    FIRST_SAVE,
    PLACED_DRAFT,
    SCHEDULED,
    SECOND_COLUMN,
    SECOND_SAVE,
    SLOT,
)
from hybrid_runtime.kernels.step.previous_step import LINES, finish, finish_reference


class ReplayPlace(NamedTuple):
    """Where the states of a manager lie, the same in all its steps.

    live_column: column of the live states.
    ring_tokens: most tokens (W) that may be pending after a step; 0: every step writes.
    ring: tokens of a slot's ring of records (L).
    cuts: rows without drafts leave a checkpoint inside.
    """

    live_column: int
    ring_tokens: int
    ring: int
    cuts: bool


class ReplaySlots(NamedTuple):
    """Exact device state per slot, int32 `[max_requests]`.

    computed: tokens computed before the step begun last (n).
    held: column of the state, -1 = none (zero state); `DEAD`.
    fold: accepted drafts of the step before that (a - 1), so n - fold were certain after it.
    written: tokens in the state after the step begun last (b).
    """

    computed: Tensor
    held: Tensor
    fold: Tensor
    written: Tensor


class ReplayPositions(NamedTuple):
    """What a step does to the state of each row, int32 `[rows]`; columns are -1 and all else is 0
    in rows that don't run.

    The row has s tokens of which d are drafts, n tokens were computed before it, b of them are in
    the state.

    read_column: column of the state that is read; -1 = zero state, nothing is read, nothing is
        pending.
    offset: accepted drafts of the row's last step (a - 1): where in the old conv_state the
        inputs start.
    pending: tokens of the ring that are folded in on reading, n - b.
    cursor: index in the ring of the first of them, b % L. The row's own token i goes to
        `(cursor + pending + i) % L`.
    write_column: column that gets the conv_state in every step, and the matrix if
        `writes`; -1 = padded row. Usually `read_column`; another one after a prefix hit.
    writes: 1: the state after R = n + s - d tokens is stored, and the inputs of the d drafts. 0:
        the state stays as it is in `read_column`, which is `write_column`, and the inputs of all s
        tokens are stored.
    checkpoint_column: column that also gets the state after `n + checkpoint_after`
        tokens; -1 = no checkpoint. Only in a row that writes.
    checkpoint_after: `-offset + 1 .. s - d`.
    certain: R; enters the key of stochastic rounding of the state that is written, and
        `R - (s - d) + checkpoint_after` that of a checkpoint.
    """

    read_column: Tensor
    offset: Tensor
    pending: Tensor
    cursor: Tensor
    write_column: Tensor
    writes: Tensor
    checkpoint_column: Tensor
    checkpoint_after: Tensor
    certain: Tensor


IDLE = tuple(-1 if "column" in name else 0 for name in ReplayPositions._fields)
"""What a row that does not run holds."""


def advance_replay_reference(
    entries: Tensor,
    num_entries: int,
    num_rows: int,
    slots: ReplaySlots,
    previous: Tensor,
    accepted: Tensor,
    placed: Tensor,
    positions: ReplayPositions,
    place: ReplayPlace,
) -> None:
    """Finish the previous step and place this one.

    Args:
        entries: int32 `[lines, ENTRY_FIELDS]`, the first `num_entries` valid, rows first.
        num_entries: valid lines.
        num_rows: those of them that are rows of the step.
        slots: read, and updated for the slots of all entries.
        previous: int32 `[4, rows]`, `placed` of the previous step; RESETS is not used.
        accepted: int32 `[rows]` of the previous step; a = 0 counts as 1, or kills a row with
            drafts.
        placed: int32 `[4, rows]`, written for this step's rows.
        positions: written whole.
        place: of all steps.

    Of the positions that a line names, one in (n - fold, n], the last one in (n, R) of a row
    without drafts (`cuts`), or one at R goes to its column: as a checkpoint, or, at R in a row
    without drafts, as the state itself. A row writes its state if it does not decode, which must
    find nothing pending, if it stores a checkpoint or ends on one, if the state is not in the live
    column, or if its tokens would not fit the ring: then the state holds R tokens, else as many as
    before.
    """
    for out, idle in zip(positions, IDLE, strict=True):
        out.fill_(idle)
    line = entries[:num_entries].long()
    slot = line[:, SLOT]
    valid = slot >= 0
    computed, held, fold = finish_reference(
        line, slots.computed, slots.held, slots.fold, previous, accepted, resets_offset=False
    )
    written = slots.written[slot.clamp(min=0)].long()
    written = torch.where(line[:, ADMIT] > 0, line[:, ADMIT_COMPUTED], written)
    runs = valid & (line[:, SCHEDULED] > 0) & (held != DEAD)

    draft, scheduled = line[:, DRAFT], line[:, SCHEDULED]
    first, second = line[:, FIRST_SAVE], line[:, SECOND_SAVE]
    certain = computed + scheduled - draft

    def named(low: Tensor, high: Tensor) -> Tensor:
        """The last position of its line in (low, high]; 0: there is none."""
        found = [torch.where((at > low) & (at <= high), at, 0) for at in (first, second)]
        return torch.maximum(*found)

    def column(position: Tensor) -> Tensor:
        return torch.where(position == first, line[:, FIRST_COLUMN], line[:, SECOND_COLUMN])

    passed, ends = named(computed - fold, computed), named(certain - 1, certain) > 0
    inside = torch.where(draft == 0, named(computed, certain - 1), 0) * place.cuts
    position = torch.where(passed > 0, passed, torch.where(inside > 0, inside, certain))
    stores = (passed > 0) | (inside > 0) | (ends & (draft > 0))
    write = torch.where(ends & (draft == 0), column(certain), place.live_column)
    pending = torch.where(held >= 0, computed - written, 0)
    full = computed - written + scheduled > place.ring_tokens
    writes = (line[:, DECODES] == 0) | stores | ends | (held != place.live_column) | full

    after = computed, held, fold, torch.where(runs & writes, certain, written)
    for field, value in zip(slots, after, strict=True):
        field[slot[valid]] = value[valid].int()
    values = ReplayPositions(
        read_column=held,
        offset=fold,
        pending=pending,
        cursor=written % place.ring,
        write_column=write,
        writes=writes,
        checkpoint_column=torch.where(stores, column(position), -1),
        checkpoint_after=torch.where(stores, position - computed, 0),
        certain=certain,
    )
    n = num_rows
    placed[CERTAIN, :n] = torch.where(runs, certain, 0)[:n].int()
    placed[COLUMN, :n] = torch.where(runs, write, -1)[:n].int()
    placed[PLACED_DRAFT, :n] = draft[:n].int()
    for out, value, idle in zip(positions, values, IDLE, strict=True):
        out[:n] = torch.where(runs, value, idle)[:n].int()


@triton.jit
def _within(position, low, high):
    """`position` if it lies in (low, high], else 0."""
    return tl.where((position > low) & (position <= high), position, 0)


@triton.jit(
    do_not_specialize=[
        "num_entries", "num_rows", "previous_stride", "placed_stride", "max_rows", "live_column",
        "ring_tokens", "ring",
    ],
    do_not_specialize_on_alignment=["accepted"],
)  # fmt: skip
def _advance_replay_kernel(
    entries,
    num_entries,
    num_rows,
    slot_computed,
    slot_held,
    slot_fold,
    slot_written,
    previous,
    previous_stride,
    accepted,
    placed,
    placed_stride,
    read_column,
    offset,
    pending_tokens,
    cursor,
    write_column,
    writes_state,
    checkpoint_column,
    checkpoint_after,
    certain_tokens,
    max_rows,
    live_column,
    ring_tokens,
    ring,
    CUTS: tl.constexpr,
):
    i_line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    here = i_line < num_entries
    p_entry = entries + i_line * ENTRY_FIELDS
    slot = tl.load(p_entry + SLOT, mask=here, other=-1)
    valid = slot >= 0
    scheduled = tl.load(p_entry + SCHEDULED, mask=here, other=0)
    draft = tl.load(p_entry + DRAFT, mask=here, other=0)
    computed, held, fold = finish(
        p_entry, here, slot, slot_computed, slot_held, slot_fold, previous, previous_stride,
        accepted, RESETS_OFFSET=False,
    )  # fmt: skip
    admitted = tl.load(p_entry + ADMIT, mask=here, other=0) > 0
    written = tl.load(slot_written + slot, mask=valid, other=0)
    given = tl.load(p_entry + ADMIT_COMPUTED, mask=here, other=0)
    written = tl.where(admitted, given, written)
    runs = valid & (scheduled > 0) & (held != DEAD)

    first = tl.load(p_entry + FIRST_SAVE, mask=here, other=0)
    second = tl.load(p_entry + SECOND_SAVE, mask=here, other=0)
    first_column = tl.load(p_entry + FIRST_COLUMN, mask=here, other=-1)
    second_column = tl.load(p_entry + SECOND_COLUMN, mask=here, other=-1)
    certain = computed + scheduled - draft
    low = computed - fold
    passed = tl.maximum(_within(first, low, computed), _within(second, low, computed))
    ends = (certain > 0) & ((certain == first) | (certain == second))
    position = tl.where(passed > 0, passed, certain)
    stores = (passed > 0) | (ends & (draft > 0))
    if CUTS:
        last = certain - 1
        inside = tl.maximum(_within(first, computed, last), _within(second, computed, last))
        cuts = (inside > 0) & (draft == 0)
        position = tl.where(cuts & (passed == 0), inside, position)
        stores |= cuts
    write = tl.where(certain == first, first_column, second_column)
    write = tl.where(ends & (draft == 0), write, live_column)
    write = tl.where(runs, write, -1)
    full = computed - written + scheduled > ring_tokens
    decodes = tl.load(p_entry + DECODES, mask=here, other=0)
    writes = (decodes == 0) | stores | ends | (held != live_column) | full

    tl.store(slot_computed + slot, computed, mask=valid)
    tl.store(slot_held + slot, held, mask=valid)
    tl.store(slot_fold + slot, fold, mask=valid)
    tl.store(slot_written + slot, tl.where(runs & writes, certain, written), mask=valid)

    is_row = i_line < num_rows
    certain = tl.where(runs, certain, 0)
    tl.store(placed + CERTAIN * placed_stride + i_line, certain, mask=is_row)
    tl.store(placed + COLUMN * placed_stride + i_line, write, mask=is_row)
    tl.store(placed + PLACED_DRAFT * placed_stride + i_line, draft, mask=is_row)
    is_output = i_line < max_rows
    runs = runs & is_row
    stores = stores & runs
    tl.store(read_column + i_line, tl.where(runs, held, -1), mask=is_output)
    tl.store(offset + i_line, tl.where(runs, fold, 0), mask=is_output)
    pending = tl.where(runs & (held >= 0), computed - written, 0)
    tl.store(pending_tokens + i_line, pending, mask=is_output)
    tl.store(cursor + i_line, tl.where(runs, written % ring, 0), mask=is_output)
    tl.store(write_column + i_line, tl.where(runs, write, -1), mask=is_output)
    tl.store(writes_state + i_line, (runs & writes).to(tl.int32), mask=is_output)
    column = tl.where(position == first, first_column, second_column)
    tl.store(checkpoint_column + i_line, tl.where(stores, column, -1), mask=is_output)
    tl.store(checkpoint_after + i_line, tl.where(stores, position - computed, 0), mask=is_output)
    tl.store(certain_tokens + i_line, tl.where(runs, certain, 0), mask=is_output)


_launch = DirectLaunch(_advance_replay_kernel)


def advance_replay(
    entries: Tensor,
    num_entries: int,
    num_rows: int,
    slots: ReplaySlots,
    previous: Tensor,
    accepted: Tensor,
    placed: Tensor,
    positions: ReplayPositions,
    place: ReplayPlace,
) -> None:
    """`advance_replay_reference` by one launch where Triton runs."""
    if not runs_triton(entries):
        advance_replay_reference(
            entries, num_entries, num_rows, slots, previous, accepted, placed, positions, place
        )
        return
    max_rows = positions.read_column.shape[0]
    programs = -(-max(max_rows, num_entries) // LINES.value)  # triton.cdiv is slow on the host
    grid = (programs, 1, 1)
    arguments = (
        entries,
        num_entries,
        num_rows,
        *slots,
        previous,
        previous.stride(0),
        accepted,
        placed,
        placed.stride(0),
        *positions,
        max_rows,
        place.live_column,
        place.ring_tokens,
        place.ring,
    )
    _launch(grid, arguments, (place.cuts,))
