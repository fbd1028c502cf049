"""The kernels behind `chunk_scan`."""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_runtime.kernels.common.math import softplus
from hybrid_runtime.kernels.common.tiles import first_tile, tokens_of_tile
from hybrid_runtime.kernels.common.zero_fill import zero_tokens


@triton.jit(
    do_not_specialize=["tokens", "rows"],
    do_not_specialize_on_alignment=[
        "dt", "A_log", "dt_bias", "slot", "cu_seqlens", "write_column", "cut",
    ],
)  # fmt: skip
def steps_kernel(
    dt,
    A_log,
    dt_bias,
    slot,
    cu_seqlens,
    write_column,
    cut,
    out,
    steps,
    totals,
    rests,
    tokens,
    rows,
    dt_stride,
    dt_min,
    dt_max,
    shape,
    TILE: tl.constexpr,
):
    """Per head and chunk: time steps, and log2 of the decay from the chunk's start to each token.

    Behind the end of a row's part the step is 0, so the chunk's last total is that of its last
    token.
    """
    HEADS: tl.constexpr = shape.HEADS
    DIM: tl.constexpr = shape.DIM
    CHUNK: tl.constexpr = shape.CHUNK
    BLOCK_P: tl.constexpr = shape.BLOCK_P
    EXACT: tl.constexpr = shape.EXACT
    head = tl.program_id(0) * TILE + tl.arange(0, TILE)
    chunk = tl.program_id(1)
    is_head = head < HEADS

    # Tokens of no row, those before and behind all rows, are shared out among the chunks.
    p = tl.arange(0, BLOCK_P)
    given = out + head[:, None] * DIM + p[None, :]
    real = is_head[:, None] & (p < DIM)[None, :]
    size: tl.constexpr = HEADS * DIM
    zero_tokens(given, real, chunk, tl.load(cu_seqlens), tl.num_programs(1), size)
    behind = tl.load(cu_seqlens + rows) + chunk
    zero_tokens(given, real, behind, tokens, tl.num_programs(1), size)

    row, start, left = tokens_of_tile(cu_seqlens, cut, rows, chunk, CHUNK)
    if row < 0:
        return
    if (left <= 0) | (tl.load(slot + row) < 0) | (tl.load(write_column + row) < 0):
        return
    t = tl.arange(0, CHUNK)
    at = (start + t).to(tl.int64) * dt_stride.token
    live = (t < left)[:, None] & is_head[None, :]
    p_dt = dt + at[:, None] + head[None, :] * dt_stride.channel
    raw = tl.load(p_dt, mask=live, other=0.0).to(tl.float32)
    raw += tl.load(dt_bias + head, mask=is_head, other=0.0).to(tl.float32)[None, :]
    step = tl.minimum(tl.maximum(softplus(raw), dt_min), dt_max)
    step = tl.where(live, step, 0.0)
    rate = -tl.exp(tl.load(A_log + head, mask=is_head, other=0.0).to(tl.float32))
    # Differences of long sums lose fp32 digits where the decay is strong: sum in fp64.
    decay = (step * rate[None, :]).to(tl.float64) * 1.4426950408889634
    total = tl.cumsum(decay, axis=0)
    high = total.to(tl.float32)
    lines = tl.num_programs(1).to(tl.int64) * CHUNK
    to = head[None, :] * lines + (chunk.to(tl.int64) * CHUNK + t)[:, None]
    tl.store(steps + to, step, mask=is_head[None, :])
    tl.store(totals + to, high, mask=is_head[None, :])
    if EXACT:
        tl.store(rests + to, (total - high.to(tl.float64)).to(tl.float32), mask=is_head[None, :])


