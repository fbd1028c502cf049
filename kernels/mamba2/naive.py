"""Plain-torch specifications: the state update, the chunked scan, and the update with a ring.

Recurrence (Dao and Gu 2024, "Transformers are SSMs", section 3): with
``dt = clamp(softplus(dt_raw + dt_bias))`` and ``A = -exp(A_log)`` per head,
``h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T`` and ``y_t = h_t C_t + D x_t``.

In the replay layout the last tokens of a request may be pending: not in its state in memory, their
records in the ring. A step reads the state, folds them in, goes on over its own tokens, and
stores the state after its last certain token only if `ReplayPositions.writes` says so. The records
of tokens that are in no state then go to the ring.
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
from hybrid_runtime.kernels.mamba2.checks import check_records, check_ssm_shapes
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.replay.naive import (
    accumulator,
    gather_pending,
    initial_states,
    keep_records,
    store_states,
)
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions


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
    """Step every row token by token from one state, and store the state after every draft.

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
    acc = accumulator(x, states)
    index, valid = row_tokens(rows.cu_seqlens, max_scheduled, x.shape[0], rows.active)
    column = _read_column(rows)
    state = initial_states(states, rows.block_table, rows.slot, column, rows.active, acc)
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
    acc = accumulator(x, states)
    index, valid = row_tokens(rows.cu_seqlens, max_scheduled, x.shape[0], rows.active)
    column = _read_column(rows)
    state = initial_states(states, rows.block_table, rows.slot, column, rows.active, acc)
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


def replay_update_reference(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    records: Records,
    rows: ReplayRows,
    max_scheduled: int,
    rounding: Rounding | None = None,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
) -> Tensor:
    """Bring every row's state up to date, and step the row's tokens from there.

    A row with s tokens of which d are drafts folds its `pending` tokens of the ring into the state
    that it reads, then its own s tokens, which give outputs. If it writes, it stores the state
    after its first s - d tokens, and the last d are recorded; if not, all s are. A checkpoint is
    stored `checkpoint_after` tokens behind the pending ones, or before their end if that is
    negative. Everything is read before anything is written. A padded row and a row without tokens
    leave everything as it is.

    Args:
        x: [tokens, H, P].
        dt: [tokens, H], raw (before bias, softplus and clamp).
        A_log: [H].
        B: [tokens, G, N]; H is a multiple of G, head h uses group h // (H // G).
        C: [tokens, G, N].
        D: [H].
        dt_bias: [H].
        states: [blocks, H, P, N] in the state's own dtype, any block stride, changed in place.
        records: of this layer, changed in place. The ring is long enough for a row's pending tokens
            and those that it records not to overlap.
        rows: whose tokens these are, and where each row reads and writes.
        max_scheduled: upper bound of tokens per row.
        rounding: states are rounded stochastically; None: to nearest.
        dt_min: lower clamp of dt.
        dt_max: upper clamp of dt.

    Returns:
        [tokens, H, P] in x's dtype; 0 for padded rows. Arithmetic is fp32, or fp64 when x or the
        states are.

    Raises:
        ValueError: heads are no multiple of groups, or states or records have another shape.
    """
    heads_per_group = check_records(x, B, states, records)
    acc = accumulator(x, states)
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
    state = initial_states(states, rows.block_table, rows.slot, positions.read_column, active, acc)
    pending = torch.where(active & (positions.read_column >= 0), positions.pending, 0).long()
    past = Records(*gather_pending(records, rows.slot, positions.cursor, pending, acc))

    def store(passed: Tensor, here: Tensor) -> None:
        """Store what the rows `here` have after `passed` tokens from the first pending one on."""
        position = positions.certain - certain - pending + passed
        checkpoint = here & (positions.checkpoint_column >= 0)
        checkpoint &= pending + positions.checkpoint_after == passed
        written = here & writes & (pending + certain == passed)
        for column, chosen in (
            (positions.checkpoint_column, checkpoint),
            (positions.write_column, written),
        ):
            store_states(
                states, state, rows.block_table, rows.slot, column, chosen, rounding, position
            )

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
    keep_records(records, (xs, Bs, steps), rows.slot, positions.cursor + pending, keeps)
    return scatter_rows(y.to(x.dtype), index, valid, x.shape[0])


def fold_reference(
    states: Tensor,
    records: Records,
    A_log: Tensor,
    block_table: Tensor,
    slot: Tensor,
    positions: ReplayPositions,
    rounding: Rounding | None = None,
) -> None:
    """Write each row's state after `positions.pending` tokens of the ring to its write column.

    Arguments as in `replay_update_reference`; checkpoints are not stored, and a write column of -1
    leaves the row out.
    """
    active = (slot >= 0) & (positions.write_column >= 0)
    acc = accumulator(records.x, states)
    state = initial_states(states, block_table, slot, positions.read_column, active, acc)
    pending = torch.where(active & (positions.read_column >= 0), positions.pending, 0).long()
    past = Records(*gather_pending(records, slot, positions.cursor, pending, acc))
    rate = -torch.exp(A_log.to(acc))
    for j in range(past.x.shape[1]):
        state = advance_state(state, past.x[:, j], past.B[:, j], past.dt[:, j], rate)
    store_states(
        states, state, block_table, slot, positions.write_column, active, rounding,
        positions.certain,
    )  # fmt: skip


def advance_state(state: Tensor, x: Tensor, B: Tensor, step: Tensor, rate: Tensor) -> Tensor:
    """The state after one token, of which one with step 0 changes nothing.

    state: [rows, H, P, N]. x: [rows, H, P]. B: [rows, G, N]. step: [rows, H]. rate: [H], negative.
    """
    B = repeat(B, "r g n -> r (g h) 1 n", h=x.shape[1] // B.shape[1])
    inflow = rearrange(step[:, :, None] * x, "r h p -> r h p 1") * B
    return state * rearrange(torch.exp(step * rate), "r h -> r h 1 1") + inflow


def _read_column(rows: StateRows) -> Tensor:
    """Columns that states are read from, -1 where none is."""
    return torch.where(rows.read_column >= 0, rows.read_column + rows.read_offset, -1)


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
