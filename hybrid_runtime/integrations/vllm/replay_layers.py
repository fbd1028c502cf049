"""vLLM's Mamba-2 layers with replay: one state per request, whatever the number of drafts.

vLLM lets a plug-in name a class to build in place of `MambaMixer2`. Ours is that class with two
methods replaced: its cache has no blocks for drafts, and the decode rows of a step go through
`replay_update`. Projections, convolution, sharding, quantised weights and prompts stay vLLM's.
`ReplayLayers` is what the layers of a model share.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybrid_runtime.integrations.vllm import versions
from hybrid_runtime.integrations.vllm.config import say_once
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.mamba2.recurrence import mamba2
from hybrid_runtime.kernels.mamba2.replay_update import replay_update
from hybrid_runtime.kernels.replay.ring import ring_length
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.vllm_rows import StepRows

if TYPE_CHECKING:
    Base = Any
else:
    Base = object

NAME = "MambaMixer2"
"""vLLM's class, under whose name vLLM looks for one to build instead."""

OURS = "HybridRuntimeMixer2"
"""The name of ours."""

_collected: ContextVar[list[Any] | None] = ContextVar("_collected", default=None)


@contextmanager
def collecting(replays: bool) -> Iterator[list[Any]]:
    """The Mamba-2 layers that are built inside this context, if `replays`.

    A model inside a model collects none: its layers belong to the outer model.
    """
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

    replay: shared by the layers of the model; None = this layer runs as vLLM's.
    replay_index: its index among those layers.
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
            records=replay.records[self.replay_index],
            rows=ReplayRows(
                block_table=replay.tables[self.replay_index],
                slot=step.slot,
                cu_seqlens=start,
                draft=step.draft,
                positions=step.positions,
            ),
            max_scheduled=1 + self.num_spec,
            rounding=replay.rounding(self.replay_index),
            out=output.unflatten(-1, (heads, self.head_dim)),
        )
        if checker is not None and expected is not None:
            checker.compare(self, expected, output, start)


@functools.cache
def mixer_class() -> type:
    """The class that vLLM builds: `ReplayMixer` before its own."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    return type(OURS, (ReplayMixer, MambaMixer2), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    # Caches of compiled code find a class by module and name.
    if name == OURS:
        return mixer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> str | None:
    """Have vLLM build our class from now on; why not, if another plug-in has replaced its own."""
    from vllm.model_executor import custom_op

    built = custom_op.op_registry_oot.get(NAME)
    if built is None:
        custom_op.PluggableLayer.register_oot(name=NAME)(mixer_class())
    elif built is not mixer_class():
        return f"another plug-in has replaced {NAME}"
    return None


EVERY_STEP = 0
"""`ring_tokens` with which every step writes its states: vLLM copies, shares and frees them by the
tokens computed, so that they must not lag behind."""


class ReplayLayers:
    """What the Mamba-2 layers of a model share, above all the records of drafts, by request slot.

    The records lie outside of vLLM's blocks. They are allocated with the model, so that vLLM counts
    them as memory of the model.

    layers: vLLM's layers; sets `replay` and `replay_index` of each.
    slots: most requests at a time.
    drafts: most drafts of a step.
    dtype: of the records' vectors.
    stochastic: states of 16 bits are rounded stochastically.

    rows: slots, positions and blocks of a step's rows, rewritten before each step.
    recurrence, params: as a flush takes them.
    rings: of all layers, by record `[layers, slots, ...]`.
    records: the ring of each layer.
    tables: the block table of each layer, int32 `[slots, 2]`.
    A_log: float32 `[layers, H]`, the logarithm of vLLM's -A.
    checker: of check mode, else None.
    """

    checker: Any = None

    def __init__(
        self,
        layers: list[Any],
        slots: int,
        drafts: int,
        dtype: torch.dtype,
        device: torch.device | str,
        stochastic: bool = False,
    ) -> None:
        one = layers[0]
        heads, groups = one.num_heads // one.tp_size, one.n_groups // one.tp_size
        width = one.conv1d.weight.shape[-1]
        self.layers, self.drafts = layers, drafts
        self.recurrence = mamba2(heads, one.head_dim, one.ssm_state_size, groups, width, dtype)
        self.ring_length = ring_length(drafts, EVERY_STEP)
        self.rings = self.recurrence.allocate_records(len(layers), slots, self.ring_length, device)
        self.A_log = torch.zeros((len(layers), heads), dtype=torch.float32, device=device)
        self.params = (self.A_log,)
        # vLLM's own has no seed by request either.
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._seed = torch.arange(slots, **ints) if stochastic else None
        # No more cache groups than layers; how many is known when vLLM has made its cache.
        self.rows = _Rows(StepRows.allocate(slots, len(layers), device))
        self.records = [Records(*self.rings).layer(index) for index in range(len(layers))]
        self.tables = [self.rows.whole.tables[0]] * len(layers)
        for index, layer in enumerate(layers):
            layer.replay, layer.replay_index = self, index

    def rounding(self, layer: int) -> Rounding | None:
        """By what the states of this layer are rounded; of the first layer: those of all."""
        return None if self._seed is None else Rounding(self._seed, layer)

    @property
    def bytes(self) -> int:
        """Memory of the rings."""
        return sum(ring.nbytes for ring in self.rings)

    def take_weights(self) -> None:
        """Set `A_log` from the layers' A, after weights are loaded. A trained A is negative."""
        rates = torch.stack([layer.A.detach() for layer in self.layers]).float()
        self.A_log.copy_((-rates).clamp(min=torch.finfo(torch.float32).tiny).log())

    def assign(self, groups: list[list[str]]) -> None:
        """Set the block table of each layer; `groups` has the layers' names by cache group."""
        group = {name: index for index, names in enumerate(groups) for name in names}
        self.tables = [self.rows.whole.tables[group[layer.prefix]] for layer in self.layers]
        self.take_weights()


