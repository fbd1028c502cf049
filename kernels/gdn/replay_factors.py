"""What the keys, queries and gates of one head come to: factors of its states, changes and outputs.

With q and k raw, rq and rk what makes their lengths 1 (times K ** -0.5 in q), D_ij the decay after
token j up to token i and D_i that of the state in memory, which lacks the pending tokens,

    change_i = beta_i v_i - beta_i rk_i D_i (S k_i) - sum over pending j of A_ij u_j
    u_i = change_i - sum over own j < i of lower_ij u_j
    o_i = rq_i D_i (S q_i) + sum over pending j of B_ij u_j + sum over own j <= i of upper_ij u_j

    A_ij, lower_ij = beta_i rk_i rk_j D_ij (k_i k_j),   B_ij, upper_ij = rq_i rk_j D_ij (q_i k_j)

Logarithms of decays are summed up token by token: none is a difference of sums, which would lose
digits where a token erases the state.
"""

# mypy: disable-error-code="assignment,var-annotated"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hybrid_runtime.kernels.common.math import softplus
from hybrid_runtime.kernels.replay.products import load_apart, product

OWN = tl.constexpr(16)
"""Of a row's own tokens: the least number that a product sums over."""


class Keys(NamedTuple):
    """Raw keys and queries of a head as operands: of each a part of K at a time.

    of_read, of_query: `[PART, QUERIES]`, the row's own.
    own: `[OWN, PART]`. past: `[PENDING, PART]`.
    """

    of_read: Any
    of_query: Any
    own: Any
    past: Any


class Gates(NamedTuple):
    """g: logarithms of the row's own decays `[QUERIES]`, 0 where there is no token. past_g: of the
    pending ones `[PENDING]`. beta: `[QUERIES]`. rk: `[OWN]`. past_rk: `[PENDING]`."""

    g: Any
    past_g: Any
    beta: Any
    rk: Any
    past_rk: Any


class Factors(NamedTuple):
    """See above; i are columns.

    beta, of_read, of_query: `[QUERIES]`, of v, S k and S q.
    A, B: `[PENDING, QUERIES]`.
    lower, upper: of each own token j a vector `[QUERIES]`.
    """

    beta: Any
    of_read: Any
    of_query: Any
    A: Any
    B: Any
    lower: Any
    upper: Any


class Weights(NamedTuple):
    """Of a state that is stored. past: of the pending u `[PENDING]`. own: of the row's own
    `[QUERIES]`. decay: of the state that is read."""

    past: Any
    own: Any
    decay: Any


@triton.jit
def ring_index(token, row, shape):
    """Where tokens lie in the ring; those of the row follow the pending ones."""
    index = row.cursor + token
    return tl.where(index >= shape.RING, index - shape.RING, index)


@triton.jit
def part_columns(s: tl.constexpr, shape):
    """Columns of K of a part, `[PART]`."""
    return s * shape.PART + tl.arange(0, shape.PART)


@triton.jit
def load_rows(p_rows, live, key_stride: tl.constexpr, shape):
    """Parts of keys or queries that are `live`, `[tokens, PART]` each; 0 elsewhere."""
    parts = ()
    for s in tl.static_range(shape.PARTS):
        n = part_columns(s, shape)
        mask = live[:, None] & (n < shape.KEY)[None, :]
        parts += (load_apart(p_rows[:, None] + n[None, :] * key_stride, mask),)
    return parts


@triton.jit
def squares(parts):
    """Sums of squares of rows, whose parts these are."""
    total = tl.zeros((parts[0].shape[0],), tl.float32)
    for s in tl.static_range(len(parts)):
        part = parts[s].to(tl.float32)
        total += tl.sum(part * part, axis=1)
    return total


