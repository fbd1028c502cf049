"""The replay layout's state update in plain torch.

The state of a request in memory may lack the last tokens before a step, the pending ones: their
inputs are in the window cache. A step reads the state, folds them in, goes on over its own tokens,
and stores the state after its last certain token only if `ReplayPositions.writes` says so; the
inputs of tokens that no state holds then go to the window cache.
"""

from __future__ import annotations

import math

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import (
    gather_rows,
    physical_blocks,
    row_tokens,
    scatter_rows,
)
from hybrid_runtime.kernels.mamba2.naive import _accumulator, _initial_states, _time_step
from hybrid_runtime.kernels.mamba2.window_cache import WindowCache, check_window_cache
from hybrid_runtime.kernels.replay.rounding import (
    Rounding,
    round_state_reference,
    rounding_key_reference,
)
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions


def replay_update_reference(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    window_cache: WindowCache,
    rows: ReplayRows,
    max_scheduled: int,
    rounding: Rounding | None = None,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
) -> Tensor:
    """Bring every row's state up to date, and step the row's tokens from there.

    A row with s tokens of which d are drafts folds its `pending` tokens of the window cache into
    the state that it reads, then its own s tokens, which give outputs. If it writes, it stores the
    state after its first s - d tokens, and the inputs of the last d go to the window cache; if not,
    those of all s do. A snapshot is stored `snapshot_after` tokens behind the pending ones, or
    before their end if that is negative. Everything is read before anything is written. A padded
    row and a row without tokens leave everything as it is.

    Args:
        x: [tokens, H, P].
        dt: [tokens, H], raw (before bias, softplus and clamp).
        A_log: [H].
        B: [tokens, G, N]; H is a multiple of G, head h uses group h // (H // G).
        C: [tokens, G, N].
        D: [H].
        dt_bias: [H].
        states: [blocks, H, P, N] in the state's own dtype, any block stride, changed in place.
        window_cache: of this layer, changed in place. The ring is long enough for a row's pending
            tokens and those that it stores not to overlap.
        rows: whose tokens these are, and where each row reads and writes.
        max_scheduled: upper bound of tokens per row.
        rounding: states are rounded stochastically; None: to nearest.
        dt_min: lower clamp of dt.
        dt_max: upper clamp of dt.

    Returns:
        [tokens, H, P] in x's dtype; 0 for padded rows. Arithmetic is fp32, or fp64 when x or the
        states are.

    Raises:
        ValueError: heads are no multiple of groups, or states or cache have another shape.
    """
    heads_per_group = check_window_cache(x, B, states, window_cache)
    acc = _accumulator(x, states)
    positions = rows.positions
    scheduled = rows.cu_seqlens[1:] - rows.cu_seqlens[:-1]
    certain = (scheduled - rows.draft).long()
    active = (rows.slot >= 0) & (positions.write_column >= 0) & (scheduled > 0)
    writes = active & (positions.writes > 0)
    index, valid = row_tokens(rows.cu_seqlens, max_scheduled, x.shape[0], active)
    xs = gather_rows(x, index, valid)
    Bs = gather_rows(B, index, valid)
    Cs = repeat(gather_rows(C, index, valid), "r t g n -> r t (g h) n", h=heads_per_group).to(acc)
    steps = _time_step(dt, dt_bias, index, valid, acc, dt_min, dt_max)
    rate = -torch.exp(A_log.to(acc))
    state = _initial_states(
        states, rows.block_table, rows.slot, positions.read_column, torch.zeros_like(rows.slot),
        active, acc,
    )  # fmt: skip
    pending = torch.where(active & (positions.read_column >= 0), positions.pending, 0).long()
    past = gather_pending(window_cache, rows.slot, positions.cursor, pending, acc)

    def store(passed: Tensor, here: Tensor) -> None:
        """Store what the rows `here` have after `passed` tokens from the first pending one on."""
        key = _key(rounding, rows.slot, positions.certain - certain - pending + passed)
        snapshot = here & (positions.snapshot_column >= 0)
        snapshot &= pending + positions.snapshot_after == passed
        written = here & writes & (pending + certain == passed)
        for column, chosen in (
            (positions.snapshot_column, snapshot),
            (positions.write_column, written),
        ):
            _store(states, state, rows.block_table, rows.slot, column, chosen, key)

    for j in range(past.x.shape[1]):
        state = advance_state(state, past.x[:, j], past.B[:, j], past.dt[:, j], rate)
        store(torch.full_like(pending, j + 1), active & (j < pending))
    y = torch.zeros(xs.shape, dtype=acc, device=x.device)
    for i in range(max_scheduled):
        state = advance_state(state, xs[:, i].to(acc), Bs[:, i].to(acc), steps[:, i], rate)
        y[:, i] = einsum(state, Cs[:, i], "r h p n, r h n -> r h p")
        y[:, i] += D.to(acc)[:, None] * xs[:, i].to(acc)
        store(pending + i + 1, active & (i < certain))

    first = torch.where(writes, certain, 0)
    keeps = valid & (torch.arange(max_scheduled, device=x.device) >= first[:, None])
    row, token = keeps.nonzero(as_tuple=True)
    at = (positions.cursor[row] + pending[row] + token) % window_cache.length
    for cache, value in zip(window_cache, (xs, Bs, steps), strict=True):
        cache[rows.slot[row].long(), :, at] = value[row, token].to(cache.dtype)
    return scatter_rows(y.to(x.dtype), index, valid, x.shape[0])


