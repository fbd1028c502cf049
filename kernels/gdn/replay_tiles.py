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
    load_gates,
    load_rows,
    ring_index,
    squares,
    state_factors,
)
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
    target, b_h, b_past, b_u, own_keys, past_keys, gates, own_rk, row, cell, element, inside, shape,
    place, dot_type: tl.constexpr,
):  # fmt: skip
    """Store a tile of the state after `target.after` tokens of the row.

    b_h: parts of the tile in memory, renamed. b_past, b_u: u of the pending tokens
    `[ROWS, PENDING]` and of its own `[ROWS, QUERIES]`.
    """
    i = tl.arange(0, shape.QUERIES)
    past_weights, own_weights, decay = state_factors(gates, own_rk, target.after, row, shape)
    own = tl.where((i < target.after)[None, :], b_u * own_weights[None, :], 0.0)
    own = split(widen(own), 3, dot_type)
    past = split(b_past * past_weights[None, :], 3, dot_type)
    for s in tl.static_range(shape.PARTS):
        inflow = tl.zeros((shape.ROWS, shape.PART), tl.float32)
        for k in tl.static_range(len(own)):
            inflow = product(own[len(own) - 1 - k], own_keys[s], inflow, dot_type)
            inflow = product(past[len(own) - 1 - k], past_keys[s], inflow, dot_type)
        h = name_back(b_h[s].to(tl.float32) * decay + inflow)
        if place is not None:
            h = round_state(h, element + s * shape.PART, target.key, place)
        # Not read before the next step: evict it first.
        p_state = target.state + cell + s * (shape.PART * shape.KEY_STRIDE)
        h = h.to(target.state.dtype.element_ty)
        tl.store(p_state, h, mask=inside[s], cache_modifier=".cs")