MOST_COLUMNS = 128
"""Most columns of a head's matrix; with 256 the kernel compiles, but has not been measured."""


def unhandled(layers: list[Any]) -> str | None:
    """Why a model with these layers does not replay, or None."""
    one = layers[0]
    if one.ssm_state_size > MOST_COLUMNS:
        return f"its states have {one.ssm_state_size} columns, the kernel takes {MOST_COLUMNS}"
    sizes = {(x.num_heads, x.head_dim, x.ssm_state_size, x.n_groups) for x in layers}
    return "its Mamba layers differ in size" if len(sizes) > 1 else None


def build(layers: list[Any], vllm_config: Any) -> ReplayLayers:
    """Have the layers of a model that has just been built replay."""
    mamba = getattr(vllm_config, "mamba_config", None)
    shared = ReplayLayers(
        layers,
        slots=vllm_config.scheduler_config.max_num_seqs,
        drafts=vllm_config.num_speculative_tokens,
        dtype=vllm_config.model_config.dtype,
        device=vllm_config.device_config.device,
        stochastic=getattr(mamba, "enable_stochastic_rounding", False),
    )
    say_once(
        "info",
        "hybrid-runtime replays: one state per request in %d layers, and %.2f GiB of records of "
        "drafts for %d requests (--max-num-seqs).",
        len(layers),
        shared.bytes / 2**30,
        len(shared.rows.whole.slot),
    )
    return shared


class _Rows:
    """`StepRows`, and views of its first rows, each made once."""

    def __init__(self, whole: StepRows) -> None:
        self.whole = whole
        self._views: dict[int, StepRows] = {}

    def first(self, rows: int) -> StepRows:
        if rows not in self._views:
            self._views[rows] = self.whole.first(rows)
        return self._views[rows]


def layer_groups(kv_cache_config: Any, groups: list[int]) -> list[list[str]]:
    """Names of the layers of the cache groups with these indices."""
    return [list(kv_cache_config.kv_cache_groups[index].layer_names) for index in groups]