def fold_reference(
    states: Tensor,
    window_cache: WindowCache,
    A_log: Tensor,
    block_table: Tensor,
    slot: Tensor,
    positions: ReplayPositions,
    rounding: Rounding | None = None,
) -> None:
    """Write each row's state after `positions.pending` tokens of the window cache to its write
    column.

    Arguments as in `replay_update_reference`; snapshots are not stored, and a write column of -1
    leaves the row out.
    """
    active = (slot >= 0) & (positions.write_column >= 0)
    acc = _accumulator(window_cache.x, states)
    state = _initial_states(
        states, block_table, slot, positions.read_column, torch.zeros_like(slot), active, acc
    )
    pending = torch.where(active & (positions.read_column >= 0), positions.pending, 0).long()
    past = gather_pending(window_cache, slot, positions.cursor, pending, acc)
    rate = -torch.exp(A_log.to(acc))
    for j in range(past.x.shape[1]):
        state = advance_state(state, past.x[:, j], past.B[:, j], past.dt[:, j], rate)
    key = _key(rounding, slot, positions.certain)
    _store(states, state, block_table, slot, positions.write_column, active, key)


def gather_pending(
    window_cache: WindowCache, slot: Tensor, cursor: Tensor, pending: Tensor, acc: torch.dtype
) -> WindowCache:
    """Each row's pending tokens from the first on, as `[rows, tokens, H or G, ...]` in `acc`; 0
    behind them. `tokens` is the most that any row has."""
    token = torch.arange(int(pending.max()) if len(pending) else 0, device=slot.device)
    within = token < pending[:, None]
    at = torch.where(within, (cursor[:, None] + token) % window_cache.length, 0).long()
    row = torch.where(pending > 0, slot, 0).long()[:, None]
    parts = []
    for cache in window_cache:
        taken = cache[row, :, at].to(acc)
        mask = within.reshape(*within.shape, *([1] * (taken.dim() - 2)))
        parts.append(torch.where(mask, taken, torch.zeros((), dtype=acc)))
    return WindowCache(*parts)


def advance_state(state: Tensor, x: Tensor, B: Tensor, step: Tensor, rate: Tensor) -> Tensor:
    """The state after one token, of which one with step 0 changes nothing.

    state: [rows, H, P, N]. x: [rows, H, P]. B: [rows, G, N]. step: [rows, H]. rate: [H], negative.
    """
    B = repeat(B, "r g n -> r (g h) 1 n", h=x.shape[1] // B.shape[1])
    inflow = rearrange(step[:, :, None] * x, "r h p -> r h p 1") * B
    return state * rearrange(torch.exp(step * rate), "r h -> r h 1 1") + inflow


def _key(rounding: Rounding | None, slot: Tensor, position: Tensor) -> Tensor | None:
    if rounding is None:
        return None
    seed = rounding.seed[slot.clamp(min=0).long()]
    return rounding_key_reference(seed, rounding.layer, position)


def _store(
    states: Tensor,
    state: Tensor,
    block_table: Tensor,
    slot: Tensor,
    column: Tensor,
    chosen: Tensor,
    key: Tensor | None,
) -> None:
    """Write the states of the `chosen` rows, bool `[rows]`, to their blocks."""
    block = physical_blocks(block_table, slot, column, chosen)[chosen]
    key = None if key is None else key[chosen]
    states[block] = round_state_reference(state[chosen], states.dtype, key)
