"""vLLM's Mamba-2 layers with replay. Projections, convolution, sharding, quantised weights and
prompts stay vLLM's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.integrations.vllm import hooks
from hybrid_runtime.integrations.vllm.replay_checker import Reference
from hybrid_runtime.integrations.vllm.replay_layers import Kind, ReplayLayer, layer_class
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.mamba2.recurrence import mamba2
from hybrid_runtime.kernels.mamba2.replay_update import replay_update
from hybrid_runtime.kernels.recurrence import Recurrence

OURS = "HybridRuntimeMixer2"
"""The name of our class."""

MOST_COLUMNS = 128
"""Most columns of a head's matrix; with 256 the kernel compiles, but has not been measured."""


class ReplayMixer(ReplayLayer):
    """Mixed in before vLLM's class."""

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> Any:
        from vllm.forward_context import get_forward_context

        every = get_forward_context().attn_metadata
        metadata = every.get(self.prefix) if every else None
        if self.replay is None or metadata is None or not metadata.num_decodes:
            return super().conv_ssm_forward(projected_states, output)
        tokens = metadata.num_decode_tokens
        self._verify(projected_states[:tokens], output[:tokens], metadata)
        if metadata.num_prefills:
            # Decode rows come first. vLLM's metadata of the others is relative to their start.
            every[self.prefix] = dataclasses.replace(metadata, num_decodes=0, num_decode_tokens=0)
            try:
                super().conv_ssm_forward(projected_states[tokens:], output[tokens:])
            finally:
                every[self.prefix] = metadata
        return None

    def _verify(self, projected: Tensor, output: Tensor, metadata: Any) -> None:
        """Run the decode rows of a step: vLLM's convolution, then our state update.

        projected, output: `[tokens, ...]`, of the decode rows alone.
        """
        replay = self.replay
        assert replay is not None
        mixed, dt = projected[:, self.tped_intermediate_size :].split(
            [self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        blocks, start = metadata.state_indices_tensor_d[:, :1], metadata.query_start_loc_d
        mixed = self._convolve(mixed, self.conv_weights, blocks, start, metadata)
        x, B, C = self.split_hidden_states_B_C_fn(mixed)
        heads, groups = self.num_heads // self.tp_size, self.n_groups // self.tp_size
        x = x.unflatten(-1, (heads, self.head_dim))
        B = B.unflatten(-1, (groups, self.ssm_state_size))
        C = C.unflatten(-1, (groups, self.ssm_state_size))
        step, checker = replay.rows.first(blocks.shape[0]), replay.checker
        expected = None
        if checker is not None:
            expected = checker.expect(self, step, start, _theirs(self, x, dt, B, C, start))
        replay_update(
            x=x,
            dt=dt,
            A_log=replay.params[0][self.replay_index],
            B=B,
            C=C,
            D=self.D,
            dt_bias=self.dt_bias,
            states=self.kv_cache[1],
            records=Records(*replay.records[self.replay_index]),
            rows=replay.replay_rows(self.replay_index, step, start),
            max_scheduled=1 + replay.drafts,
            rounding=replay.rounding(self.replay_index),
            out=output.unflatten(-1, (heads, self.head_dim)),
        )
        if expected is not None:
            checker.compare(self, expected, output, start)


def _theirs(layer: Any, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, start: Tensor) -> Reference:
    """vLLM's own update of these rows."""
    from vllm.model_executor.layers.mamba import mamba_mixer2

    def run(states: Tensor, columns: Tensor, accepted: Tensor) -> Tensor:
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)
        dim, state = x.shape[2], B.shape[2]
        mamba_mixer2.selective_state_update(
            states,
            x,
            dt[:, :, None].expand(-1, -1, dim),
            layer.A[:, None, None].expand(-1, dim, state).float(),
            B,
            C,
            layer.D[:, None].expand(-1, dim),
            layer.dt_bias[:, None].expand(-1, dim),
            dt_softplus=True,
            state_batch_indices=columns,
            dst_state_batch_indices=columns,
            out=out,
            num_accepted_tokens=accepted,
            cu_seqlens=start,
            is_blackwell=layer.is_blackwell,
        )
        return out

    return run


def _recurrence(layer: Any, dtype: torch.dtype) -> Recurrence:
    heads, groups = layer.num_heads // layer.tp_size, layer.n_groups // layer.tp_size
    width = layer.conv1d.weight.shape[-1]
    return mamba2(heads, layer.head_dim, layer.ssm_state_size, groups, width, dtype)


def _params(layer: Any) -> tuple[Tensor, ...]:
    """The logarithm of vLLM's -A. A trained A is negative."""
    least = torch.finfo(torch.float32).tiny
    return ((-layer.A.detach().float()).clamp(min=least).log(),)


def _sizes(layer: Any) -> tuple[int, ...]:
    return layer.num_heads, layer.head_dim, layer.ssm_state_size, layer.n_groups


def _unhandled(layer: Any) -> str | None:
    if layer.ssm_state_size <= MOST_COLUMNS:
        return None
    return f"its states have {layer.ssm_state_size} columns, the kernel takes {MOST_COLUMNS}"


MAMBA2 = Kind(
    hooks=hooks.MAMBA2,
    mixin=ReplayMixer,
    ours=OURS,
    recurrence=_recurrence,
    params=_params,
    sizes=_sizes,
    unhandled=_unhandled,
    flushes_plain_rows=lambda: False,
)


def __getattr__(name: str) -> Any:
    if name == OURS:
        return layer_class(MAMBA2)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
