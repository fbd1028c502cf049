"""What the replaying layers of a model share: the guesses of each request's last step, and where
the rows of a step find their state."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_runtime.integrations.vllm.config import say_once
from hybrid_runtime.kernels.mamba2.window_cache import WindowCache
from hybrid_runtime.kernels.step.vllm_rows import StepRows

EVERY_STEP = 0
"""Window: vLLM's blocks hold whole states, so that every step writes them."""


class ReplayLayers:
    """The window caches of all Mamba-2 layers of a model, by request slot.

    They lie outside of vLLM's blocks, and are allocated with the model, so that vLLM counts them
    as memory of the model.

    layers: vLLM's layers; each is told of this object.
    slots: most requests at a time. drafts: guesses per step, at most.

    rows: what is placed in each step. A_log: `[layers, H]`, of vLLM's A. cache: of all layers.
    caches, tables: of each layer: its window cache; its blocks, `[slots, 2]`.
    checker: of check mode.
    """

    checker: Any = None

    def __init__(
        self,
        layers: list[Any],
        slots: int,
        drafts: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        one = layers[0]
        heads, groups = one.num_heads // one.tp_size, one.n_groups // one.tp_size
        shape = (heads, one.head_dim, one.ssm_state_size)
        self.layers, self.drafts = layers, drafts
        self.cache = WindowCache.allocate(
            len(layers), slots, drafts, EVERY_STEP, shape, groups, dtype, device
        )
        self.A_log = torch.zeros((len(layers), heads), dtype=torch.float32, device=device)
        # No more cache groups than layers; how many is known when vLLM has made its cache.
        self.rows = _Rows(StepRows.allocate(slots, len(layers), device))
        self.caches = [self.cache.layer(index) for index in range(len(layers))]
        self.tables = [self.rows.whole.tables[0]] * len(layers)
        for index, layer in enumerate(layers):
            layer.replay, layer.replay_index = self, index

    @property
    def bytes(self) -> int:
        """Memory of the window caches."""
        return sum(part.numel() * part.element_size() for part in self.cache)

    def take_weights(self) -> None:
        """Follow the layers' A, once they are loaded. A trained one is negative."""
        rates = torch.stack([layer.A.detach() for layer in self.layers]).float()
        self.A_log.copy_((-rates).clamp(min=torch.finfo(torch.float32).tiny).log())

    def assign(self, groups: list[list[str]]) -> None:
        """Tell each layer its cache group's blocks; names of the layers of each group."""
        place = {name: index for index, names in enumerate(groups) for name in names}
        self.tables = [self.rows.whole.tables[place[layer.prefix]] for layer in self.layers]
        self.take_weights()


MOST_COLUMNS = 128
"""Columns of a head's state; with 256 the kernel compiles, but has not been measured."""


def unhandled(layers: list[Any]) -> str | None:
    """Why a model with these layers does not replay."""
    one = layers[0]
    if one.ssm_state_size > MOST_COLUMNS:
        return f"its states have {one.ssm_state_size} columns, the kernel takes {MOST_COLUMNS}"
    sizes = {(x.num_heads, x.head_dim, x.ssm_state_size, x.n_groups) for x in layers}
    return "its Mamba layers differ in size" if len(sizes) > 1 else None


def build(layers: list[Any], vllm_config: Any) -> ReplayLayers:
    """For the layers of a model that has just been built."""
    shared = ReplayLayers(
        layers,
        slots=vllm_config.scheduler_config.max_num_seqs,
        drafts=vllm_config.num_speculative_tokens,
        dtype=vllm_config.model_config.dtype,
        device=vllm_config.device_config.device,
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
    """Views of the first rows, each made once."""

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
