"""The replay layout's step of one row, for the heads of one program.

A chunk of State Space Duality (Dao and Gu 2024, section 6). The pending tokens of the ring and then
the row's own have positions; where there is no token, step and inputs are 0. With the sum
S of step times rate up to a position, and h the state that is read,

    y_i = exp(S_i) C_i h + D x_i + sum over j <= i of exp(S_i - S_j) step_j (C_i B_j) x_j
    h'  = exp(S_c) h + sum over j <= c of exp(S_c - S_j) step_j x_j B_j

where c is the last position that is folded. A row that writes takes its outputs from h', which has
all tokens up to its last certain one, so that the outputs' sum runs over the row's own tokens only.
All sums over tokens or columns are matrix products. x, B and C are exact operands; what is fp32
goes in as a sum of bfloat16 (`split`). States of 16 bits go in as they are, h' too: rounded to the
nearest, as the next step reads it. What is added to a state is summed up by itself first, because
the matrix units' own additions round down.

Drafts have no part in h', so that one that is not finite leaves it alone; it spoils the row's
outputs.
"""

# mypy: disable-error-code="assignment,var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from hybrid_runtime.kernels.mamba2.replay_factors import (
    Group,
    load_steps,
    output_factors,
    state_factors,
    time_steps,
)
from hybrid_runtime.kernels.replay.products import (
    into_range,
    load_apart,
    name_back,
    product,
    rename,
    split,
    store_apart,
)
from hybrid_runtime.kernels.replay.rounding import round_state

OWN_POSITIONS = tl.constexpr(16)
"""Of a row's own tokens: the least number that a product sums over."""


@triton.jit
def ring_index(position, base, row, shape):
    """Where positions lie in the ring: the row's own, from `base` on, follow the pending ones."""
    own = position - base
    index = row.cursor + tl.where(own < 0, position, own + row.pending)
    return tl.where(index >= shape.RING, index - shape.RING, index)


@triton.jit
def load_B(inputs, records, live, j, ring, base, n, strides, shape):
    """Parts of B at the positions that are `live`, `[positions, PART]` each."""
    parts = ()
    for s in tl.static_range(shape.PARTS):
        part = n + s * shape.PART
        p_B = tl.where(
            (j < base)[:, None],
            records.B + ring[:, None] * shape.STATE + part[None, :],
            inputs.B + (j - base)[:, None] * strides.B_token + part[None, :] * strides.B_state,
        )
        parts += (load_apart(p_B, live[:, None] & (part < shape.STATE)[None, :]),)
    return parts


@triton.jit
def load_C(inputs, i, n, row, strides, shape):
    """Parts of C of the row's tokens, `[QUERIES, PART]` each."""
    parts = ()
    for s in tl.static_range(shape.PARTS):
        part = n + s * shape.PART
        p_C = inputs.C + i[:, None] * strides.C_token + part[None, :] * strides.C_state
        mask = (i < row.scheduled)[:, None] & (part < shape.STATE)[None, :]
        parts += (load_apart(p_C, mask),)
    return parts


@triton.jit
def keep_B(Bs, records, kept, ring, n, shape):
    """Store B of the positions that are `kept` in the ring."""
    for s in tl.static_range(shape.PARTS):
        part = n + s * shape.PART
        p_B = records.B + ring[:, None] * shape.STATE + part[None, :]
        store_apart(p_B, Bs[s], kept[:, None] & (part < shape.STATE)[None, :])


@triton.jit
def point_x(inputs, records, head, j, ring, base, p, strides, shape):
    """Where x lies at positions j of a head, `[positions, ROWS]`, and the distance `[positions, 1]`
    to the next head's."""
    p_x = tl.where(
        (j < base)[:, None],
        records.x + (head * shape.RING + ring)[:, None] * shape.DIM + p[None, :],
        inputs.x
        + (j - base)[:, None] * strides.x_token
        + head * strides.x_head
        + p[None, :] * strides.x_dim,
    )
    return p_x, tl.where((j < base)[:, None], shape.RING * shape.DIM, strides.x_head)


