"""The Mamba-2 mixer of a Nemotron-H layer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid_runtime.models.config import NemotronHConfig
from hybrid_runtime.models.forward_batch import Caches
from hybrid_runtime.models.mamba_kernels import ConvInputs, LayerState, MambaPart, ScanInputs
from hybrid_runtime.models.norm import GatedRMSNorm
from hybrid_runtime.models.products import in_halves


class DepthwiseTaps(nn.Module):
    """Weights of the causal convolution, under the names of an nn.Conv1d."""

    def __init__(
        self, channels: int, taps: int, bias: bool, device: torch.device | str, dtype: torch.dtype
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        )


class Mamba2Mixer(nn.Module):
    """in_proj to gate, xBC and dt; convolution; state space model; gated norm; out_proj.

    ``A_log``, ``D`` and ``dt_bias`` are held in fp32 (fp64 in an fp64 model) whatever the dtype of
    the other weights: they enter exponentials. ``layer`` is the layer's index in the model, its key
    of ``Caches.states``.
    """

    def __init__(
        self, config: NemotronHConfig, layer: int, device: torch.device | str, dtype: torch.dtype
    ):
        super().__init__()
        self.config = config
        self._layer, self._index = layer, config.pattern[:layer].count("M")
        inner, heads = config.mamba_intermediate_size, config.mamba_num_heads
        group = config.n_groups * config.ssm_state_size
        self._projected, self._convolved = [inner, config.conv_dim, heads], [inner, group, group]
        fine = torch.promote_types(dtype, torch.float32)
        self.in_proj = nn.Linear(
            config.hidden_size,
            inner + config.conv_dim + heads,
            bias=config.use_bias,
            device=device,
            dtype=dtype,
        )
        self.conv1d = DepthwiseTaps(
            config.conv_dim, config.conv_kernel, config.use_conv_bias, device, dtype
        )
        self.A_log = nn.Parameter(torch.empty(heads, device=device, dtype=fine))
        self.D = nn.Parameter(torch.empty(heads, device=device, dtype=fine))
        self.dt_bias = nn.Parameter(torch.empty(heads, device=device, dtype=fine))
        self.norm = GatedRMSNorm(inner, config.n_groups, config.layer_norm_epsilon, device, dtype)
        self.out_proj = nn.Linear(
            inner, config.hidden_size, bias=config.use_bias, device=device, dtype=dtype
        )

    def forward(self, x: Tensor, parts: Sequence[MambaPart], caches: Caches) -> Tensor:
        """Mix the tokens of each row through its state.

        Args:
            x: [T, hidden_size].
            parts: all rows of the batch, with the kernels that run them.
            caches: holds the layer's states.

        Returns:
            [T, hidden_size], or [2, T, hidden_size] whose sum it is (`in_halves`).
        """
        gate, xBC, dt = self.in_proj(x).split(self._projected, dim=-1)
        state = LayerState(
            self._index, *caches.states[self._layer], caches.window_cache.get(self._layer)
        )
        if not parts:
            return torch.zeros_like(x)
        y = torch.empty_like(gate, memory_format=torch.contiguous_format)
        for part in parts:
            self._mix(part, xBC, dt, state, y)
        return in_halves(self.out_proj, self.norm(y, gate))

    def _mix(self, part: MambaPart, xBC: Tensor, dt: Tensor, state: LayerState, y: Tensor) -> None:
        """Convolution and state space model over a part's tokens, to its share of
        y [T, inner size]."""
        config, tokens = self.config, part.part.tokens
        heads = config.mamba_num_heads, config.mamba_head_dim
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
                B=B.unflatten(-1, (config.n_groups, config.ssm_state_size)),
                C=C.unflatten(-1, (config.n_groups, config.ssm_state_size)),
                D=self.D,
                dt_bias=self.dt_bias,
            ),
            state,
            out=tokens(y).unflatten(-1, heads),
        )