@triton.jit
def update_tiles(
    inputs, records, source, target, checkpoint, keeps, out, row, share, strides, shape, place,
    dot_type: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """Outputs of the row's tokens; the records of those from `row.first_recorded` on to the ring;
    if WRITES, the states of `target`, and of `checkpoint` if the row `keeps` one.

    inputs, records, row, share, strides, shape, target, checkpoint: see `replay_launch`.
    source: pointer to the head's state that is read.
    out: pointer to the head's outputs of the row's first token.
    place: `LastPlace` by which states are rounded stochastically; None: they are not.
    dot_type: of the products' operands.
    """
    HEADS: tl.constexpr = shape.HEADS
    KEY: tl.constexpr = shape.KEY
    VALUE: tl.constexpr = shape.VALUE
    PART: tl.constexpr = shape.PART
    PARTS: tl.constexpr = shape.PARTS
    ROWS: tl.constexpr = shape.ROWS
    QUERIES: tl.constexpr = shape.QUERIES
    SIZE: tl.constexpr = source.dtype.element_ty.primitive_bitwidth
    # What has 8 digits is one bfloat16, 11 digits are two, 24 are three.
    PIECES: tl.constexpr = 3 if SIZE == 32 else (1 if source.dtype.element_ty == tl.bfloat16 else 2)
    n = tl.arange(0, PART)
    i = tl.arange(0, QUERIES)
    o = tl.arange(0, OWN)
    j = tl.arange(0, shape.PENDING)
    p = share.value + tl.arange(0, ROWS)
    cell = p[:, None] * shape.VALUE_STRIDE + n[None, :] * shape.KEY_STRIDE
    is_own = i < row.scheduled
    past_ring = ring_index(j, row, shape)
    own_ring = ring_index(row.pending + i, row, shape)

    # The state of a single tile is on its way while all else is loaded; those of several are
    # copied ahead by the loop.
    early = ()
    if shape.RUN == 1:
        for s in tl.static_range(PARTS):
            known = (p < VALUE)[:, None] & (n + s * PART < KEY)[None, :] & row.reads
            p_early = source + cell + s * (PART * shape.KEY_STRIDE)
            early += (tl.load(p_early, mask=known, other=0.0),)
    # All loads come first: no load passes a store.
    p_k = inputs.k + i * strides.k_token
    b_k = load_rows(p_k, is_own, n, strides.k_key, shape)
    b_q = load_rows(inputs.q + i * strides.q_token, is_own, n, strides.q_key, shape)
    b_own = load_rows(inputs.k + o * strides.k_token, o < row.scheduled, n, strides.k_key, shape)
    p_past = records.k + past_ring * KEY
    b_past = load_rows(p_past, j < row.pending, n, 1, shape)
    own_rk = tl.rsqrt(squares(b_k) + EPS)
    rq = tl.rsqrt(squares(b_q) + EPS) * shape.SCALE
    gates = load_gates(inputs, records, row, strides, shape, tl.rsqrt(squares(b_own) + EPS))
    keys = Keys(
        of_read=transpose_all(b_k),
        of_query=transpose_all(b_q),
        own=rename_all(b_own),
        past=rename_all(b_past),
    )
    factors = combine(keys, gates, own_rk, rq, row, shape, dot_type)

    kept = is_own & (i >= row.first_recorded)
    if share.writes_g:
        tl.store(records.g + own_ring, gates.g, mask=kept)
    if share.writes_k:
        tl.store(records.rk + own_ring, own_rk, mask=kept)
        for s in tl.static_range(PARTS):
            part = n + s * PART
            p_kept = records.k + own_ring[:, None] * KEY + part[None, :]
            store_apart(p_kept, b_k[s], kept[:, None] & (part < KEY)[None, :])
    own_keys = ()
    if WRITES:
        for s in tl.static_range(PARTS):
            folded = (o < row.certain)[:, None]
            own_keys += (tl.where(folded, keys.own[s], tl.zeros_like(keys.own[s])),)

    for r in tl.range(shape.RUN, num_stages=shape.STAGES):
        down = r * ROWS
        in_value = p + down < VALUE
        p_source = source + cell + down * shape.VALUE_STRIDE
        read_k = tl.zeros((ROWS, QUERIES), tl.float32)
        read_q = tl.zeros((ROWS, QUERIES), tl.float32)
        b_h = ()
        inside = ()
        for s in tl.static_range(PARTS):
            mask = in_value[:, None] & (n + s * PART < KEY)[None, :]
            if shape.RUN == 1:
                tile = early[s]
            else:
                p_part = p_source + s * (PART * shape.KEY_STRIDE)
                tile = tl.load(p_part, mask=mask & row.reads, other=0.0)
            tile = rename(tile)
            b_h += (tile,)
            inside += (mask,)
            operands = split(tile.to(tl.float32), PIECES, dot_type)
            k_sum = tl.zeros((ROWS, QUERIES), tl.float32)
            q_sum = tl.zeros((ROWS, QUERIES), tl.float32)
            for k in tl.static_range(len(operands)):
                smaller = operands[len(operands) - 1 - k]
                k_sum = product(smaller, keys.of_read[s], k_sum, dot_type)
                if len(operands) - k <= 2:
                    q_sum = product(smaller, keys.of_query[s], q_sum, dot_type)
            read_k += k_sum
            read_q += q_sum
        p_u = records.u + past_ring[:, None] * VALUE + (p + down)[None, :]
        b_u = tl.trans(load_apart(p_u, (j < row.pending)[:, None] & in_value[None, :]))
        p_v = inputs.v + i[:, None] * strides.v_token + (p + down)[None, :] * strides.v_value
        b_v = tl.trans(load_apart(p_v, is_own[:, None] & in_value[None, :])).to(tl.float32)
        pieces = split(b_u, 3, dot_type)
        past = apply(pieces, factors.A, tl.zeros_like(read_k), dot_type)
        change = factors.beta[None, :] * b_v - factors.of_read[None, :] * read_k - past
        y = apply(pieces, factors.B, tl.zeros_like(read_q), dot_type)
        y += factors.of_query[None, :] * read_q
        for t in tl.static_range(shape.TOKENS):
            # Selected, not multiplied by 0: a draft may not be finite.
            u = tl.sum(tl.where((i == t)[None, :], change, 0.0), axis=1)[:, None]
            change = tl.where((i > t)[None, :], change - factors.lower[t][None, :] * u, change)
            y = tl.where((i >= t)[None, :], y + factors.upper[t][None, :] * u, y)
        p_change = records.u + own_ring[:, None] * VALUE + (p + down)[None, :]
        store_apart(p_change, tl.trans(change), kept[:, None] & in_value[None, :])
        p_out = out + i[:, None] * (HEADS * VALUE) + (p + down)[None, :]
        y = tl.trans(y).to(out.dtype.element_ty)
        store_apart(p_out, y, is_own[:, None] & in_value[None, :])
        if WRITES:
            here = cell + down * shape.VALUE_STRIDE
            element = (share.head * VALUE + p + down)[:, None] * KEY + n[None, :]
            store_state(
                target, b_h, b_u, change, own_keys, keys.past, gates, own_rk, row, here, element,
                inside, shape, place, dot_type,
            )  # fmt: skip
            if keeps:
                store_state(
                    checkpoint, b_h, b_u, change, own_keys, keys.past, gates, own_rk, row, here,
                    element, inside, shape, place, dot_type,
                )  # fmt: skip
