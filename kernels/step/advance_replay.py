"""`advance` for the replay layout: finish the previous step's counts, place the new one.

A request has one live state, in the last column of its block table, and snapshots in the columns
below. The guesses of its last step are kept as inputs in the window cache; the next step folds in
those that were accepted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.step.boundary import keeps, keeps_reference, load_rule
from hybrid_runtime.kernels.step.entry import (
    CERTAIN,
    COLUMN,
    DEAD,
    DRAFT,
    ENTRY_FIELDS,
    PLACED_DRAFT,
    SCHEDULED,
    SLOT,
)
from hybrid_runtime.kernels.step.previous_step import LINES, finish, finish_reference


class ReplaySlots(NamedTuple):
    """Exact device state per slot, int32 `[max_requests]`.

    computed: tokens computed.
    held: column of the state, -1 = none (zero state); `DEAD`.
    fold: accepted guesses that the state does not hold yet.
    turn: half of the window cache that holds their inputs.
    """

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
        block_size: tokens of a block; retained boundaries are multiples of it.
        live_column: column of the live states.

    The state that is read covers n - fold tokens, the one that is written R = n + s - d. A retained
    boundary in (n - fold, n] or at R goes to its own column: as a snapshot, or, at R in a row
    without guesses, as the state itself.
    """
    for out, idle in zip(positions, IDLE, strict=True):
        out.fill_(idle)
    line = entries[:num_entries].long()
    slot = line[:, SLOT]
    valid = slot >= 0
    computed, held, fold = finish_reference(
        line, slots.computed, slots.held, slots.fold, previous, accepted, resets_offset=False
    )
    turn = slots.turn[slot.clamp(min=0)].long()
    runs = valid & (line[:, SCHEDULED] > 0) & (held != DEAD)
    after = computed, held, fold, torch.where(runs, 1 - turn, turn)
    for field, value in zip(slots, after, strict=True):
        field[slot[valid]] = value[valid].int()

    draft = line[:, DRAFT]
    covered, certain = computed - fold, computed + line[:, SCHEDULED] - draft
    passed = (covered // block_size + 1) * block_size
    passes = (passed <= computed) & keeps_reference(passed, line)
    ends = keeps_reference(certain, line)
    boundary = torch.where(passes, passed, certain)
    stores = passes | (ends & (draft > 0))
    write = torch.where(ends & (draft == 0), certain // block_size - 1, live_column)
    values = ReplayPositions(
        read_column=held,
        fold=fold,
        turn=turn,
        write_column=write,
        snapshot_column=torch.where(stores, boundary // block_size - 1, -1),
        snapshot_after=torch.where(stores, boundary - covered, 0),
        certain=certain,
    )
    n = num_rows
    placed[CERTAIN, :n] = torch.where(runs, certain, 0)[:n].int()
    placed[COLUMN, :n] = torch.where(runs, write, -1)[:n].int()
    placed[PLACED_DRAFT, :n] = draft[:n].int()
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
    turn = tl.load(slot_turn + slot, mask=valid, other=0)
    runs = valid & (scheduled > 0) & (held != DEAD)
    tl.store(slot_computed + slot, computed, mask=valid)
    tl.store(slot_held + slot, held, mask=valid)
    tl.store(slot_fold + slot, fold, mask=valid)
    tl.store(slot_turn + slot, tl.where(runs, 1 - turn, turn), mask=valid)

    every, first, second = load_rule(p_entry, here)
    covered = computed - fold
    certain = computed + scheduled - draft
    passed = (covered // BLOCK_SIZE + 1) * BLOCK_SIZE
    passes = (passed <= computed) & keeps(passed, every, first, second)
    ends = keeps(certain, every, first, second)
    boundary = tl.where(passes, passed, certain)
    stores = runs & (passes | (ends & (draft > 0)))
    write = tl.where(ends & (draft == 0), certain // BLOCK_SIZE - 1, live_column)
    write = tl.where(runs, write, -1)
    certain = tl.where(runs, certain, 0)

    is_row = i_line < num_rows
    tl.store(placed + CERTAIN * placed_stride + i_line, certain, mask=is_row)
    tl.store(placed + COLUMN * placed_stride + i_line, write, mask=is_row)
    tl.store(placed + PLACED_DRAFT * placed_stride + i_line, draft, mask=is_row)
    inside = i_line < max_rows
    runs = runs & is_row
    stores = stores & is_row
    tl.store(read_column + i_line, tl.where(runs, held, -1), mask=inside)
    tl.store(fold_count + i_line, tl.where(runs, fold, 0), mask=inside)
    tl.store(turn_half + i_line, tl.where(runs, turn, 0), mask=inside)
    tl.store(write_column + i_line, tl.where(runs, write, -1), mask=inside)
    column = tl.where(stores, boundary // BLOCK_SIZE - 1, -1)
    tl.store(snapshot_column + i_line, column, mask=inside)
    tl.store(snapshot_after + i_line, tl.where(stores, boundary - covered, 0), mask=inside)
    tl.store(certain_tokens + i_line, tl.where(runs, certain, 0), mask=inside)


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
    # By position, as a compiled handle takes them.
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
    )
    key = (entries.device, block_size)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _advance_replay_kernel[grid](*arguments)
        if entries.is_cuda:
            _compiled[key] = compiled
    else:
        compiled[grid](*arguments)


_compiled: dict[tuple[torch.device, int], Any] = {}
"""Handles of the compiled kernel, launched directly as in advance."""
