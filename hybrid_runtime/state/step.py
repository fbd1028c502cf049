"""One step between `begin_step` and the arrival of its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import Cuts
from hybrid_runtime.kernels.step.advance_replay import IDLE, ReplayPositions
from hybrid_runtime.state.boundaries import Ints, RetentionRule, lost_checkpoints
from hybrid_runtime.state.rows import StepRows


class Checkpoint(NamedTuple):
    """A state whose bytes are written.

    slot, generation: the request that it belongs to.
    position: tokens in the state; in the columns layout a multiple of the block size.
    column: column of the request's block table that holds it.
    """

    slot: int
    generation: int
    position: int
    column: int


class StepPositions(NamedTuple):
    """Where the rows of the step begun last read and write their states.

    Device tensors, int32 `[max_rows]` by row, at addresses that never change. Columns are -1 in
    rows that do not run.

    read_column: column that a row starts from; -1: from the zero state, nothing is read.
    read_offset: where the state starts there: the matrix so many columns further, the conv_state
        at that input. In the replay layout the matrix lies in `read_column` itself.
    write_column: the running column. In the columns layout the matrix after R + j tokens goes to
        column `write_column + j` and the conv_state to `write_column`; in the replay layout the
        conv_state and, if the step writes it, the matrix after R tokens go to `write_column`.
    replay: what a verify pass of the replay layout folds and stores; None in the columns layout.
    cuts: where rows without drafts leave a checkpoint on the way; None without `prompt_cuts`. The
        same memory as `replay.checkpoint_after` and its column, which say more in rows with drafts.
    """

    read_column: Tensor
    read_offset: Tensor
    write_column: Tensor
    replay: ReplayPositions | None = None
    cuts: Cuts | None = None

    def clear(self) -> None:
        """Let no row run, as before the first step."""
        self.read_column.fill_(-1)
        self.read_offset.zero_()
        self.write_column.fill_(-1)
        if self.cuts is not None:
            self.cuts.after.zero_()
        if self.replay is not None:
            for part, idle in zip(self.replay, IDLE, strict=True):
                part.fill_(idle)

    def first(self, rows: int) -> StepPositions:
        """Views of the first `rows` rows."""
        replay, cuts = self.replay, self.cuts
        return StepPositions(
            self.read_column[:rows],
            self.read_offset[:rows],
            self.write_column[:rows],
            None if replay is None else ReplayPositions(*(field[:rows] for field in replay)),
            None if cuts is None else Cuts(*(field[:rows] for field in cuts)),
        )


@dataclass(slots=True, eq=False)
class Step:
    """Handle of a step.

    number: of the step, counted from 0.
    rows: as they were given to `begin_step`.
    generation: int32 `[rows]`, of the requests that held the slots when it began.
    kept: at which positions checkpoints were wanted then, `[rows]` or for all.
    positions: where its rows read and write; valid until the next `begin_step`.
    entries, packed: its lines as `kernels.step` reads them, on the device and on the host.
    placed: int32 `[4, max_rows]`, where the device has put its rows.
    candidates: rows for which a copy of a state could not be ruled out.
    ended: `end_step` has been called, or the step was abandoned.
    accepted: int32 `[rows]`, accepted counts; None until the host knows them.
    copied: rows whose state was copied; None until then.
    published: checkpoints that the step has left; empty until then.
    """

    number: int
    rows: StepRows
    generation: NDArray[np.int32]
    kept: RetentionRule
    positions: StepPositions
    entries: Tensor
    packed: NDArray[np.int32]
    placed: Tensor
    candidates: NDArray[np.intp]
    ended: bool = False
    accepted: NDArray[np.int32] | None = None
    copied: NDArray[np.intp] | None = None
    published: list[Checkpoint] = field(default_factory=list)

    @property
    def read_column(self) -> Tensor:
        """See `StepPositions`."""
        return self.positions.read_column

    @property
    def read_offset(self) -> Tensor:
        """See `StepPositions`."""
        return self.positions.read_offset

    @property
    def write_column(self) -> Tensor:
        """See `StepPositions`."""
        return self.positions.write_column

    @property
    def skipped(self) -> bool:
        """No counts can make this step copy a state."""
        return len(self.candidates) == 0

    def repeated(
        self, number: int, rows: StepRows, placed: Tensor, candidates: NDArray[np.intp]
    ) -> Step:
        """A step of the same requests, whose packed lines are those of this one."""
        return Step(
            number, rows, self.generation, self.kept, self.positions, self.entries,
            self.packed, placed, candidates,
        )  # fmt: skip

    def current(self, generation: NDArray[np.int32], live: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Rows `[rows]` whose request still holds its slot."""
        slot = self.rows.slot
        return (slot >= 0) & live[slot] & (generation[slot] == self.generation)

    def count_lost(self, inside: Ints | int) -> int:
        """Rows that pass a position without leaving the checkpoint that is wanted there. inside:
        positions inside the rows at which they leave one, `[rows]`; 0: there is none."""
        start, end = self.rows.computed_min, self.rows.certain_min
        lost = lost_checkpoints(start, end, self.kept, inside) * (self.rows.slot >= 0)
        return int(np.count_nonzero(lost))
