"""One step between `begin_step` and the arrival of its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.advance_columns import Positions
from hybrid_runtime.state.rows import StepRows


class Snapshot(NamedTuple):
    """A state whose bytes are written: the first `boundary` tokens of (slot, generation)."""

    slot: int
    generation: int
    boundary: int
    column: int


@dataclass(slots=True, eq=False)
class Step:
    """Handle of a step. Device tensors are int32 `[max_requests]` at addresses that never change,
    columns -1 in rows that are not running; they are valid until the next `begin_step`.

    read_column, read_offset: where each row's state is read (column -1: zero state, read nothing).
    write_column: running column; the state after R + j tokens goes to column + j, the window to it.
    In the replay layout the offset is that of the window and the number of records to fold, and
    the write column gets the state after R tokens; see `HybridStateManager.replay`.
    """

    number: int
    rows: StepRows
    generation: NDArray[np.int32]
    retention: NDArray[np.int32]
    read_column: Tensor
    read_offset: Tensor
    write_column: Tensor
    entries: Tensor
    packed: NDArray[np.int32]
    placed: Tensor
    candidates: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    ended: bool = False
    accepted: NDArray[np.int32] | None = None
    copied: NDArray[np.intp] | None = None
    published: list[Snapshot] = field(default_factory=list)

    @property
    def skipped(self) -> bool:
        """No counts can make this step copy a state."""
        return len(self.candidates) == 0

    @classmethod
    def of(
        cls,
        number: int,
        rows: StepRows,
        positions: Positions,
        entries: Tensor,
        packed: NDArray[np.int32],
        placed: Tensor,
    ) -> Step:
        """A step whose rows stand in the first lines of `packed`, on the device `entries`."""
        lines = packed[: len(rows)]
        return cls(
            number=number,
            rows=rows,
            generation=lines[:, fields.GENERATION],
            retention=lines[:, fields.EVERY : fields.SECOND + 1],
            read_column=positions.read_column,
            read_offset=positions.read_offset,
            write_column=positions.write_column,
            entries=entries,
            packed=packed,
            placed=placed,
        )

    def again(
        self, number: int, rows: StepRows, placed: Tensor, candidates: NDArray[np.intp]
    ) -> Step:
        """A step that differs from this one in nothing but its counts."""
        return Step(
            number=number,
            rows=rows,
            generation=self.generation,
            retention=self.retention,
            read_column=self.read_column,
            read_offset=self.read_offset,
            write_column=self.write_column,
            entries=self.entries,
            packed=self.packed,
            placed=placed,
            candidates=candidates,
        )

    def current(self, generation: NDArray[np.int32], live: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Rows `[rows]` whose request still holds its slot."""
        slot = self.rows.slot
        return (slot >= 0) & live[slot] & (generation[slot] == self.generation)
