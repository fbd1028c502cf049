"""The replay layout's verify pass over one row in steady decode, for the heads of one program.

The states of the next heads are copied to shared memory meanwhile, which takes no registers. B and
C of all tokens stay in registers as fp32, converted once for all heads. A head's state is taken in
chunks of few rows, so that they fit beside them. Scalars and x lie one element per lane, computed
once, and are handed to all lanes where they are used: in a program of one warp a gather is a
shuffle, and nothing waits for a barrier.

The recorded and the certain token are folded in by one multiply-add each. The guesses leave the
state alone: with the decays a, y_i = a_(c..i) C_i h + sum over guesses j <= i of a_(j+1..i) dt_j
(C_i B_j) x_j, and C_i B_j is common to the heads of a group.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from hybrid_runtime.kernels.replay.loads import (
    load_chunk,
    load_rows,
    load_scalars,
    load_vectors,
    take_apart,
)
from hybrid_runtime.kernels.replay.tile import (
    load_parts,
    store_at,
    store_part,
    time_step,
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
    # Addresses as one pointer per thread and head, the rest constants that cost nothing.
    line = tl.arange(0, HIGH)
    cell = (top + line)[:, None] * STATE + n[None, :]
    lines = tl.arange(0, TILE)
    p = top + lines
    in_dim = p < DIM
    heads = first + tl.arange(0, RUN)
    raws = load_scalars(
        past_dt + heads, dt + heads * dt_head, dt_bias + heads, A_log + heads, D + heads,
        count, scheduled, HEADS, RECORDS, TOKENS, dt_token,
    )  # fmt: skip
    next_xs = load_rows(
        x + first * x_head, past_x + first * DIM, p, in_dim, count, scheduled, x_token, x_dim,
        HEADS, DIM, TOKENS, RECORDS,
    )  # fmt: skip
    # All loads before the first use: none passes what goes through shared memory.
    if KEEP:
        if RECORDS > 0:
            past_Bs = load_vectors(past_B, groups * STATE, 1, count, RECORDS, STATE, SPLIT * LOW)
        new_Bs = load_vectors(B, B_token, B_state, scheduled, TOKENS, STATE, SPLIT * LOW)
        new_Cs = load_vectors(C, C_token, C_state, scheduled, TOKENS, STATE, SPLIT * LOW)
    sole = ()
    if RUN == 1:
        cells = taken + first * (DIM * STATE) + cell
        for q in tl.static_range(chunks):
            sole += (
                load_chunk(cells, top + line, n, reads, q, DIM, STATE, TILE, SPLIT, LOW, HIGH),
            )
    Bs = ()
    Cs = ()
    news = ()
    if KEEP:
        if RECORDS > 0:
            Bs += take_apart(past_Bs, RECORDS, SPLIT, LOW)
        news = take_apart(new_Bs, TOKENS, SPLIT, LOW)
        Bs += (news[0],)
        Cs = take_apart(new_Cs, TOKENS, SPLIT, LOW)
    # What the guesses add to each other's outputs needs no state, and is common to heads
    # but for its decay.
    overlaps = ()
    for j in tl.static_range(1, TOKENS):
        if not KEEP:
            Bj = load_parts(B + j * B_token, n, B_state, j < scheduled, STATE, SPLIT, LOW, 0.0)
        for i in tl.static_range(j, TOKENS):
            overlap = tl.zeros((LOW,), tl.float32)
            if KEEP:
                for s in tl.static_range(SPLIT):
                    overlap += Cs[i][s] * news[j][s]
            else:
                at = C + i * C_token
                Ci = load_parts(at, n, C_state, i < scheduled, STATE, SPLIT, LOW, 0.0)
                for s in tl.static_range(SPLIT):
                    overlap += Ci[s].to(tl.float32) * Bj[s].to(tl.float32)
            overlaps += (tl.sum(overlap, axis=0),)

    # What lies beyond the row's end is undefined: nothing that is stored depends on it.
    steps = ()
    for i in tl.static_range(TOKENS):
        raw = raws[RECORDS + i].to(tl.float32) + raws[RECORDS + TOKENS].to(tl.float32)
        steps += (time_step(raw, dt_min, dt_max),)
    of_heads = head_factors(raws, steps, overlaps, count, behind, TOKENS, RECORDS, SNAPSHOT)
    for r in tl.range(RUN, num_stages=STAGES):
        head = first + r
        across = head * DIM
        xs = next_xs
        # Too narrow to be copied as states are; and no load passes the stores below.
        if RUN > 1:
            beyond = first + tl.minimum(r + 1, RUN - 1)
            next_xs = load_rows(
                x + beyond * x_head, past_x + beyond * DIM, p, in_dim, count, scheduled, x_token,
                x_dim, HEADS, DIM, TOKENS, RECORDS,
            )  # fmt: skip
        here = tl.full((1,), r, tl.int32)
        factors = ()
        for k in tl.static_range(len(of_heads)):
            factors += (tl.sum(tl.gather(of_heads[k], here, 0), 0),)
        skip = factors[0]
        total = factors[1]
        inflows = factors[2 : RECORDS + 3]
        carries = factors[RECORDS + 3 : RECORDS + TOKENS + 2]
        weights = factors[RECORDS + TOKENS + 2 :]
        if SNAPSHOT:
            end: tl.constexpr = RECORDS + TOKENS + 2 + TOKENS * (TOKENS - 1) // 2
            before = factors[end]
            shares = factors[end + 1 :]
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
        vs = (xs[0].to(tl.float32),)
        for j in tl.static_range(RECORDS):
            vs += (xs[TOKENS + RECORDS - 1 - j].to(tl.float32),)
        sums = (tl.zeros((TILE,), tl.float32),) * TOKENS
        for q in tl.static_range(chunks):
            within = top + q * HIGH + line < DIM
            if RUN == 1:
                held = sole[q]
            else:
                held = load_chunk(
                    from_head, top + line, n, reads, q, DIM, STATE, TILE, SPLIT, LOW, HIGH
                )
            if SNAPSHOT:
                for s in tl.static_range(SPLIT):
                    folded = held[s].to(tl.float32) * before
                    for j in tl.static_range(RECORDS + 1):
                        Bk = keys[RECORDS - j][s].to(tl.float32)
                        u = tl.gather(shares[j] * vs[j], line + q * HIGH, 0)
                        folded += u[:, None] * Bk[None, :]
                    inside = within[:, None] & (n + s * LOW < STATE)[None, :]
                    element = across * STATE + q * HIGH * STATE + s * LOW + cell
                    store_part(snapshot, folded, element, inside, early, ROUND, DIGITS, LEAST)
            us = ()
            for j in tl.static_range(RECORDS + 1):
                us += (tl.gather(inflows[j] * vs[j], line + q * HIGH, 0),)
            h = ()
            for s in tl.static_range(SPLIT):
                folded = held[s].to(tl.float32) * total
                for j in tl.static_range(RECORDS + 1):
                    Bk = keys[RECORDS - j][s].to(tl.float32)
                    folded += us[j][:, None] * Bk[None, :]
                h += (folded,)
            ys = ()
            for i in tl.static_range(TOKENS):
                product = h[0] * queries[i][0].to(tl.float32)[None, :]
                for s in tl.static_range(1, SPLIT):
                    product += h[s] * queries[i][s].to(tl.float32)[None, :]
                y = tl.gather(tl.sum(product, axis=1), lines % HIGH, 0)
                ys += (tl.where(lines // HIGH == q, y, sums[i]),)
            sums = ys
            for s in tl.static_range(SPLIT):
                inside = within[:, None] & (n + s * LOW < STATE)[None, :]
                if (DIM % TILE == 0) & (STATE == SPLIT * LOW):
                    inside = tl.full((HIGH, LOW), True, tl.int1)
                offset = q * HIGH * STATE + s * LOW
                element = across * STATE + offset + cell
                store_at(to_head + offset, h[s], element, inside, key, ROUND, DIGITS, LEAST)
        for i in tl.static_range(TOKENS):
            y = sums[i]
            if i == 0:
                y += skip * xs[0].to(tl.float32)
            else:
                y *= carries[i - 1]
            for back in tl.static_range(i):
                y += weights[i * (i - 1) // 2 + back] * xs[i - back].to(tl.float32)
            spot = out + (across + i * (HEADS * DIM)) + p
            tl.store(spot, y.to(out.dtype.element_ty), mask=in_dim & (i < scheduled))
        for j in tl.static_range(1, TOKENS):
            spot = next_x + (across + (j - 1) * (HEADS * DIM)) + p
            tl.store(spot, xs[j], mask=in_dim & (j < scheduled))
    for j in tl.static_range(1, TOKENS):
        if keeps_dt & (j < scheduled):
            tl.store(next_dt + (j - 1) * HEADS + heads, steps[j])
    for j in tl.static_range(1, TOKENS):
        if keeps_B & (j < scheduled):
            recorded = load_parts(B + j * B_token, n, B_state, True, STATE, SPLIT, LOW)
            for s in tl.static_range(SPLIT):
                part = n + s * LOW
                tl.store(next_B + (j - 1) * (groups * STATE) + part, recorded[s], part < STATE)


@triton.jit
def head_factors(
    raws, steps, overlaps, count, behind, TOKENS: tl.constexpr, RECORDS: tl.constexpr,
    SNAPSHOT: tl.constexpr,
):  # fmt: skip
    """What heads' scalars come to: D; the decay of the state; of what becomes part of it, from the
    last token back, step times decay; the decay of the state up to each guess; the weights of x in
    the guesses' outputs; with a snapshot, the second and the third up to the boundary."""
    rate = -tl.exp(raws[RECORDS + TOKENS + 1].to(tl.float32))
    skip = raws[RECORDS + TOKENS + 2].to(tl.float32)
    inflows = (steps[0],)
    later = steps[0]
    for j in tl.static_range(RECORDS):
        inflows += (raws[RECORDS - 1 - j] * tl.exp(later * rate),)
        later += raws[RECORDS - 1 - j]
    decays = ()
    carries = ()
    for i in tl.static_range(1, TOKENS):
        decays += (tl.exp(steps[i] * rate),)
        if i == 1:
            carries += (decays[0],)
        else:
            carries += (carries[i - 2] * decays[i - 1],)
    weights = ()
    for i in tl.static_range(1, TOKENS):
        decay = rate * 0 + 1.0
        for back in tl.static_range(i):
            # From guess i back to 1. Of guess j in the outputs of tokens j .. there are
            # TOKENS - j overlaps, behind those of the guesses before it.
            weight = steps[i - back] * decay
            weight *= overlaps[(i - back - 1) * (2 * TOKENS - i + back) // 2 + back]
            if back == 0:
                weight += skip
            weights += (weight,)
            decay *= decays[i - back - 1]
    factors = (skip, tl.exp(later * rate))
    factors += inflows + carries + weights
    if SNAPSHOT:
        # The same of the tokens up to the boundary.
        later = tl.where(behind > count, steps[0], 0.0)
        shares = (later,)
        for j in tl.static_range(RECORDS):
            step = tl.where(RECORDS - 1 - j < behind, raws[RECORDS - 1 - j], 0.0)
            shares += (step * tl.exp(later * rate),)
            later += step
        factors += (tl.exp(later * rate),)
        factors += shares
    return factors
