"""The cache memory of an engine: blocks of keys, values and states, and the tables over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.engine.block_pool import BlockPool, BlockTable
from hybrid_runtime.engine.config import state_group
from hybrid_runtime.engine.device_tables import DeviceTables
from hybrid_runtime.engine.offload.tier import HostTier
from hybrid_runtime.engine.prefix_cache import KEYS, STATE
from hybrid_runtime.engine.state_blocks import ColumnBlocks, RoleBlocks, StateBlocks
from hybrid_runtime.models.forward_batch import Caches
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.state.layout import StateLayout


@dataclass(frozen=True, slots=True)
class Memory:
    """All blocks of one engine.

    kv, state: which request owns which blocks.
    states: layer to (conv_states, matrices) as the layout stores them.
    caches: all of it as models take it.
    records: the rings of all layers, `[layers, slots, *]` each; none in layouts without rings.
    """

    kv: BlockTable
    state: StateBlocks
    states: dict[int, tuple[Tensor, Tensor]]
    caches: Caches
    records: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        model: HybridModel,
        head: Any,
        layout: StateLayout,
        slots: int,
        max_length: int,
        num_blocks: tuple[int, int],
        kv_block: int,
        kv_dtype: torch.dtype,
        depth: int,
        waits: Waits,
    ) -> Memory:
        """Memory for `slots` requests of up to `max_length` tokens.

        head: the draft head, whose keys and values need room too, or None.
        num_blocks: KV blocks and state blocks.
        kv_block: tokens of a KV block.
        kv_dtype: of keys and values.
        depth: steps that may be queued, and two.
        waits: where waits for block tables on their way are counted.
        """
        device = model.device
        group = state_group(model)
        columns = -(-max_length // kv_block), layout.table_columns(max_length)
        tables = DeviceTables(slots, columns, device, depth, waits)
        kv = BlockTable(BlockPool(num_blocks[0]), tables, 0)
        pool = BlockPool(num_blocks[1])
        state: StateBlocks
        if layout.replays:
            state = RoleBlocks(pool, tables, 1)
        else:
            state = ColumnBlocks(BlockTable(pool, tables, 1), layout.block_size)

        def cache(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
            one = torch.zeros((kv.pool.size, kv_block, *shape), dtype=kv_dtype, device=device)
            return one, torch.zeros_like(one)

        keys = {layer: cache(model.kv_shape) for layer in model.kv_layers}
        if head is not None:
            keys |= {layer: cache(head.kv_shape) for layer in head.kv_layers}
        states = {layer: layout.allocate(state.pool.size, device) for layer in group.layers}
        records = layout.allocate_records(len(group.layers), slots, device)
        caches = Caches(
            kv=keys,
            states={i: (layout.positions_first(c), m) for i, (c, m) in states.items()},
            kv_block_table=kv.device_table,
            state_block_table=state.device_table,
            records={
                layer: tuple(part[i] for part in records)
                for i, layer in enumerate(group.layers)
                if records
            },
        )
        return cls(kv, state, states, caches, records)

    def release(self) -> None:
        """Give the bytes of all blocks back, also where their tensors are still held."""
        parts = [
            part
            for layer in (self.caches.kv, self.states)
            for two in layer.values()
            for part in two
        ]
        for tensor in (*parts, *self.records):
            tensor.untyped_storage().resize_(0)
        if self.kv.device_table.is_cuda:
            torch.cuda.empty_cache()  # PyTorch would keep it for itself

    def copy_keys(self, source: int, target: int) -> None:
        """Launch a copy of a KV block's keys and values, of all layers."""
        for layer in self.caches.kv.values():
            for part in layer:
                part[target].copy_(part[source])

    def host_tier(self, num_blocks: tuple[int, int]) -> HostTier:
        """Host memory for KV blocks and state blocks."""
        groups = {
            KEYS: [part for layer in self.caches.kv.values() for part in layer],
            STATE: [part for layer in self.states.values() for part in layer],
        }
        counts = dict(zip((KEYS, STATE), num_blocks, strict=True))
        return HostTier({name: g for name, g in groups.items() if g}, counts)