@triton.jit
def carry(
    h,
    start,
    tokens,
    first,
    given_x,
    given_B,
    steps,
    totals,
    rests,
    kept,
    line,
    n,
    x_stride,
    B_stride,
    dot_type: tl.constexpr,
    shape,
    TRIPS: tl.constexpr,
):
    """One tile of a head's state, `h`, through `tokens` tokens from `start` on, in chunks from
    `first` on; the state at the start of each chunk goes to `kept`.

    given_x, given_B, kept: addresses for token 0 or chunk 0. line: chunks before the head's own in
    `steps` and its like. n: columns of the tile.
    """
    HEADS: tl.constexpr = shape.HEADS
    DIM: tl.constexpr = shape.DIM
    STATE: tl.constexpr = shape.STATE
    CHUNK: tl.constexpr = shape.CHUNK
    EXACT: tl.constexpr = shape.EXACT
    p = tl.arange(0, shape.BLOCK_P)
    t = tl.arange(0, CHUNK)
    real = (p < DIM)[:, None] & (n < STATE)[None, :]
    first = first.to(tl.int64)
    sums = (line + first) * CHUNK
    kept += first * (HEADS * DIM * STATE)
    # Triton 3.6's interpreter has no loops of run-time length; there TRIPS bounds them.
    for trip in range(TRIPS if TRIPS > 0 else tl.cdiv(tokens, CHUNK)):
        here = trip * CHUNK < tokens
        live = trip * CHUNK + t < tokens
        token = (start + trip * CHUNK + t).to(tl.int64)
        mask = (p < DIM)[:, None] & live[None, :]
        xs = tl.load(given_x + token[None, :] * x_stride.token, mask=mask, other=0.0)
        mask = live[:, None] & (n < STATE)[None, :]
        Bs = tl.load(given_B + token[:, None] * B_stride.token, mask=mask, other=0.0)
        at = sums + trip * CHUNK
        step = tl.load(steps + at + t, mask=here, other=0.0)
        whole = tl.load(totals + at + (CHUNK - 1), mask=here, other=0.0)
        left = whole - tl.load(totals + at + t, mask=here, other=0.0)
        if EXACT:
            left += tl.load(rests + at + (CHUNK - 1), mask=here, other=0.0)
            left -= tl.load(rests + at + t, mask=here, other=0.0)
        to = kept + tl.cast(trip, tl.int64) * (HEADS * DIM * STATE)
        tl.store(to, h.to(kept.dtype.element_ty), mask=real & here)
        xs = (xs.to(tl.float32) * (step * tl.exp2(left))[None, :]).to(dot_type)
        h = tl.dot(xs, Bs.to(dot_type), h * tl.exp2(whole), input_precision="ieee")
    return h


