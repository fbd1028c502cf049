"""Replay in vLLM's layers: one state per request, whatever the number of drafts.

vLLM lets a plug-in name a class to build in place of one of its layers. Ours is that class with few
methods replaced: its cache has no blocks for drafts, and the decode rows of a step go through our
state update. Here is what all kinds of layers have in common, and `ReplayLayers`, what the layers
of a model share. Each kind has a file: `mamba2_layers`, `gdn_layers`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybrid_runtime.integrations.vllm import versions
from hybrid_runtime.integrations.vllm.config import say_once
from hybrid_runtime.integrations.vllm.hooks import LayerHooks
from hybrid_runtime.kernels.recurrence import Recurrence
from hybrid_runtime.kernels.replay.ring import ring_length
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.kernels.step.vllm_rows import StepRows

if TYPE_CHECKING:
    Base = Any
else:
    Base = object

_collected: ContextVar[list[Any] | None] = ContextVar("_collected", default=None)


@contextmanager
def collecting(replays: bool) -> Iterator[list[Any]]:
    """The layers of ours that are built inside this context, if `replays`.

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


class ReplayLayer(Base):
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

    def _convolve(
        self, mixed: Tensor, weight: Tensor, blocks: Tensor, start: Tensor, metadata: Any
    ) -> Tensor:
        """vLLM's convolution of a step's decode rows, `[tokens, channels]` each.

        blocks: of each row's state. start: `[rows + 1]`, where its tokens begin.
        """
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
        from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

        assert self.replay is not None
        windows = self.kv_cache[0]
        convolved: Tensor = causal_conv1d_update(
            mixed,
            windows if is_conv_state_dim_first() else windows.transpose(-1, -2),
            weight,
            self.conv1d.bias,
            self.activation,
            conv_state_indices=blocks,
            num_accepted_tokens=metadata.num_accepted_tokens,
            query_start_loc=start,
            # Without blocks for drafts the width of vLLM's table no longer says how long a row
            # may be.
            max_query_len=1 + self.replay.drafts,
        )
        return convolved


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of layer that replays.

    hooks: vLLM's class, and what of it is used.
    mixin: mixed in before it, a `ReplayLayer`.
    ours: name of the class that results; its module must find it, see `layer_class`.
    recurrence: of a layer of vLLM's, with activations of a dtype.
    params: of a layer, as `Recurrence.params` says, from its weights.
    sizes: of a layer; those of a model must be alike.
    unhandled: why a layer does not replay, or None.
    flushes_plain_rows: vLLM's own code, which knows no records, runs rows without drafts.
    """

    hooks: LayerHooks
    mixin: type
    ours: str
    recurrence: Callable[[Any, torch.dtype], Recurrence]
    params: Callable[[Any], tuple[Tensor, ...]]
    sizes: Callable[[Any], tuple[int, ...]]
    unhandled: Callable[[Any], str | None]
    flushes_plain_rows: Callable[[], bool]


@functools.cache
def layer_class(kind: Kind) -> type:
    """The class that vLLM builds: the mixin before vLLM's own. Caches of compiled code find a class
    by module and name, so the module of the mixin must have it as an attribute."""
    base = getattr(importlib.import_module(kind.hooks.module), kind.hooks.name)
    return type(kind.ours, (kind.mixin, base), {"__module__": kind.mixin.__module__})


def register(kind: Kind) -> str | None:
    """Have vLLM build our class from now on; why not, if another plug-in has replaced its own."""
    from vllm.model_executor import custom_op

    name = kind.hooks.name
    built = custom_op.op_registry_oot.get(name)
    if built is None:
        custom_op.PluggableLayer.register_oot(name=name)(layer_class(kind))
    elif built is not layer_class(kind):
        return f"another plug-in has replaced {name}"
    return None


EVERY_STEP = 0
"""`ring_tokens` with which every step writes its states: vLLM copies, shares and frees them by the
tokens computed, so that they must not lag behind."""


class ReplayLayers:
    """What the layers of a model share, above all the records of drafts, by request slot.

    The records lie outside of vLLM's blocks. They are allocated with the model, so that vLLM counts
    them as memory of the model.

    kind: of the layers.
    layers: vLLM's layers; sets `replay` and `replay_index` of each.
    slots: most requests at a time.
    drafts: most drafts of a step.
    dtype: of the records' vectors.
    stochastic: states of 16 bits are rounded stochastically.

    rows: slots, positions and blocks of a step's rows, rewritten before each step.
    recurrence, params: as a flush takes them, params of all layers, layers first.
    rings: of all layers, by record `[layers, slots, ...]`.
    records: the rings of each layer.
    tables: the block table of each layer, int32 `[slots, 2]`.
    checker: of check mode, else None.
    """

    checker: Any = None

    def __init__(
        self,
        kind: Kind,
        layers: list[Any],
        slots: int,
        drafts: int,
        dtype: torch.dtype,
        device: torch.device | str,
        stochastic: bool = False,
    ) -> None:
        self.kind, self.layers, self.drafts = kind, layers, drafts
        self.recurrence = kind.recurrence(layers[0], dtype)
        self.ring_length = ring_length(drafts, EVERY_STEP)
        self.rings = self.recurrence.allocate_records(len(layers), slots, self.ring_length, device)
        self.params = tuple(
            torch.zeros((len(layers), *spec.shape), dtype=spec.dtype, device=device)
            for spec in self.recurrence.params
        )
        # vLLM's own has no seed by request either.
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self._seed = torch.arange(slots, **ints) if stochastic else None
        # No more cache groups than layers; how many is known when vLLM has made its cache.
        self.rows = _Rows(StepRows.allocate(slots, len(layers), device))
        self.records = [tuple(ring[index] for ring in self.rings) for index in range(len(layers))]
        self.tables = [self.rows.whole.tables[0]] * len(layers)
        for index, layer in enumerate(layers):
            layer.replay, layer.replay_index = self, index

    def replay_rows(self, layer: int, step: StepRows, start: Tensor) -> ReplayRows:
        """Of a step in this layer. start: `[rows + 1]`, where the tokens of its rows begin."""
        return ReplayRows(
            block_table=self.tables[layer],
            slot=step.slot,
            cu_seqlens=start,
            draft=step.draft,
            positions=step.positions,
        )

    def rounding(self, layer: int) -> Rounding | None:
        """By what the states of this layer are rounded; of the first layer: those of all."""
        return None if self._seed is None else Rounding(self._seed, layer)

    @property
    def bytes(self) -> int:
        """Memory of the rings."""
        return sum(ring.nbytes for ring in self.rings)

    def take_weights(self) -> None:
        """Set `params` from the layers, after weights are loaded."""
        for index, layer in enumerate(self.layers):
            for param, value in zip(self.params, self.kind.params(layer), strict=True):
                param[index].copy_(value)

    def assign(self, groups: list[list[str]]) -> None:
        """Set the block table of each layer; `groups` has the layers' names by cache group."""
        group = {name: index for index, names in enumerate(groups) for name in names}
        self.tables = [self.rows.whole.tables[group[layer.prefix]] for layer in self.layers]
        self.take_weights()


