"""The replay layout's verify pass over one row in steady decode, for the heads of one program.

The states of the next heads are copied to shared memory meanwhile, which takes no registers. B and
C of all tokens stay in registers as fp32, converted once for all heads. A head's state is taken in
chunks of few rows, so that they fit beside them. Scalars and x lie one element per lane, computed
once, and are handed to all lanes where they are used: in a program of one warp a gather is a
shuffle, and nothing waits for a barrier.

The accepted guesses and the certain token are folded in by one multiply-add each. This step's
guesses leave the state alone: with the decays a, y_i = a_(c..i) C_i h + sum over guesses j <= i of
a_(j+1..i) dt_j (C_i B_j) x_j, and C_i B_j is common to the heads of a group.
"""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import triton
import triton.language as tl

from hybrid_runtime.kernels.replay.factors import head_factors, pick_head, query_overlaps
from hybrid_runtime.kernels.replay.loads import (
    load_chunk,
    load_rows,
    load_scalars,
    load_vectors,
    take_apart,
)
from hybrid_runtime.kernels.replay.tile import load_parts, store_at, store_part, time_step


@triton.jit
def verify_row(
    inputs, past, ahead, blocks, out, row, share, keys, clamp, strides, shape, place,
    SNAPSHOT: tl.constexpr,
):  # fmt: skip
    """One certain token and guesses: fold, write the state, give all outputs.

    inputs, blocks, row, share, keys, clamp: tuples of `program`.
    past, ahead: `Guesses` that are folded, and that are written.
    out: pointer to the outputs of the row's first token.
    strides, shape, place: `InputStrides`, `ReplayShape`, and `LastPlace` or None.
    """
    DIM: tl.constexpr = shape.DIM
    TOKENS: tl.constexpr = shape.TOKENS
    DRAFTS: tl.constexpr = shape.DRAFTS
    RUN: tl.constexpr = shape.RUN
    # Addresses as one pointer per thread and head, the rest constants that cost nothing.
    o_line = tl.arange(0, shape.CHUNK)
    o_n = share.o_n
    o_cell = (share.p + o_line)[:, None] * shape.STATE + o_n[None, :]
    o_p = share.p + tl.arange(0, shape.TILE)
    i_heads = share.head + tl.arange(0, RUN)
    raws = load_scalars(inputs, past, i_heads, row, strides, shape)
    next_xs = load_rows(inputs, past, share.head, o_p, row, strides, shape)
    # All loads before the first use: none passes what goes through shared memory.
    if shape.HOLD:
        if DRAFTS > 0:
            past_Bs = load_vectors(
                past.B, shape.HEADS // shape.HEADS_PER_GROUP * shape.STATE, 1, row.fold, DRAFTS,
                shape,
            )  # fmt: skip
        new_Bs = load_vectors(
            inputs.B, strides.B_token, strides.B_state, row.scheduled, TOKENS, shape
        )
        new_Cs = load_vectors(
            inputs.C, strides.C_token, strides.C_state, row.scheduled, TOKENS, shape
        )
    sole = ()
    if RUN == 1:
        p_cells = blocks.read + share.head * (DIM * shape.STATE) + o_cell
        for q in tl.static_range(shape.TILE // shape.CHUNK):
            sole += (load_chunk(p_cells, share.p + o_line, o_n, row.reads, q, shape),)
    Bs = ()
    Cs = ()
    news = ()
    if shape.HOLD:
        if DRAFTS > 0:
            Bs += take_apart(past_Bs, DRAFTS, shape)
        news = take_apart(new_Bs, TOKENS, shape)
        Bs += (news[0],)
        Cs = take_apart(new_Cs, TOKENS, shape)
    overlaps = query_overlaps(inputs, news, Cs, o_n, row, strides, shape)

    # What lies beyond the row's end is undefined: nothing that is stored depends on it.
    steps = ()
    for i in tl.static_range(TOKENS):
        raw = raws[DRAFTS + i].to(tl.float32) + raws[DRAFTS + TOKENS].to(tl.float32)
        steps += (time_step(raw, clamp),)
    of_heads = head_factors(raws, steps, overlaps, row, shape, SNAPSHOT)
    for r in tl.range(RUN, num_stages=shape.STAGES):
        xs = next_xs
        # Too narrow to be copied as states are; and no load passes the stores below.
        if RUN > 1:
            i_next = share.head + tl.minimum(r + 1, RUN - 1)
            next_xs = load_rows(inputs, past, i_next, o_p, row, strides, shape)
        factors = pick_head(of_heads, r)
        held = Bs, Cs
        if not shape.HOLD:
            held = load_head_vectors(inputs, past, o_n, row, strides, shape)
        i_first = (share.head + r) * DIM
        sums = fold_head(
            blocks, sole, xs, held, factors, i_first, o_cell, row, share, keys, shape, place,
            SNAPSHOT,
        )  # fmt: skip
        store_outputs(out, sums, xs, factors, i_first, o_p, row, shape)
        for j in tl.static_range(1, TOKENS):
            p_x = ahead.x + (i_first + (j - 1) * (shape.HEADS * DIM)) + o_p
            tl.store(p_x, xs[j], mask=(o_p < DIM) & (j < row.scheduled))
    store_guesses(inputs, ahead, steps, i_heads, o_n, row, share, strides, shape)


@triton.jit
def load_head_vectors(inputs, past, o_n, row, strides, shape):
    """B of what is folded and C of all tokens, where they don't stay in registers."""
    groups: tl.constexpr = shape.HEADS // shape.HEADS_PER_GROUP
    Bs = ()
    for j in tl.static_range(shape.DRAFTS):
        p_B = past.B + j * (groups * shape.STATE)
        Bs += (load_parts(p_B, o_n, 1, j < row.fold, shape, 0.0),)
    Bs += (load_parts(inputs.B, o_n, strides.B_state, True, shape),)
    Cs = ()
    for i in tl.static_range(shape.TOKENS):
        p_C = inputs.C + i * strides.C_token
        Cs += (load_parts(p_C, o_n, strides.C_state, i < row.scheduled, shape, 0.0),)
    return Bs, Cs


@triton.jit
def fold_head(
    blocks, sole, xs, held, factors, i_first, o_cell, row, share, keys, shape, place,
    SNAPSHOT: tl.constexpr,
):  # fmt: skip
    """Fold and write a head's tile chunk by chunk; C h of each token, `[TILE]`.

    sole: the tile's chunks, if the program has one head and so has loaded them.
    xs: x of the tokens, then of the guesses that are folded.
    held: B of what is folded, the certain token last; C of the tokens.
    i_first: index of the head's first row among all heads'.
    """
    DIM: tl.constexpr = shape.DIM
    STATE: tl.constexpr = shape.STATE
    TILE: tl.constexpr = shape.TILE
    CHUNK: tl.constexpr = shape.CHUNK
    PART: tl.constexpr = shape.PART
    PARTS: tl.constexpr = shape.PARTS
    folded: tl.constexpr = shape.DRAFTS + 1
    Bs, Cs = held
    o_line = tl.arange(0, CHUNK)
    o_lines = tl.arange(0, TILE)
    o_n = share.o_n
    p_read = blocks.read + i_first * STATE + o_cell
    p_write = blocks.write + i_first * STATE + o_cell
    vs = (xs[0].to(tl.float32),)
    for j in tl.static_range(shape.DRAFTS):
        vs += (xs[shape.TOKENS + shape.DRAFTS - 1 - j].to(tl.float32),)
    sums = (tl.zeros((TILE,), tl.float32),) * shape.TOKENS
    for q in tl.static_range(TILE // CHUNK):
        within = share.p + q * CHUNK + o_line < DIM
        if shape.RUN == 1:
            b_old = sole[q]
        else:
            b_old = load_chunk(p_read, share.p + o_line, o_n, row.reads, q, shape)
        if SNAPSHOT:
            for s in tl.static_range(PARTS):
                b_h = b_old[s].to(tl.float32) * factors.snapshot_decay[0]
                for j in tl.static_range(folded):
                    b_B = Bs[folded - 1 - j][s].to(tl.float32)
                    u = tl.gather(factors.snapshot_inflows[j] * vs[j], o_line + q * CHUNK, 0)
                    b_h += u[:, None] * b_B[None, :]
                inside = within[:, None] & (o_n + s * PART < STATE)[None, :]
                element = i_first * STATE + q * CHUNK * STATE + s * PART + o_cell
                store_part(blocks.snapshot, b_h, element, inside, keys.snapshot, place)
        us = ()
        for j in tl.static_range(folded):
            us += (tl.gather(factors.inflows[j] * vs[j], o_line + q * CHUNK, 0),)
        b_new = ()
        for s in tl.static_range(PARTS):
            b_h = b_old[s].to(tl.float32) * factors.decay[0]
            for j in tl.static_range(folded):
                b_B = Bs[folded - 1 - j][s].to(tl.float32)
                b_h += us[j][:, None] * b_B[None, :]
            b_new += (b_h,)
        ys = ()
        for i in tl.static_range(shape.TOKENS):
            product = b_new[0] * Cs[i][0].to(tl.float32)[None, :]
            for s in tl.static_range(1, PARTS):
                product += b_new[s] * Cs[i][s].to(tl.float32)[None, :]
            y = tl.gather(tl.sum(product, axis=1), o_lines % CHUNK, 0)
            ys += (tl.where(o_lines // CHUNK == q, y, sums[i]),)
        sums = ys
        for s in tl.static_range(PARTS):
            inside = within[:, None] & (o_n + s * PART < STATE)[None, :]
            if (DIM % TILE == 0) & (STATE == PARTS * PART):
                inside = tl.full((CHUNK, PART), True, tl.int1)
            offset = q * CHUNK * STATE + s * PART
            element = i_first * STATE + offset + o_cell
            store_at(p_write + offset, b_new[s], element, inside, keys.write, place)
    return sums


@triton.jit
def store_outputs(out, sums, xs, factors, i_first, o_p, row, shape):
    for i in tl.static_range(shape.TOKENS):
        y = sums[i]
        if i == 0:
            y += factors.skip[0] * xs[0].to(tl.float32)
        else:
            y *= factors.carries[i - 1]
        for back in tl.static_range(i):
            y += factors.weights[i * (i - 1) // 2 + back] * xs[i - back].to(tl.float32)
        p_y = out + (i_first + i * (shape.HEADS * shape.DIM)) + o_p
        tl.store(p_y, y.to(out.dtype.element_ty), mask=(o_p < shape.DIM) & (i < row.scheduled))


@triton.jit
def store_guesses(inputs, ahead, steps, i_heads, o_n, row, share, strides, shape):
    """Time steps and B of this step's guesses, for the next one."""
    groups: tl.constexpr = shape.HEADS // shape.HEADS_PER_GROUP
    for j in tl.static_range(1, shape.TOKENS):
        if share.writes_dt & (j < row.scheduled):
            tl.store(ahead.dt + (j - 1) * shape.HEADS + i_heads, steps[j])
    for j in tl.static_range(1, shape.TOKENS):
        if share.writes_B & (j < row.scheduled):
            p_B = inputs.B + j * strides.B_token
            b_B = load_parts(p_B, o_n, strides.B_state, True, shape)
            for s in tl.static_range(shape.PARTS):
                part = o_n + s * shape.PART
                p_next = ahead.B + (j - 1) * (groups * shape.STATE) + part
                tl.store(p_next, b_B[s], part < shape.STATE)
