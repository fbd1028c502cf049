"""Host-side book of slots: who lives where, and what is known of each without asking the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.state.align import Retention
from hybrid_runtime.state.rows import StepRows

NONE = -1


class SlotBook:
    """Arrays by slot, `[max_requests]`.

    generation: bumped at each release, so that a late result cannot reach the slot's next tenant.
    held_min, held_max: bounds on the column that the last begun step ran in (-1: none yet).
    computed: exact tokens computed after the last resolved step.
    unfinished: row in the last ended step whose counts the device has still to fold in, or -1.
    open_step: number of the begun, not yet ended step that the slot is in, or -1.
    admit: lines (flag, computed, column) for the next step's entries.
    retention: (every, first, second) in tokens.
    """

    def __init__(self, max_requests: int, block_size: int) -> None:
        def full(value: int, *shape: int) -> NDArray[np.int32]:
            return np.full((max_requests, *shape), value, np.int32)

        self.live = np.zeros(max_requests, bool)
        self.generation = full(0)
        self.held_min = full(NONE)
        self.held_max = full(NONE)
        self.last_draft = full(0)
        self.computed = full(0)
        self.unfinished = full(NONE)
        self.open_step = full(NONE)
        self.admit = full(0, 3)
        self.retention = full(0, 3)
        self._block_size = block_size

    def take(self, slot: int, computed: int, column: int | None) -> int:
        """Admit a request; the slot's generation."""
        self._check(slot)
        if self.live[slot]:
            raise ValueError(f"slot is {slot}, which is in use; it must be released first")
        if computed < 0:
            raise ValueError(f"computed is {computed}; it must be at least 0")
        if (computed == 0) != (column is None):
            raise ValueError(
                f"hit_column is {column} with computed={computed}; a fresh request has no column "
                "to read, one with computed tokens must name the column that holds their state"
            )
        if column is not None and column < 0:
            raise ValueError(f"hit_column is {column}; it must be at least 0")
        held = NONE if column is None else column
        self.live[slot] = True
        self.held_min[slot] = self.held_max[slot] = held
        self.last_draft[slot] = 0
        self.computed[slot] = computed
        self.unfinished[slot] = self.open_step[slot] = NONE
        self.admit[slot] = 1, computed, held
        self.retention[slot] = self._block_size, 0, 0
        return int(self.generation[slot])

    def drop(self, slot: int) -> None:
        self.require_live(slot)
        self.live[slot] = False
        self.generation[slot] += 1
        self.unfinished[slot] = self.open_step[slot] = NONE
        self.admit[slot] = 0

    def begin(
        self, rows: StepRows, column_min: NDArray[Any], column_max: NDArray[Any], number: int
    ) -> None:
        """Book a begun step: every earlier count has been folded in or listed to be."""
        live = rows.slot >= 0
        slot = rows.slot[live]
        self.unfinished[:] = NONE
        self.admit[slot] = 0
        self.held_min[slot], self.held_max[slot] = column_min[live], column_max[live]
        self.last_draft[slot] = rows.draft[live]
        self.open_step[slot] = number

    def end(self, slot: NDArray[np.int32], current: NDArray[np.bool_]) -> None:
        """Book an ended step: the next launch folds in the counts of its `current` rows."""
        self.unfinished[slot[current]] = np.flatnonzero(current)
        self.open_step[slot[current]] = NONE

    def retain(self, slot: int, every: int, positions: tuple[int, ...]) -> None:
        self.require_live(slot)
        block = self._block_size
        for name, value in (("every", every), *(("positions", p) for p in positions)):
            if value < 0 or value % block:
                raise ValueError(
                    f"{name} is {value}; it must be a multiple of the block size ({block})"
                )
        if len(positions) > 2:
            raise ValueError(f"positions has {len(positions)} entries; at most 2 are kept")
        self.retention[slot] = every, *positions, *([0] * (2 - len(positions)))

    def kept(self, slot: NDArray[Any]) -> Retention:
        """The retention rules of `slot` `[rows]`."""
        return Retention(*self.retention[slot].astype(np.int64).T)

    def require_live(self, slot: int) -> None:
        self._check(slot)
        if not self.live[slot]:
            raise ValueError(f"slot is {slot}, which holds no request; it must be admitted first")

    def _check(self, slot: int) -> None:
        if not 0 <= slot < len(self.live):
            raise ValueError(f"slot is {slot}; it must be in 0..{len(self.live) - 1}")