@triton.jit
def combine_group(Bs, Cs, j, i, base, shape, SCALES: tl.constexpr, dot_type: tl.constexpr):
    """Parts of C as operands `[PART, QUERIES]`, and what the heads of the group have in common.
    SCALES: C must become fp16."""
    queries = ()
    most = tl.zeros((shape.QUERIES,), tl.float32)
    overlaps = tl.zeros((j.shape[0], shape.QUERIES), tl.float32)
    for s in tl.static_range(shape.PARTS):
        queries += (tl.trans(rename(Cs[s])),)
        most = tl.maximum(most, tl.max(tl.abs(Cs[s].to(tl.float32)), axis=1))
        overlaps = product(rename(Bs[s]), queries[s], overlaps, dot_type)
    unit = tl.full((shape.QUERIES,), 1.0, tl.float32)
    if SCALES:
        queries, unit = into_range(queries, most)
    group = Group(
        overlaps=overlaps,
        diagonal=tl.where(j[:, None] == i[None, :] + base, 1.0, 0.0),
        unit=unit,
    )
    return queries, group


@triton.jit
def store_state(p_state, h, element, inside, key, place):
    if place is not None:
        h = round_state(h, element, key, place)
    # Not read before the next step: evict it first.
    tl.store(p_state, h.to(p_state.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def update_heads(
    inputs, records, source, target, out, row, share, key, clamp, strides, shape, place,
    dot_type: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """Outputs of the row's tokens; the records of those from `row.first_recorded_token` on to
    the ring; if WRITES, the state after `row.tokens_folded` tokens to `target`.

    inputs, records, row, share, clamp, strides, shape: see `replay_launch`.
    source, target: pointers to states `[H, P, N]`.
    out: pointer to the outputs of the row's first token.
    key, place: by what states are rounded stochastically; place None: they are not.
    dot_type: of the products' operands.
    """
    HEADS: tl.constexpr = shape.HEADS
    DIM: tl.constexpr = shape.DIM
    STATE: tl.constexpr = shape.STATE
    PART: tl.constexpr = shape.PART
    PARTS: tl.constexpr = shape.PARTS
    RING: tl.constexpr = shape.RING
    RUN: tl.constexpr = shape.RUN
    FULL: tl.constexpr = (DIM % shape.ROWS == 0) & (STATE == PARTS * PART)
    WIDE: tl.constexpr = source.dtype.element_ty == tl.float32
    SCALES: tl.constexpr = (source.dtype.element_ty == tl.float16) & (dot_type != tl.float32)
    # What two leave out would show in fp32, and change some bits of what is rounded stochastically.
    PIECES: tl.constexpr = 3 if WIDE or place is not None else 2
    n = tl.arange(0, PART)
    j = tl.arange(0, OWN_POSITIONS if WRITES else shape.POSITIONS)
    f_j = tl.arange(0, shape.POSITIONS)
    i = tl.arange(0, shape.QUERIES)
    p = share.p + tl.arange(0, shape.ROWS)
    # One position per lane, even if there are fewer: a load of fewer would be repeated by lane.
    lane = tl.arange(0, 32)
    in_dim = p < DIM
    # Positions that outputs sum over: behind h' there are only the row's own tokens.
    base = row.unfolded
    if WRITES:
        base = 0
    own = j - base
    is_own = (own >= 0) & (own < row.scheduled)
    live = (j < base) | is_own
    kept = is_own & (own >= row.first_recorded_token)
    ring = ring_index(j, base, row, shape)
    lane_ring = ring_index(lane, base, row, shape)
    lane_kept = (lane - base >= row.first_recorded_token) & (lane - base < row.scheduled)
    cell = p[:, None] * STATE + n[None, :]
    p_source = source + share.head * (DIM * STATE) + cell
    p_x, x_next = point_x(inputs, records, share.head, j, ring, base, p, strides, shape)

    # The state of a single head is on its way while all else is loaded; those of several are
    # copied ahead by the loop.
    early = ()
    if RUN == 1:
        for s in tl.static_range(PARTS):
            inside = in_dim[:, None] & (n + s * PART < STATE)[None, :] & row.reads
            early += (tl.load(p_source + s * PART, mask=inside, other=0.0),)
    ahead = load_steps(inputs, records, share.head, lane, lane_ring, base, row, strides, shape)
    if WRITES:
        f_ring = ring_index(f_j, row.unfolded, row, shape)
        f_lane_ring = ring_index(lane, row.unfolded, row, shape)
        f_x, f_next = point_x(
            inputs, records, share.head, f_j, f_ring, row.unfolded, p, strides, shape
        )
        f_ahead = load_steps(
            inputs, records, share.head, lane, f_lane_ring, row.unfolded, row, strides, shape
        )
        is_folded = f_j < row.tokens_folded
        f_Bs = load_B(inputs, records, is_folded, f_j, f_ring, row.unfolded, n, strides, shape)
    # All loads come first. No load passes a store, which waits for what it stores, nor a barrier,
    # so that in between they would come one after another.
    Bs = load_B(inputs, records, live, j, ring, base, n, strides, shape)
    Cs = load_C(inputs, i, n, row, strides, shape)
    queries, group = combine_group(Bs, Cs, j, i, base, shape, SCALES, dot_type)
    keep_B(Bs, records, kept & share.writes_B, ring, n, shape)
    if WRITES:
        folded = ()
        for s in tl.static_range(PARTS):
            folded += (rename(f_Bs[s]),)

    for r in tl.range(RUN, num_stages=shape.STAGES):
        head = share.head + r
        beyond = tl.minimum(head + 1, HEADS - 1)
        raw = ahead
        ahead = load_steps(inputs, records, beyond, lane, lane_ring, base, row, strides, shape)
        steps = time_steps(raw, lane, base, row, clamp)
        if share.writes_dt:
            tl.store(records.dt + head * RING + lane_ring, steps, mask=lane_kept)
        if WRITES:
            steps = tl.where(lane < row.own_folded, 0.0, steps)
        mixes, carries = output_factors(raw, steps, group, lane, j, i, base, dot_type)

        b_x = load_apart(p_x + r * x_next, live[:, None] & in_dim[None, :])
        p_kept = records.x + (head * RING + ring)[:, None] * DIM + p[None, :]
        store_apart(p_kept, b_x, kept[:, None] & in_dim[None, :])
        b_x = tl.trans(b_x)
        if WRITES:
            f_raw = f_ahead
            f_ahead = load_steps(
                inputs, records, beyond, lane, f_lane_ring, row.unfolded, row, strides, shape
            )
            f_steps = time_steps(f_raw, lane, row.unfolded, row, clamp)
            f_steps = tl.where(lane < row.tokens_folded, f_steps, 0.0)
            weights, decay = state_factors(f_raw, f_steps, shape.POSITIONS)
            b_f = tl.trans(load_apart(f_x + r * f_next, is_folded[:, None] & in_dim[None, :]))
            inflows = split(b_f.to(tl.float32) * weights[None, :], PIECES, dot_type)
        # Two sums, since each product waits for the sum before it.
        y = tl.zeros((shape.ROWS, shape.QUERIES), tl.float32)
        z = tl.zeros((shape.ROWS, shape.QUERIES), tl.float32)
        for s in tl.static_range(PARTS):
            inside = in_dim[:, None] & (n + s * PART < STATE)[None, :]
            p_part = p_source + r * (DIM * STATE) + s * PART
            if RUN == 1:
                b_h = early[s]
            elif FULL:
                b_h = tl.load(p_part, mask=row.reads, other=0.0)
            else:
                b_h = tl.load(p_part, mask=inside & row.reads, other=0.0)
            b_h = rename(b_h)
            if WRITES:
                inflow = tl.zeros((shape.ROWS, PART), tl.float32)
                for k in tl.static_range(len(inflows)):
                    inflow = product(inflows[len(inflows) - 1 - k], folded[s], inflow, dot_type)
                b_h = b_h.to(tl.float32) * decay + inflow
                new = name_back(b_h)
                element = cell + (head * (DIM * STATE) + s * PART)
                if FULL:
                    inside = tl.full((shape.ROWS, PART), True, tl.int1)
                store_state(target + element, new, element, inside, key, place)
            operands = (b_h,)
            if WIDE:
                operands = split(b_h, 2, dot_type)
            elif dot_type != tl.float32:
                operands = (b_h.to(source.dtype.element_ty),)
            y = product(operands[0], queries[s], y, dot_type)
            if len(operands) > 1:
                z = product(operands[1], queries[s], z, dot_type)
        y = (y + z) * carries[None, :]
        for k in tl.static_range(len(mixes)):
            y = product(b_x, mixes[k], y, dot_type)
        p_out = out + i[:, None] * (HEADS * DIM) + (head * DIM + p)[None, :]
        y = tl.trans(y).to(out.dtype.element_ty)
        outgoing = (i >= row.first_output_token) & (i < row.scheduled)
        store_apart(p_out, y, outgoing[:, None] & in_dim[None, :])