@triton.jit
def load_gates(inputs, records, row, strides, shape):
    """a and b `[QUERIES]`, A_log, dt_bias; g and rk of the pending tokens `[PENDING]`."""
    i = tl.arange(0, shape.QUERIES)
    j = tl.arange(0, shape.PENDING)
    own = i < row.scheduled
    past = j < row.pending
    ring = ring_index(j, row, shape)
    return (
        tl.load(inputs.a + i * strides.a_token, mask=own, other=0.0).to(tl.float32),
        tl.load(inputs.b + i * strides.b_token, mask=own, other=0.0).to(tl.float32),
        tl.load(inputs.A_log).to(tl.float32),
        tl.load(inputs.dt_bias).to(tl.float32),
        tl.load(records.g + ring, mask=past, other=0.0),
        tl.load(records.rk + ring, mask=past, other=0.0),
    )


@triton.jit
def find_gates(loaded, rk, row, shape):
    """`Gates` of a head. loaded: by `load_gates`. rk: of its own keys."""
    a, b, A_log, dt_bias, past_g, past_rk = loaded
    own = tl.arange(0, shape.QUERIES) < row.scheduled
    g = -tl.exp(A_log) * softplus(a + dt_bias)
    return Gates(
        g=tl.where(own, g, 0.0),
        past_g=past_g,
        beta=1 / (1 + tl.exp(-b)),
        rk=rk,
        past_rk=past_rk,
    )


@triton.jit
def sum_behind(g, end):
    """Of each token j the sum of those in (j, end). g: `[tokens]`."""
    at = tl.arange(0, g.shape[0])
    inside = (at[:, None] > at[None, :]) & (at < end)[:, None]
    return tl.sum(tl.where(inside, g[:, None], 0.0), axis=0)


@triton.jit
def sum_between(g, TOKENS: tl.constexpr):
    """`[OWN, QUERIES]`: of the own tokens j and i the sum of those in (j, i]."""
    i = tl.arange(0, g.shape[0])
    j = tl.arange(0, OWN)
    total = tl.zeros((OWN, g.shape[0]), tl.float32)
    for t in tl.static_range(1, TOKENS):
        passed = tl.sum(tl.where(i == t, g, 0.0), axis=0)
        total += tl.where((j < t)[:, None] & (i >= t)[None, :], passed, 0.0)
    return total


@triton.jit
def combine(keys, gates, rk, rq, row, shape, dot_type: tl.constexpr):
    """`Factors` of a head. rk, rq: of its own keys and queries `[QUERIES]`."""
    i = tl.arange(0, shape.QUERIES)
    j = tl.arange(0, OWN)
    lower = tl.zeros((OWN, shape.QUERIES), tl.float32)
    upper = tl.zeros((OWN, shape.QUERIES), tl.float32)
    A = tl.zeros((shape.PENDING, shape.QUERIES), tl.float32)
    B = tl.zeros((shape.PENDING, shape.QUERIES), tl.float32)
    for s in tl.static_range(shape.PARTS):
        lower = product(keys.own[s], keys.of_read[s], lower, dot_type)
        upper = product(keys.own[s], keys.of_query[s], upper, dot_type)
        A = product(keys.past[s], keys.of_read[s], A, dot_type)
        B = product(keys.past[s], keys.of_query[s], B, dot_type)
    of_read = gates.beta * rk
    until = i[:, None] <= i[None, :]
    reached = tl.sum(tl.where(until, gates.g[:, None], 0.0), axis=0)
    behind = sum_behind(gates.past_g, row.pending)
    past = gates.past_rk[:, None] * tl.exp(behind[:, None] + reached[None, :])
    within = gates.rk[:, None] * tl.exp(sum_between(gates.g, shape.TOKENS))
    lower = lower * within * of_read[None, :]
    upper = upper * within * rq[None, :]
    lowers = ()
    uppers = ()
    for t in tl.static_range(shape.TOKENS):
        lowers += (tl.sum(tl.where((j == t)[:, None], lower, 0.0), axis=0),)
        uppers += (tl.sum(tl.where((j == t)[:, None], upper, 0.0), axis=0),)
    decay = tl.exp(reached + tl.sum(gates.past_g, axis=0))
    return Factors(
        beta=gates.beta,
        of_read=of_read * decay,
        of_query=rq * decay,
        A=A * past * of_read[None, :],
        B=B * past * rq[None, :],
        lower=lowers,
        upper=uppers,
    )


