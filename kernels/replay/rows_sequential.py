"""The replay layout's step of one row token by token, for the heads of one program.

For the few rows that the other forms leave out: several certain tokens in `replay_verify`, a
snapshot or more than 8 tokens in `replay_chunk`.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from hybrid_runtime.kernels.replay.tile import load_parts, step_parts, store_part, time_step


@triton.jit
def walk_row(
    inputs,
    past,
    ahead,
    taken,
    to,
    snapshot,
    out,
    count,
    scheduled,
    certain,
    behind,
    keeps,
    reads,
    first,
    top,
    n,
    keeps_dt,
    keeps_B,
    key,
    early,
    dt_min,
    dt_max,
    x_token: tl.constexpr,
    x_head: tl.constexpr,
    x_dim: tl.constexpr,
    dt_token: tl.constexpr,
    dt_head: tl.constexpr,
    B_token: tl.constexpr,
    B_state: tl.constexpr,
    C_token: tl.constexpr,
    C_state: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    ROUND: tl.constexpr,
    DIGITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Arguments as of `verify_row`. snapshot, behind: block that gets the state after that many of
    the `count + certain` tokens that become part of it, if it `keeps` one; early: its rounding."""
    x, dt, A_log, B, C, D, dt_bias = inputs
    past_x, past_B, past_dt = past
    next_x, next_B, next_dt = ahead
    groups: tl.constexpr = HEADS // HEADS_PER_GROUP
    chunks: tl.constexpr = TILE // HIGH
    for turn_of in range(RUN * chunks):
        head = first + turn_of // chunks
        p = top + turn_of % chunks * HIGH + tl.arange(0, HIGH)
        in_dim = p < DIM
        across = head * DIM + p
        elements = ()
        insides = ()
        walk = ()
        for s in tl.static_range(SPLIT):
            part = n + s * LOW
            elements += (across[:, None] * STATE + part[None, :],)
            insides += (in_dim[:, None] & (part < STATE)[None, :],)
            old = tl.load(taken + elements[s], mask=insides[s] & reads, other=0.0)
            walk += (old.to(tl.float32),)
        bias = tl.load(dt_bias + head).to(tl.float32)
        rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
        skip = tl.load(D + head).to(tl.float32)
        row_x = x + head * x_head + p * x_dim
        row_dt = dt + head * dt_head
        if keeps & (behind == 0):
            for s in tl.static_range(SPLIT):
                store_part(snapshot, walk[s], elements[s], insides[s], early, ROUND, DIGITS, LEAST)
        k = (count * 0).to(tl.int64)
        while k < count:
            xk = tl.load(past_x + across + k * (HEADS * DIM), mask=in_dim, other=0.0)
            Bk = load_parts(past_B + k * (groups * STATE), n, 1, True, STATE, SPLIT, LOW)
            step = tl.load(past_dt + head + k * HEADS)
            walk = step_parts(walk, xk, Bk, step, rate, SPLIT)
            k += 1
            if keeps & (behind == k):
                for s in tl.static_range(SPLIT):
                    store_part(
                        snapshot, walk[s], elements[s], insides[s], early, ROUND, DIGITS,
                        LEAST,
                    )  # fmt: skip
        k = (count * 0).to(tl.int64)
        while k < scheduled:
            xk = tl.load(row_x + k * x_token, mask=in_dim, other=0.0)
            Bk = load_parts(B + k * B_token, n, B_state, True, STATE, SPLIT, LOW)
            Ck = load_parts(C + k * C_token, n, C_state, True, STATE, SPLIT, LOW)
            raw = tl.load(row_dt + k * dt_token).to(tl.float32)
            step = time_step(raw + bias, dt_min, dt_max)
            walk = step_parts(walk, xk, Bk, step, rate, SPLIT)
            sums = tl.zeros((HIGH, LOW), tl.float32)
            for s in tl.static_range(SPLIT):
                sums += walk[s] * Ck[s].to(tl.float32)[None, :]
            output = tl.sum(sums, axis=1) + skip * xk.to(tl.float32)
            tl.store(out + across + k * (HEADS * DIM), output.to(out.dtype.element_ty), mask=in_dim)
            guess = k - certain
            if guess >= 0:
                tl.store(next_x + across + guess * (HEADS * DIM), xk, mask=in_dim)
                if keeps_dt:
                    tl.store(next_dt + head + guess * HEADS, step)
                if keeps_B & (turn_of == 0):
                    for s in tl.static_range(SPLIT):
                        recorded = next_B + guess * (groups * STATE) + n + s * LOW
                        tl.store(recorded, Bk[s], mask=n + s * LOW < STATE)
            k += 1
            if k == certain:
                for s in tl.static_range(SPLIT):
                    store_part(to, walk[s], elements[s], insides[s], key, ROUND, DIGITS, LEAST)
            if keeps & (k <= certain) & (behind == count + k):
                for s in tl.static_range(SPLIT):
                    store_part(
                        snapshot, walk[s], elements[s], insides[s], early, ROUND, DIGITS,
                        LEAST,
                    )  # fmt: skip
