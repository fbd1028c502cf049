"""The Mamba-2 mixer of a Nemotron-H layer."""

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.mamba.chunk_scan import chunk_scan
from hybrid_runtime.kernels.mamba.conv1d_update import conv1d_update
from hybrid_runtime.kernels.mamba.conv1d_varlen import conv1d_varlen
from hybrid_runtime.kernels.mamba.selective_state_update import selective_state_update
from hybrid_runtime.kernels.replay.conv1d import replay_conv1d_update
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.replay.update import replay_update
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.models.config import NemotronHConfig
from hybrid_runtime.models.forward_batch import Caches, RowBatch, StatePositions
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
    """in_proj to gate, xBC and dt; convolution; state update; gated norm; out_proj.

    ``A_log``, ``D`` and ``dt_bias`` are held in fp32 (fp64 in an fp64 model) whatever the dtype of
    the other weights: they enter exponentials.
    """

    def __init__(self, config: NemotronHConfig, device: torch.device | str, dtype: torch.dtype):
        super().__init__()
        self.config = config
        inner, heads = config.mamba_intermediate_size, config.mamba_num_heads
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

    def forward(
        self, x: Tensor, batch: RowBatch, positions: StatePositions, caches: Caches, layer: int
    ) -> Tensor:
        """Mix tokens of each row through its state.

        Args:
            x: [T, hidden_size].
            batch: the rows; update rows are stepped, prefill rows scanned in chunks.
            positions: where their states are read and written.
            caches: holds the layer's window and state.
            layer: key of caches.states.

        Returns:
            [T, hidden_size], or [2, T, hidden_size] whose sum it is (`in_halves`).
        """
        config = self.config
        inner, state = config.mamba_intermediate_size, config.n_groups * config.ssm_state_size
        gate, mixed, dt = self.in_proj(x).split(
            [inner, config.conv_dim, config.mamba_num_heads], dim=-1
        )
        windows, states = caches.states[layer]
        low, high = config.time_step_limit
        outputs = []
        for part in batch.parts(x.shape[0]):
            where = (
                caches.state_block_table,
                part.rows(batch.slot),
                part.cu_seqlens,
                part.rows(positions.draft),
            )
            rows = StateRows(
                *where,
                part.rows(positions.read_column),
                part.rows(positions.read_offset),
                part.rows(positions.write_column),
            )
            replay = rounding = None
            if part.update and positions.replay is not None:
                folds = ReplayPositions(*(part.rows(field) for field in positions.replay))
                replay = ReplayRows(*where, folds)
                if positions.rounding is not None:
                    rounding = positions.rounding._replace(layer=config.pattern[:layer].count("M"))

            inputs = (part.tokens(mixed), self.conv1d.weight[:, 0], self.conv1d.bias, windows)
            if replay is not None:
                convolved = replay_conv1d_update(*inputs, replay, part.max_scheduled)
            else:
                convolve = conv1d_update if part.update else conv1d_varlen
                convolved = convolve(*inputs, rows, part.max_scheduled)
            heads, B, C = convolved.split([inner, state, state], dim=-1)
            operands = (
                heads.unflatten(-1, (config.mamba_num_heads, config.mamba_head_dim)),
                part.tokens(dt),
                self.A_log,
                B.unflatten(-1, (config.n_groups, config.ssm_state_size)),
                C.unflatten(-1, (config.n_groups, config.ssm_state_size)),
                self.D,
                self.dt_bias,
                states,
            )
            if replay is not None:
                window_cache = caches.window_cache[layer]
                y = replay_update(
                    *operands, window_cache, replay, part.max_scheduled, rounding, low, high
                )
            elif part.update:
                y = selective_state_update(*operands, rows, part.max_scheduled, low, high)
            else:
                y = chunk_scan(*operands, rows, part.max_scheduled, config.chunk_size, low, high)
            outputs.append(y.flatten(-2))
        if not outputs:
            return torch.zeros_like(x)
        scanned = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return in_halves(self.out_proj, self.norm(scanned, gate))
