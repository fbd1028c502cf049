"""Which kernels run which rows of a batch through a Mamba layer, chosen once per forward pass."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from hybrid_runtime.kernels.common.varlen import Cuts, StateRows
from hybrid_runtime.kernels.conv.replay import replay_conv1d_update
from hybrid_runtime.kernels.conv.update import conv1d_update
from hybrid_runtime.kernels.conv.varlen import conv1d_varlen
from hybrid_runtime.kernels.mamba2.chunk_scan import chunk_scan
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.mamba2.replay_update import replay_update
from hybrid_runtime.kernels.mamba2.state_update import selective_state_update
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.models.forward_batch import BatchPart, Caches, RowBatch, StatePositions


class LayerState(NamedTuple):
    """The states of one Mamba layer.

    mamba_layer: the layer's index among the Mamba layers.
    conv_states: `[blocks, W - 1 + K, C]`, inputs of the convolution.
    matrices: `[blocks, H, P, N]`.
    records: of the last tokens (replay layout).
    """

    mamba_layer: int
    conv_states: Tensor
    matrices: Tensor
    records: Records | None


class ConvInputs(NamedTuple):
    """The convolution's input and parameters; shapes as of `conv1d_update`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


class ScanInputs(NamedTuple):
    """The state space model's inputs and parameters; shapes as of `selective_state_update`."""

    x: Tensor
    dt: Tensor
    A_log: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    dt_bias: Tensor


class MambaPart(Protocol):
    """Rows of a batch that one pair of kernels runs. States are changed in place."""

    @property
    def part(self) -> BatchPart:
        """The rows and their tokens."""

    def conv1d(self, inputs: ConvInputs, state: LayerState) -> Tensor:
        """Convolution and SiLU over the part's tokens: `[tokens, C]`."""

    def scan(self, inputs: ScanInputs, state: LayerState, out: Tensor) -> None:
        """Outputs of the state space model at the part's tokens to `out`, `[tokens, H, P]`."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Rows of any length without drafts: the SSM state is scanned in chunks. cuts: checkpoints that
    they leave on the way."""

    part: BatchPart
    rows: StateRows
    cuts: Cuts | None
    dt_limit: tuple[float, float]
    chunk_size: int

    def conv1d(self, inputs: ConvInputs, state: LayerState) -> Tensor:
        return conv1d_varlen(
            **inputs._asdict(),
            conv_states=state.conv_states,
            rows=self.rows,
            max_scheduled=self.part.max_scheduled,
            cuts=self.cuts,
        )

    def scan(self, inputs: ScanInputs, state: LayerState, out: Tensor) -> None:
        chunk_scan(
            **inputs._asdict(),
            states=state.matrices,
            rows=self.rows,
            max_scheduled=self.part.max_scheduled,
            chunk_size=self.chunk_size,
            dt_min=self.dt_limit[0],
            dt_max=self.dt_limit[1],
            cuts=self.cuts,
            out=out,
        )


@dataclass(frozen=True, slots=True)
class ColumnsUpdatePart:
    """Decoding rows of the columns layout: the state after each draft is stored."""

    part: BatchPart
    rows: StateRows
    dt_limit: tuple[float, float]

    def conv1d(self, inputs: ConvInputs, state: LayerState) -> Tensor:
        return conv1d_update(
            **inputs._asdict(),
            conv_states=state.conv_states,
            rows=self.rows,
            max_scheduled=self.part.max_scheduled,
        )

    def scan(self, inputs: ScanInputs, state: LayerState, out: Tensor) -> None:
        selective_state_update(
            **inputs._asdict(),
            states=state.matrices,
            rows=self.rows,
            max_scheduled=self.part.max_scheduled,
            dt_min=self.dt_limit[0],
            dt_max=self.dt_limit[1],
            out=out,
        )


@dataclass(frozen=True, slots=True)
class ReplayUpdatePart:
    """Decoding rows of the replay layout: pending tokens are folded in on reading."""

    part: BatchPart
    rows: ReplayRows
    dt_limit: tuple[float, float]
    rounding: Rounding | None

    def conv1d(self, inputs: ConvInputs, state: LayerState) -> Tensor:
        return replay_conv1d_update(
            **inputs._asdict(),
            conv_states=state.conv_states,
            rows=self.rows,
            max_scheduled=self.part.max_scheduled,
        )

    def scan(self, inputs: ScanInputs, state: LayerState, out: Tensor) -> None:
        if state.records is None:
            raise ValueError("caches.records lacks a layer, must have each (replay layout)")
        replay_update(
            **inputs._asdict(),
            states=state.matrices,
            records=state.records,
            rows=self.rows,
            max_scheduled=self.part.max_scheduled,
            rounding=None
            if self.rounding is None
            else self.rounding._replace(layer=state.mamba_layer),
            dt_min=self.dt_limit[0],
            dt_max=self.dt_limit[1],
            out=out,
        )


def mamba_parts(
    batch: RowBatch,
    positions: StatePositions,
    caches: Caches,
    tokens: int,
    dt_limit: tuple[float, float],
    chunk_size: int,
) -> list[MambaPart]:
    """The parts of a batch of `tokens` tokens, each with the kernels for its rows.

    dt_limit: bounds of the time step. chunk_size: tokens that prompts are scanned in.
    """
    parts: list[MambaPart] = []
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
            parts.append(PromptPart(part, rows, cuts, dt_limit, chunk_size))
        elif positions.replay is None:
            parts.append(ColumnsUpdatePart(part, rows, dt_limit))
        else:
            replay = ReplayRows(
                block_table=rows.block_table,
                slot=rows.slot,
                cu_seqlens=rows.cu_seqlens,
                draft=rows.draft,
                positions=ReplayPositions(*(part.rows(field) for field in positions.replay)),
                ring_length=positions.ring_length,
            )
            parts.append(ReplayUpdatePart(part, replay, dt_limit, positions.rounding))
    return parts
