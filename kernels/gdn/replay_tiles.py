"""The replay layout's step of one row, for the tiles of one head that a program has.

A tile of the state in memory is read once: its products with the row's keys and queries (and those
of pending tokens with what is recorded of them) give what each token changes, by a triangular
solve, and the outputs. A row that writes then adds what all tokens up to its last certain one have
changed, by one product more, while the tile is in registers; a checkpoint is the same sum up to
another token. See `replay_factors` for the algebra.

What is fp32 goes into products as a sum of three bfloat16 (`split`), two where only outputs need
it, keys and queries as they are. Each part of K is summed up by itself first, because the matrix
units' own additions round down; so is what is added to a state.

Drafts have no part in a state that is written, so that one that is not finite leaves it alone.
"""

# mypy: disable-error-code="assignment,var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from hybrid_runtime.kernels.gdn.replay_factors import (
    OWN,
    Keys,
    combine,
    find_gates,
    load_factors,
    load_gates,
    load_rows,
    load_weights,
    part_columns,
    ring_index,
    squares,
    state_weights,
    store_factors,
    store_weights,
)
from hybrid_runtime.kernels.gdn.replay_launch import Target
from hybrid_runtime.kernels.replay.products import (
    load_apart,
    name_back,
    product,
    rename,
    split,
    store_apart,
)
from hybrid_runtime.kernels.replay.rounding import round_state

EPS = tl.constexpr(1e-6)
"""`naive.NORM_EPS`."""


@triton.jit
def rename_all(parts):
    """Parts of K as operands that a product sums over, or whose columns it keeps."""
    renamed = ()
    for s in tl.static_range(len(parts)):
        renamed += (rename(parts[s]),)
    return renamed


@triton.jit
def transpose_all(parts):
    transposed = ()
    for s in tl.static_range(len(parts)):
        transposed += (tl.trans(rename(parts[s])),)
    return transposed


@triton.jit
def widen(tile):
    """Columns of 0 behind those of a tile, until there are as many as a product sums over."""
    high: tl.constexpr = tile.shape[0]
    if tile.shape[1] < OWN:
        many: tl.constexpr = OWN // tile.shape[1]
        tl.static_assert(many == 2)
        pair = tl.join(tile, tl.zeros_like(tile))
        tile = pair.permute(0, 2, 1).reshape(high, OWN)
    return tile


@triton.jit
def apply(past, weights, total, dot_type: tl.constexpr):
    """Sum over pending tokens of weight times u, with as many digits as the weights have parts;
    smallest parts first."""
    for level in tl.static_range(len(weights)):
        for p in tl.static_range(len(weights) - level):
            total = product(past[p], weights[len(weights) - 1 - level - p], total, dot_type)
    return total


@triton.jit
def store_state(
    target, weights, b_h, b_past, b_u, inputs, records, row, p, share, strides, shape, place,
    dot_type: tl.constexpr,
):  # fmt: skip
    """Store a tile of the state after `target.after` tokens of the row.

    b_h: parts of the tile in memory, renamed. b_past, b_u: u of the pending tokens
    `[ROWS, PENDING]` and of its own `[ROWS, QUERIES]`. p: its rows of V.
    """
    i = tl.arange(0, shape.QUERIES)
    o = tl.arange(0, OWN)
    j = tl.arange(0, shape.PENDING)
    # Keys are loaded again: registers that hold them throughout are what runs short.
    p_own = inputs.k + o * strides.k_token
    own_keys = rename_all(load_rows(p_own, o < target.after, strides.k_key, shape))
    p_past = records.k + ring_index(j, row, shape) * shape.KEY
    past_keys = rename_all(load_rows(p_past, j < row.pending, 1, shape))
    own = tl.where((i < target.after)[None, :], b_u * weights.own[None, :], 0.0)
    own = split(widen(own), 3, dot_type)
    past = split(b_past * weights.past[None, :], 3, dot_type)
    for s in tl.static_range(shape.PARTS):
        n = part_columns(s, shape)
        inflow = tl.zeros(b_h[s].shape, tl.float32)
        for k in tl.static_range(len(own)):
            inflow = product(own[len(own) - 1 - k], own_keys[s], inflow, dot_type)
            inflow = product(past[len(own) - 1 - k], past_keys[s], inflow, dot_type)
        h = name_back(b_h[s].to(tl.float32) * weights.decay + inflow)
        if place is not None:
            element = (share.head * shape.VALUE + p)[:, None] * shape.KEY + n[None, :]
            h = round_state(h, element, target.key, place)
        cell = p[:, None] * shape.VALUE_STRIDE + n[None, :] * shape.KEY_STRIDE
        inside = (p < shape.VALUE)[:, None] & (n < shape.KEY)[None, :]
        # Not read before the next step: evict it first.
        h = h.to(target.state.dtype.element_ty)
        tl.store(target.state + cell, h, mask=inside, cache_modifier=".cs")


