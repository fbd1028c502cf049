"""One step between `begin_step` and the arrival of its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

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
    -1 in rows that are not running; they are valid until the next `begin_step`.

    read_column, read_offset: where each row's state is read (column -1: zero state, read nothing).
    write_column: running column; the state after R + j tokens goes to column + j, the window to it.
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
    candidates: NDArray[np.intp]
    ended: bool = False
    accepted: NDArray[np.int32] | None = None
    copied: NDArray[np.intp] | None = None
    published: list[Snapshot] = field(default_factory=list)

    @property
    def skipped(self) -> bool:
        """No accepted count of this step can require a copy."""
        return len(self.candidates) == 0

    def current(self, generation: NDArray[np.int32], live: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Rows `[rows]` whose request still holds its slot."""
        slot = self.rows.slot
        return (slot >= 0) & live[slot] & (generation[slot] == self.generation)
