"""A recurrence: the kind of state that a layer keeps and how tokens change it, as plain data and
functions.

This is all that the state manager and the engine know of it: tensors of a checkpoint, records of a
token, and how pending records are folded. What the numbers mean is known to its folder alone
(`mamba2`), and to the layers of models that have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.kernels.step.state_table import StateTable


class TensorSpec(NamedTuple):
    """A tensor of a state block, or of the ring.

    name: as error messages call it.
    shape: in elements.
    dtype: of its elements.
    token_axis: axis of `shape` along which tokens lie one after another; None: there is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    token_axis: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def longer(self, tokens: int) -> TensorSpec:
        """With room for so many more tokens, if they lie along an axis."""
        if self.token_axis is None:
            return self
        axis = self.token_axis
        shape = (*self.shape[:axis], self.shape[axis] + tokens, *self.shape[axis + 1 :])
        return self._replace(shape=shape)


class CheckpointSpec(NamedTuple):
    """The two parts of a state, by how they roll back to the state after j of a step's drafts.

    conv_state: last inputs of the convolution, `conv_width - 1` along its `token_axis`. A block has
        room for a step's drafts behind them: the state after j drafts starts j positions later.
    matrix: has no `token_axis`. The state after j drafts is another block's (`columns` layout), or
        follows from the records (`replay`).
    """

    conv_state: TensorSpec
    matrix: TensorSpec


class Flush(Protocol):
    """Folds pending records into states in memory, all layers in one launch."""

    def __call__(
        self,
        table: StateTable,
        records: tuple[Tensor, ...],
        params: tuple[Tensor, ...],
        listed: Tensor,
        slot: Tensor,
        positions: ReplayPositions,
        rounding: Rounding | None,
    ) -> None:
        """Write state and conv_state of the listed rows after their pending tokens.

        The matrix of the read column after `pending` tokens of the ring goes to the write column,
        the conv_state's inputs at `offset` to offset 0 there; both columns may be one. No listed
        row reads a block that another one writes.

        table: of all layers; changed.
        records: as `Recurrence.allocate_records` made them.
        params: as `Recurrence.params` says.
        listed: int32 `[count]`, rows to flush; -1 = none. It indexes the arguments below.
        slot: int32 `[rows]`; -1 = padded row.
        positions: int32 `[rows]` each; `writes` and the checkpoints' are not used.
        rounding: seed by slot; its layer is the number of the first layer. None: to nearest.
        """


@dataclass(frozen=True, slots=True)
class Recurrence:
    """checkpoint: of one state block, without drafts.
    records: of one token; `token_axis` is where the ring of a slot has its tokens, and of length 1.
    params: of one layer, what `flush` needs of its weights.
    flush: see `Flush`.
    """

    checkpoint: CheckpointSpec
    records: tuple[TensorSpec, ...]
    params: tuple[TensorSpec, ...]
    flush: Flush

    def __post_init__(self) -> None:
        conv_state, matrix = self.checkpoint
        for part, rolls_back in ((conv_state, True), (matrix, False)):
            if (part.token_axis is not None) != rolls_back:
                must = "an axis of its shape" if rolls_back else "None"
                raise ValueError(f"{part.name}.token_axis is {part.token_axis}; it must be {must}")
        for spec in (*self.checkpoint, *self.records, *self.params):
            if not spec.shape or min(spec.shape) < 1:
                raise ValueError(f"{spec.name}.shape is {spec.shape}; all must be >= 1")
        for spec in self.records:
            if spec.token_axis is None or spec.shape[spec.token_axis] != 1:
                raise ValueError(
                    f"{spec.name} is {spec}; a record must have a token_axis of length 1"
                )

    def ring(self, length: int) -> tuple[TensorSpec, ...]:
        """The records of a slot's last `length` tokens. The token at position t (the first of a
        request is 0) lies at index t % length."""
        return tuple(spec.longer(length - 1) for spec in self.records)

    def allocate_records(
        self, layers: int, slots: int, length: int, device: torch.device | str
    ) -> tuple[Tensor, ...]:
        """The rings of all layers and slots: by record a zeroed tensor `[layers, slots, *shape]`.
        `length`: of a ring, see `ring_length`."""
        return tuple(
            torch.zeros((layers, slots, *spec.shape), dtype=spec.dtype, device=device)
            for spec in self.ring(length)
        )
