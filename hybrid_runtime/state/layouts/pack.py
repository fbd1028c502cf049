"""How the host packs a step for the device, and what it decides in the columns layout before one,
from bounds alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.state import align
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.slot_table import Held, SlotTable


class Plan(NamedTuple):
    """held: where the rows' states are left. candidates: rows for which a copy of a state cannot be
    ruled out. moving: the same for the copy before the step (in-place runners)."""

    held: Held
    candidates: NDArray[np.intp]
    moving: NDArray[np.intp]


def pack_step(
    packed: NDArray[np.int32],
    slot_table: SlotTable,
    rows: StepRows,
    layout: StateLayout,
    columns: int,
    in_place: bool,
) -> tuple[Plan, int]:
    """Fill `packed` `[lines, ENTRY_FIELDS]` with this step's rows and candidates, then with the
    slots of the pending step that are not among them; the plan, and the number of lines used.

    Raises `ValueError` where a row contradicts its slot; nothing but `packed` has changed then.
    """
    n, slot = len(rows), rows.slot
    entry, known = packed[:n], pack_rows(packed, slot_table, rows)
    end_min = rows.computed_min + rows.scheduled
    end_max = end_min if rows.exact_counts else rows.computed_max + rows.scheduled
    column_min = align.running_column(end_min, layout.block_size)
    column_max = (
        column_min if rows.exact_counts else align.running_column(end_max, layout.block_size)
    )
    _check_slots(
        slot_table, rows, known, column_max, end_max, columns, layout.num_speculative_tokens
    )

    kept = align.Retention(layout.block_size)
    if not slot_table.uniform:
        kept = align.Retention(*entry[:, fields.EVERY : fields.SECOND + 1].T)
    may_act = align.postcopy_candidates(
        end_min - rows.draft, end_max - rows.draft, rows.draft, kept
    )
    live = None
    if rows.padded:
        live = slot >= 0
        may_act &= live
    candidates = may_act.nonzero()[0]
    moving = candidates[:0]
    if in_place:
        shifts: NDArray[np.bool_] | None = None
        if rows.reads_offset is not None:
            entry[:, fields.READS_OFFSET] = rows.reads_offset
            shifts = ~rows.reads_offset & (known[:, SlotTable.LAST_DRAFT] > 0)
        held_min, held_max = known[:, SlotTable.HELD_MIN], known[:, SlotTable.HELD_MAX]
        may_move = align.precopy_candidates(column_min, column_max, held_min, held_max, shifts)
        moving = np.flatnonzero(may_move if live is None else may_move & live)
    if len(candidates):
        packed[: len(candidates), fields.CANDIDATE] = candidates
    if len(moving):
        packed[: len(moving), fields.PRECANDIDATE] = moving
    return Plan(Held(column_min, column_max, 0), candidates, moving), pack_unfinished(
        packed, slot_table, n
    )


def pack_rows(
    packed: NDArray[np.int32], slot_table: SlotTable, rows: StepRows
) -> NDArray[np.int32]:
    """Fill the first lines of `packed` with this step's rows; what the host knows of their slots,
    `[rows, KNOWN_FIELDS]`, meaningless in padded rows."""
    slot, entry = rows.slot, packed[: len(rows)]
    slot_table.lines.take(slot, axis=0, out=entry, mode="wrap")
    entry[:, fields.SCHEDULED] = rows.scheduled
    entry[:, fields.DRAFT] = rows.draft
    if rows.padded:
        entry[:, fields.SLOT] = slot
        entry[slot < 0, fields.PREVIOUS] = -1
    return slot_table.known.take(slot, axis=0, mode="wrap")


def pack_unfinished(packed: NDArray[np.int32], slot_table: SlotTable, start: int) -> int:
    """Add a line from `start` on for each slot of the pending step that the lines before it do not
    name; the number of lines now used."""
    left = slot_table.unfinished >= 0
    named = packed[:start, fields.SLOT]
    left[named if not (named < 0).any() else named[named >= 0]] = False
    slot = np.flatnonzero(left)
    stop = start + len(slot)
    if len(slot):
        packed[start:stop] = 0
        packed[start:stop, fields.SLOT] = slot
        packed[start:stop, fields.PREVIOUS] = slot_table.unfinished[slot]
    return stop


def _check_slots(
    slot_table: SlotTable,
    rows: StepRows,
    known: NDArray[np.int32],
    column_max: NDArray[Any],
    end_max: NDArray[Any],
    columns: int,
    num_draft: int,
) -> None:
    far = column_max + num_draft >= columns
    mixed = (rows.draft > 0) & (rows.scheduled - rows.draft > 1)
    mixed &= column_max > known[:, SlotTable.HELD_MIN] + 1
    fits = f"a position whose column and drafts fit {columns} block-table columns"
    must = "draft + 1 in a row with drafts that runs more than one column above its last step"
    refuse(
        slot_table,
        rows,
        known,
        Refusal(far, end_max, "computed_max + rows.scheduled", fits),
        Refusal(mixed, rows.scheduled, "scheduled", must),
    )


class Refusal(NamedTuple):
    """Rows that no step may have, and what to say of the first one's value."""

    bad: NDArray[np.bool_]
    values: NDArray[Any]
    name: str
    must: str


def refuse(
    slot_table: SlotTable, rows: StepRows, known: NDArray[np.int32], *refusals: Refusal
) -> None:
    """Raise `ValueError` for the first refusal with a bad row, padded ones aside; rows whose slots
    hold no request or an unfinished step come first."""
    gone = ~slot_table.live.take(rows.slot, mode="wrap")
    busy = known[:, SlotTable.OPEN_STEP] >= 0
    bad = gone | busy
    for refusal in refusals:
        bad |= refusal.bad
    live = rows.slot >= 0
    if not (bad & live if rows.padded else bad).any():
        return
    for which, values, name, must in (
        Refusal(gone, rows.slot, "slot", "a slot that has been admitted"),
        Refusal(busy, rows.slot, "slot", "a slot whose last step has ended"),
        *refusals,
    ):
        if (which & live).any():
            i = int((which & live).argmax())
            raise ValueError(f"rows.{name}[{i}] is {values[i]}; it must be {must}")
