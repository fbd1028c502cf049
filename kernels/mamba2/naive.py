"""Plain-torch specifications of the state update and the chunked scan.

Recurrence (Dao and Gu 2024, "Transformers are SSMs", section 3): with
``dt = clamp(softplus(dt_raw + dt_bias))`` and ``A = -exp(A_log)`` per head,
``h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T`` and ``y_t = h_t C_t + D x_t``.
"""

import math

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import (
    Cuts,
    StateRows,
    gather_rows,
    physical_blocks,
    row_tokens,
    scatter_rows,
    split_rows,
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
    rows: StateRows,
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
        rows: the rows, with read offsets in columns.
        max_scheduled: upper bound of tokens per row.
        dt_min: lower clamp of dt.
        dt_max: upper clamp of dt.

    Returns:
        [tokens, H, P] in x's dtype; 0 for padded rows. Arithmetic is fp32, or fp64 when x or the
        states are.

    Raises:
        ValueError: heads are no multiple of groups, or states have another shape.
    """
    heads_per_group = check_ssm_shapes(x, B, states)
    acc = _accumulator(x, states)
    index, valid = row_tokens(rows.cu_seqlens, max_scheduled, x.shape[0], rows.active)
    state = _initial_states(
        states, rows.block_table, rows.slot, rows.read_column, rows.read_offset, rows.active, acc
    )
    xs = gather_rows(x, index, valid).to(acc)
    Bs, Cs = (
        repeat(gather_rows(v, index, valid).to(acc), "r t g n -> r t (g h) n", h=heads_per_group)
        for v in (B, C)
    )
    step = _time_step(dt, dt_bias, index, valid, acc, dt_min, dt_max)
    decay = torch.exp(step * -torch.exp(A_log.to(acc)))
    skip = D.to(acc)[:, None] * xs

    first_stored = rows.cu_seqlens.diff().long() - 1 - rows.draft.long()
    y = torch.zeros_like(xs)
    for i in range(max_scheduled):
        # A step beyond a row's end has dt = 0: decay 1 and no input, so its state stays.
        inflow = (step[:, i, :, None] * xs[:, i])[..., None] * Bs[:, i, :, None, :]
        state = state * decay[:, i, :, None, None] + inflow
        y[:, i] = einsum(state, Cs[:, i], "r h p n, r h n -> r h p") + skip[:, i]
        stored = (valid[:, i] & (first_stored <= i)).nonzero()[:, 0]
        column = rows.write_column[stored].long() + i - first_stored[stored]
        target = rows.block_table[rows.slot[stored].long(), column].long()
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
    rows: StateRows,
    max_scheduled: int,
    chunk_size: int,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    cuts: Cuts | None = None,
) -> Tensor:
    """What `selective_state_update_reference` computes, by matrix products, for prefill rows.

    Within a chunk the outputs are a masked matrix product, between chunks the state is carried
    (Dao and Gu 2024, section 6). Prefill rows have no drafts (``draft`` is 0 in each row), so
    only the state after a row's last token is stored, in ``write_column``.

    Args:
        chunk_size: tokens per matrix product; any positive number gives the same result up to
            rounding. All other arguments as in `selective_state_update_reference`.
        cuts: states that are stored inside rows, and go on as they were stored; None: there are
            none.

    Returns:
        [tokens, H, P] in x's dtype; 0 for padded rows.

    Raises:
        ValueError: as in `selective_state_update_reference`, or chunk_size is not positive.
    """
    if cuts is not None:
        given = x, dt, A_log, B, C, D, dt_bias, states
        before, behind = (
            chunk_scan_reference(*given, part, max_scheduled, chunk_size, dt_min, dt_max)
            for part in split_rows(rows, cuts)
        )
        return before + behind
    heads_per_group = check_ssm_shapes(x, B, states)
    if chunk_size <= 0:
        raise ValueError(f"chunk_size is {chunk_size}, must be positive")
    acc = _accumulator(x, states)
    index, valid = row_tokens(rows.cu_seqlens, max_scheduled, x.shape[0], rows.active)
    state = _initial_states(
        states, rows.block_table, rows.slot, rows.read_column, rows.read_offset, rows.active, acc
    )
    state = rearrange(state, "r (g h) p n -> r g h p n", h=heads_per_group)
    xs = gather_rows(x, index, valid).to(acc)
    Bs, Cs = (rearrange(gather_rows(v, index, valid).to(acc), "r t g n -> r g t n") for v in (B, C))
    step = _time_step(dt, dt_bias, index, valid, acc, dt_min, dt_max)
    log_decay = step * -torch.exp(A_log.to(acc))
    log_decay = rearrange(log_decay, "r t (g h) -> r g h t", h=heads_per_group)
    inflow = rearrange(xs * step[..., None], "r t (g h) p -> r g h t p", h=heads_per_group)

    outputs = [torch.zeros_like(inflow[:, :, :, :0])]
    for begin in range(0, max_scheduled, chunk_size):
        part = slice(begin, begin + chunk_size)
        # Differences of long sums lose fp32 digits where the decay is strong: sum in fp64.
        total = log_decay[..., part].double().cumsum(-1)
        between = total[..., :, None] - total[..., None, :]
        causal = between.new_ones(between.shape[-2:], dtype=torch.bool).tril()
        weight = torch.exp(between.masked_fill(~causal, -math.inf)).to(acc)
        score = einsum(Cs[:, :, part], Bs[:, :, part], "r g l n, r g s n -> r g l s")
        within = (weight * score[:, :, None]) @ inflow[:, :, :, part]
        carried = einsum(Cs[:, :, part], state, "r g l n, r g h p n -> r g h l p")
        outputs.append(within + torch.exp(total).to(acc)[..., None] * carried)
        to_end = torch.exp(total[..., -1:] - total).to(acc)
        kept = inflow[:, :, :, part] * to_end[..., None]
        added = einsum(kept, Bs[:, :, part], "r g h l p, r g l n -> r g h p n")
        state = torch.exp(total[..., -1]).to(acc)[..., None, None] * state + added

    y = rearrange(torch.cat(outputs, dim=3), "r g h t p -> r t (g h) p") + D.to(acc)[:, None] * xs
    stored = (rows.active & (rows.cu_seqlens.diff() > 0)).nonzero()[:, 0]
    target = physical_blocks(rows.block_table, rows.slot, rows.write_column, rows.active)
    state = rearrange(state, "r g h p n -> r (g h) p n")
    states[target[stored]] = state[stored].to(states.dtype)
    return scatter_rows(y.to(x.dtype), index, valid, x.shape[0])


def check_ssm_shapes(x: Tensor, B: Tensor, states: Tensor) -> int:
    """Heads per group of x `[..., H, P]` and B `[..., G, N]`; raises `ValueError` where they or the
    states don't fit each other."""
    (heads, dim), (groups, state) = x.shape[-2:], B.shape[-2:]
    if heads % groups:
        raise ValueError(f"x has {heads} heads, must be a multiple of B's {groups} groups")
    if tuple(states.shape[1:]) != (heads, dim, state):
        raise ValueError(
            f"states is {tuple(states.shape)}, must be [blocks, {heads}, {dim}, {state}]"
        )
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
    """[rows, H, P, N], zeros where nothing is read."""
    reads = active & (read_column >= 0)
    state = states[physical_blocks(block_table, slot, read_column + read_offset, reads)].to(acc)
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