@triton.jit(
    do_not_specialize=["chunks"],
    do_not_specialize_on_alignment=[
        "block_table", "slot", "cu_seqlens", "read_column", "read_offset", "write_column", "cut",
        "cut_column",
    ],
)  # fmt: skip
def carry_kernel(
    x,
    B,
    steps,
    totals,
    rests,
    states,
    carried,
    block_table,
    slot,
    cu_seqlens,
    read_column,
    read_offset,
    write_column,
    cut,
    cut_column,
    chunks,
    x_stride,
    B_stride,
    state_stride,
    table_stride,
    dot_type: tl.constexpr,
    shape,
    TRIPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tile of one head's state through a whole row."""
    HEADS_PER_GROUP: tl.constexpr = shape.HEADS_PER_GROUP
    DIM: tl.constexpr = shape.DIM
    STATE: tl.constexpr = shape.STATE
    CHUNK: tl.constexpr = shape.CHUNK
    BLOCK_P: tl.constexpr = shape.BLOCK_P
    tiles: tl.constexpr = (STATE + TILE - 1) // TILE
    head = tl.program_id(0) // tiles
    row = tl.program_id(1)
    row_slot = tl.load(slot + row)
    start = tl.load(cu_seqlens + row)
    scheduled = tl.load(cu_seqlens + row + 1) - start
    source = tl.load(read_column + row)
    target = tl.load(write_column + row)
    if (row_slot < 0) | (target < 0) | (scheduled <= 0):
        return
    p = tl.arange(0, BLOCK_P)
    n = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    real = (p < DIM)[:, None] & (n < STATE)[None, :]
    wide = head.to(tl.int64)
    table = block_table + row_slot.to(tl.int64) * table_stride
    further = tl.load(read_offset + row)
    block = tl.load(table + source + further, mask=source >= 0, other=0).to(tl.int64)
    element = p.to(tl.int64)[:, None] * state_stride.dim
    element += n.to(tl.int64)[None, :] * state_stride.state
    element += wide * state_stride.head
    old = states + block * state_stride.block + element
    h = tl.load(old, mask=real & (source >= 0), other=0.0).to(tl.float32)

    given_x = x + wide * x_stride.head + p[:, None] * x_stride.dim
    given_B = B + (head // HEADS_PER_GROUP).to(tl.int64) * B_stride.head + n[None, :] * B_stride.dim
    kept = carried + wide * (DIM * STATE) + p[:, None] * STATE + n[None, :]
    number = row
    if cut is not None:
        before = tl.load(cut + row)
        h = carry(
            h, start, before, first_tile(start, 2 * row, CHUNK), given_x, given_B, steps, totals,
            rests, kept, wide * chunks, n, x_stride, B_stride, dot_type, shape, TRIPS,
        )  # fmt: skip
        # What goes on is what a later call would read.
        checkpoint = h.to(states.dtype.element_ty)
        h = tl.where(before > 0, checkpoint.to(tl.float32), h)
        tl.debug_barrier()  # as below: the checkpoint's block may be the one that was read
        column = tl.load(cut_column + row)
        to = tl.load(table + column, mask=before > 0, other=0).to(tl.int64)
        stored = states + to * state_stride.block + element
        tl.store(stored, checkpoint, mask=real & (before > 0))
        start += before
        scheduled -= before
        number = 2 * row + 1
    h = carry(
        h, start, scheduled, first_tile(start, number, CHUNK), given_x, given_B, steps, totals,
        rests, kept, wide * chunks, n, x_stride, B_stride, dot_type, shape, TRIPS,
    )  # fmt: skip

    # A row's read and write column may be the same block: each element is read and written by this
    # program alone, and what is stored depends on what was loaded. The barrier covers layouts in
    # which several threads load one element.
    tl.debug_barrier()
    to = tl.load(table + target).to(tl.int64)
    tl.store(states + to * state_stride.block + element, h.to(states.dtype.element_ty), mask=real)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["D", "slot", "cu_seqlens", "write_column", "cut"],
)
def outputs_kernel(
    x,
    B,
    C,
    D,
    steps,
    totals,
    rests,
    carried,
    slot,
    cu_seqlens,
    write_column,
    cut,
    out,
    rows,
    x_stride,
    B_stride,
    C_stride,
    dot_type: tl.constexpr,
    shape,
    TOKENS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Outputs of some tokens of a chunk for some heads of one group, which share C B^T.

    PIECE is how much of the state is multiplied at once: all of it where there are matrix units,
    little in fp32, whose operands lie in registers."""
    HEADS: tl.constexpr = shape.HEADS
    HEADS_PER_GROUP: tl.constexpr = shape.HEADS_PER_GROUP
    DIM: tl.constexpr = shape.DIM
    STATE: tl.constexpr = shape.STATE
    CHUNK: tl.constexpr = shape.CHUNK
    BLOCK_P: tl.constexpr = shape.BLOCK_P
    EXACT: tl.constexpr = shape.EXACT
    parts: tl.constexpr = CHUNK // TOKENS
    part = tl.program_id(0) % parts
    head = tl.program_id(0) // parts * EACH
    chunk = tl.program_id(1)
    row, start, left = tokens_of_tile(cu_seqlens, cut, rows, chunk, CHUNK)
    if row < 0:
        return
    if part * TOKENS >= left:
        return
    m = part * TOKENS + tl.arange(0, TOKENS)
    p = tl.arange(0, BLOCK_P)
    queried = (start + m).to(tl.int64)
    given = out + queried[:, None] * (HEADS * DIM) + p[None, :]
    real = (m < left)[:, None] & (p < DIM)[None, :]
    if (tl.load(slot + row) < 0) | (tl.load(write_column + row) < 0):
        nothing = tl.zeros((TOKENS, BLOCK_P), out.dtype.element_ty)
        for i in range(EACH):
            tl.store(given + (head + i) * DIM, nothing, mask=real)
        return

    k = tl.arange(0, CHUNK)
    n = tl.arange(0, PIECE)
    token = (start + k).to(tl.int64)
    group = (head // HEADS_PER_GROUP).to(tl.int64)
    query_at = C + queried[:, None] * C_stride.token + group * C_stride.head
    key_at = B + token[:, None] * B_stride.token + group * B_stride.head
    query_real = (m < left)[:, None]
    key_real = (k < left)[:, None]
    in_state = (n < STATE)[None, :]
    Cs = tl.load(query_at + n[None, :] * C_stride.dim, mask=query_real & in_state, other=0.0)
    Bs = tl.load(key_at + n[None, :] * B_stride.dim, mask=key_real & in_state, other=0.0)
    Cs = Cs.to(dot_type)
    score = tl.dot(Cs, tl.trans(Bs.to(dot_type)), input_precision="ieee")
    for low in range(PIECE, BLOCK_N, PIECE):
        more = low + n
        mask = query_real & (more < STATE)[None, :]
        Ci = tl.load(query_at + more[None, :] * C_stride.dim, mask=mask, other=0.0)
        mask = key_real & (more < STATE)[None, :]
        Bi = tl.load(key_at + more[None, :] * B_stride.dim, mask=mask, other=0.0)
        Bi = tl.trans(Bi.to(dot_type))
        score = tl.dot(Ci.to(dot_type), Bi, score, input_precision="ieee")
    score = tl.where(k[None, :] <= m[:, None], score, 0.0)

    lines = tl.num_programs(1).to(tl.int64) * CHUNK
    given_x = x + token[:, None] * x_stride.token + p[None, :] * x_stride.dim
    queried_x = x + queried[:, None] * x_stride.token + p[None, :] * x_stride.dim
    given_state = carried + chunk.to(tl.int64) * (HEADS * DIM * STATE)
    given_state += p[:, None] * STATE + n[None, :]
    given_step = (k < left)[:, None] & (p < DIM)[None, :]
    whole = (p < DIM)[:, None] & (n < STATE)[None, :]
    for i in range(EACH):
        wide = tl.cast(head + i, tl.int64)
        line = wide * lines + chunk * CHUNK
        xs = tl.load(given_x + wide * x_stride.head, mask=given_step, other=0.0)
        h = tl.load(given_state + wide * (DIM * STATE), mask=whole, other=0.0)
        total = tl.load(totals + line + m)
        decay = total[:, None] - tl.load(totals + line + k)[None, :]
        if EXACT:
            decay += tl.load(rests + line + m)[:, None] - tl.load(rests + line + k)[None, :]
        # Above the diagonal the score is 0, but exp2 must not be infinite there.
        weight = score * tl.exp2(tl.minimum(decay, 0.0)) * tl.load(steps + line + k)[None, :]
        y = tl.dot(Cs, tl.trans(h.to(dot_type)), input_precision="ieee")
        for low in range(PIECE, BLOCK_N, PIECE):
            more = low + n
            mask = query_real & (more < STATE)[None, :]
            Ci = tl.load(query_at + more[None, :] * C_stride.dim, mask=mask, other=0.0)
            mask = (p < DIM)[:, None] & (more < STATE)[None, :]
            hi = tl.load(given_state + wide * (DIM * STATE) + low, mask=mask, other=0.0)
            hi = tl.trans(hi.to(dot_type))
            y = tl.dot(Ci.to(dot_type), hi, y, input_precision="ieee")
        y *= tl.exp2(total)[:, None]
        y = tl.dot(weight.to(dot_type), xs.to(dot_type), y, input_precision="ieee")
        if TOKENS < CHUNK:
            own = tl.load(queried_x + wide * x_stride.head, mask=real, other=0.0)
        else:
            own = xs
        y += tl.load(D + head + i).to(tl.float32) * own.to(tl.float32)
        tl.store(given + (head + i) * DIM, y.to(out.dtype.element_ty), mask=real)
