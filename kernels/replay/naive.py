"""What the references of replaying recurrences share: states and records as padded tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import physical_blocks
from hybrid_runtime.kernels.replay.rounding import (
    Rounding,
    round_state_reference,
    rounding_key_reference,
)


def accumulator(x: Tensor, states: Tensor) -> torch.dtype:
    """What a reference computes in: fp32, or fp64 where inputs or states are."""
    return torch.promote_types(torch.promote_types(x.dtype, states.dtype), torch.float32)


def initial_states(
    states: Tensor,
    block_table: Tensor,
    slot: Tensor,
    read_column: Tensor,
    active: Tensor,
    acc: torch.dtype,
) -> Tensor:
    """`[rows, *]` in `acc`, zeros where nothing is read. states: `[blocks, *]` of three axes."""
    reads = active & (read_column >= 0)
    state = states[physical_blocks(block_table, slot, read_column, reads)].to(acc)
    return torch.where(reads[:, None, None, None], state, state.new_zeros(()))


def gather_pending(
    records: tuple[Tensor, ...], slot: Tensor, cursor: Tensor, pending: Tensor, acc: torch.dtype
) -> tuple[Tensor, ...]:
    """Of each record `[slots, heads, L, ...]` the rows' pending tokens from the first on, as
    `[rows, tokens, heads, ...]` in `acc`; 0 behind them. `tokens` is the most that any row has."""
    length = records[0].shape[2]
    token = torch.arange(int(pending.max()) if len(pending) else 0, device=slot.device)
    within = token < pending[:, None]
    at = torch.where(within, (cursor[:, None] + token) % length, 0).long()
    row = torch.where(pending > 0, slot, 0).long()[:, None]
    parts = []
    for ring in records:
        taken = ring[row, :, at].to(acc)
        mask = within.reshape(*within.shape, *([1] * (taken.dim() - 2)))
        parts.append(torch.where(mask, taken, torch.zeros((), dtype=acc)))
    return tuple(parts)


def keep_records(
    records: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    slot: Tensor,
    first: Tensor,
    keeps: Tensor,
) -> None:
    """Store `values` `[rows, tokens, heads, ...]` of the tokens that a row `keeps`, bool
    `[rows, tokens]`, in its slot's ring, where a row's token 0 lies at index `first` modulo L."""
    row, token = keeps.nonzero(as_tuple=True)
    at = (first[row] + token) % records[0].shape[2]
    for ring, value in zip(records, values, strict=True):
        ring[slot[row].long(), :, at] = value[row, token].to(ring.dtype)


def store_states(
    states: Tensor,
    state: Tensor,
    block_table: Tensor,
    slot: Tensor,
    column: Tensor,
    chosen: Tensor,
    rounding: Rounding | None,
    position: Tensor,
) -> None:
    """Write the states of the `chosen` rows, bool `[rows]`, to their blocks.

    rounding: stochastically, by the tokens in each state, `position` `[rows]`; None: to nearest.
    """
    key = None
    if rounding is not None:
        seed = rounding.seed[slot.clamp(min=0).long()]
        key = rounding_key_reference(seed, rounding.layer, position)[chosen]
    block = physical_blocks(block_table, slot, column, chosen)[chosen]
    states[block] = round_state_reference(state[chosen], states.dtype, key)
