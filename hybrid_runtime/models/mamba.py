"""The Mamba-2 mixer, and the kernels that run it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.common.varlen import Cuts, StateRows
from hybrid_runtime.kernels.linear.quantize import Quantizer, Scaled
from hybrid_runtime.kernels.mamba2.chunk_scan import chunk_scan
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.mamba2.replay_update import replay_update
from hybrid_runtime.kernels.mamba2.state_update import selective_state_update
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.models.forward_batch import Pass
from hybrid_runtime.models.linear import Linear
from hybrid_runtime.models.model import Mamba2Shape
from hybrid_runtime.models.norm import GatedRMSNorm
from hybrid_runtime.models.state_parts import ConvInputs, LayerState, StatePart


class ScanInputs(NamedTuple):
    """The state space model's inputs and parameters; shapes as of `selective_state_update`."""

    x: Tensor
    dt: Tensor
    A_log: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    dt_bias: Tensor


class Mamba2Scans(NamedTuple):
    """`Scans` of Mamba-2.

    dt_min, dt_max: bounds of the time step.
    chunk_size: tokens that prompts are scanned in.
    """

    dt_min: float
    dt_max: float
    chunk_size: int

    def prompts(
        self,
        inputs: ScanInputs,
        state: LayerState,
        rows: StateRows,
        max_scheduled: int,
        cuts: Cuts | None,
        out: Tensor,
    ) -> None:
        chunk_scan(
            **inputs._asdict(),
            states=state.matrices,
            rows=rows,
            max_scheduled=max_scheduled,
            chunk_size=self.chunk_size,
            dt_min=self.dt_min,
            dt_max=self.dt_max,
            cuts=cuts,
            out=out,
        )

    def columns(
        self,
        inputs: ScanInputs,
        state: LayerState,
        rows: StateRows,
        max_scheduled: int,
        out: Tensor,
    ) -> None:
        selective_state_update(
            **inputs._asdict(),
            states=state.matrices,
            rows=rows,
            max_scheduled=max_scheduled,
            dt_min=self.dt_min,
            dt_max=self.dt_max,
            out=out,
        )

    def replay(
        self,
        inputs: ScanInputs,
        state: LayerState,
        records: tuple[Tensor, ...],
        rows: ReplayRows,
        max_scheduled: int,
        rounding: Rounding | None,
        out: Tensor,
    ) -> None:
        replay_update(
            **inputs._asdict(),
            states=state.matrices,
            records=Records(*records),
            rows=rows,
            max_scheduled=max_scheduled,
            rounding=rounding,
            dt_min=self.dt_min,
            dt_max=self.dt_max,
            out=out,
        )


class CausalConv1dWeights(nn.Module):
    """Weights of the causal convolution, under the names of an nn.Conv1d."""

    def __init__(
        self, channels: int, width: int, bias: bool, device: torch.device | str, dtype: torch.dtype
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        )


class Mamba2Mixer(nn.Module):
    """in_proj to gate, xBC and dt; convolution; state space model; gated norm; out_proj.

    ``A_log``, ``D`` and ``dt_bias`` are held in fp32 (fp64 in an fp64 model) whatever the dtype of
    the other weights: they enter exponentials.

    Args:
        shape: of the recurrence.
        layer: the layer's index in the model, its key of ``Caches.states``.
        mamba_layer: its index among the Mamba layers.
        bias, conv_bias: whether projections and convolution have one.
    """

    def __init__(
        self,
        hidden_size: int,
        shape: Mamba2Shape,
        layer: int,
        mamba_layer: int,
        bias: bool,
        conv_bias: bool,
        eps: float,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.shape, self.layer, self.mamba_layer = shape, layer, mamba_layer
        inner, heads, group = shape.inner, shape.heads, shape.groups * shape.state_size
        self._projected = [inner, shape.conv_channels, heads]
        self._convolved = [inner, group, group]
        fine = torch.promote_types(dtype, torch.float32)
        self.in_proj = Linear(hidden_size, sum(self._projected), device, dtype, bias)
        self.conv1d = CausalConv1dWeights(
            shape.conv_channels, shape.conv_width, conv_bias, device, dtype
        )
        self.A_log = nn.Parameter(torch.empty(heads, device=device, dtype=fine))
        self.D = nn.Parameter(torch.empty(heads, device=device, dtype=fine))
        self.dt_bias = nn.Parameter(torch.empty(heads, device=device, dtype=fine))
        self.norm = GatedRMSNorm(inner, shape.groups, eps, device, dtype)
        self.out_proj = Linear(inner, hidden_size, device, dtype, bias, halves=True)

    @property
    def quantizer(self) -> Quantizer | None:
        """As of `Linear`."""
        return self.in_proj.quantizer

    def forward(self, x: Tensor | Scaled, step: Pass) -> Tensor:
        """Mix the tokens of each row through its state.

        Args:
            x: [T, hidden_size].
            step: with the `StatePart`s of all rows and the caches that hold the layer's states.

        Returns:
            [T, hidden_size], or [2, T, hidden_size] whose sum it is.
        """
        projected: Tensor = self.in_proj(x)
        gate, xBC, dt = projected.split(self._projected, dim=-1)
        caches, layer = step.caches, self.layer
        state = LayerState(self.mamba_layer, *caches.states[layer], caches.records.get(layer))
        if not step.state_parts:
            return projected.new_zeros(len(projected), self.out_proj.outputs)
        y = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for part in step.state_parts:
            self._mix(part, xBC, dt, state, y)
        out: Tensor = self.out_proj(self.norm(y, gate, self.out_proj.quantizer))
        return out

    def _mix(self, part: StatePart, xBC: Tensor, dt: Tensor, state: LayerState, y: Tensor) -> None:
        """Convolution and state space model over a part's tokens, to its share of
        y [T, inner size]."""
        shape, tokens = self.shape, part.part.tokens
        heads, groups = (shape.heads, shape.head_dim), (shape.groups, shape.state_size)
        convolved = part.conv1d(
            ConvInputs(x=tokens(xBC), weight=self.conv1d.weight[:, 0], bias=self.conv1d.bias),
            state,
        )
        x, B, C = convolved.split(self._convolved, dim=-1)
        part.scan(
            ScanInputs(
                x=x.unflatten(-1, heads),
                dt=tokens(dt),
                A_log=self.A_log,
                B=B.unflatten(-1, groups),
                C=C.unflatten(-1, groups),
                D=self.D,
                dt_bias=self.dt_bias,
            ),
            state,
            out=tokens(y).unflatten(-1, heads),
        )