@triton.jit
def state_weights(gates, own_rk, after, row, shape):
    """`Weights` of a state after `after` of the row's tokens, or that many below 0 before the last
    pending one."""
    i = tl.arange(0, shape.QUERIES)
    j = tl.arange(0, shape.PENDING)
    past_end = row.pending + tl.minimum(after, 0)
    passed = tl.sum(tl.where(i < after, gates.g, 0.0), axis=0)
    behind = sum_behind(gates.past_g, past_end)
    total = tl.sum(tl.where(j < past_end, gates.past_g, 0.0), axis=0)
    return Weights(
        past=tl.where(j < past_end, gates.past_rk * tl.exp(behind + passed), 0.0),
        own=tl.where(i < after, own_rk * tl.exp(sum_behind(gates.g, after)), 0.0),
        decay=tl.exp(total + passed),
    )


@triton.jit
def line_offsets(shape):
    """Where a line of prepared factors has lower, upper, A, B and the weights of the two states,
    behind beta, of_read and of_query."""
    Q: tl.constexpr = shape.QUERIES
    LOWER: tl.constexpr = 3 * Q
    UPPER: tl.constexpr = LOWER + shape.TOKENS * Q
    A: tl.constexpr = UPPER + shape.TOKENS * Q
    B: tl.constexpr = A + shape.PENDING * Q
    WEIGHTS: tl.constexpr = B + shape.PENDING * Q
    return LOWER, UPPER, A, B, WEIGHTS


@triton.jit
def store_factors(line, factors, shape):
    i = tl.arange(0, shape.QUERIES)
    cell = tl.arange(0, shape.PENDING)[:, None] * shape.QUERIES + i[None, :]
    LOWER, UPPER, A, B, _ = line_offsets(shape)
    tl.store(line + i, factors.beta)
    tl.store(line + shape.QUERIES + i, factors.of_read)
    tl.store(line + 2 * shape.QUERIES + i, factors.of_query)
    for t in tl.static_range(shape.TOKENS):
        tl.store(line + LOWER + t * shape.QUERIES + i, factors.lower[t])
        tl.store(line + UPPER + t * shape.QUERIES + i, factors.upper[t])
    tl.store(line + A + cell, factors.A)
    tl.store(line + B + cell, factors.B)


@triton.jit
def load_factors(line, shape):
    i = tl.arange(0, shape.QUERIES)
    cell = tl.arange(0, shape.PENDING)[:, None] * shape.QUERIES + i[None, :]
    LOWER, UPPER, A, B, _ = line_offsets(shape)
    lowers = ()
    uppers = ()
    for t in tl.static_range(shape.TOKENS):
        lowers += (tl.load(line + LOWER + t * shape.QUERIES + i),)
        uppers += (tl.load(line + UPPER + t * shape.QUERIES + i),)
    return Factors(
        beta=tl.load(line + i),
        of_read=tl.load(line + shape.QUERIES + i),
        of_query=tl.load(line + 2 * shape.QUERIES + i),
        A=tl.load(line + A + cell),
        B=tl.load(line + B + cell),
        lower=lowers,
        upper=uppers,
    )


@triton.jit
def store_weights(line, i_state: tl.constexpr, weights, shape):
    i = tl.arange(0, shape.QUERIES)
    j = tl.arange(0, shape.PENDING)
    p_weights = line + line_offsets(shape)[4] + i_state * (shape.PENDING + shape.QUERIES + 1)
    tl.store(p_weights + j, weights.past)
    tl.store(p_weights + shape.PENDING + i, weights.own)
    tl.store(p_weights + shape.PENDING + shape.QUERIES, weights.decay)


@triton.jit
def load_weights(line, i_state, shape):
    i = tl.arange(0, shape.QUERIES)
    j = tl.arange(0, shape.PENDING)
    p_weights = line + line_offsets(shape)[4] + i_state * (shape.PENDING + shape.QUERIES + 1)
    return Weights(
        past=tl.load(p_weights + j),
        own=tl.load(p_weights + shape.PENDING + i),
        decay=tl.load(p_weights + shape.PENDING + shape.QUERIES),
    )