@triton.jit
def load_tile(source, p, row, shape):
    """Parts of the tile of a state, `[ROWS, PART]` each. p: its rows of V."""
    parts = ()
    for s in tl.static_range(shape.PARTS):
        n = part_columns(s, shape)
        cell = p[:, None] * shape.VALUE_STRIDE + n[None, :] * shape.KEY_STRIDE
        known = (p < shape.VALUE)[:, None] & (n < shape.KEY)[None, :] & row.reads
        parts += (tl.load(source + cell, mask=known, other=0.0),)
    return parts


@triton.jit
def load_keys(inputs, row, strides, shape):
    """Keys and queries of the row's own tokens, as `load_rows`."""
    i = tl.arange(0, shape.QUERIES)
    own = i < row.scheduled
    b_k = load_rows(inputs.k + i * strides.k_token, own, strides.k_key, shape)
    return b_k, load_rows(inputs.q + i * strides.q_token, own, strides.q_key, shape)


@triton.jit
def load_others(inputs, records, row, strides, shape):
    """What else a head's factors are made of: own keys, as many as a product sums over, those of
    the pending tokens, and what `load_gates` gives."""
    o = tl.arange(0, OWN)
    j = tl.arange(0, shape.PENDING)
    b_own = load_rows(inputs.k + o * strides.k_token, o < row.scheduled, strides.k_key, shape)
    p_past = records.k + ring_index(j, row, shape) * shape.KEY
    b_past = load_rows(p_past, j < row.pending, 1, shape)
    return b_own, b_past, load_gates(inputs, records, row, strides, shape)


@triton.jit
def find_factors(b_k, b_q, others, records, row, share, shape, dot_type: tl.constexpr):
    """`Factors`, and `Gates` and norms of own keys for `state_weights`; stores the records that all
    tiles of the head share. b_k, b_q, others: as `load_keys` and `load_others` gave them."""
    b_own, b_past, loaded = others
    own_rk = tl.rsqrt(squares(b_k) + EPS)
    rq = tl.rsqrt(squares(b_q) + EPS) * shape.SCALE
    gates = find_gates(loaded, tl.rsqrt(squares(b_own) + EPS), row, shape)
    keys = Keys(
        of_read=transpose_all(b_k),
        of_query=transpose_all(b_q),
        own=rename_all(b_own),
        past=rename_all(b_past),
    )
    factors = combine(keys, gates, own_rk, rq, row, shape, dot_type)
    i = tl.arange(0, shape.QUERIES)
    own_ring = ring_index(row.pending + i, row, shape)
    kept = (i < row.scheduled) & (i >= row.first_recorded)
    if share.writes_g:
        tl.store(records.g + own_ring, gates.g, mask=kept)
    if share.writes_k:
        tl.store(records.rk + own_ring, own_rk, mask=kept)
        for s in tl.static_range(shape.PARTS):
            n = part_columns(s, shape)
            p_kept = records.k + own_ring[:, None] * shape.KEY + n[None, :]
            store_apart(p_kept, b_k[s], kept[:, None] & (n < shape.KEY)[None, :])
    return factors, gates, own_rk


@triton.jit
def prepare(
    inputs, records, target, checkpoint, line, row, share, strides, shape, dot_type: tl.constexpr
):  # fmt: skip
    """To `line` what the tiles of a head have in common; the records of that."""
    b_k, b_q = load_keys(inputs, row, strides, shape)
    others = load_others(inputs, records, row, strides, shape)
    factors, gates, own_rk = find_factors(b_k, b_q, others, records, row, share, shape, dot_type)
    store_factors(line, factors, shape)
    store_weights(line, 0, state_weights(gates, own_rk, target.after, row, shape), shape)
    store_weights(line, 1, state_weights(gates, own_rk, checkpoint.after, row, shape), shape)


