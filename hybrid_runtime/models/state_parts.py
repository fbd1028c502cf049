"""The rows of a batch as layers with states take them: which run as prompts, which as updates in
which layout, decided once per forward pass. What runs them is the recurrence's, see `Scans`."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from hybrid_runtime.kernels.common.varlen import Cuts, StateRows
from hybrid_runtime.kernels.conv.replay import replay_conv1d_update
from hybrid_runtime.kernels.conv.update import conv1d_update
from hybrid_runtime.kernels.conv.varlen import conv1d_varlen
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.models.forward_batch import BatchPart, Caches, RowBatch, StatePositions


class LayerState(NamedTuple):
    """The states of one layer.

    number: of the layer among those with states, from 0.
    conv_states: `[blocks, W - 1 + K, C]`, inputs of the convolution.
    matrices: `[blocks, *]`, of the recurrence's shape.
    records: of the last tokens, as the recurrence has them (replay layout).
    """

    number: int
    conv_states: Tensor
    matrices: Tensor
    records: tuple[Tensor, ...] | None


class ConvInputs(NamedTuple):
    """The convolution's input and parameters; shapes as of `conv1d_update`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


class Scans(Protocol):
    """The kernels of a recurrence. inputs: what a layer gives to its parts' `scan`, of which only
    the two know more. Outputs at a part's tokens go to `out`; states are changed in place."""

    def prompts(
        self,
        inputs: Any,
        state: LayerState,
        rows: StateRows,
        max_scheduled: int,
        cuts: Cuts | None,
        out: Tensor,
    ) -> None:
        """Rows of any length without drafts. cuts: checkpoints that they leave on the way."""

    def columns(
        self, inputs: Any, state: LayerState, rows: StateRows, max_scheduled: int, out: Tensor
    ) -> None:
        """Decoding rows of the columns layout: the state after each draft is stored."""

    def replay(
        self,
        inputs: Any,
        state: LayerState,
        records: tuple[Tensor, ...],
        rows: ReplayRows,
        max_scheduled: int,
        rounding: Rounding | None,
        out: Tensor,
    ) -> None:
        """Decoding rows of the replay layout: pending tokens are folded in on reading."""


class StatePart(Protocol):
    """Rows of a batch that one pair of kernels runs. States are changed in place."""

    @property
    def part(self) -> BatchPart:
        """The rows and their tokens."""

    def conv1d(self, inputs: ConvInputs, state: LayerState) -> Tensor:
        """Convolution and SiLU over the part's tokens: `[tokens, C]`."""

    def scan(self, inputs: Any, state: LayerState, out: Tensor) -> None:
        """The recurrence over the part's tokens."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """See `Scans.prompts`."""

    part: BatchPart
    rows: StateRows
    cuts: Cuts | None
    scans: Scans

    def conv1d(self, inputs: ConvInputs, state: LayerState) -> Tensor:
        return conv1d_varlen(
            **inputs._asdict(),
            conv_states=state.conv_states,
            rows=self.rows,
            max_scheduled=self.part.max_scheduled,
            cuts=self.cuts,
        )

    def scan(self, inputs: Any, state: LayerState, out: Tensor) -> None:
        self.scans.prompts(inputs, state, self.rows, self.part.max_scheduled, self.cuts, out)


@dataclass(frozen=True, slots=True)
class ColumnsUpdatePart:
    """See `Scans.columns`."""

    part: BatchPart
    rows: StateRows
    scans: Scans

    def conv1d(self, inputs: ConvInputs, state: LayerState) -> Tensor:
        return conv1d_update(
            **inputs._asdict(),
            conv_states=state.conv_states,
            rows=self.rows,
            max_scheduled=self.part.max_scheduled,
        )

    def scan(self, inputs: Any, state: LayerState, out: Tensor) -> None:
        self.scans.columns(inputs, state, self.rows, self.part.max_scheduled, out)


@dataclass(frozen=True, slots=True)
class ReplayUpdatePart:
    """See `Scans.replay`."""

    part: BatchPart
    rows: ReplayRows
    rounding: Rounding | None
    scans: Scans

    def conv1d(self, inputs: ConvInputs, state: LayerState) -> Tensor:
        return replay_conv1d_update(
            **inputs._asdict(),
            conv_states=state.conv_states,
            rows=self.rows,
            max_scheduled=self.part.max_scheduled,
        )

    def scan(self, inputs: Any, state: LayerState, out: Tensor) -> None:
        if state.records is None:
            raise ValueError("caches.records lacks a layer, must have each (replay layout)")
        rounding = self.rounding
        if rounding is not None:
            rounding = rounding._replace(layer=state.number)
        self.scans.replay(
            inputs, state, state.records, self.rows, self.part.max_scheduled, rounding, out
        )


def state_parts(
    batch: RowBatch, positions: StatePositions, caches: Caches, tokens: int, scans: Scans
) -> list[StatePart]:
    """The parts of a batch of `tokens` tokens, each with the kernels for its rows."""
    parts: list[StatePart] = []
    for part in batch.parts(tokens):
        rows = StateRows(
            block_table=caches.state_block_table,
            slot=part.rows(batch.slot),
            cu_seqlens=part.cu_seqlens,
            draft=part.rows(positions.draft),
            read_column=part.rows(positions.read_column),
            read_offset=part.rows(positions.read_offset),
            write_column=part.rows(positions.write_column),
        )
        if not part.update:
            cuts = positions.cuts
            cuts = None if cuts is None else Cuts(*(part.rows(field) for field in cuts))
            parts.append(PromptPart(part, rows, cuts, scans))
        elif positions.replay is None:
            parts.append(ColumnsUpdatePart(part, rows, scans))
        else:
            replay = ReplayRows(
                block_table=rows.block_table,
                slot=rows.slot,
                cu_seqlens=rows.cu_seqlens,
                draft=rows.draft,
                positions=ReplayPositions(*(part.rows(field) for field in positions.replay)),
                ring_length=positions.ring_length,
            )
            parts.append(ReplayUpdatePart(part, replay, positions.rounding, scans))
    return parts
