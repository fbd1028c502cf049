"""Mamba-2 state update for few tokens and chunked scan for prefill (references).

Recurrence (Dao and Gu 2024, "Transformers are SSMs", section 3): with
``dt = clamp(softplus(dt_raw + dt_bias))`` and ``A = -exp(A_log)`` per head,
``h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T`` and ``y_t = h_t C_t + D x_t``.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import (
    gather_rows,
    physical_blocks,
    row_tokens,
    scatter_rows,
)


def selective_state_update_reference(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    block_table: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    draft: Tensor,
    read_column: Tensor,
    read_offset: Tensor,
    write_column: Tensor,
    max_scheduled: int,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
) -> Tensor:
    """Step every row token by token from one state, and store the state after every guess.

    The initial state of a row is read from column ``read_column + read_offset``. Of a row with s
    tokens of which d are drafts, the state after token i (counted from 0) is stored in column
    ``write_column + i - (s - 1 - d)`` when that is not below ``write_column``; columns
    ``write_column .. write_column + d`` thus hold the states after ``s - d .. s`` tokens. All
    states are read before the first one is written.

    Args:
        x: [tokens, H, P].
        dt: [tokens, H], raw (before bias, softplus and clamp).
        A_log: [H].
        B: [tokens, G, N]; H is a multiple of G, head h uses group h // (H // G).
        C: [tokens, G, N].
        D: [H].
        dt_bias: [H].
        states: [blocks, H, P, N] in the state's own dtype, any block stride, changed in place.
        block_table: int32 [slots, columns] of physical blocks.
        slot: int32 [rows]; -1 = padded row.
        cu_seqlens: int32 [rows + 1].
        draft: int32 [rows].
        read_column: int32 [rows]; -1 = zero initial state, nothing is read.
        read_offset: int32 [rows], in columns.
        write_column: int32 [rows]; -1 = padded row.
        max_scheduled: upper bound of tokens per row.
        dt_min: lower clamp of dt.
        dt_max: upper clamp of dt.

    Returns:
        [tokens, H, P] in x's dtype; 0 for padded rows. Arithmetic is fp32, or fp64 when x or the
        states are.

    Raises:
        ValueError: heads are no multiple of groups, or states have another shape.
    """
    heads_per_group = _check(x, B, states)
    acc = _accumulator(x, states)
    active = (slot >= 0) & (write_column >= 0)
    index, valid = row_tokens(cu_seqlens, max_scheduled, x.shape[0], active)
    state = _initial_states(states, block_table, slot, read_column, read_offset, active, acc)
    xs = gather_rows(x, index, valid).to(acc)
    Bs = gather_rows(B, index, valid).to(acc).repeat_interleave(heads_per_group, dim=2)
    Cs = gather_rows(C, index, valid).to(acc).repeat_interleave(heads_per_group, dim=2)
    step = _time_step(dt, dt_bias, index, valid, acc, dt_min, dt_max)
    decay = torch.exp(step * -torch.exp(A_log.to(acc)))
    skip = D.to(acc)[:, None] * xs

    first_stored = (cu_seqlens[1:] - cu_seqlens[:-1]).long() - 1 - draft.long()
    y = torch.zeros_like(xs)
    for i in range(max_scheduled):
        # A step beyond a row's end has dt = 0: decay 1 and no input, so its state stays.
        inflow = (step[:, i, :, None] * xs[:, i])[..., None] * Bs[:, i, :, None, :]
        state = state * decay[:, i, :, None, None] + inflow
        y[:, i] = torch.einsum("rhpn,rhn->rhp", state, Cs[:, i]) + skip[:, i]
        stored = (valid[:, i] & (first_stored <= i)).nonzero()[:, 0]
        column = write_column[stored].long() + i - first_stored[stored]
        target = block_table[slot[stored].long(), column].long()
        states[target] = state[stored].to(states.dtype)
    return scatter_rows(y.to(x.dtype), index, valid, x.shape[0])


def chunk_scan_reference(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    block_table: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    draft: Tensor,
    read_column: Tensor,
    read_offset: Tensor,
    write_column: Tensor,
    max_scheduled: int,
    chunk_size: int,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
) -> Tensor:
    """What `selective_state_update_reference` computes, by matrix products, for prefill rows.

    Within a chunk the outputs are a masked matrix product, between chunks the state is carried
    (Dao and Gu 2024, section 6). Prefill rows have no drafts (``draft`` is 0 in each row), so
    only the state after a row's last token is stored, in ``write_column``.

    Args:
        chunk_size: tokens per matrix product; any positive number gives the same result up to
            rounding. All other arguments as in :func:`selective_state_update_reference`.

    Returns:
        [tokens, H, P] in x's dtype; 0 for padded rows.

    Raises:
        ValueError: as in :func:`selective_state_update_reference`, or chunk_size is not positive.
    """
    heads_per_group = _check(x, B, states)
    if chunk_size <= 0:
        raise ValueError(f"chunk_size is {chunk_size}, must be positive")
    del draft
    acc = _accumulator(x, states)
    active = (slot >= 0) & (write_column >= 0)
    index, valid = row_tokens(cu_seqlens, max_scheduled, x.shape[0], active)
    rows, groups = index.shape[0], B.shape[1]
    state = _initial_states(states, block_table, slot, read_column, read_offset, active, acc)
    state = state.unflatten(1, (groups, heads_per_group))
    xs = gather_rows(x, index, valid).to(acc)
    Bs = gather_rows(B, index, valid).to(acc).transpose(1, 2)  # [rows, G, steps, N]
    Cs = gather_rows(C, index, valid).to(acc).transpose(1, 2)
    step = _time_step(dt, dt_bias, index, valid, acc, dt_min, dt_max)
    log_decay = step * -torch.exp(A_log.to(acc))
    inflow = (xs * step[..., None]).unflatten(2, (groups, heads_per_group))
    inflow = inflow.permute(0, 2, 3, 1, 4)  # [rows, G, H // G, steps, P]

    outputs = []
    for begin in range(0, max_scheduled, chunk_size):
        part = slice(begin, min(begin + chunk_size, max_scheduled))
        # Differences of long sums lose fp32 digits where the decay is strong: sum in fp64.
        total = log_decay[:, part].double().cumsum(1).unflatten(2, (groups, heads_per_group))
        total = total.permute(0, 2, 3, 1)  # [rows, G, H // G, length]
        length = total.shape[-1]
        between = total[..., :, None] - total[..., None, :]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        weight = torch.exp(between.masked_fill(~causal, -math.inf)).to(acc)
        score = (Cs[:, :, part] @ Bs[:, :, part].transpose(-1, -2))[:, :, None]
        from_state = torch.einsum("rgln,rghpn->rghlp", Cs[:, :, part], state)
        carried = torch.exp(total).to(acc)[..., None] * from_state
        outputs.append((weight * score) @ inflow[:, :, :, part] + carried)
        to_end = torch.exp(total[..., -1:] - total).to(acc)
        added = torch.einsum(
            "rghlp,rgln->rghpn", inflow[:, :, :, part] * to_end[..., None], Bs[:, :, part]
        )
        state = torch.exp(total[..., -1]).to(acc)[..., None, None] * state + added

    if not outputs:
        return torch.zeros_like(x)
    y = torch.cat(outputs, dim=3).permute(0, 3, 1, 2, 4).reshape(xs.shape)
    y = y + D.to(acc)[:, None] * xs
    stored = valid[:, 0].nonzero()[:, 0]
    target = block_table[slot[stored].long(), write_column[stored].long()].long()
    states[target] = state.reshape(rows, *states.shape[1:])[stored].to(states.dtype)
    return scatter_rows(y.to(x.dtype), index, valid, x.shape[0])


def _check(x: Tensor, B: Tensor, states: Tensor) -> int:
    heads, groups = x.shape[1], B.shape[1]
    if heads % groups:
        raise ValueError(f"x has {heads} heads, must be a multiple of B's {groups} groups")
    expected = (heads, x.shape[2], B.shape[2])
    if tuple(states.shape[1:]) != expected:
        raise ValueError(f"states is {tuple(states.shape)}, must be [blocks, *{expected}]")
    return heads // groups


def _accumulator(x: Tensor, states: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, states.dtype), torch.float32)


def _initial_states(
    states: Tensor,
    block_table: Tensor,
    slot: Tensor,
    read_column: Tensor,
    read_offset: Tensor,
    active: Tensor,
    acc: torch.dtype,
) -> Tensor:
    reads = active & (read_column >= 0)
    block = physical_blocks(block_table, slot, read_column + read_offset, reads)
    state = states[block].to(acc)
    return torch.where(reads[:, None, None, None], state, state.new_zeros(()))


def _time_step(
    dt: Tensor,
    dt_bias: Tensor,
    index: Tensor,
    valid: Tensor,
    acc: torch.dtype,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    """[rows, steps, H], 0 where there is no token."""
    raw = gather_rows(dt, index, valid).to(acc)
    step = F.softplus(raw + dt_bias.to(acc)).clamp(dt_min, dt_max)
    return torch.where(valid[:, :, None], step, step.new_zeros(()))
