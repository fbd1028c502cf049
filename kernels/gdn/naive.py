"""Plain-torch specifications: the gated delta rule, the same from a state that lacks some tokens,
the scan of prompts, and the update with a ring.

Recurrence (Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks"), per value head, with keys and
queries of length 1 (queries times K ** -0.5 besides),

    g = -exp(A_log) softplus(a + dt_bias),   beta = sigmoid(b)
    S' = exp(g) S,   u = beta (v - S' k),   S = S' + u k^T,   o = S q

g is one number per head (GDN) or one per channel of the key (KDA, "Kimi Linear"): `[..., Hv]` or
`[..., Hv, K]`.

In the replay layout the last tokens of a request may be pending: not in its state in memory, their
records in the ring. u, the key and g are all that it takes to bring the state to them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
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
from hybrid_runtime.kernels.gdn.checks import check_heads, check_inputs, check_records
from hybrid_runtime.kernels.gdn.records import Records
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

NORM_EPS = 1e-6
"""Added to the square of a norm, as deployed."""
CHUNK = 32
"""Tokens that `chunk_scan_reference` takes at once."""


def inverse_norm(x: Tensor) -> Tensor:
    """1 / norm over the last axis."""
    return torch.rsqrt(x.square().sum(-1) + NORM_EPS)


def gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, acc: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Logarithm of the decay, of a's shape, and beta, of b's shape, in `acc`."""
    rate = -torch.exp(A_log.to(acc))
    rate = rate[:, None] if dt_bias.dim() == 2 else rate
    return rate * F.softplus(a.to(acc) + dt_bias.to(acc)), torch.sigmoid(b.to(acc))


def decayed(state: Tensor, g: Tensor) -> Tensor:
    """state: `[..., H, V, K]`. g: `[..., H]` or `[..., H, K]`."""
    by_channel = g.dim() == state.dim() - 1
    return state * torch.exp(g[..., None, :] if by_channel else g[..., None, None])


