"""The kernels behind `chunk_scan`.

In a chunk whose first token finds the state S `[V, K]`, with k and q as normalised, D_i the decay
from the chunk's start to token i, D_ij that from token j to token i and D_end that of the chunk,

    r_i = v_i - D_i S k_i,   u = T diag(beta) r,   T = (I + A)^-1
    A_ij = beta_i D_ij (k_i k_j), j < i,   P_ij = D_ij (q_i k_j), j <= i
    o_i = D_i S q_i + (P u)_i,   S' = D_end S + sum over i of (D_end / D_i) u_i k_i^T

(the WY form: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule"). What of it
does not need S is found for all chunks at once: k, q, the matrices diag(D_end / D) T diag(beta) and
P T diag(beta), which r is multiplied by, and D. No exponent is positive.

Of inputs of 16 bits, products have operands in fp16, which has 8 times the precision of bf16 but
not its range. Keys, queries and entries of T are at most 1. Changes and states are bounded by
values, so both are held in units of a power of two that is not far below the largest of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_runtime.kernels.common.math import softplus
from hybrid_runtime.kernels.common.tiles import first_tile, tokens_of_tile
from hybrid_runtime.kernels.common.zero_fill import zero_tokens
from hybrid_runtime.kernels.gdn.naive import NORM_EPS

EPS = tl.constexpr(NORM_EPS)
HEADROOM = tl.constexpr(1 / 32)
"""Of the largest value in its unit. A state is at most the root of the number of tokens as large
as a value, were every one a new key's: below 2**22 tokens it fits into fp16."""


@triton.jit
def normalised(raw):
    """Lines of keys or queries, of length 1, in fp32."""
    raw = raw.to(tl.float32)
    return raw * tl.rsqrt(tl.sum(raw * raw, axis=1) + EPS)[:, None]


