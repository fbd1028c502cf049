"""The replay layout's step of one row by matrix products, for the heads of one program.

For 16-bit states, where multiply-adds on every element take longer than the memory. Positions 0 ..
7 are the recorded guesses that are folded in, 8 .. 15 the row's tokens, those that are not there
have step 0 and zero inputs. With the sum S of step times rate, c the last certain position and h
the state that is read (State Space Duality, Dao and Gu 2024, section 6)

    y_i = exp(S_i) C_i h + D x_i + sum over j <= i of exp(S_i - S_j) step_j (C_i B_j) x_j
    h'  = exp(S_c) h + sum over j <= c of exp(S_c - S_j) step_j x_j B_j

h, x, B and C are exact operands; what is computed in fp32 goes in as the sum of two bfloat16 (three
where states are rounded by chance). Guesses are masked out of the second product, so that one that
is not finite leaves h' alone; in the first it spoils the row's outputs. A program is one warp. The
columns of a part of 32 are renamed such that a lane holds 8 neighbours of memory both as operand
and as result, and states pass from memory to the products and back without an exchange between
lanes.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from hybrid_runtime.kernels.replay.tile import store_at, time_step


@triton.jit
def rename(part):
    """Columns (t, j, e) of 4 x 4 x 2 as (j, t, e), and back."""
    high: tl.constexpr = part.shape[0]
    return part.reshape(high, 4, 4, 2).permute(0, 2, 1, 3).reshape(high, 32)


@triton.jit
def pieces(a, COUNT: tl.constexpr):
    """fp32 as a sum of bfloat16, which leaves 2**-17 of it with two, nothing with three."""
    parts = ()
    for _ in tl.static_range(COUNT - 1):
        high = ((a.to(tl.int32, bitcast=True) + 32768) & -65536).to(tl.float32, bitcast=True)
        parts += (high.to(tl.bfloat16),)
        a -= high
    parts += (a.to(tl.bfloat16),)
    return parts


@triton.jit
def product(a, b, c, dot_type: tl.constexpr):
    """a b + c in fp32. Operands of 16 bits, but for the interpreter, which has no bfloat16."""
    if dot_type == tl.float32:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c)


@triton.jit
def load_steps(past_dt, dt, dt_bias, A_log, D, j, count, scheduled, HEADS: tl.constexpr, dt_token):
    """Of one head: steps of the records, raw steps of the tokens `[16]`, bias, A_log, D."""
    old = tl.load(past_dt + j * HEADS, mask=j < count, other=0.0)
    new = tl.load(dt + (j - 8) * dt_token, mask=(j >= 8) & (j - 8 < scheduled), other=0.0)
    return old, new, tl.load(dt_bias), tl.load(A_log), tl.load(D)


@triton.jit
def chunk_row(
    inputs,
    past,
    ahead,
    taken,
    to,
    out,
    count,
    scheduled,
    certain,
    reads,
    first,
    top,
    keeps_dt,
    keeps_B,
    key,
    dt_min,
    dt_max,
    dot_type: tl.constexpr,
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
    HIGH: tl.constexpr,
    STAGES: tl.constexpr,
    ROUND: tl.constexpr,
    DIGITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    x, dt, A_log, B, C, D, dt_bias = inputs
    past_x, past_B, past_dt = past
    next_x, next_B, next_dt = ahead
    groups: tl.constexpr = HEADS // HEADS_PER_GROUP
    PIECES: tl.constexpr = 3 if ROUND else 2  # by chance, what two leave would change some bits
    type_: tl.constexpr = taken.dtype.element_ty
    n = tl.arange(0, 32)
    j = tl.arange(0, 16)
    i = tl.arange(0, 8)
    is_old = j < 8
    live = (j < count) | ((j >= 8) & (j - 8 < scheduled))
    guess = (j - 8 >= certain) & (j - 8 < scheduled)
    queried = i < scheduled
    folds = live & (j < 8 + certain)

    p = top + tl.arange(0, HIGH)
    cell = p[:, None] * STATE + n[None, :]
    from_first = taken + first * (DIM * STATE) + cell
    x_first = tl.where(
        is_old[:, None],
        past_x + j[:, None] * (HEADS * DIM) + (first * DIM + p)[None, :],
        x + (j - 8)[:, None] * x_token + first * x_head + p[None, :] * x_dim,
    )
    x_next = tl.where(is_old[:, None], DIM, x_head)
    x_step = tl.where(is_old[:, None], HIGH, HIGH * x_dim)
    # All loads before anything that waits for one, those of far memory first. Only what a loop
    # loads can be on its way meanwhile otherwise.
    early_h = ()
    if RUN == 1:
        for q in tl.static_range(TILE // HIGH):
            for s in tl.static_range(SPLIT):
                inside = (p + q * HIGH < DIM)[:, None] & (n + s * 32 < STATE)[None, :] & reads
                at = from_first + (q * HIGH * STATE + s * 32)
                early_h += (tl.load(at, mask=inside, other=0.0),)
    raws = load_steps(
        past_dt + first, dt + first * dt_head, dt_bias + first, A_log + first, D + first,
        j, count, scheduled, HEADS, dt_token,
    )  # fmt: skip
    Bs = ()
    certain_Bs = ()
    Cs = ()
    for s in tl.static_range(SPLIT):
        part = n + s * 32
        at = tl.where(
            is_old[:, None],
            past_B + j[:, None] * (groups * STATE) + part[None, :],
            B + (j - 8)[:, None] * B_token + part[None, :] * B_state,
        )
        Bs += (tl.load(at, mask=live[:, None] & (part < STATE)[None, :], other=0.0),)
        # Again and not selected: what another layout is made of would be exchanged for each head.
        certain_Bs += (tl.load(at, mask=folds[:, None] & (part < STATE)[None, :], other=0.0),)
        at = C + i[:, None] * C_token + part[None, :] * C_state
        Cs += (tl.load(at, mask=queried[:, None] & (part < STATE)[None, :], other=0.0),)
    early_x = ()
    if RUN == 1:
        for q in tl.static_range(TILE // HIGH):
            mask = live[:, None] & (p + q * HIGH < DIM)[None, :]
            early_x += (tl.load(x_first + q * x_step, mask=mask, other=0.0),)

    keys = ()
    queries = ()
    most = tl.zeros((8,), tl.float32)
    pdl = tl.zeros((16, 8), tl.float32)
    for s in tl.static_range(SPLIT):
        keys += (rename(certain_Bs[s]),)
        queries += (tl.trans(rename(Cs[s])),)
        most = tl.maximum(most, tl.max(tl.abs(Cs[s].to(tl.float32)), axis=1))
        pdl = product(rename(Bs[s]), queries[s], pdl, dot_type)
        at = next_B + (j - 8 - certain)[:, None] * (groups * STATE) + (n + s * 32)[None, :]
        recorded = (guess & keeps_B)[:, None] & (n + s * 32 < STATE)[None, :]
        tl.store(at, Bs[s], mask=recorded)
    unit = tl.full((8,), 1.0, tl.float32)
    if type_ == tl.float16:
        # A power of two per token brings C into the range of fp16, where it is exact.
        power = most.to(tl.int32, bitcast=True) & 0x7F800000
        power = tl.maximum(power, 15 << 23)
        scale = (0x7F000000 - power + (14 << 23)).to(tl.float32, bitcast=True)
        unit = (power - (14 << 23)).to(tl.float32, bitcast=True)
        scaled = ()
        for s in tl.static_range(SPLIT):
            scaled += ((queries[s].to(tl.float32) * scale[None, :]).to(tl.float16),)
        queries = scaled

    for r in tl.range(RUN, num_stages=STAGES):
        head = first + r
        across = head * DIM
        old, new, bias, A, skip = raws
        beyond = tl.minimum(head + 1, HEADS - 1)
        raws = load_steps(
            past_dt + beyond, dt + beyond * dt_head, dt_bias + beyond, A_log + beyond,
            D + beyond, j, count, scheduled, HEADS, dt_token,
        )  # fmt: skip
        rate = -tl.exp(A.to(tl.float32))
        steps = time_step(new.to(tl.float32) + bias.to(tl.float32), dt_min, dt_max)
        steps = tl.where(is_old, old, tl.where(live, steps, 0.0))
        if keeps_dt:
            tl.store(next_dt + head + (j - 8 - certain) * HEADS, steps, mask=guess)
        # Below exp(-110) all is 0; larger numbers would cost the sums' precision.
        passed = tl.maximum(steps * rate, -110.0)
        sums = tl.cumsum(passed, axis=0)
        total = tl.sum(tl.where(j < 8 + certain, passed, 0.0), axis=0)
        # Of what is folded, the step times the decay behind it.
        weights = steps * tl.exp(tl.minimum(total - sums, 0.0))
        weights = tl.where(folds, weights, 0.0)
        total = tl.exp(total)
        reached = tl.sum(tl.where(j[:, None] <= 8 + i[None, :], passed[:, None], 0.0), axis=0)
        decay = tl.exp(tl.minimum(reached[None, :] - sums[:, None], 0.0))
        mix = tl.where(j[:, None] <= 8 + i[None, :], pdl * decay * steps[:, None], 0.0)
        mix += tl.where(j[:, None] == 8 + i[None, :], skip.to(tl.float32), 0.0)
        mixes = pieces(mix, 2)
        carries = tl.exp(reached) * unit

        # Addresses as one pointer per lane and head, the rest constants that cost nothing.
        from_head = from_first + r * (DIM * STATE)
        to_head = to + across * STATE + cell
        x_spot = x_first + r * x_next
        next_spot = next_x + (j - 8 - certain)[:, None] * (HEADS * DIM) + (across + p)[None, :]
        out_spot = out + i[:, None] * (HEADS * DIM) + (across + p)[None, :]
        for q in tl.static_range(TILE // HIGH):
            in_dim = p + q * HIGH < DIM
            if DIM % TILE == 0:
                in_dim = tl.full((HIGH,), True, tl.int1)
            if RUN == 1:
                xs = early_x[q]
            else:
                spot = x_spot + q * x_step
                xs = tl.load(spot, mask=live[:, None] & in_dim[None, :], other=0.0)
            tl.store(next_spot + q * HIGH, xs, mask=guess[:, None] & in_dim[None, :])
            xs = tl.trans(xs)
            certain_xs = tl.where(folds[None, :], xs, 0.0).to(tl.float32)
            us = pieces(certain_xs * weights[None, :], PIECES)
            ys = tl.zeros((HIGH, 8), tl.float32)
            for s in tl.static_range(SPLIT):
                offset = q * HIGH * STATE + s * 32
                inside = in_dim[:, None] & (n + s * 32 < STATE)[None, :]
                if RUN == 1:
                    h = early_h[q * SPLIT + s]
                elif (DIM % TILE == 0) & (STATE == SPLIT * 32):
                    h = tl.load(from_head + offset, mask=reads, other=0.0)
                else:
                    h = tl.load(from_head + offset, mask=inside & reads, other=0.0)
                if (DIM % TILE == 0) & (STATE == SPLIT * 32):
                    inside = tl.full((HIGH, 32), True, tl.int1)
                h = rename(h)
                ys = product(h, queries[s], ys, dot_type)
                h = h.to(tl.float32)
                element = across * STATE + offset + cell
                g = h * total
                for k in tl.static_range(PIECES):
                    g = product(us[k], keys[s], g, dot_type)
                g = rename(g)
                store_at(to_head + offset, g, element, inside, key, ROUND, DIGITS, LEAST)
            ys *= carries[None, :]
            for k in tl.static_range(2):
                ys = product(xs, mixes[k], ys, dot_type)
            ys = tl.trans(ys).to(out.dtype.element_ty)
            tl.store(out_spot + q * HIGH, ys, mask=queried[:, None] & in_dim[None, :])