def advance_state(
    state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The state after one token, and its u `[..., H, V]`. A token with g, beta and k of 0 changes
    nothing.

    state: `[..., H, V, K]`. k: `[..., H, K]`, normalised. v: `[..., H, V]`. g: as `decayed`.
    beta: `[..., H]`.
    """
    read = einsum(decayed(state, g), k, "... v k, ... k -> ... v")
    u = beta[..., None] * (v - read)
    return fold_token(state, u, k, g), u


def fold_token(state: Tensor, u: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """The state after one recorded token; arguments as `advance_state`'s."""
    return decayed(state, g) + u[..., :, None] * k[..., None, :]


def delta_rule_reference(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token from a state that has all tokens before them.

    Args:
        state: `[H, V, K]`.
        q: `[T, H, K]`, normalised and scaled.
        k: `[T, H, K]`, normalised.
        v: `[T, H, V]`.
        g: `[T, H]`, or `[T, H, K]`.
        beta: `[T, H]`.

    Returns:
        o `[T, H, V]`, u `[T, H, V]`, and the state after the last token.
    """
    outputs, changes = [], []
    for i in range(len(k)):
        state, u = advance_state(state, k[i], v[i], g[i], beta[i])
        outputs.append(einsum(state, q[i], "h v k, h k -> h v"))
        changes.append(u)
    return torch.stack(outputs), torch.stack(changes), state


def delta_rule_replayed_reference(
    state: Tensor,
    past: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor]:
    """What `delta_rule_reference` computes, from a state that lacks p tokens, by products: the WY
    form (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule").

    Where D_ij is the decay after token j up to token i, and D_i that of the state,

        (I + L) U = beta (v - D_i S k_i - sum over pending j of D_ij (k_i k_j) u_j)
        L_ij = beta_i D_ij (k_i k_j), j < i
        o_i = D_i S q_i + sum over j <= i of D_ij (q_i k_j) u_j

    No exponent is positive, and none is a difference of sums.

    Args:
        past: u `[p, H, V]`, k `[p, H, K]`, normalised, and g of the pending tokens. All other
            arguments as in `delta_rule_reference`.

    Returns:
        o and u of the T tokens.
    """
    past_u, past_k, past_g = past
    p = len(past_u)
    keys, passed = torch.cat([past_k, k]), _by_channel(torch.cat([past_g, g]))
    passing = decays_between(passed)[p:]
    reached = torch.exp(passed.cumsum(0))[p:]
    until = torch.arange(len(k), device=k.device)[:, None] + p
    at = torch.arange(len(keys), device=k.device)
    of_keys = einsum(k[:, None] * keys, passing, "i j h k, i j h k -> h i j")
    of_keys = of_keys * (at < until) * beta.T[..., None]
    of_queries = einsum(q[:, None] * keys, passing, "i j h k, i j h k -> h i j") * (at <= until)

    read = einsum(state, reached * k, "h v k, t h k -> h t v")
    change = (beta[..., None] * v).transpose(0, 1) - beta.T[..., None] * read
    change = change - einsum(of_keys[..., :p], past_u, "h i j, j h v -> h i v")
    lower = of_keys[..., p:] + torch.eye(len(k), dtype=k.dtype, device=k.device)
    u = torch.linalg.solve_triangular(lower, change, upper=False, unitriangular=True)
    o = einsum(state, reached * q, "h v k, t h k -> h t v")
    o = o + of_queries @ torch.cat([past_u.transpose(0, 1), u], 1)
    return o.transpose(0, 1), u.transpose(0, 1)


def fold_replayed_reference(state: Tensor, u: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """The state `[H, V, K]` after recorded tokens, by one product; arguments as in
    `delta_rule_replayed_reference`."""
    passed = _by_channel(g)
    behind = decays_between(passed)[-1] if len(g) else passed
    total = torch.exp(passed.sum(0))
    return state * total[:, None, :] + einsum(u, behind * k, "j h v, j h k -> h v k")


def decays_between(passed: Tensor) -> Tensor:
    """`[i, j, ...]`: the decay after token j up to token i; 1 where j >= i. passed: `[T, ...]`."""
    at = torch.arange(len(passed), device=passed.device)
    inside = (at > at[:, None]) & (at <= at[:, None, None])  # [i, j, l]
    return torch.exp(einsum(inside.to(passed.dtype), passed, "i j l, l ... -> i j ..."))


def _by_channel(g: Tensor) -> Tensor:
    return g[..., None] if g.dim() == 2 else g


def chunk_scan_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    rows: StateRows,
    max_scheduled: int,
    cuts: Cuts | None = None,
) -> Tensor:
    """What `delta_rule_reference` computes, for prefill rows: chunk after chunk by its products.

    The initial state of a row is read from column ``read_column + read_offset``. Prefill rows have
    no drafts (``draft`` is 0 in each row), so only the state after a row's last token is stored, in
    ``write_column``. All states are read before the first one is written. A padded row and a row
    without tokens leave everything as it is.

    Args:
        q: [tokens, Hk, K], as the convolution leaves it.
        k: [tokens, Hk, K], likewise.
        v: [tokens, Hv, V]; Hv is a multiple of Hk, value head h uses key head h // (Hv // Hk).
        a: [tokens, Hv], or [tokens, Hv, K] for a decay per channel.
        b: [tokens, Hv].
        A_log: [Hv].
        dt_bias: [Hv], or [Hv, K].
        states: [blocks, Hv, V, K] in the state's own dtype, any strides, changed in place.
        rows: the rows, with read offsets in columns.
        max_scheduled: upper bound of tokens per row.
        cuts: states that are stored inside rows, and go on as they were stored; None: there are
            none.

    Returns:
        [tokens, Hv, V] in v's dtype; 0 for padded rows. Arithmetic is fp32, or fp64 when v or the
        states are.

    Raises:
        ValueError: an input or the states have another shape.
    """
    if cuts is not None:
        given = q, k, v, a, b, A_log, dt_bias, states
        before, behind = (
            chunk_scan_reference(*given, part, max_scheduled) for part in split_rows(rows, cuts)
        )
        return before + behind
    check_inputs(q, k, v, a, b, A_log, dt_bias)
    group = check_heads(k, v, states)
    acc = accumulator(v, states)
    index, valid = row_tokens(rows.cu_seqlens, max_scheduled, v.shape[0], rows.active)
    column = torch.where(rows.read_column >= 0, rows.read_column + rows.read_offset, -1)
    state = initial_states(states, rows.block_table, rows.slot, column, rows.active, acc)
    keys, queries = normalised(q.to(acc), k.to(acc), group)
    # Rows are independent, as heads are: here they are more heads. A token that a row has not got
    # has g, beta and k of 0.
    every = [
        rearrange(gather_rows(part, index, valid), "r t h ... -> t (r h) ...")
        for part in (queries, keys, v.to(acc), *gates(a, b, A_log, dt_bias, acc))
    ]
    heads = rearrange(state, "r h v k -> (r h) v k")
    outputs = []
    for begin in range(0, max_scheduled, CHUNK):
        q_, k_, v_, g, beta = (part[begin : begin + CHUNK] for part in every)
        none = v_[:0], k_[:0], g[:0]
        o, u = delta_rule_replayed_reference(heads, none, q_, k_, v_, g, beta)
        heads = fold_replayed_reference(heads, u, k_, g)
        outputs.append(o)
    state = rearrange(heads, "(r h) v k -> r h v k", h=v.shape[1])
    stored = rows.active & (rows.cu_seqlens.diff() > 0)
    block = physical_blocks(rows.block_table, rows.slot, rows.write_column, stored)
    states[block[stored]] = state[stored].to(states.dtype)
    y = rearrange(torch.cat([every[2][:0], *outputs]), "t (r h) v -> r t h v", h=v.shape[1])
    return scatter_rows(y.to(v.dtype), index, valid, v.shape[0])


def normalised(q: Tensor, k: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """k of length 1 and q of length K ** -0.5, each for its `group` value heads:
    `[..., Hk, K]` to `[..., Hv, K]`."""
    keys = k * inverse_norm(k)[..., None]
    queries = q * (inverse_norm(q) * k.shape[-1] ** -0.5)[..., None]
    return keys.repeat_interleave(group, -2), queries.repeat_interleave(group, -2)


def replay_update_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    records: Records,
    rows: ReplayRows,
    max_scheduled: int,
    rounding: Rounding | None = None,
) -> Tensor:
    """Bring every row's state up to date, and step the row's tokens from there.

    A row with s tokens of which d are drafts folds its `pending` tokens of the ring into the state
    that it reads, then its own s tokens, which give outputs. If it writes, it stores the state
    after its first s - d tokens, and the last d are recorded; if not, all s are. A checkpoint is
    stored `checkpoint_after` tokens behind the pending ones, or before their end if that is
    negative. Everything is read before anything is written. A padded row and a row without tokens
    leave everything as it is.

    Args:
        q: [tokens, Hk, K], as the convolution leaves it.
        k: [tokens, Hk, K], likewise.
        v: [tokens, Hv, V]; Hv is a multiple of Hk, value head h uses key head h // (Hv // Hk).
        a: [tokens, Hv], or [tokens, Hv, K] for a decay per channel.
        b: [tokens, Hv].
        A_log: [Hv].
        dt_bias: [Hv], or [Hv, K].
        states: [blocks, Hv, V, K] in the state's own dtype, any strides, changed in place.
        records: of this layer, changed in place. The ring is long enough for a row's pending tokens
            and those that it records not to overlap.
        rows: whose tokens these are, and where each row reads and writes.
        max_scheduled: upper bound of tokens per row.
        rounding: states are rounded stochastically; None: to nearest.

    Returns:
        [tokens, Hv, V] in v's dtype; 0 for padded rows. Arithmetic is fp32, or fp64 when v or the
        states are.

    Raises:
        ValueError: an input, the states or the records have another shape.
    """
    check_inputs(q, k, v, a, b, A_log, dt_bias)
    group = check_records(k, v, states, records)
    acc = accumulator(v, states)
    positions = rows.positions
    scheduled = rows.cu_seqlens[1:] - rows.cu_seqlens[:-1]
    certain = (scheduled - rows.draft).long()
    active = (rows.slot >= 0) & (positions.write_column >= 0) & (scheduled > 0)
    writes = active & (positions.writes > 0)
    index, valid = row_tokens(rows.cu_seqlens, max_scheduled, v.shape[0], active)
    gathered = [
        gather_rows(part, index, valid) for part in (q, k, v, *gates(a, b, A_log, dt_bias, acc))
    ]
    raw, (qs, ks, vs, gs, betas) = gathered[1], (part.to(acc) for part in gathered)
    rk = inverse_norm(ks)
    keys, queries = normalised(qs, ks, group)
    state = initial_states(states, rows.block_table, rows.slot, positions.read_column, active, acc)
    pending = torch.where(active & (positions.read_column >= 0), positions.pending, 0).long()

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

    past_u, past_k, past_g = past_records(records, rows.slot, positions.cursor, pending, acc)
    for j in range(past_u.shape[1]):
        state = fold_token(state, past_u[:, j], past_k[:, j], past_g[:, j])
        store(torch.full_like(pending, j + 1), active & (j < pending))
    outputs, changes = torch.zeros_like(vs), torch.zeros_like(vs)
    for i in range(max_scheduled):
        state, changes[:, i] = advance_state(state, keys[:, i], vs[:, i], gs[:, i], betas[:, i])
        outputs[:, i] = einsum(state, queries[:, i], "r h v k, r h k -> r h v")
        store(pending + i + 1, active & (i < certain))

    first = torch.where(writes, certain, 0)
    keeps = valid & (torch.arange(max_scheduled, device=v.device) >= first[:, None])
    fresh = changes, raw, gs, rk
    keep_records(records, fresh, rows.slot, positions.cursor + pending, keeps)
    return scatter_rows(outputs.to(v.dtype), index, valid, v.shape[0])


def fold_reference(
    states: Tensor,
    records: Records,
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
    acc = accumulator(records.u, states)
    state = initial_states(states, block_table, slot, positions.read_column, active, acc)
    pending = torch.where(active & (positions.read_column >= 0), positions.pending, 0).long()
    past_u, past_k, past_g = past_records(records, slot, positions.cursor, pending, acc)
    for j in range(past_u.shape[1]):
        state = fold_token(state, past_u[:, j], past_k[:, j], past_g[:, j])
    store_states(
        states, state, block_table, slot, positions.write_column, active, rounding,
        positions.certain,
    )  # fmt: skip


def past_records(
    records: Records, slot: Tensor, cursor: Tensor, pending: Tensor, acc: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """u, normalised k and g of each row's pending tokens, `[rows, tokens, Hv, ...]` in `acc`; 0
    behind them."""
    u, k, g, rk = gather_pending(records, slot, cursor, pending, acc)
    keys = (k * rk[..., None]).repeat_interleave(u.shape[2] // k.shape[2], 2)
    return u, keys, g
