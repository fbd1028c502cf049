"""The Gated DeltaNet mixer, and the kernels that run it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.common.varlen import Cuts, StateRows
from hybrid_runtime.kernels.conv.spec import ConvLayout
from hybrid_runtime.kernels.gdn.chunk_scan import chunk_scan
from hybrid_runtime.kernels.gdn.records import Records
from hybrid_runtime.kernels.gdn.recurrence import gdn
from hybrid_runtime.kernels.gdn.replay_update import replay_update
from hybrid_runtime.kernels.linear.quantize import Quantizer, Scaled
from hybrid_runtime.kernels.recurrence import Recurrence
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.models.forward_batch import Pass
from hybrid_runtime.models.linear import Linear, MergedLinear
from hybrid_runtime.models.mamba import CausalConv1dWeights
from hybrid_runtime.models.norm import HeadNorm
from hybrid_runtime.models.state_parts import ConvInputs, LayerState


class GDNShape(NamedTuple):
    """Sizes of a Gated DeltaNet layer.

    heads: of values (Hv), with a matrix `[value_dim, key_dim]` each.
    key_heads: of keys and queries (Hk).
    key_dim, value_dim: K and V.
    conv_width: inputs of one output of the convolution.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def keys(self) -> int:
        """Channels of k, and of q."""
        return self.key_heads * self.key_dim

    @property
    def inner(self) -> int:
        """Channels of v, and of the gate."""
        return self.heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q, k and v."""
        return 2 * self.keys + self.inner

    def recurrence(
        self, dtype: torch.dtype, matrix_dtype: torch.dtype, conv_layout: ConvLayout
    ) -> Recurrence:
        """See `gdn`."""
        return gdn(*self, dtype, matrix_dtype, conv_layout)


class ScanInputs(NamedTuple):
    """The delta rule's inputs and parameters; shapes as of `chunk_scan`."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor


class GDNScans(NamedTuple):
    """`Scans` of Gated DeltaNet."""

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
        raise ValueError(
            "Gated DeltaNet has no kernel for the columns layout, must run in the replay layout"
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
            out=out,
        )


class GatedDeltaNet(nn.Module):
    """in_proj to q, k, v, the gate z, b and a; convolution; delta rule; norm and gate; out_proj.

    ``A_log`` and ``dt_bias`` are held in fp32 whatever the dtype of the other weights: they enter
    exponentials.

    Args:
        shape: of the recurrence.
        layer: the layer's index in the model, its key of ``Caches.states``.
        state_layer: its index among the layers with states.
    """

    def __init__(
        self,
        hidden_size: int,
        shape: GDNShape,
        layer: int,
        state_layer: int,
        eps: float,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.shape, self.layer, self.state_layer = shape, layer, state_layer
        outputs = {
            "in_proj_qkv": shape.conv_channels,
            "in_proj_z": shape.inner,
            "in_proj_b": shape.heads,
            "in_proj_a": shape.heads,
        }
        self._in_proj = MergedLinear(hidden_size, outputs, device, dtype)
        for name, part in self._in_proj.parts.items():
            self.add_module(name, part)
        self.conv1d = CausalConv1dWeights(
            shape.conv_channels, shape.conv_width, False, device, dtype
        )
        fine = torch.promote_types(dtype, torch.float32)
        self.A_log = nn.Parameter(torch.empty(shape.heads, device=device, dtype=fine))
        self.dt_bias = nn.Parameter(torch.empty(shape.heads, device=device, dtype=fine))
        self.norm = HeadNorm(shape.heads, shape.value_dim, eps, device, dtype)
        self.out_proj = Linear(shape.inner, hidden_size, device, dtype, halves=True)

    @property
    def quantizer(self) -> Quantizer | None:
        """As of `Linear`."""
        return self._in_proj.quantizer

    def forward(self, x: Tensor | Scaled, step: Pass) -> Tensor:
        """Mix the tokens of each row through its state.

        Args:
            x: [T, hidden_size].
            step: with the `StatePart`s of all rows and the caches that hold the layer's states.

        Returns:
            [T, hidden_size], or [2, T, hidden_size] whose sum it is.
        """
        qkv, z, b, a = self._in_proj(x)
        if not step.state_parts:
            return z.new_zeros(len(z), self.out_proj.outputs)
        shape, caches, layer = self.shape, step.caches, self.layer
        state = LayerState(self.state_layer, *caches.states[layer], caches.records.get(layer))
        y = torch.empty_like(z, memory_format=torch.contiguous_format)
        for part in step.state_parts:
            tokens = part.part.tokens
            convolved = part.conv1d(
                ConvInputs(x=tokens(qkv), weight=self.conv1d.weight[:, 0], bias=None), state
            )
            q, k, v = convolved.split([shape.keys, shape.keys, shape.inner], -1)
            part.scan(
                ScanInputs(
                    q=q.unflatten(-1, (shape.key_heads, shape.key_dim)),
                    k=k.unflatten(-1, (shape.key_heads, shape.key_dim)),
                    v=v.unflatten(-1, (shape.heads, shape.value_dim)),
                    a=tokens(a),
                    b=tokens(b),
                    A_log=self.A_log,
                    dt_bias=self.dt_bias,
                ),
                state,
                out=tokens(y).unflatten(-1, (shape.heads, shape.value_dim)),
            )
        out: Tensor = self.out_proj(self.norm(y, z, self.out_proj.quantizer))
        return out
