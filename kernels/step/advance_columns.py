"""Bookkeeping at the start of a step: finish the previous step's counts, place the new one.

The device owns the exact counts; the host sends `entries` (see `entry`), and one launch turns them
into positions to read and write. Every slot is in exactly one entry, so no two programs touch
the same slot. Results of a step go to a buffer of that step's own, so that none is read while
another program writes it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.step.boundary import (
    cut,
    cut_reference,
    keeps,
    keeps_reference,
    load_rule,
    running_column,
    running_column_reference,
)
from hybrid_runtime.kernels.step.direct_launch import DirectLaunch
from hybrid_runtime.kernels.step.entry import (
    CERTAIN,
    COLUMN,
    DEAD,
    DECODES,
    DRAFT,
    ENTRY_FIELDS,
    OFFSET,
    PLACED_DRAFT,
    RESETS,
    SCHEDULED,
    SLOT,
    SOURCE,
    TARGET,
)
from hybrid_runtime.kernels.step.previous_step import LINES, finish, finish_reference


class SlotState(NamedTuple):
    """Exact device state per slot, int32 `[max_requests]`.

    computed: tokens computed.
    held: column that the last step ran in, -1 = none (zero state); `DEAD`.
    offset: offset at which the state starts there.
    """

    computed: Tensor
    held: Tensor
    offset: Tensor


class Positions(NamedTuple):
    """Where each row reads and writes, int32 `[max_requests]`, -1 in rows that are not running.

    read_column, read_offset, write_column: as of `StateRows`.
    cut_after, cut_column: as of `Cuts`; 0 and -1 in rows that leave no checkpoint on the way.
    """

    read_column: Tensor
    read_offset: Tensor
    write_column: Tensor
    cut_after: Tensor
    cut_column: Tensor


IDLE = tuple(0 if name == "cut_after" else -1 for name in Positions._fields)
"""What a row that does not run holds."""


def advance_reference(
    entries: Tensor,
    num_entries: int,
    num_rows: int,
    slots: SlotState,
    previous: Tensor,
    accepted: Tensor,
    placed: Tensor,
    positions: Positions,
    moves: Tensor,
    block_size: int,
    in_place: bool,
    cuts: bool,
) -> None:
    """Finish the previous step and place this one.

    Args:
        entries: int32 `[lines, ENTRY_FIELDS]`, the first `num_entries` valid, rows first.
        num_entries: valid lines.
        num_rows: those of them that are rows of the step.
        slots: read, and updated for the slots of all entries.
        previous: int32 `[4, rows]`, `placed` of the previous step.
        accepted: int32 `[rows]` of the previous step; a = 0 counts as 1, or kills a row with
            drafts.
        placed: int32 `[4, rows]`, written for this step's rows.
        positions: written whole, the cuts only if there may be some.
        moves: int32 `[3, rows]`, written if `in_place`: the pre-copies.
        block_size: tokens of a block.
        in_place: states are updated in the running column, and have to be moved there first.
        cuts: rows without drafts leave a checkpoint inside, see `cut_reference`.
    """
    for out, idle in zip(positions, IDLE, strict=True):
        out.fill_(idle)
    moves[TARGET].fill_(-1)
    line = entries[:num_entries].long()
    slot = line[:, SLOT]
    valid = slot >= 0
    counts = finish_reference(line, *slots, previous, accepted, resets_offset=True)
    for field, value in zip(slots, counts, strict=True):
        field[slot[valid]] = value[valid].int()
    computed, held, offset = counts

    draft = line[:, DRAFT]
    end = computed + line[:, SCHEDULED]
    runs = valid & (line[:, SCHEDULED] > 0) & (held != DEAD)
    column = torch.where(runs, running_column_reference(end, block_size), -1)
    resets = (draft > 0) & (end % block_size == 0) & keeps_reference(end, line)
    moved = runs & (held >= 0) & ((held != column) | ((offset > 0) & (line[:, DECODES] == 0)))
    moved &= in_place
    read = torch.where(moved, column, torch.where(runs, held, -1))
    read_offset = torch.where(moved, 0, torch.where(runs, offset, -1))
    n = num_rows
    placed[:, :n] = torch.stack([end - draft, column, draft, resets.long()])[:, :n].int()
    moves[:, :n] = torch.stack([held, offset, torch.where(moved, column, -1)])[:, :n].int()
    boundary = torch.where(runs, cut_reference(computed, end - draft, draft, line, block_size), 0)
    boundary *= cuts
    after = torch.where(boundary > 0, boundary - computed, 0)
    values = read, read_offset, column, after, boundary // block_size - 1
    for out, value in zip(positions, values, strict=True):
        out[:n] = value[:n].int()


@triton.jit(
    do_not_specialize=[
        "num_entries", "num_rows", "previous_stride", "placed_stride", "moves_stride", "max_rows",
    ],
    do_not_specialize_on_alignment=["accepted"],
)  # fmt: skip
def _advance_kernel(
    entries,
    num_entries,
    num_rows,
    slot_computed,
    slot_held,
    slot_offset,
    previous,
    previous_stride,
    accepted,
    placed,
    placed_stride,
    read_column,
    read_offset,
    write_column,
    cut_after,
    cut_column,
    moves,
    moves_stride,
    max_rows,
    BLOCK_SIZE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    CUTS: tl.constexpr,
):
    i_line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    here = i_line < num_entries
    p_entry = entries + i_line * ENTRY_FIELDS
    slot = tl.load(p_entry + SLOT, mask=here, other=-1)
    valid = slot >= 0
    scheduled = tl.load(p_entry + SCHEDULED, mask=here, other=0)
    draft = tl.load(p_entry + DRAFT, mask=here, other=0)
    computed, held, offset = finish(
        p_entry, here, slot, slot_computed, slot_held, slot_offset, previous, previous_stride,
        accepted, RESETS_OFFSET=True,
    )  # fmt: skip
    tl.store(slot_computed + slot, computed, mask=valid)
    tl.store(slot_held + slot, held, mask=valid)
    tl.store(slot_offset + slot, offset, mask=valid)

    end = computed + scheduled
    runs = valid & (scheduled > 0) & (held != DEAD)
    column = tl.where(runs, running_column(end, BLOCK_SIZE), -1)
    every, first, second = load_rule(p_entry, here)
    resets = (draft > 0) & (end % BLOCK_SIZE == 0) & keeps(end, every, first, second)
    read = tl.where(runs, held, -1)
    start = tl.where(runs, offset, -1)
    is_row = i_line < num_rows
    inside = i_line < max_rows
    if IN_PLACE:
        decodes = tl.load(p_entry + DECODES, mask=here, other=0) > 0
        moved = runs & (held >= 0) & ((held != column) | ((offset > 0) & (decodes == 0)))
        tl.store(moves + SOURCE * moves_stride + i_line, held, mask=is_row)
        tl.store(moves + OFFSET * moves_stride + i_line, offset, mask=is_row)
        target = tl.where(moved & is_row, column, -1)
        tl.store(moves + TARGET * moves_stride + i_line, target, mask=inside)
        read = tl.where(moved, column, read)
        start = tl.where(moved, 0, start)
    tl.store(placed + CERTAIN * placed_stride + i_line, end - draft, mask=is_row)
    tl.store(placed + COLUMN * placed_stride + i_line, column, mask=is_row)
    tl.store(placed + PLACED_DRAFT * placed_stride + i_line, draft, mask=is_row)
    tl.store(placed + RESETS * placed_stride + i_line, resets.to(tl.int32), mask=is_row)
    tl.store(read_column + i_line, tl.where(is_row, read, -1), mask=inside)
    tl.store(read_offset + i_line, tl.where(is_row, start, -1), mask=inside)
    tl.store(write_column + i_line, tl.where(is_row, column, -1), mask=inside)
    if CUTS:
        boundary = cut(computed, end - draft, draft, every, first, second, BLOCK_SIZE)
        boundary = tl.where(runs & is_row, boundary, 0)
        after = tl.where(boundary > 0, boundary - computed, 0)
        tl.store(cut_after + i_line, after, mask=inside)
        tl.store(cut_column + i_line, boundary // BLOCK_SIZE - 1, mask=inside)


_launch = DirectLaunch(_advance_kernel)


def advance(
    entries: Tensor,
    num_entries: int,
    num_rows: int,
    slots: SlotState,
    previous: Tensor,
    accepted: Tensor,
    placed: Tensor,
    positions: Positions,
    moves: Tensor,
    block_size: int,
    in_place: bool,
    cuts: bool,
) -> None:
    """`advance_reference` by one launch where Triton runs."""
    if not runs_triton(entries):
        advance_reference(
            entries, num_entries, num_rows, slots, previous, accepted, placed, positions, moves,
            block_size, in_place, cuts,
        )  # fmt: skip
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
        moves,
        moves.stride(0),
        max_rows,
    )
    _launch(grid, arguments, (block_size, in_place, cuts))
