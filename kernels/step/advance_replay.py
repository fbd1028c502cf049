"""`advance` for the replay layout: finish the previous step's counts, place the new one.

Entries, `previous` and `placed` are those of kernels.advance. A request has one live state in the
last column of its block table and snapshots in the columns below; the guesses of its last step are
records, of which the next step folds in those that were accepted.
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
    PLACED_DRAFT,
    PREVIOUS,
    SCHEDULED,
    SECOND,
    SLOT,
)


class ReplaySlots(NamedTuple):
    """Exact device state per slot, int32 `[max_requests]`: tokens computed; the column that holds
    the state (-1 = none, zero state; `DEAD`); how many records the computed tokens have in advance
    of that state; and the half of the records in which they stand."""

    computed: Tensor
    held: Tensor
    fold: Tensor
    turn: Tensor


class ReplayPositions(NamedTuple):
    """What a step does to the state of each row, int32 `[rows]`; columns are -1 and all else is 0
    in rows that don't run.

    read_column: column of the state that the fold starts from; -1 = zero state, nothing is read and
        nothing folded.
    fold: how many guesses of the row's last step are folded in, the accepted ones: `a - 1`.
    turn: half of the window cache that holds their inputs, 0 or 1; this step's guesses go to the
        other one.
    write_column: column that gets the state after all certain tokens; -1 = padded row. Usually
        `read_column`; another one after a prefix hit.
    snapshot_column: column that also gets the state after the first `snapshot_after` of the
        `fold + s - d` tokens that are folded in; -1 = no snapshot.
    snapshot_after: `0 .. fold + s - d`.
    certain: tokens in the state that goes to the write column; enters the key of stochastic
        rounding.
    """

    read_column: Tensor
    fold: Tensor
    turn: Tensor
    write_column: Tensor
    snapshot_column: Tensor
    snapshot_after: Tensor
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
    block_size: int,
    live_column: int,
) -> None:
    """Finish the previous step and place this one.

    entries: int32 `[lines, ENTRY_FIELDS]`, the first `num_entries` valid, rows first.
    previous, placed: int32 `[4, rows]` (R, write column, drafts; the last row is not used).
    accepted: int32 `[rows]` of the previous step; a = 0 counts as 1, or kills a row with drafts.
    The state that is read covers n - fold tokens, the one that is written R = n + s - d. A retained
    boundary in (n - fold, n] or at R goes to its own column: as a snapshot, or, at R in a row
    without guesses, as the state itself. Retained boundaries are multiples of the block size.
    """
    for out, idle in zip(positions, IDLE, strict=True):
        out.fill_(idle)
    line = entries[:num_entries].long()
    slot = line[:, SLOT]
    valid = slot >= 0
    at = slot.clamp(min=0)
    computed, held, fold, turn = (field[at].long() for field in slots)

    finishes = line[:, PREVIOUS] >= 0
    certain, column, draft, _ = previous[:, line[:, PREVIOUS].clamp(min=0)].long()
    count = torch.minimum(accepted[line[:, PREVIOUS].clamp(min=0)].long(), draft + 1)
    emitted = count.clamp(min=1)
    dead = ((count <= 0) & (draft > 0)) | (column < 0)
    computed = torch.where(finishes, certain + emitted - 1, computed)
    held = torch.where(finishes, torch.where(dead, DEAD, column), held)
    fold = torch.where(finishes, emitted - 1, fold)

    admitted = line[:, ADMIT] > 0
    computed = torch.where(admitted, line[:, ADMIT_COMPUTED], computed)
    held = torch.where(admitted, line[:, ADMIT_COLUMN], held)
    fold = torch.where(admitted, 0, fold)
    runs = valid & (line[:, SCHEDULED] > 0) & (held != DEAD)
    after = computed, held, fold, torch.where(runs, 1 - turn, turn)
    for field, value in zip(slots, after, strict=True):
        field[at[valid]] = value[valid].int()

    def kept(boundary: Tensor) -> Tensor:
        every = line[:, EVERY]
        periodic = (every > 0) & (boundary % every.clamp(min=1) == 0)
        return periodic | (boundary == line[:, FIRST]) | (boundary == line[:, SECOND])

    draft = line[:, DRAFT]
    covered, certain = computed - fold, computed + line[:, SCHEDULED] - draft
    passed = (covered // block_size + 1) * block_size
    passes = (passed <= computed) & kept(passed)
    ends = kept(certain)
    boundary = torch.where(passes, passed, certain)
    stores = passes | (ends & (draft > 0))
    write = torch.where(ends & (draft == 0), certain // block_size - 1, live_column)
    values = (
        held,
        fold,
        turn,
        write,
        torch.where(stores, boundary // block_size - 1, -1),
        torch.where(stores, boundary - covered, 0),
        certain,
    )
    n = num_rows
    where = torch.where(runs, certain, 0), torch.where(runs, write, -1), draft
    placed[:3, :n] = torch.stack(where)[:, :n].int()
    for out, value, idle in zip(positions, values, IDLE, strict=True):
        out[:n] = torch.where(runs, value, idle)[:n].int()


# Nothing that varies is specialised on, so one compiled kernel serves every step (see advance).
@triton.jit(
    do_not_specialize=[
        "num_entries", "num_rows", "previous_stride", "placed_stride", "max_rows", "live_column",
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
    slot_turn,
    previous,
    previous_stride,
    accepted,
    placed,
    placed_stride,
    read_column,
    fold_count,
    turn_half,
    write_column,
    snapshot_column,
    snapshot_after,
    certain_tokens,
    max_rows,
    live_column,
    BLOCK_SIZE: tl.constexpr,
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
    fold = tl.load(slot_fold + slot, mask=known, other=0)
    turn = tl.load(slot_turn + slot, mask=valid, other=0)

    finishes = row >= 0
    certain = tl.load(previous + CERTAIN * previous_stride + row, mask=finishes, other=0)
    column = tl.load(previous + COLUMN * previous_stride + row, mask=finishes, other=-1)
    guessed = tl.load(previous + PLACED_DRAFT * previous_stride + row, mask=finishes, other=0)
    count = tl.minimum(tl.load(accepted + row, mask=finishes, other=1), guessed + 1)
    emitted = tl.maximum(count, 1)
    dead = ((count <= 0) & (guessed > 0)) | (column < 0)
    computed = tl.where(finishes, certain + emitted - 1, computed)
    held = tl.where(finishes, tl.where(dead, DEAD, column), held)
    fold = tl.where(finishes, emitted - 1, fold)

    computed = tl.where(admitted, tl.load(entry + ADMIT_COMPUTED, mask=here, other=0), computed)
    held = tl.where(admitted, tl.load(entry + ADMIT_COLUMN, mask=here, other=-1), held)
    fold = tl.where(admitted, 0, fold)
    runs = valid & (scheduled > 0) & (held != DEAD)
    tl.store(slot_computed + slot, computed, mask=valid)
    tl.store(slot_held + slot, held, mask=valid)
    tl.store(slot_fold + slot, fold, mask=valid)
    tl.store(slot_turn + slot, tl.where(runs, 1 - turn, turn), mask=valid)

    every = tl.load(entry + EVERY, mask=here, other=0)
    first = tl.load(entry + FIRST, mask=here, other=0)
    second = tl.load(entry + SECOND, mask=here, other=0)
    covered = computed - fold
    certain = computed + scheduled - draft
    passed = (covered // BLOCK_SIZE + 1) * BLOCK_SIZE
    period = tl.maximum(every, 1)
    passes = ((every > 0) & (passed % period == 0)) | (passed == first) | (passed == second)
    passes = passes & (passed <= computed)
    ends = ((every > 0) & (certain % period == 0)) | (certain == first) | (certain == second)
    boundary = tl.where(passes, passed, certain)
    stores = runs & (passes | (ends & (draft > 0)))
    write = tl.where(ends & (draft == 0), certain // BLOCK_SIZE - 1, live_column)
    write = tl.where(runs, write, -1)
    certain = tl.where(runs, certain, 0)

    is_row = line < num_rows
    tl.store(placed + CERTAIN * placed_stride + line, certain, mask=is_row)
    tl.store(placed + COLUMN * placed_stride + line, write, mask=is_row)
    tl.store(placed + PLACED_DRAFT * placed_stride + line, draft, mask=is_row)
    inside = line < max_rows
    runs = runs & is_row
    stores = stores & is_row
    tl.store(read_column + line, tl.where(runs, held, -1), mask=inside)
    tl.store(fold_count + line, tl.where(runs, fold, 0), mask=inside)
    tl.store(turn_half + line, tl.where(runs, turn, 0), mask=inside)
    tl.store(write_column + line, tl.where(runs, write, -1), mask=inside)
    column = tl.where(stores, boundary // BLOCK_SIZE - 1, -1)
    tl.store(snapshot_column + line, column, mask=inside)
    tl.store(snapshot_after + line, tl.where(stores, boundary - covered, 0), mask=inside)
    tl.store(certain_tokens + line, tl.where(runs, certain, 0), mask=inside)


def advance_replay(
    entries: Tensor,
    num_entries: int,
    num_rows: int,
    slots: ReplaySlots,
    previous: Tensor,
    accepted: Tensor,
    placed: Tensor,
    positions: ReplayPositions,
    block_size: int,
    live_column: int,
) -> None:
    """`advance_replay_reference` by one launch where Triton runs."""
    if not runs_triton(entries):
        advance_replay_reference(
            entries, num_entries, num_rows, slots, previous, accepted, placed, positions,
            block_size, live_column,
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
        max_rows,
        live_column,
        block_size,
        LINES,
    )
    key = (entries.device, block_size)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _advance_replay_kernel[grid](*arguments)
        if entries.is_cuda:
            _compiled[key] = compiled
    else:
        compiled[grid](*arguments)


LINES = 128
"""Entries per program."""

_compiled: dict[tuple[torch.device, int], Any] = {}
"""Handles of the compiled kernel, launched directly as in advance."""
