"""What the host decides before a step, from bounds alone, and how it is packed for the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.kernels import advance as fields
from hybrid_runtime.state import align
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.slots import SlotBook


class Plan(NamedTuple):
    """column_min, column_max: bounds on each row's running column, `[rows]`. candidates: rows that
    the post-copy cannot be ruled out for. moving: the same for the pre-copy (in-place runners)."""

    column_min: NDArray[np.int64]
    column_max: NDArray[np.int64]
    candidates: NDArray[np.intp]
    moving: NDArray[np.intp]


def plan_step(
    book: SlotBook, rows: StepRows, layout: StateLayout, columns: int, in_place: bool
) -> Plan:
    """Columns and candidates of a step; `ValueError` where a row contradicts its slot."""
    slot, draft = rows.slot, rows.draft
    live = slot >= 0
    _require(live & ~book.live[slot], slot, "rows.slot", "a slot that has been admitted")
    busy = live & (book.open_step[slot] >= 0)
    _require(busy, slot, "rows.slot", "a slot whose last step has ended")
    end = np.stack([rows.computed_min, rows.computed_max]) + rows.scheduled.astype(np.int64)
    column = align.running_column(end, layout.block_size)
    held_min, held_max = book.held_min[slot], book.held_max[slot]
    far = live & (column[1] + layout.num_speculative_tokens >= columns)
    _require(
        far, end[1], "rows.computed_max + rows.scheduled",
        f"a position whose column and drafts fit {columns} block-table columns",
    )  # fmt: skip
    mixed = live & (draft > 0) & (rows.scheduled - draft > 1) & (column[1] > held_min + 1)
    _require(
        mixed, rows.scheduled, "rows.scheduled",
        "draft + 1 in a row with drafts that runs more than one column above its last step",
    )  # fmt: skip
    certain = end - draft
    may_act = live & align.postcopy_candidates(certain[0], certain[1], draft, book.kept(slot))
    moving = np.empty(0, np.intp)
    if in_place:
        shifts = np.zeros(len(rows), bool)
        if rows.reads_offset is not None:
            shifts = ~rows.reads_offset & (book.last_draft[slot] > 0)
        may_move = align.precopy_candidates(column[0], column[1], held_min, held_max, shifts)
        moving = np.flatnonzero(live & may_move)
    return Plan(column[0], column[1], np.flatnonzero(may_act), moving)


def _require(bad: NDArray[np.bool_], values: NDArray[Any], name: str, must: str) -> None:
    if bad.any():
        i = int(bad.argmax())
        raise ValueError(f"{name}[{i}] is {values[i]}; it must be {must}")


def pack_entries(packed: NDArray[np.int32], book: SlotBook, rows: StepRows, plan: Plan) -> int:
    """Fill `packed` `[lines, ENTRY_FIELDS]` with this step's rows, then with the slots of the
    pending step that are not among them; the number of lines used."""
    n, slot = len(rows), rows.slot
    entry = packed[:n]
    entry[:, fields.SLOT] = slot
    entry[:, fields.SCHEDULED] = rows.scheduled
    entry[:, fields.DRAFT] = rows.draft
    entry[:, fields.PREVIOUS] = np.where(slot >= 0, book.unfinished[slot], -1)
    entry[:, fields.ADMIT : fields.ADMIT_COLUMN + 1] = book.admit[slot]
    entry[:, fields.READS_OFFSET] = 1 if rows.reads_offset is None else rows.reads_offset
    entry[:, fields.EVERY : fields.SECOND + 1] = book.retention[slot]
    packed[: len(plan.candidates), fields.CANDIDATE] = plan.candidates
    packed[: len(plan.moving), fields.PRECANDIDATE] = plan.moving
    return pack_unfinished(packed, book, n)


def pack_unfinished(packed: NDArray[np.int32], book: SlotBook, start: int) -> int:
    """Add a line from `start` on for each slot of the pending step that the lines before it do not
    name; the number of lines now used."""
    left = book.unfinished >= 0
    named = packed[:start, fields.SLOT]
    left[named[named >= 0]] = False
    slot = np.flatnonzero(left)
    stop = start + len(slot)
    packed[start:stop] = 0
    packed[start:stop, fields.SLOT] = slot
    packed[start:stop, fields.PREVIOUS] = book.unfinished[slot]
    return stop
