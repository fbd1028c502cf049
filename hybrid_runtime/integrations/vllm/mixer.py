"""vLLM's Mamba-2 layer with replay: one state per request, whatever the number of drafts.

vLLM lets a plug-in name a class to build in place of `MambaMixer2`. Ours is that class with two
methods changed: its cache has no blocks for guesses, and the decode rows of a step go through
`replay_update`. Projections, convolution, sharding, quantisation and prompts stay vLLM's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hybrid_runtime.integrations.vllm import versions
from hybrid_runtime.kernels.mamba2.replay_update import replay_update
from hybrid_runtime.kernels.replay.rows import ReplayRows

if TYPE_CHECKING:
    from hybrid_runtime.integrations.vllm.replay_layers import ReplayLayers

    Base = Any
else:
    Base = object

NAME = "MambaMixer2"
"""Class of vLLM in whose place ours is built; vLLM looks it up by the class's name."""

OURS = "HybridRuntimeMixer2"

_collected: ContextVar[list[Any] | None] = ContextVar("_collected", default=None)


@contextmanager
def collecting(replays: bool) -> Iterator[list[Any]]:
    """The Mamba-2 layers that are built meanwhile, if their model replays. A model within a model
    collects none: they are the outer one's."""
    found: list[Any] = []
    if not replays or _collected.get() is not None:
        yield found
        return
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


class ReplayMixer(Base):
    """Mixed in before vLLM's class.

    replay: what the model's layers share, None: this layer runs as vLLM's. replay_index: which of
    them it is.
    """

    replay: ReplayLayers | None = None
    replay_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        found = _collected.get()
        if found is not None:
            found.append(self)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        spec = super().get_kv_cache_spec(vllm_config)
        return spec if self.replay is None else versions.without_spare_blocks(spec)

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> Any:
        from vllm.forward_context import get_forward_context

        every = get_forward_context().attn_metadata
        metadata = every.get(self.prefix) if every else None
        if self.replay is None or metadata is None or not metadata.num_decodes:
            return super().conv_ssm_forward(projected_states, output)
        tokens = metadata.num_decode_tokens
        self._verify(projected_states[:tokens], output[:tokens], metadata)
        if metadata.num_prefills:
            # Decode rows come first, and all that vLLM keeps of the others counts from their start.
            every[self.prefix] = dataclasses.replace(metadata, num_decodes=0, num_decode_tokens=0)
            try:
                super().conv_ssm_forward(projected_states[tokens:], output[tokens:])
            finally:
                every[self.prefix] = metadata
        return None

    def _verify(self, projected: Tensor, output: Tensor, metadata: Any) -> None:
        """The decode rows of a step: vLLM's convolution, then our state update."""
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        replay = self.replay
        assert replay is not None
        mixed, dt = projected[:, self.tped_intermediate_size :].split(
            [self.tped_conv_size, self.tped_dt_size], dim=-1
        )
        windows, states = self.kv_cache[:2]
        blocks, start = metadata.state_indices_tensor_d[:, :1], metadata.query_start_loc_d
        mixed = causal_conv1d_update(
            mixed,
            windows if is_conv_state_dim_first() else windows.transpose(-1, -2),
            self.conv_weights,
            self.conv1d.bias,
            self.activation,
            conv_state_indices=blocks,
            num_accepted_tokens=metadata.num_accepted_tokens,
            query_start_loc=start,
            max_query_len=1 + self.num_spec,
        )
        x, B, C = self.split_hidden_states_B_C_fn(mixed)
        heads, groups = self.num_heads // self.tp_size, self.n_groups // self.tp_size
        x = x.unflatten(-1, (heads, self.head_dim))
        B = B.unflatten(-1, (groups, self.ssm_state_size))
        C = C.unflatten(-1, (groups, self.ssm_state_size))
        step, checker = replay.rows.first(blocks.shape[0]), replay.checker
        expected = checker.expect(self, x, dt, B, C, step, start) if checker else None
        replay_update(
            x=x,
            dt=dt,
            A_log=replay.A_log[self.replay_index],
            B=B,
            C=C,
            D=self.D,
            dt_bias=self.dt_bias,
            states=states,
            window_cache=replay.caches[self.replay_index],
            rows=ReplayRows(
                block_table=replay.tables[self.replay_index],
                slot=step.slot,
                cu_seqlens=start,
                draft=step.draft,
                positions=step.positions,
            ),
            max_scheduled=1 + self.num_spec,
            out=output.unflatten(-1, (heads, self.head_dim)),
        )
        if checker is not None and expected is not None:
            checker.compare(self, expected, output, start)


@functools.cache
def mixer_class() -> type:
    """The class for vLLM to build: its own with replay."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    return type(OURS, (ReplayMixer, MambaMixer2), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    # Caches of compiled code name classes by their module.
    if name == OURS:
        return mixer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> str | None:
    """Have our class built in place of vLLM's from now on, or say why not."""
    from vllm.model_executor import custom_op

    built = custom_op.op_registry_oot.get(NAME)
    if built is None:
        custom_op.PluggableLayer.register_oot(name=NAME)(mixer_class())
    elif built is not mixer_class():
        return f"another plug-in has replaced {NAME}"
    return None
