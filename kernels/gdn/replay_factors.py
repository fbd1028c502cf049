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
from hybrid_runtime.kernels.replay.products import load_apart, product, split

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
    A, B: `[PENDING, QUERIES]`, as operands.
    lower, upper: of each own token j a vector `[QUERIES]`.
    """

    beta: Any
    of_read: Any
    of_query: Any
    A: Any
    B: Any
    lower: Any
    upper: Any


@triton.jit
def ring_index(token, row, shape):
    """Where tokens lie in the ring; those of the row follow the pending ones."""
    index = row.cursor + token
    return tl.where(index >= shape.RING, index - shape.RING, index)


@triton.jit
def load_rows(p_rows, live, n, key_stride: tl.constexpr, shape):
    """Parts of keys or queries that are `live`, `[tokens, PART]` each; 0 elsewhere."""
    parts = ()
    for s in tl.static_range(shape.PARTS):
        part = n + s * shape.PART
        mask = live[:, None] & (part < shape.KEY)[None, :]
        parts += (load_apart(p_rows[:, None] + part[None, :] * key_stride, mask),)
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
def load_gates(inputs, records, row, strides, shape, rk):
    """`Gates` of a head. rk: of its own keys."""
    i = tl.arange(0, shape.QUERIES)
    j = tl.arange(0, shape.PENDING)
    own = i < row.scheduled
    ring = ring_index(j, row, shape)
    a = tl.load(inputs.a + i * strides.a_token, mask=own, other=0.0).to(tl.float32)
    b = tl.load(inputs.b + i * strides.b_token, mask=own, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(inputs.A_log).to(tl.float32))
    g = rate * softplus(a + tl.load(inputs.dt_bias).to(tl.float32))
    return Gates(
        g=tl.where(own, g, 0.0),
        past_g=tl.load(records.g + ring, mask=j < row.pending, other=0.0),
        beta=1 / (1 + tl.exp(-b)),
        rk=rk,
        past_rk=tl.load(records.rk + ring, mask=j < row.pending, other=0.0),
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
    # Outputs are rounded to 16 bits: two parts of what only they need are enough.
    return Factors(
        beta=gates.beta,
        of_read=of_read * decay,
        of_query=rq * decay,
        A=split(A * past * of_read[None, :], 3, dot_type),
        B=split(B * past * rq[None, :], 2, dot_type),
        lower=lowers,
        upper=uppers,
    )


@triton.jit
def state_factors(gates, own_rk, after, row, shape):
    """Of a state after `after` of the row's tokens, or that many below 0 before the last pending
    one: weights of the pending u `[PENDING]`, of its own `[QUERIES]`, and the decay of the state
    that is read."""
    i = tl.arange(0, shape.QUERIES)
    j = tl.arange(0, shape.PENDING)
    past_end = row.pending + tl.minimum(after, 0)
    passed = tl.sum(tl.where(i < after, gates.g, 0.0), axis=0)
    behind = sum_behind(gates.past_g, past_end)
    past = tl.where(j < past_end, gates.past_rk * tl.exp(behind + passed), 0.0)
    own = tl.where(i < after, own_rk * tl.exp(sum_behind(gates.g, after)), 0.0)
    total = tl.sum(tl.where(j < past_end, gates.past_g, 0.0), axis=0)
    return past, own, tl.exp(total + passed)
