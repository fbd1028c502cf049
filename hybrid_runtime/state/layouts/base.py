"""What a state layout decides: where rows read and write, what is copied, what is left behind."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.kernels.step.advance_columns import Positions, SlotState
from hybrid_runtime.kernels.step.advance_replay import ReplaySlots
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.state import align
from hybrid_runtime.state.layouts.pack import Plan
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.slot_table import Held
from hybrid_runtime.state.step import Step

NO_ROWS: NDArray[np.intp] = np.empty(0, np.intp)


class Settled(NamedTuple):
    """Of a step with known counts, `[rows]`: the boundary that it passed, whether its snapshot is
    complete, and whether that took a copy."""

    boundary: align.Ints
    complete: align.Bools
    copied: align.Bools


class LayoutPolicy(Protocol):
    """One per manager. All tensors are on its device, int32, at addresses that never change."""

    @property
    def slots(self) -> SlotState | ReplaySlots:
        """Exact state by slot."""

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """What a placed step's kernels read, by row."""

    @property
    def nowhere(self) -> tuple[Tensor, ...]:
        """Stand-ins for `outputs` where no row is placed."""

    @property
    def positions(self) -> Positions:
        """The outputs that every layout has."""

    @property
    def columns(self) -> int:
        """Width of the narrowest block table; 0 before `bind`."""

    def bind(self, states: StateTable, columns: int) -> None:
        """Take the state memory."""

    def needed(self, rows: StepRows) -> tuple[align.Ints, align.Ints]:
        """First and last column, `[rows]`, that each request must own for this step."""

    def held(self, rows: StepRows) -> Held:
        """Where this step leaves its rows' states."""

    def pack(self, packed: NDArray[np.int32], rows: StepRows) -> tuple[Plan, int]:
        """Fill `packed` for this step; the plan and the lines used. Raises `ValueError` for rows
        that contradict their slots; nothing but `packed` has changed then."""

    def repeat(
        self,
        rows: StepRows,
        last: StepRows,
        end_min: align.Ints,
        end_max: align.Ints,
        kept: align.Retention,
    ) -> NDArray[np.intp] | None:
        """Candidates of `rows`, which follow on the like rows `last` and end in these bounds; None
        where something has to be sent or refused."""

    def advance(
        self,
        entries: Tensor,
        lines: int,
        num_rows: int,
        previous: Tensor,
        accepted: Tensor,
        placed: Tensor,
        outputs: tuple[Tensor, ...],
    ) -> None:
        """Fold the previous step's counts in and place this one, in one launch."""

    def before(self, entries: Tensor, plan: Plan) -> None:
        """What must be launched between `advance` and the forward pass."""

    def after(
        self,
        step: Step,
        accepted: Tensor,
        candidates: NDArray[np.intp],
        current: NDArray[np.bool_] | None,
        decided: bool,
        every_row: bool,
    ) -> None:
        """What must be launched once the counts are there. `current`: rows whose requests still
        hold their slots (None: all); `decided`: the host has read the counts already;
        `every_row`: candidates or not."""

    def settle(
        self,
        step: Step,
        computed: align.Ints,
        certain: align.Ints,
        accepted: NDArray[np.int32],
        current: NDArray[np.bool_],
    ) -> Settled:
        """What the step has left, from exact counts; rows that are not `current` mean nothing."""
