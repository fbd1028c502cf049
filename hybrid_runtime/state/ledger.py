"""The host's ledger of slots: which request has each, and what is known without the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.state.boundaries import LONGEST, NEVER, RetentionRule
from hybrid_runtime.state.rows import StepRows

NONE = -1


class StateColumns(NamedTuple):
    """Where a begun step leaves its states, `[rows]` or one value for all.

    column_min, column_max: bounds on the column; replay: columns other than the live one, -1 none.
    certain: at least so many tokens are in them whatever is accepted (replay).
    decoded: the row was one that decodes, so tokens of the ring may be pending (replay).
    """

    column_min: NDArray[Any] | int
    column_max: NDArray[Any] | int
    certain: NDArray[Any] | int = 0
    decoded: NDArray[Any] | int = 0


class Ledger:
    """Arrays by slot, `[max_requests]` where nothing else is said.

    max_rows: most rows of a step. block_size: in tokens.
    lines: int32 `[max_requests + 1, ENTRY_FIELDS]`, each slot's line of the table that the device
        gets (see kernels.step.entry), so that packing a step is one gather; the last one is that of
        padded rows, whose slot is -1.
    generation: view of `lines`: bumped at each release, so that a late result cannot reach the
        slot's next tenant.
    unfinished: view of `lines`: row in the last ended step whose counts the device has still to
        fold in, or -1.
    known: int32 `[max_requests + 1, KNOWN_FIELDS]`, what only the host uses, likewise gathered and
        scattered once a step; the last line means nothing. HELD_MIN, HELD_MAX: bounds on the column
        that the last begun step ran in, -1 if there was none; in the replay layout the columns in
        which it may have left its state besides the live one, -1: there is none.
        LAST_DRAFT: the step's drafts. OPEN_STEP: its number while it has not ended, -1 if it has,
        FLUSHED if the slot's state was overwritten by its last checkpoint. CERTAIN, DECODED: as of
        `StateColumns`.
    live: a request has the slot.
    computed: exact tokens computed after the last settled step.
    certain: those of them that are no drafts of that step, exactly (replay).
    written: tokens in the state in memory after it, exactly (replay).
    held: column of that state after it, exactly (replay).
    stored: int32 `[max_requests, 2]`, tokens in the last checkpoint of a settled step, 0 if there
        is none, and its column.
    ended: slots whose last count was negative: their text has ended, and no later step runs them.
    version: changes with every admission, release and change of retention.
    """

    HELD_MIN, HELD_MAX, LAST_DRAFT, OPEN_STEP, CERTAIN, DECODED = range(6)
    KNOWN_FIELDS = 6
    FLUSHED = NEVER

    def __init__(self, max_requests: int, max_rows: int, block_size: int) -> None:
        self.max_requests, self.max_rows = max_requests, max_rows
        self.lines = np.zeros((max_requests + 1, fields.ENTRY_FIELDS), np.int32)
        self.lines[:-1, fields.SLOT] = np.arange(max_requests)
        self.lines[-1, fields.SLOT] = NONE
        self.lines[:, fields.DECODES] = 1
        self.generation = self.lines[:, fields.GENERATION]
        self.unfinished = self.lines[:, fields.PREVIOUS]
        self.known = np.empty((max_requests + 1, self.KNOWN_FIELDS), np.int32)
        self.live = np.zeros(max_requests, bool)
        self.computed = np.zeros(max_requests, np.int32)
        self.certain = np.zeros(max_requests, np.int32)
        self.written = np.zeros(max_requests, np.int32)
        self.held = np.full(max_requests, NONE, np.int32)
        self.stored = np.zeros((max_requests, 2), np.int32)
        self._known = tuple(self.known.T)
        self._row = np.arange(max_rows)
        self._admitted: list[int] = []
        self._special: set[int] = set()
        self.ended: set[int] = set()
        self.version = 0
        self.block_size = block_size
        self.reset()
        self.generation[:] = 0

    def reset(self) -> None:
        """No slot holds a request, whatever was there before."""
        self.version += 1
        self.live[:] = False
        self.generation += 1
        self.lines[:, fields.ADMIT] = 0
        self.unfinished[:] = self.known[:] = NONE
        self._admitted.clear()
        self._special.clear()
        self.ended.clear()

    def check_admission(self, slot: int, computed: int, column: int | None, columns: int) -> None:
        """Refuse what `admit` cannot take. columns: of the block table; 0: not known yet."""
        self.require_slot(slot)
        if self.live[slot]:
            raise ValueError(f"slot is {slot}, which is in use; it must be released first")
        _integer("computed", computed, LONGEST - 1)
        if (computed == 0) != (column is None):
            raise ValueError(
                f"hit_column is {column} with computed={computed}; a fresh request has no column "
                "to read, one with computed tokens must name the column that holds their state"
            )
        if column is not None:
            _integer("hit_column", column, (columns or LONGEST) - 1)

    def admit(self, slot: int, computed: int, column: int | None) -> int:
        """Give a request a free slot; the slot's generation."""
        held = NONE if column is None else column
        self.live[slot] = True
        self.known[slot] = held, held, 0, NONE, computed, 0
        self.computed[slot] = self.certain[slot] = self.written[slot] = computed
        self.held[slot] = held
        self.stored[slot] = 0
        self.unfinished[slot] = NONE
        self.lines[slot, fields.ADMIT : fields.ADMIT_COLUMN + 1] = 1, computed, held
        self.lines[slot, fields.EVERY : fields.SECOND + 1] = self.block_size, 0, 0
        self._admitted.append(slot)
        self.version += 1
        return int(self.generation[slot])

    def release(self, slot: int) -> None:
        """End the request in `slot`."""
        self.require_live(slot)
        self.live[slot] = False
        self.generation[slot] += 1
        self.lines[slot, fields.ADMIT] = 0
        self._special.discard(slot)
        self.ended.discard(slot)
        self.version += 1

    def holds(self, slot: int, generation: int) -> bool:
        """Whether the request of `generation` still has `slot`."""
        return bool(self.live[slot]) and int(self.generation[slot]) == generation

    def kept(self, slot: NDArray[Any]) -> RetentionRule:
        """Which boundaries are retained, `[rows]`; meaningless where the slot is -1. As long as no
        request has got another one, the rule of admission for all: retain each boundary."""
        if not self._special:
            return RetentionRule(self.block_size)
        lines = self.lines.take(slot, axis=0, mode="wrap")
        return RetentionRule(*lines[:, fields.EVERY : fields.SECOND + 1].T)

    def begin_step(self, rows: StepRows, left: StateColumns, number: int) -> None:
        """Book a begun step, whose launch folds in the counts of all steps that have ended."""
        self.unfinished[:] = NONE
        known = left.column_min, left.column_max, rows.draft, number, left.certain, left.decoded
        for column, values in zip(self._known, known, strict=True):
            column[rows.index] = values
        if self._admitted:
            self.lines[rows.index, fields.ADMIT] = 0
            self._admitted = [s for s in self._admitted if self.lines[s, fields.ADMIT]]

    def end_step(self, rows: StepRows, current: NDArray[np.bool_] | None) -> None:
        """Book an ended step: the next launch folds in the counts of its `current` rows (None: of
        all)."""
        index, row = rows.index, self._row[: len(rows)]
        if current is not None:
            row = current.nonzero()[0]
            index = index[row]
        self.unfinished[index] = row
        self._known[self.OPEN_STEP][index] = NONE

    def retain(self, slot: int, every: int, positions: tuple[int, ...]) -> None:
        self.require_live(slot)
        block = self.block_size
        if not isinstance(positions, tuple | list):
            raise ValueError(f"positions is {positions!r}; it must be a tuple of at most 2")
        for name, value in (("every", every), *(("positions", p) for p in positions)):
            _integer(name, value, LONGEST - 1)
            if value % block:
                raise ValueError(
                    f"{name} is {value}; it must be a multiple of the block size ({block})"
                )
        if len(positions) > 2:
            raise ValueError(f"positions has {len(positions)} entries; at most 2 are kept")
        rule = every, *positions, *([0] * (2 - len(positions)))
        self.lines[slot, fields.EVERY : fields.SECOND + 1] = rule
        self._special.add(slot)
        self.version += 1

    def flushed(self, slot: int, boundary: int) -> None:
        """The state of the request has become that after `boundary` tokens; no step may follow."""
        self.certain[slot] = self.written[slot] = boundary
        self.known[slot, self.OPEN_STEP] = self.FLUSHED
        self.version += 1

    def require_live(self, slot: int) -> None:
        self.require_slot(slot)
        if not self.live[slot]:
            raise ValueError(f"slot is {slot}, which holds no request; it must be admitted first")

    def require_slot(self, slot: int) -> None:
        _integer("slot", slot, len(self.live) - 1)


def _integer(name: str, value: Any, most: int) -> None:
    if not isinstance(value, int | np.integer):
        raise ValueError(f"{name} is {value!r}; it must be an integer in 0..{most}")
    if not 0 <= value <= most:
        raise ValueError(f"{name} is {value}; it must be in 0..{most}")
