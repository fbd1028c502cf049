"""What a state layout decides: where rows read and write, what is copied, what is left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.state import boundaries
from hybrid_runtime.state.demand import BlockDemand
from hybrid_runtime.state.ledger import StateColumns
from hybrid_runtime.state.pack import StepPlan
from hybrid_runtime.state.replay.flush import FlushInputs
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Snapshot, Step, StepPositions

NO_ROWS: NDArray[np.intp] = np.empty(0, np.intp)
Ints2D = NDArray[np.int64]


class Outcome(NamedTuple):
    """What a step with known counts has left, `[rows]`.

    boundary: the block boundary that it passed or ended on, in tokens.
    complete: the snapshot there is in its column.
    copied: that took a copy of a state, unless the row is dead.
    """

    boundary: boundaries.Ints
    complete: boundaries.Bools
    copied: boundaries.Bools


class LayoutPolicy(Protocol):
    """One per manager, which makes it by its layout's kind."""

    @property
    def slots(self) -> Any:
        """Exact state by slot: a NamedTuple of int32 `[max_requests]`, the first `computed`."""

    @property
    def outputs(self) -> Any:
        """What the launch that places a step writes: a NamedTuple of int32 `[max_rows]`."""

    @property
    def nowhere(self) -> Any:
        """Stand-ins for `outputs` where no row is placed."""

    @property
    def positions(self) -> StepPositions:
        """`outputs` as kernels read them."""

    @property
    def cuts(self) -> bool:
        """The runner's prompt kernels leave snapshots inside rows."""

    @property
    def columns(self) -> int:
        """Width of the narrowest block table; 0 before `bind`."""

    def bind(self, states: StateTable, columns: int, flush_inputs: FlushInputs | None) -> None:
        """Take the memory of the states and, if it can be flushed, what that reads."""

    def check_hit(self, computed: int, column: int) -> None:
        """Refuse a request of `computed` tokens whose state lies in `column`, if one of its steps
        might have to write that column while it reads it."""

    def block_demand(self, rows: StepRows, known: boundaries.Ints | None) -> BlockDemand:
        """See `HybridStateManager.block_demand`."""

    def pack(self, packed: NDArray[np.int32], rows: StepRows) -> tuple[StepPlan, int]:
        """Fill `packed` with a step's lines; its plan, and how many lines.

        Raises `ValueError` for rows that contradict their slots; only `packed` has changed then.
        """

    def held(self, rows: StepRows) -> StateColumns:
        """Where a step of `rows` leaves its states."""

    def repeat(
        self, rows: StepRows, last: StepRows, kept: boundaries.RetentionRule
    ) -> StepPlan | None:
        """The plan of `rows`, which differ from those of the last step, `last`, in their counts
        only; None if other lines must be packed for them, or they must be refused."""

    def advance(
        self,
        entries: Tensor,
        lines: int,
        num_rows: int,
        previous: Tensor,
        accepted: Tensor,
        placed: Tensor,
        slots: Any,
        outputs: Any,
    ) -> None:
        """Fold the previous step's counts into `slots` and place this one, in one launch.

        entries: the step's lines, of which the first `num_rows` are rows.
        previous, accepted: what the previous step placed, and the counts that it ended with.
        placed, slots, outputs: written; `slots` and `outputs` as the policy has them.
        """

    def touched(
        self, rows: StepRows, computed: boundaries.Ints, outputs: Any
    ) -> tuple[Ints2D, Ints2D]:
        """Columns that a placed step reads and those that it may write, `[rows, ..]`; -1: none.

        computed: exact tokens computed before it. outputs: what the launch that places it wrote.
        """

    def lacking(
        self, rows: StepRows, queued: Sequence[Step], outputs: Any
    ) -> tuple[boundaries.Ints, boundaries.Ints, boundaries.Ints]:
        """Tokens that the states which a placed step reads lack, `[rows]`: exactly, and the least
        and most that the host knows of.

        queued: steps whose counts the host has not read, oldest first. outputs: as in `touched`.
        """

    def launch_precopy(self, entries: Tensor, plan: StepPlan) -> None:
        """Move the states that must move before the forward pass."""

    def launch_postcopy(
        self,
        step: Step,
        accepted: Tensor,
        candidates: NDArray[np.intp],
        current: NDArray[np.bool_] | None,
        decided: bool,
        every_row: bool,
    ) -> None:
        """Copy boundary states once the counts are there.

        accepted: int32 `[rows]` or longer, on the device.
        candidates: rows that may need a copy.
        current: `[rows]`, whose requests still hold their slots; None: all do.
        decided: the host knows the counts, and `step.copied` are the rows.
        every_row: launch for all rows, candidates or not.
        """

    def foresee(
        self,
        step: Step,
        computed: boundaries.Ints,
        certain: boundaries.Ints,
        current: boundaries.Bools,
    ) -> Callable[[NDArray[np.int32]], Outcome]:
        """What the step leaves, as far as that needs no accepted counts; the call that takes them
        and books. Meaningless in rows that are not `current`.

        computed: tokens before it. certain: after it, guesses aside. Both exact, `[rows]`.
        """

    def last_snapshot(self, slot: int, step: Step | None) -> Snapshot | None:
        """See `HybridStateManager.last_snapshot`; `step`: the oldest one outstanding that has a row
        of the request, None if none has."""

    def flush(self, snapshots: Sequence[Snapshot]) -> int:
        """Store those that no step stores, each as `last_snapshot` gives it; how many."""

    def compile_flush(self) -> None:
        """Compile what `flush` launches."""
