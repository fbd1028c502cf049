"""The cache memory of an engine: blocks of keys, values and states, and the tables over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.engine.block_pool import BlockPool, BlockTable
from hybrid_runtime.engine.offload.tier import HostTier
from hybrid_runtime.engine.prefix_cache import KEYS, STATE
from hybrid_runtime.engine.scheduler import most_state_blocks
from hybrid_runtime.kernels.replay.window_cache import WindowCache
from hybrid_runtime.models.forward_batch import Caches
from hybrid_runtime.models.nemotron_h import NemotronH
from hybrid_runtime.state.layout import StateLayout


@dataclass(frozen=True, slots=True)
class Memory:
    """kv, state: who owns which blocks. states: layer to (window, SSM) blocks as the layout has
    them. caches: all of it as models take it. records: those of all layers, stacked (replay)."""

    kv: BlockTable
    state: BlockTable
    states: dict[int, tuple[Tensor, Tensor]]
    caches: Caches
    window_cache: WindowCache | None

    @classmethod
    def allocate(
        cls,
        model: NemotronH,
        head: Any,
        layout: StateLayout,
        slots: int,
        max_length: int,
        num_blocks: tuple[int, int] | None,
        depth: int,
        waits: Waits,
    ) -> Memory:
        """Memory for `slots` requests of up to `max_length` tokens.

        head: the draft head, whose keys and values need room too, or None. num_blocks: KV and state
        blocks; None = enough for all requests at full length. depth: steps that may be queued.
        """
        device, dtype, block = model.device, model.dtype, layout.block_size
        drafts, columns = layout.num_speculative_tokens, -(-max_length // block)
        if num_blocks is None:
            spare = most_state_blocks(drafts, depth - 2, layout.replays)
            num_blocks = (slots * columns, slots * (3 if layout.replays else drafts + 4) + spare)
        kv = BlockTable(slots, columns, BlockPool(num_blocks[0]), device, depth, waits)
        # Behind the columns of snapshots lies the live state, or room for states of guesses.
        state = BlockTable(
            slots,
            columns + 1 + (0 if layout.replays else drafts),
            BlockPool(num_blocks[1]),
            device,
            depth,
            waits,
            always=columns if layout.replays else None,
        )

        def cache(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
            one = torch.zeros((kv.pool.size, block, *shape), dtype=dtype, device=device)
            return one, torch.zeros_like(one)

        keys = {layer: cache(model.kv_shape) for layer in model.kv_layers}
        if head is not None:
            keys |= {layer: cache(head.kv_shape) for layer in head.kv_layers}
        states = {layer: layout.allocate(state.pool.size, device) for layer in model.state_layers}
        window_cache = _records(model, layout, slots) if layout.replays else None
        caches = Caches(
            kv=keys,
            states={i: (layout.positions_first(w), s) for i, (w, s) in states.items()},
            kv_block_table=kv.device_table,
            state_block_table=state.device_table,
            window_cache={}
            if window_cache is None
            else {layer: window_cache.layer(i) for i, layer in enumerate(model.state_layers)},
        )
        return cls(kv, state, states, caches, window_cache)

    def host_tier(self, num_blocks: tuple[int, int]) -> HostTier:
        """Host memory for KV blocks and state blocks."""
        groups = {
            KEYS: [part for layer in self.caches.kv.values() for part in layer],
            STATE: [part for layer in self.states.values() for part in layer],
        }
        counts = dict(zip((KEYS, STATE), num_blocks, strict=True))
        return HostTier({name: g for name, g in groups.items() if g}, counts)


def _records(model: NemotronH, layout: StateLayout, slots: int) -> WindowCache:
    return WindowCache.allocate(
        len(model.state_layers),
        slots,
        layout.num_speculative_tokens,
        layout.ssm_shape,
        model.config.n_groups,
        model.dtype,
        model.device,
    )