@triton.jit
def update_tile(
    inputs, records, source, target, checkpoint, stored, line, out, row, share, strides, shape,
    place, dot_type: tl.constexpr,
):  # fmt: skip
    """Outputs of the row's tokens; the records of those from `row.first_recorded` on to the ring;
    and so many states as are `stored`: none, that of `target`, or that of `checkpoint` as well.

    inputs, records, row, share, strides, shape, target, checkpoint: see `replay_launch`.
    source: pointer to the head's state that is read.
    line: what `prepare` stored; None: it is found here.
    out: pointer to the head's outputs of the row's first token.
    place: `LastPlace` by which states are rounded stochastically; None: they are not.
    dot_type: of the products' operands.
    """
    HEADS: tl.constexpr = shape.HEADS
    VALUE: tl.constexpr = shape.VALUE
    ROWS: tl.constexpr = shape.ROWS
    QUERIES: tl.constexpr = shape.QUERIES
    SIZE: tl.constexpr = source.dtype.element_ty.primitive_bitwidth
    # What has 8 digits is one bfloat16, 11 digits are two, 24 are three.
    PIECES: tl.constexpr = 3 if SIZE == 32 else (1 if source.dtype.element_ty == tl.bfloat16 else 2)
    i = tl.arange(0, QUERIES)
    j = tl.arange(0, shape.PENDING)
    p = share.value + tl.arange(0, ROWS)
    in_value = p < VALUE
    is_own = i < row.scheduled

    # All loads come first: no load passes a store.
    tile = load_tile(source, p, row, shape)
    b_k, b_q = load_keys(inputs, row, strides, shape)
    if line is None:
        others = load_others(inputs, records, row, strides, shape)
    else:
        factors = load_factors(line, shape)
    p_u = records.u + ring_index(j, row, shape)[:, None] * VALUE + p[None, :]
    b_u = load_apart(p_u, (j < row.pending)[:, None] & in_value[None, :])
    p_v = inputs.v + i[:, None] * strides.v_token + p[None, :] * strides.v_value
    b_v = load_apart(p_v, is_own[:, None] & in_value[None, :])
    if line is None:
        factors, gates, own_rk = find_factors(
            b_k, b_q, others, records, row, share, shape, dot_type
        )
    of_read = transpose_all(b_k)
    of_query = transpose_all(b_q)
    read_k = tl.zeros((ROWS, QUERIES), tl.float32)
    read_q = tl.zeros((ROWS, QUERIES), tl.float32)
    b_h = rename_all(tile)
    for s in tl.static_range(shape.PARTS):
        operands = split(b_h[s].to(tl.float32), PIECES, dot_type)
        k_sum = tl.zeros((ROWS, QUERIES), tl.float32)
        q_sum = tl.zeros((ROWS, QUERIES), tl.float32)
        for k in tl.static_range(len(operands)):
            smaller = operands[len(operands) - 1 - k]
            k_sum = product(smaller, of_read[s], k_sum, dot_type)
            if len(operands) - k <= 2:
                q_sum = product(smaller, of_query[s], q_sum, dot_type)
        read_k += k_sum
        read_q += q_sum
    b_u = tl.trans(b_u)
    b_v = tl.trans(b_v).to(tl.float32)
    pieces = split(b_u, 3, dot_type)
    past = apply(pieces, split(factors.A, 3, dot_type), tl.zeros_like(read_k), dot_type)
    change = factors.beta[None, :] * b_v - factors.of_read[None, :] * read_k - past
    # Outputs are rounded to 16 bits: two parts of what only they need are enough.
    y = apply(pieces, split(factors.B, 2, dot_type), tl.zeros_like(read_q), dot_type)
    y += factors.of_query[None, :] * read_q
    for t in tl.static_range(shape.TOKENS):
        # Selected, not multiplied by 0: a draft may not be finite.
        u = tl.sum(tl.where((i == t)[None, :], change, 0.0), axis=1)[:, None]
        change = tl.where((i > t)[None, :], change - factors.lower[t][None, :] * u, change)
        y = tl.where((i >= t)[None, :], y + factors.upper[t][None, :] * u, y)
    kept = is_own & (i >= row.first_recorded)
    own_ring = ring_index(row.pending + i, row, shape)
    p_change = records.u + own_ring[:, None] * VALUE + p[None, :]
    store_apart(p_change, tl.trans(change), kept[:, None] & in_value[None, :])
    p_out = out + i[:, None] * (HEADS * VALUE) + p[None, :]
    y = tl.trans(y).to(out.dtype.element_ty)
    store_apart(p_out, y, is_own[:, None] & in_value[None, :])
    # One copy of the code for both: compilation takes by far more time than the length of it.
    i_state = 0
    while i_state < stored:
        chosen = Target(
            state=tl.where(i_state == 0, target.state, checkpoint.state),
            after=tl.where(i_state == 0, target.after, checkpoint.after),
            key=tl.where(i_state == 0, target.key, checkpoint.key),
        )
        if line is None:
            weights = state_weights(gates, own_rk, chosen.after, row, shape)
        else:
            weights = load_weights(line, i_state, shape)
        store_state(
            chosen, weights, b_h, b_u, change, inputs, records, row, p, share, strides, shape,
            place, dot_type,
        )  # fmt: skip
        i_state += 1