@triton.jit
def invert(A, i, j, dot_type: tl.constexpr, LEVELS: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A, from blocks on the diagonal to blocks twice as
    large: with those inverted, what lies between two is - T A T. Entries stay as small as they are
    in the result, unlike powers of A.

    i, j: index of rows and columns. LEVELS: log2 of their number.
    """
    apart = i ^ j  # whose highest bit tells which blocks an entry lies between
    T = tl.where(apart == 0, 1.0, tl.where(apart == 1, -A, 0.0))
    for level in range(1, LEVELS):
        between = tl.where(apart >> level == 1, A, 0.0).to(dot_type)
        left = T.to(dot_type)
        step = tl.dot(left, between, input_precision="ieee")
        T -= tl.dot(step.to(dot_type), left, input_precision="ieee")
    return T


@triton.jit(
    do_not_specialize=["tokens", "rows"],
    do_not_specialize_on_alignment=[
        "a", "b", "A_log", "dt_bias", "slot", "cu_seqlens", "write_column", "cut",
    ],
)  # fmt: skip
def prepare_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    slot,
    cu_seqlens,
    write_column,
    cut,
    out,
    keys,
    queries,
    to_change,
    to_output,
    decays,
    largest,
    tokens,
    rows,
    q_stride,
    k_stride,
    v_stride,
    a_stride,
    b_stride,
    dot_type: tl.constexpr,
    shape,
):
    """What a chunk of one head needs beside its state. Behind the end of a row's part g, beta, k
    and q are 0, so that those tokens change nothing."""
    HEADS: tl.constexpr = shape.HEADS
    GROUP: tl.constexpr = shape.GROUP
    VALUE: tl.constexpr = shape.VALUE
    CHUNK: tl.constexpr = shape.CHUNK
    BLOCK_K: tl.constexpr = shape.BLOCK_K
    head = tl.program_id(0)
    chunk = tl.program_id(1)

    # Tokens of no row, those before and behind all rows, are shared out among the chunks.
    n = tl.arange(0, shape.BLOCK_V)
    given = out + head * VALUE + n
    real = n < VALUE
    size: tl.constexpr = HEADS * VALUE
    zero_tokens(given, real, chunk, tl.load(cu_seqlens), tl.num_programs(1), size)
    behind = tl.load(cu_seqlens + rows) + chunk
    zero_tokens(given, real, behind, tokens, tl.num_programs(1), size)

    row, start, left = tokens_of_tile(cu_seqlens, cut, rows, chunk, CHUNK)
    if row < 0:
        return
    if (tl.load(slot + row) < 0) | (tl.load(write_column + row) < 0):
        zero_tokens(given, real, start, start + tl.minimum(left, CHUNK), 1, size)
        return
    if left <= 0:
        return

    t = tl.arange(0, CHUNK)
    c = tl.arange(0, BLOCK_K)
    live = t < left
    token = (start + t).to(tl.int64)
    wide = head.to(tl.int64)
    group = wide // GROUP
    mask = live[:, None] & (c < shape.KEY)[None, :]
    p_k = k + group * k_stride.head + token[:, None] * k_stride.token + c[None, :] * k_stride.dim
    p_q = q + group * q_stride.head + token[:, None] * q_stride.token + c[None, :] * q_stride.dim
    raw = tl.load(a + token * a_stride.token + wide * a_stride.channel, mask=live, other=0.0)
    beta = tl.load(b + token * b_stride.token + wide * b_stride.channel, mask=live, other=0.0)
    key = tl.load(p_k, mask=mask, other=0.0)
    query = tl.load(p_q, mask=mask, other=0.0)
    if largest is not None:
        p_v = v + wide * v_stride.head + token[:, None] * v_stride.token + n[None, :] * v_stride.dim
        value = tl.load(p_v, mask=live[:, None] & real[None, :], other=0.0).to(tl.float32)
        most = tl.max(tl.max(tl.abs(value), axis=1), axis=0)
        tl.store(largest + wide * tl.num_programs(1) + chunk, most)

    key = normalised(key).to(dot_type)
    query = (normalised(query) * shape.SCALE).to(dot_type)
    if head % GROUP == 0:
        lines = (chunk.to(tl.int64) * (HEADS // GROUP) + group) * CHUNK + t
        o_key = lines[:, None] * BLOCK_K + c[None, :]
        tl.store(keys + o_key, key)
        tl.store(queries + o_key, query)
    raw = raw.to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    g = -tl.exp(tl.load(A_log + head).to(tl.float32)) * softplus(raw)
    # Differences of long sums lose fp32 digits where the decay is strong: sum in fp64, and keep
    # what fp32 leaves of a sum.
    total = tl.cumsum(tl.where(live, g, 0.0).to(tl.float64) * 1.4426950408889634, axis=0)
    high = total.to(tl.float32)
    low = (total - high.to(tl.float64)).to(tl.float32)
    end = tl.sum(tl.where(t == CHUNK - 1, total, 0.0), axis=0)
    to_end = tl.exp2((end - total).to(tl.float32))
    beta = tl.where(live, 1 / (1 + tl.exp(-beta.to(tl.float32))), 0.0)

    i = t[:, None]
    j = t[None, :]
    apart = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    decay = tl.where(i >= j, tl.exp2(tl.minimum(apart, 0.0)), 0.0)
    score = tl.dot(query, tl.trans(key), input_precision="ieee")
    read = (score * decay).to(dot_type)
    score = tl.dot(key, tl.trans(key), input_precision="ieee")
    A = tl.where(i > j, score * decay * beta[:, None], 0.0)
    T = invert(A, i, j, dot_type, shape.LEVELS)
    read = tl.dot(read, T.to(dot_type), input_precision="ieee")

    lines = (chunk.to(tl.int64) * HEADS + head) * CHUNK + t
    o_pair = lines[:, None] * CHUNK + j
    tl.store(decays + lines, tl.exp2(high))
    tl.store(to_output + o_pair, (read * beta[None, :]).to(dot_type))
    tl.store(to_change + o_pair, (T * to_end[:, None] * beta[None, :]).to(dot_type))


@triton.jit
def unit_above(most):
    """A power of two above `most` (of those between which neither it nor its inverse is subnormal),
    and its inverse."""
    bits = most.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 1 << 23), 252 << 23) + (1 << 23)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def carry(
    h,
    start,
    tokens,
    first,
    p_v,
    p_out,
    keys,
    queries,
    to_change,
    to_output,
    decays,
    largest,
    head,
    real,
    v_stride,
    dot_type: tl.constexpr,
    shape,
    TRIPS: tl.constexpr,
):
    """One tile of a head's state, `h` `[K, TILE]`, through `tokens` tokens from `start` on, in
    chunks from `first` on, with their outputs.

    p_v, p_out: addresses for token 0. largest: of values, by chunks of the head, or None. real:
    which columns of the tile are the state's.
    """
    HEADS: tl.constexpr = shape.HEADS
    GROUP: tl.constexpr = shape.GROUP
    CHUNK: tl.constexpr = shape.CHUNK
    BLOCK_K: tl.constexpr = shape.BLOCK_K
    t = tl.arange(0, CHUNK)
    c = tl.arange(0, BLOCK_K)
    trips = (tokens + CHUNK - 1) // CHUNK
    first = first.to(tl.int64)
    unit = 1.0
    scale = 1.0
    if largest is not None:
        most = tl.max(tl.max(tl.abs(h), axis=1), axis=0)
        lane = tl.arange(0, 128)
        at = trips * 0
        while at < trips:
            some = tl.load(largest + first + at + lane, mask=at + lane < trips, other=0.0)
            most = tl.maximum(most, tl.max(some, axis=0))
            at += 128
        unit, scale = unit_above(most * HEADROOM)
        h *= scale
    KEY_LINES: tl.constexpr = HEADS // GROUP * CHUNK
    LINES: tl.constexpr = HEADS * CHUNK
    key_line = first * KEY_LINES + head // GROUP * CHUNK + t
    line = first * LINES + head * CHUNK + t
    o_key = key_line[:, None] * BLOCK_K + c[None, :]
    o_pair = line[:, None] * CHUNK + t[None, :]
    p_end = decays + first * LINES + head * CHUNK + (CHUNK - 1)
    end = tl.load(p_end, mask=tokens > 0, other=1.0)
    # Triton 3.6's interpreter has no loops of run-time length; there TRIPS bounds them.
    for trip in range(TRIPS if TRIPS > 0 else trips):
        here = trip * CHUNK < tokens
        live = trip * CHUNK + t < tokens
        live = live[:, None] & real[None, :]
        token = (start + trip * CHUNK + t).to(tl.int64)[:, None]
        chunk = tl.cast(trip, tl.int64)
        key = tl.load(keys + chunk * (KEY_LINES * BLOCK_K) + o_key, mask=here, other=0.0)
        query = tl.load(queries + chunk * (KEY_LINES * BLOCK_K) + o_key, mask=here, other=0.0)
        change = tl.load(to_change + chunk * (LINES * CHUNK) + o_pair, mask=here, other=0.0)
        read = tl.load(to_output + chunk * (LINES * CHUNK) + o_pair, mask=here, other=0.0)
        value = tl.load(p_v + token * v_stride.token, mask=live, other=0.0)
        decay = tl.load(decays + chunk * LINES + line, mask=here, other=1.0)[:, None]
        # A number alone would be waited for: load the next chunk's.
        further = (trip + 1) * CHUNK < tokens
        next_end = tl.load(p_end + (chunk + 1) * LINES, mask=further, other=1.0)

        state = h.to(dot_type)
        r = value.to(tl.float32) * scale - decay * tl.dot(key, state, input_precision="ieee")
        y = tl.dot(query, state, input_precision="ieee") * decay
        r = r.to(dot_type)
        u = tl.dot(change, r, input_precision="ieee").to(dot_type)
        h = tl.dot(tl.trans(key), u, h * end, input_precision="ieee")
        end = next_end
        y = tl.dot(read, r, y, input_precision="ieee") * unit
        tl.store(p_out + token * (HEADS * shape.VALUE), y.to(p_out.dtype.element_ty), mask=live)
    return h * unit


@triton.jit(
    do_not_specialize=["chunks"],
    do_not_specialize_on_alignment=[
        "largest", "block_table", "slot", "cu_seqlens", "read_column", "read_offset",
        "write_column", "cut", "cut_column",
    ],
)  # fmt: skip
def carry_kernel(
    v,
    out,
    keys,
    queries,
    to_change,
    to_output,
    decays,
    largest,
    states,
    block_table,
    slot,
    cu_seqlens,
    read_column,
    read_offset,
    write_column,
    cut,
    cut_column,
    chunks,
    v_stride,
    state_stride,
    table_stride,
    dot_type: tl.constexpr,
    shape,
    TRIPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of one head's state through a whole row."""
    VALUE: tl.constexpr = shape.VALUE
    CHUNK: tl.constexpr = shape.CHUNK
    tiles: tl.constexpr = (VALUE + TILE - 1) // TILE
    head = (tl.program_id(0) // tiles).to(tl.int64)
    row = tl.program_id(1)
    row_slot = tl.load(slot + row)
    start = tl.load(cu_seqlens + row)
    scheduled = tl.load(cu_seqlens + row + 1) - start
    source = tl.load(read_column + row)
    target = tl.load(write_column + row)
    if (row_slot < 0) | (target < 0) | (scheduled <= 0):
        return
    n = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    c = tl.arange(0, shape.BLOCK_K)
    real = n < VALUE
    inside = (c < shape.KEY)[:, None] & real[None, :]
    table = block_table + row_slot.to(tl.int64) * table_stride
    further = tl.load(read_offset + row)
    block = tl.load(table + source + further, mask=source >= 0, other=0).to(tl.int64)
    element = c.to(tl.int64)[:, None] * state_stride.state
    element += n.to(tl.int64)[None, :] * state_stride.dim
    element += head * state_stride.head
    old = states + block * state_stride.block + element
    h = tl.load(old, mask=inside & (source >= 0), other=0.0).to(tl.float32)

    p_v = v + head * v_stride.head + n[None, :] * v_stride.dim
    p_out = out + head * VALUE + n[None, :]
    of_head = None
    if largest is not None:
        of_head = largest + head * chunks
    number = row
    if cut is not None:
        before = tl.load(cut + row)
        h = carry(
            h, start, before, first_tile(start, 2 * row, CHUNK), p_v, p_out, keys, queries,
            to_change, to_output, decays, of_head, head, real, v_stride, dot_type, shape, TRIPS,
        )  # fmt: skip
        # What goes on is what a later call would read.
        checkpoint = h.to(states.dtype.element_ty)
        h = tl.where(before > 0, checkpoint.to(tl.float32), h)
        tl.debug_barrier()  # as below: the checkpoint's block may be the one that was read
        column = tl.load(cut_column + row)
        to = tl.load(table + column, mask=before > 0, other=0).to(tl.int64)
        stored = states + to * state_stride.block + element
        tl.store(stored, checkpoint, mask=inside & (before > 0))
        start += before
        scheduled -= before
        number = 2 * row + 1
    h = carry(
        h, start, scheduled, first_tile(start, number, CHUNK), p_v, p_out, keys, queries,
        to_change, to_output, decays, of_head, head, real, v_stride, dot_type, shape, TRIPS,
    )  # fmt: skip

    # A row's read and write column may be the same block: each element is read and written by this
    # program alone, and what is stored depends on what was loaded. The barrier covers layouts in
    # which several threads load one element.
    tl.debug_barrier()
    to = tl.load(table + target).to(tl.int64)
    tl.store(states + to * state_stride.block + element, h.to(states.dtype.element_ty), mask=inside)
