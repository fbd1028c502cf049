"""The replay layout's step of one row token by token, for the heads of one program.

For the few rows that the other forms leave out: several certain tokens beside `verify_row`, a
snapshot or more than 8 tokens beside `chunk_row`.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

from hybrid_runtime.kernels.replay.tile import load_parts, step_parts, store_parts, time_step


@triton.jit
def walk_row(
    inputs, past, ahead, blocks, out, row, share, keys, clamp, strides, shape, place,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Arguments as of `verify_row`; CHUNK rows of a head's state are walked at a time."""
    HEADS: tl.constexpr = shape.HEADS
    DIM: tl.constexpr = shape.DIM
    STATE: tl.constexpr = shape.STATE
    PART: tl.constexpr = shape.PART
    PARTS: tl.constexpr = shape.PARTS
    groups: tl.constexpr = HEADS // shape.HEADS_PER_GROUP
    chunks: tl.constexpr = shape.TILE // CHUNK
    o_n = share.o_n
    for i in range(shape.RUN * chunks):
        i_chunk = tl.cast(i, tl.int32)  # in the interpreter i is an int, which no constexpr divides
        i_head = share.head + i_chunk // chunks
        o_p = share.p + i_chunk % chunks * CHUNK + tl.arange(0, CHUNK)
        in_dim = o_p < DIM
        across = i_head * DIM + o_p
        elements = ()
        insides = ()
        walk = ()
        for s in tl.static_range(PARTS):
            part = o_n + s * PART
            elements += (across[:, None] * STATE + part[None, :],)
            insides += (in_dim[:, None] & (part < STATE)[None, :],)
            b_old = tl.load(blocks.read + elements[s], mask=insides[s] & row.reads, other=0.0)
            walk += (b_old.to(tl.float32),)
        bias = tl.load(inputs.dt_bias + i_head).to(tl.float32)
        rate = -tl.exp(tl.load(inputs.A_log + i_head).to(tl.float32))
        skip = tl.load(inputs.D + i_head).to(tl.float32)
        p_x = inputs.x + i_head * strides.x_head + o_p * strides.x_dim
        p_dt = inputs.dt + i_head * strides.dt_head
        if row.snapshots & (row.snapshot_after == 0):
            store_parts(blocks.snapshot, walk, elements, insides, keys.snapshot, place)
        k = (row.fold * 0).to(tl.int64)
        while k < row.fold:
            b_x = tl.load(past.x + across + k * (HEADS * DIM), mask=in_dim, other=0.0)
            b_B = load_parts(past.B + k * (groups * STATE), o_n, 1, True, shape)
            step = tl.load(past.dt + i_head + k * HEADS)
            walk = step_parts(walk, b_x, b_B, step, rate)
            k += 1
            if row.snapshots & (row.snapshot_after == k):
                store_parts(blocks.snapshot, walk, elements, insides, keys.snapshot, place)
        k = (row.fold * 0).to(tl.int64)
        while k < row.scheduled:
            b_x = tl.load(p_x + k * strides.x_token, mask=in_dim, other=0.0)
            b_B = load_parts(inputs.B + k * strides.B_token, o_n, strides.B_state, True, shape)
            b_C = load_parts(inputs.C + k * strides.C_token, o_n, strides.C_state, True, shape)
            raw = tl.load(p_dt + k * strides.dt_token).to(tl.float32)
            step = time_step(raw + bias, clamp)
            walk = step_parts(walk, b_x, b_B, step, rate)
            sums = tl.zeros((CHUNK, PART), tl.float32)
            for s in tl.static_range(PARTS):
                sums += walk[s] * b_C[s].to(tl.float32)[None, :]
            y = tl.sum(sums, axis=1) + skip * b_x.to(tl.float32)
            tl.store(out + across + k * (HEADS * DIM), y.to(out.dtype.element_ty), mask=in_dim)
            i_guess = k - row.certain
            if i_guess >= 0:
                tl.store(ahead.x + across + i_guess * (HEADS * DIM), b_x, mask=in_dim)
                if share.writes_dt:
                    tl.store(ahead.dt + i_head + i_guess * HEADS, step)
                if share.writes_B & (i_chunk == 0):
                    for s in tl.static_range(PARTS):
                        p_B = ahead.B + i_guess * (groups * STATE) + o_n + s * PART
                        tl.store(p_B, b_B[s], mask=o_n + s * PART < STATE)
            k += 1
            if k == row.certain:
                store_parts(blocks.write, walk, elements, insides, keys.write, place)
            if row.snapshots & (k <= row.certain) & (row.snapshot_after == row.fold + k):
                store_parts(blocks.snapshot, walk, elements, insides, keys.snapshot, place)
