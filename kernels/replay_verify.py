"""The replay layout's verify pass over one row in steady decode, for the heads of one program.

The states of the next heads are copied to shared memory meanwhile, which takes no registers. B and
C of all tokens stay in registers as fp32, converted once for all heads. A head's state is taken in
chunks of few rows, so that they fit beside them, while a head's scalars are computed once for all
chunks. The recorded and the certain token are folded in by one multiply-add each. The guesses leave
the state alone: with the decays a, y_i = a_(c..i) C_i h + sum over guesses j <= i of a_(j+1..i)
dt_j (C_i B_j) x_j, and C_i B_j is common to the heads of a group.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from hybrid_runtime.kernels.replay_tile import (
    load_parts,
    load_scalars,
    store_at,
    store_part,
    time_step,
    widen,
)


@triton.jit
def verify_row(
    inputs,
    past,
    ahead,
    taken,
    to,
    snapshot,
    out,
    count,
    scheduled,
    behind,
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
    TOKENS: tl.constexpr,
    RECORDS: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STAGES: tl.constexpr,
    KEEP: tl.constexpr,
    SNAPSHOT: tl.constexpr,
    ROUND: tl.constexpr,
    DIGITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """One certain token and guesses: fold, write the state, give all outputs.

    inputs: x, dt, A_log, B, C, D, dt_bias of the row's first token and the program's group; past,
    ahead: x, B, dt of the records that are folded and of those that are written. taken, to: blocks
    read and written. count: records to fold. first, top: first head and row of its state.
    snapshot: block that gets the state after `behind` of the `count + 1` tokens, if SNAPSHOT; its
    rounding is by `early`.
    """
    x, dt, A_log, B, C, D, dt_bias = inputs
    past_x, past_B, past_dt = past
    next_x, next_B, next_dt = ahead
    groups: tl.constexpr = HEADS // HEADS_PER_GROUP
    chunks: tl.constexpr = TILE // HIGH
    Bs = ()
    Cs = ()
    if KEEP:
        for j in tl.static_range(RECORDS):
            at = past_B + j * (groups * STATE)
            Bs += (widen(load_parts(at, n, 1, j < count, STATE, SPLIT, LOW, 0.0), SPLIT),)
        Bs += (widen(load_parts(B, n, B_state, True, STATE, SPLIT, LOW), SPLIT),)
        for i in tl.static_range(TOKENS):
            at = C + i * C_token
            # 0 beyond the row's end, where what is computed is not stored.
            Ci = load_parts(at, n, C_state, i < scheduled, STATE, SPLIT, LOW, 0.0)
            Cs += (widen(Ci, SPLIT),)
    # What the guesses add to each other's outputs needs no state, and is common to heads
    # but for its decay.
    overlaps = ()
    for j in tl.static_range(1, TOKENS):
        Bj = load_parts(B + j * B_token, n, B_state, j < scheduled, STATE, SPLIT, LOW, 0.0)
        for i in tl.static_range(j, TOKENS):
            overlap = tl.zeros((LOW,), tl.float32)
            if KEEP:
                for s in tl.static_range(SPLIT):
                    overlap += Cs[i][s] * Bj[s].to(tl.float32)
            else:
                at = C + i * C_token
                Ci = load_parts(at, n, C_state, i < scheduled, STATE, SPLIT, LOW, 0.0)
                for s in tl.static_range(SPLIT):
                    overlap += Ci[s].to(tl.float32) * Bj[s].to(tl.float32)
            overlaps += (tl.sum(overlap, axis=0),)

    # Addresses as one pointer per thread and head, the rest constants that cost nothing.
    p = top + tl.arange(0, HIGH)
    cell = p[:, None] * STATE + n[None, :]
    raws = load_scalars(
        past_dt + first, dt + first * dt_head, dt_bias + first, A_log + first, D + first,
        count, scheduled, HEADS, RECORDS, TOKENS, dt_token,
    )  # fmt: skip
    for r in tl.range(RUN, num_stages=STAGES):
        head = first + r
        across = head * DIM
        mine = raws
        beyond = tl.minimum(head + 1, HEADS - 1)
        raws = load_scalars(
            past_dt + beyond, dt + beyond * dt_head, dt_bias + beyond, A_log + beyond,
            D + beyond, count, scheduled, HEADS, RECORDS, TOKENS, dt_token,
        )  # fmt: skip
        bias = mine[RECORDS + TOKENS].to(tl.float32)
        rate = -tl.exp(mine[RECORDS + TOKENS + 1].to(tl.float32))
        skip = mine[RECORDS + TOKENS + 2].to(tl.float32)
        # What lies beyond the row's end is undefined: nothing that is stored depends on it.
        new_steps = ()
        for i in tl.static_range(TOKENS):
            raw = mine[RECORDS + i].to(tl.float32)
            new_steps += (time_step(raw + bias, dt_min, dt_max),)
        # Of what becomes part of the state, from the last token back: step times decay.
        inflows = (new_steps[0],)
        later = new_steps[0]
        for j in tl.static_range(RECORDS):
            inflows += (mine[RECORDS - 1 - j] * tl.exp(later * rate),)
            later += mine[RECORDS - 1 - j]
        total = tl.exp(later * rate)
        if SNAPSHOT:
            # The same for the tokens up to the boundary.
            later = tl.where(behind > count, new_steps[0], 0.0)
            shares = (later,)
            for j in tl.static_range(RECORDS):
                step = tl.where(RECORDS - 1 - j < behind, mine[RECORDS - 1 - j], 0.0)
                shares += (step * tl.exp(later * rate),)
                later += step
            before = tl.exp(later * rate)
        decays = (rate * 0 + 1.0,)
        for i in tl.static_range(1, TOKENS):
            decays += (tl.exp(new_steps[i] * rate),)
        carries = (decays[0],)
        for i in tl.static_range(1, TOKENS):
            carries += (carries[i - 1] * decays[i],)
        weights = ()
        for i in tl.static_range(1, TOKENS):
            decay = rate * 0 + 1.0
            for back in tl.static_range(i):
                # From guess i back to 1. Of guess j in the outputs of tokens j .. there are
                # TOKENS - j overlaps, behind those of the guesses before it.
                weight = new_steps[i - back] * decay
                weight *= overlaps[(i - back - 1) * (2 * TOKENS - i + back) // 2 + back]
                if back == 0:
                    weight += skip
                weights += (weight,)
                decay *= decays[i - back]
        if keeps_dt:
            for j in tl.static_range(1, TOKENS):
                tl.store(next_dt + head + (j - 1) * HEADS, new_steps[j], j < scheduled)

        keys = Bs
        queries = Cs
        if not KEEP:
            for j in tl.static_range(RECORDS):
                spot = past_B + j * (groups * STATE)
                keys += (load_parts(spot, n, 1, j < count, STATE, SPLIT, LOW, 0.0),)
            keys += (load_parts(B, n, B_state, True, STATE, SPLIT, LOW),)
            for i in tl.static_range(TOKENS):
                spot = C + i * C_token
                live = i < scheduled
                queries += (load_parts(spot, n, C_state, live, STATE, SPLIT, LOW, 0.0),)
        from_head = taken + across * STATE + cell
        to_head = to + across * STATE + cell
        row_x = x + head * x_head + p * x_dim
        past_head = past_x + across + p
        next_head = next_x + across + p
        out_head = out + across + p
        for q in tl.static_range(chunks):
            in_dim = p + q * HIGH < DIM
            if DIM % TILE == 0:
                in_dim = tl.full((HIGH,), True, tl.int1)
            held = ()
            for s in tl.static_range(SPLIT):
                spot = from_head + (q * HIGH * STATE + s * LOW)
                if (DIM % TILE == 0) & (STATE == SPLIT * LOW):
                    held += (tl.load(spot, mask=reads, other=0.0),)
                else:
                    inside = in_dim[:, None] & (n + s * LOW < STATE)[None, :] & reads
                    held += (tl.load(spot, mask=inside, other=0.0),)
            xs = ()
            for i in tl.static_range(TOKENS):
                spot = row_x + (i * x_token + q * HIGH * x_dim)
                xs += (tl.load(spot, mask=in_dim & (i < scheduled)),)
            vs = (xs[0].to(tl.float32),)
            for j in tl.static_range(RECORDS):
                spot = past_head + ((RECORDS - 1 - j) * (HEADS * DIM) + q * HIGH)
                old = tl.load(spot, mask=in_dim & (RECORDS - 1 - j < count), other=0.0)
                vs += (old.to(tl.float32),)
            if SNAPSHOT:
                for s in tl.static_range(SPLIT):
                    folded = held[s].to(tl.float32) * before
                    for j in tl.static_range(RECORDS + 1):
                        Bk = keys[RECORDS - j][s].to(tl.float32)
                        folded += (shares[j] * vs[j])[:, None] * Bk[None, :]
                    inside = in_dim[:, None] & (n + s * LOW < STATE)[None, :]
                    element = across * STATE + q * HIGH * STATE + s * LOW + cell
                    store_part(snapshot, folded, element, inside, early, ROUND, DIGITS, LEAST)
            us = ()
            for j in tl.static_range(RECORDS + 1):
                us += (inflows[j] * vs[j],)
            h = ()
            for s in tl.static_range(SPLIT):
                folded = held[s].to(tl.float32) * total
                for j in tl.static_range(RECORDS + 1):
                    Bk = keys[RECORDS - j][s].to(tl.float32)
                    folded += us[j][:, None] * Bk[None, :]
                h += (folded,)
            for i in tl.static_range(TOKENS):
                product = h[0] * queries[i][0].to(tl.float32)[None, :]
                for s in tl.static_range(1, SPLIT):
                    product += h[s] * queries[i][s].to(tl.float32)[None, :]
                y = tl.sum(product, axis=1)
                if i == 0:
                    y += skip * xs[0].to(tl.float32)
                else:
                    y *= carries[i]
                for back in tl.static_range(i):
                    y += weights[i * (i - 1) // 2 + back] * xs[i - back].to(tl.float32)
                spot = out_head + (i * (HEADS * DIM) + q * HIGH)
                tl.store(spot, y.to(out.dtype.element_ty), mask=in_dim & (i < scheduled))
            for j in tl.static_range(1, TOKENS):
                spot = next_head + ((j - 1) * (HEADS * DIM) + q * HIGH)
                tl.store(spot, xs[j], mask=in_dim & (j < scheduled))
            for s in tl.static_range(SPLIT):
                inside = in_dim[:, None] & (n + s * LOW < STATE)[None, :]
                if (DIM % TILE == 0) & (STATE == SPLIT * LOW):
                    inside = tl.full((HIGH, LOW), True, tl.int1)
                offset = q * HIGH * STATE + s * LOW
                element = across * STATE + offset + cell
                store_at(to_head + offset, h[s], element, inside, key, ROUND, DIGITS, LEAST)
    for j in tl.static_range(1, TOKENS):
        if keeps_B & (j < scheduled):
            Bj = load_parts(B + j * B_token, n, B_state, True, STATE, SPLIT, LOW)
            for s in tl.static_range(SPLIT):
                part = n + s * LOW
                tl.store(next_B + (j - 1) * (groups * STATE) + part, Bj[s], part < STATE)
