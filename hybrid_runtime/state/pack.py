"""How the host packs a step for the device, and what it decides in the columns layout before one,
from bounds alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.state import boundaries
from hybrid_runtime.state.align import arithmetic
from hybrid_runtime.state.checks import Refusal, refuse
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.ledger import Ledger, StateColumns
from hybrid_runtime.state.rows import StepRows


class StepPlan(NamedTuple):
    """What the host decides before a step.

    held: where the step leaves its rows' states.
    candidates: rows for which a copy of a state cannot be ruled out.
    moving: the same for the copy before the forward pass (in-place runners).
    """

    held: StateColumns
    candidates: NDArray[np.intp]
    moving: NDArray[np.intp]


def pack_step(
    packed: NDArray[np.int32],
    ledger: Ledger,
    rows: StepRows,
    layout: StateLayout,
    columns: int,
    in_place: bool,
) -> tuple[StepPlan, int]:
    """Fill `packed` `[lines, ENTRY_FIELDS]` with this step's rows and candidates, then with the
    slots of the pending step that are not among them; the plan, and the number of lines used.

    Raises `ValueError` where a row contradicts its slot; nothing but `packed` has changed then.
    """
    n, slot = len(rows), rows.slot
    entry, known = packed[:n], pack_rows(packed, ledger, rows)
    column_min = arithmetic.running_column(rows.computed_min + rows.scheduled, layout.block_size)
    end_max = rows.computed_max + rows.scheduled
    column_max = (
        column_min if rows.exact_counts else arithmetic.running_column(end_max, layout.block_size)
    )
    _check_slots(ledger, rows, known, column_max, end_max, columns, layout.num_speculative_tokens)

    kept = ledger.kept(rows.index)
    may_act = arithmetic.postcopy_candidates(rows.certain_min, rows.certain_max, rows.draft, kept)
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
            shifts = ~rows.reads_offset & (known[:, Ledger.LAST_DRAFT] > 0)
        held_min, held_max = known[:, Ledger.HELD_MIN], known[:, Ledger.HELD_MAX]
        may_move = arithmetic.precopy_candidates(column_min, column_max, held_min, held_max, shifts)
        moving = np.flatnonzero(may_move if live is None else may_move & live)
    if len(candidates):
        packed[: len(candidates), fields.CANDIDATE] = candidates
    if len(moving):
        packed[: len(moving), fields.PRECANDIDATE] = moving
    return StepPlan(StateColumns(column_min, column_max, 0), candidates, moving), pack_unfinished(
        packed, ledger, n
    )


def pack_rows(packed: NDArray[np.int32], ledger: Ledger, rows: StepRows) -> NDArray[np.int32]:
    """Fill the first lines of `packed` with this step's rows; what the host knows of their slots,
    `[rows, KNOWN_FIELDS]`, meaningless in padded rows."""
    entry = packed[: len(rows)]
    ledger.lines.take(rows.index, axis=0, out=entry, mode="wrap")
    entry[:, fields.SCHEDULED] = rows.scheduled
    entry[:, fields.DRAFT] = rows.draft
    return ledger.known.take(rows.index, axis=0, mode="wrap")


def pack_unfinished(packed: NDArray[np.int32], ledger: Ledger, start: int) -> int:
    """Add a line from `start` on for each slot of the pending step that the lines before it do not
    name; the number of lines now used."""
    left = ledger.unfinished >= 0
    named = packed[:start, fields.SLOT]
    left[named[named >= 0] if np.count_nonzero(named < 0) else named] = False
    slot = left.nonzero()[0]
    stop = start + len(slot)
    if len(slot):
        packed[start:stop] = 0
        packed[start:stop, fields.SLOT] = slot
        packed[start:stop, fields.PREVIOUS] = ledger.unfinished[slot]
    return stop


def unfiled_column(known: boundaries.Ints, layout: StateLayout) -> boundaries.Ints:
    """Lowest column with a snapshot that the runner may still file, from the tokens computed as of
    the results that it has read, `known`: it lies no deeper than the last one that a step could
    still fold guesses beyond."""
    return boundaries.blocks_below(
        np.maximum(known - layout.num_speculative_tokens, 0), layout.block_size
    )


def _check_slots(
    ledger: Ledger,
    rows: StepRows,
    known: NDArray[np.int32],
    column_max: NDArray[Any],
    end_max: NDArray[Any],
    columns: int,
    num_draft: int,
) -> None:
    far = column_max + num_draft >= columns
    fits = f"a position whose column and drafts fit {columns} block-table columns"
    refusals = [Refusal(far, end_max, "computed_max + rows.scheduled", fits)]
    if rows.chunked:
        mixed = (rows.draft > 0) & (rows.certain > 1)
        mixed &= column_max > known[:, Ledger.HELD_MIN] + 1
        must = "draft + 1 in a row with drafts that runs more than one column above its last step"
        refusals.append(Refusal(mixed, rows.scheduled, "scheduled", must))
    refuse(ledger, rows, known, *refusals)
