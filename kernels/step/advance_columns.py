"""Bookkeeping at the start of a step: finish the previous step's counts, place the new one.

The device owns the exact counts. The host packs what it knows into one int32 table of `entries`
(one line per row of the new step, then one line per slot that only has to be finished), and one
launch turns it into read and write positions. Every slot stands in exactly one entry, so no two
programs touch the same slot; results of a step go to that step's own buffer, so none is read while
another program writes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.step.entry import (
    ADMIT,
    ADMIT_COLUMN,
    ADMIT_COMPUTED,
    CERTAIN,
    COLUMN,
    DEAD,
    DRAFT,
    ENTRY_FIELDS,
    EVERY,
    FIRST,
    OFFSET,
    PLACED_DRAFT,
    PREVIOUS,
    READS_OFFSET,
    RESETS,
    SCHEDULED,
    SECOND,
    SLOT,
    SOURCE,
    TARGET,
)


class SlotState(NamedTuple):
    """Exact device state per slot, int32 `[max_requests]`: tokens computed, the column that the
    last step ran in (-1 = none, zero state; `DEAD`), and the offset at which its state starts."""

    computed: Tensor
    held: Tensor
    offset: Tensor


class Positions(NamedTuple):
    """Where each row reads and writes, int32 `[max_requests]`, -1 in rows that are not running."""

    read_column: Tensor
    read_offset: Tensor
    write_column: Tensor


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
) -> None:
    """Finish the previous step and place this one.

    entries: int32 `[lines, ENTRY_FIELDS]`, the first `num_entries` valid, rows first.
    previous, placed: int32 `[4, rows]` (R, column, drafts, "all accepted resets the offset").
    accepted: int32 `[rows]` of the previous step; a = 0 counts as 1, or kills a row with drafts.
    moves: int32 `[3, rows]` (source column, offset, target column or -1), written if `in_place`.
    Formulas: README "How it works" (n' = R + a - 1, c = cdiv(n' + s, B) - 1).
    """
    for out in positions:
        out.fill_(-1)
    moves[TARGET].fill_(-1)
    line = entries[:num_entries].long()
    slot = line[:, SLOT]
    valid = slot >= 0
    at = slot.clamp(min=0)
    computed, held, offset = (field[at].long() for field in slots)

    finishes = line[:, PREVIOUS] >= 0
    row = line[:, PREVIOUS].clamp(min=0)
    certain, column, draft, resets = previous[:, row].long()
    count = torch.minimum(accepted[row].long(), draft + 1)
    emitted = count.clamp(min=1)
    dead = ((count <= 0) & (draft > 0)) | (column < 0)
    after = torch.where((resets > 0) & (emitted == draft + 1), 0, emitted - 1)
    computed = torch.where(finishes, certain + emitted - 1, computed)
    held = torch.where(finishes, torch.where(dead, DEAD, column), held)
    offset = torch.where(finishes, after, offset)

    admitted = line[:, ADMIT] > 0
    computed = torch.where(admitted, line[:, ADMIT_COMPUTED], computed)
    held = torch.where(admitted, line[:, ADMIT_COLUMN], held)
    offset = torch.where(admitted, 0, offset)
    for field, value in zip(slots, (computed, held, offset), strict=True):
        field[at[valid]] = value[valid].int()

    scheduled, draft = line[:, SCHEDULED], line[:, DRAFT]
    end = computed + scheduled
    runs = valid & (scheduled > 0) & (held != DEAD)
    column = torch.where(runs, -(-end // block_size) - 1, -1)
    every = line[:, EVERY]
    kept = (every > 0) & (end % every.clamp(min=1) == 0)
    kept |= (end == line[:, FIRST]) | (end == line[:, SECOND])
    resets = (draft > 0) & (end % block_size == 0) & kept
    moved = runs & (held >= 0) & ((held != column) | ((offset > 0) & (line[:, READS_OFFSET] == 0)))
    moved &= in_place
    read = torch.where(moved, column, torch.where(runs, held, -1))
    read_offset = torch.where(moved, 0, torch.where(runs, offset, -1))
    n = num_rows
    placed[:, :n] = torch.stack([end - draft, column, draft, resets.long()])[:, :n].int()
    moves[:, :n] = torch.stack([held, offset, torch.where(moved, column, -1)])[:, :n].int()
    for out, value in zip(positions, (read, read_offset, column), strict=True):
        out[:n] = value[:n].int()


# Nothing that varies is specialised on, so one compiled kernel serves every step (see `_launch`).
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
    moves,
    moves_stride,
    max_rows,
    BLOCK_SIZE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    LINES: tl.constexpr,
):
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    here = line < num_entries
    entry = entries + line * ENTRY_FIELDS
    slot = tl.load(entry + SLOT, mask=here, other=-1)
    valid = slot >= 0
    scheduled = tl.load(entry + SCHEDULED, mask=here, other=0)
    draft = tl.load(entry + DRAFT, mask=here, other=0)
    row = tl.load(entry + PREVIOUS, mask=here, other=-1)
    admitted = tl.load(entry + ADMIT, mask=here, other=0) > 0

    known = valid & (row < 0) & ~admitted
    computed = tl.load(slot_computed + slot, mask=known, other=0)
    held = tl.load(slot_held + slot, mask=known, other=-1)
    offset = tl.load(slot_offset + slot, mask=known, other=0)

    finishes = row >= 0
    certain = tl.load(previous + CERTAIN * previous_stride + row, mask=finishes, other=0)
    column = tl.load(previous + COLUMN * previous_stride + row, mask=finishes, other=-1)
    guessed = tl.load(previous + PLACED_DRAFT * previous_stride + row, mask=finishes, other=0)
    resets = tl.load(previous + RESETS * previous_stride + row, mask=finishes, other=0)
    count = tl.minimum(tl.load(accepted + row, mask=finishes, other=1), guessed + 1)
    emitted = tl.maximum(count, 1)
    dead = ((count <= 0) & (guessed > 0)) | (column < 0)
    after = tl.where((resets > 0) & (emitted == guessed + 1), 0, emitted - 1)
    computed = tl.where(finishes, certain + emitted - 1, computed)
    held = tl.where(finishes, tl.where(dead, DEAD, column), held)
    offset = tl.where(finishes, after, offset)

    computed = tl.where(admitted, tl.load(entry + ADMIT_COMPUTED, mask=here, other=0), computed)
    held = tl.where(admitted, tl.load(entry + ADMIT_COLUMN, mask=here, other=-1), held)
    offset = tl.where(admitted, 0, offset)
    tl.store(slot_computed + slot, computed, mask=valid)
    tl.store(slot_held + slot, held, mask=valid)
    tl.store(slot_offset + slot, offset, mask=valid)

    end = computed + scheduled
    runs = valid & (scheduled > 0) & (held != DEAD)
    # end >= 1 wherever `runs`, so truncating division is the floor here.
    column = tl.where(runs, (end + BLOCK_SIZE - 1) // BLOCK_SIZE - 1, -1)
    every = tl.load(entry + EVERY, mask=here, other=0)
    kept = (every > 0) & (end % tl.maximum(every, 1) == 0)
    kept = kept | (end == tl.load(entry + FIRST, mask=here, other=0))
    kept = kept | (end == tl.load(entry + SECOND, mask=here, other=0))
    resets = (draft > 0) & (end % BLOCK_SIZE == 0) & kept
    read = tl.where(runs, held, -1)
    start = tl.where(runs, offset, -1)
    is_row = line < num_rows
    if IN_PLACE:
        reads_offset = tl.load(entry + READS_OFFSET, mask=here, other=0) > 0
        moved = runs & (held >= 0) & ((held != column) | ((offset > 0) & (reads_offset == 0)))
        tl.store(moves + SOURCE * moves_stride + line, held, mask=is_row)
        tl.store(moves + OFFSET * moves_stride + line, offset, mask=is_row)
        target = tl.where(moved & is_row, column, -1)
        tl.store(moves + TARGET * moves_stride + line, target, mask=line < max_rows)
        read = tl.where(moved, column, read)
        start = tl.where(moved, 0, start)
    tl.store(placed + CERTAIN * placed_stride + line, end - draft, mask=is_row)
    tl.store(placed + COLUMN * placed_stride + line, column, mask=is_row)
    tl.store(placed + PLACED_DRAFT * placed_stride + line, draft, mask=is_row)
    tl.store(placed + RESETS * placed_stride + line, resets.to(tl.int32), mask=is_row)
    inside = line < max_rows
    tl.store(read_column + line, tl.where(is_row, read, -1), mask=inside)
    tl.store(read_offset + line, tl.where(is_row, start, -1), mask=inside)
    tl.store(write_column + line, tl.where(is_row, column, -1), mask=inside)


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
) -> None:
    """`advance_reference` by one launch where Triton runs."""
    if not runs_triton(entries):
        advance_reference(
            entries, num_entries, num_rows, slots, previous, accepted, placed, positions, moves,
            block_size, in_place,
        )  # fmt: skip
        return
    max_rows = positions.read_column.shape[0]
    grid = (triton.cdiv(max(max_rows, num_entries), LINES), 1, 1)
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
        block_size,
        in_place,
        LINES,
    )
    key = (entries.device, block_size, in_place)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _advance_kernel[grid](*arguments)
        if entries.is_cuda:
            _compiled[key] = compiled
    else:
        compiled[grid](*arguments)


LINES = 128
"""Entries per program."""

_compiled: dict[tuple[torch.device, int, bool], Any] = {}
"""Handles of the compiled kernel: launching one directly skips the ordinary launcher's per-call
work on argument types, most of the host time of so small a launch."""