def unhandled(kind: Kind, layers: list[Any]) -> str | None:
    """Why a model with these layers does not replay, or None."""
    if why := kind.unhandled(layers[0]):
        return why
    sizes = {kind.sizes(layer) for layer in layers}
    return "its Mamba layers differ in size" if len(sizes) > 1 else None


def build(kind: Kind, layers: list[Any], vllm_config: Any) -> ReplayLayers:
    """Have the layers of a model that has just been built replay."""
    mamba = getattr(vllm_config, "mamba_config", None)
    shared = ReplayLayers(
        kind,
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
    """`StepRows`, and parts of it, each made once."""

    def __init__(self, whole: StepRows) -> None:
        self.whole = whole
        self._views: dict[int, StepRows] = {}
        self._chosen: StepRows | None = None

    def begin(self) -> None:
        """Another batch: what was chosen of the one before is forgotten."""
        self._chosen = None

    def first(self, rows: int) -> StepRows:
        """Views of the first rows, which captured graphs may read."""
        if rows not in self._views:
            self._views[rows] = self.whole.first(rows)
        return self._views[rows]

    def where(self, mask: Tensor, count: int) -> StepRows:
        """Copies of the `count` rows of this batch where `mask` is set, in their order. The mask is
        the same for all layers."""
        if self._chosen is None:
            index = mask.int().argsort(descending=True, stable=True)[:count]
            self._chosen = self.whole._replace(
                slot=self.whole.slot[index],
                draft=self.whole.draft[index],
                positions=ReplayPositions(*(part[index] for part in self.whole.positions)),
            )
        return self._chosen


def layer_groups(kv_cache_config: Any, groups: list[int]) -> list[list[str]]:
    """Names of the layers of the cache groups with these indices."""
    return [list(kv_cache_config.kv_cache_groups[index].layer_names) for index in groups]
