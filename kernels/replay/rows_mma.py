"""The replay layout's step of one row by matrix products, for the heads of one program.

For 16-bit states, where multiply-adds on every element take longer than the memory. Positions 0 ..
7 are the guesses that are folded in, 8 .. 15 the row's tokens; those that are not there have step 0
and zero inputs. With the sum S of step times rate, c the last certain position and h the state that
is read (State Space Duality, Dao and Gu 2024, section 6)

    y_i = exp(S_i) C_i h + D x_i + sum over j <= i of exp(S_i - S_j) step_j (C_i B_j) x_j
    h'  = exp(S_c) h + sum over j <= c of exp(S_c - S_j) step_j x_j B_j

h, x, B and C are exact operands; what is computed in fp32 goes in as the sum of two bfloat16 (three
where states are stochastically rounded). Guesses are masked out of the second product, so that one
that is not finite leaves h' alone; in the first it spoils the row's outputs. A program is one warp.
The columns of a part of 32 are renamed such that a lane holds 8 neighbours of memory both as
operand and as result: states pass from memory to the products and back without an exchange between
lanes.
"""

# mypy: disable-error-code="assignment,var-annotated"
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
def load_steps(inputs, past, i_head, j, row, strides, shape):
    """Of one head: steps of the guesses, raw steps of the tokens `[16]`, bias, A_log, D."""
    p_past = past.dt + i_head
    p_dt = inputs.dt + i_head * strides.dt_head
    is_token = (j >= 8) & (j - 8 < row.scheduled)
    old = tl.load(p_past + j * shape.HEADS, mask=j < row.fold, other=0.0)
    new = tl.load(p_dt + (j - 8) * strides.dt_token, mask=is_token, other=0.0)
    bias = tl.load(inputs.dt_bias + i_head)
    return old, new, bias, tl.load(inputs.A_log + i_head), tl.load(inputs.D + i_head)


@triton.jit
def into_range(Cs, most):
    """C as fp16 by a power of two per token, which brings it where fp16 is exact, and what undoes
    it. Cs: parts `[32, 8]`; most: largest absolute values `[8]`."""
    power = most.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(power, 15 << 23)
    scale = (0x7F000000 - power + (14 << 23)).to(tl.float32, bitcast=True)
    unit = (power - (14 << 23)).to(tl.float32, bitcast=True)
    scaled = ()
    for s in tl.static_range(len(Cs)):
        scaled += ((Cs[s].to(tl.float32) * scale[None, :]).to(tl.float16),)
    return scaled, unit


@triton.jit
def load_group(inputs, past, i, j, n, row, strides, shape):
    """Parts of B at the 16 positions, of those of it that are folded, and of C of the 8 tokens."""
    STATE: tl.constexpr = shape.STATE
    groups: tl.constexpr = shape.HEADS // shape.HEADS_PER_GROUP
    live = (j < row.fold) | ((j >= 8) & (j - 8 < row.scheduled))
    folds = live & (j < 8 + row.certain)
    Bs = ()
    certain_Bs = ()
    Cs = ()
    for s in tl.static_range(shape.PARTS):
        part = n + s * 32
        at = tl.where(
            (j < 8)[:, None],
            past.B + j[:, None] * (groups * STATE) + part[None, :],
            inputs.B + (j - 8)[:, None] * strides.B_token + part[None, :] * strides.B_state,
        )
        Bs += (tl.load(at, mask=live[:, None] & (part < STATE)[None, :], other=0.0),)
        # Again and not selected: what another layout is made of would be exchanged for each head.
        certain_Bs += (tl.load(at, mask=folds[:, None] & (part < STATE)[None, :], other=0.0),)
        at = inputs.C + i[:, None] * strides.C_token + part[None, :] * strides.C_state
        queried = (i < row.scheduled)[:, None] & (part < STATE)[None, :]
        Cs += (tl.load(at, mask=queried, other=0.0),)
    return Bs, certain_Bs, Cs


@triton.jit
def token_steps(raws, ahead, i_head, j, row, share, clamp, shape):
    """Time steps of a head at the 16 positions, 0 where none is; those of guesses are kept."""
    old, new, bias, _, _ = raws
    live = (j < row.fold) | ((j >= 8) & (j - 8 < row.scheduled))
    guess = (j - 8 >= row.certain) & (j - 8 < row.scheduled)
    steps = time_step(new.to(tl.float32) + bias.to(tl.float32), clamp)
    steps = tl.where(j < 8, old, tl.where(live, steps, 0.0))
    if share.writes_dt:
        p_dt = ahead.dt + i_head + (j - 8 - row.certain) * shape.HEADS
        tl.store(p_dt, steps, mask=guess)
    return steps


@triton.jit
def head_weights(raws, steps, overlaps, unit, i, j, row):
    """Of a head: decay of the state; weights of x in what is folded; weights of x in the outputs
    `[16, 8]`, in pieces; decay of the state in the outputs, times the unit of C."""
    A, skip = raws[3], raws[4]
    live = (j < row.fold) | ((j >= 8) & (j - 8 < row.scheduled))
    # Below exp(-110) all is 0; larger numbers would cost the sums' precision.
    passed = tl.maximum(steps * -tl.exp(A.to(tl.float32)), -110.0)
    sums = tl.cumsum(passed, axis=0)
    total = tl.sum(tl.where(j < 8 + row.certain, passed, 0.0), axis=0)
    # Of what is folded, the step times the decay behind it.
    weights = steps * tl.exp(tl.minimum(total - sums, 0.0))
    weights = tl.where(live & (j < 8 + row.certain), weights, 0.0)
    reached = tl.sum(tl.where(j[:, None] <= 8 + i[None, :], passed[:, None], 0.0), axis=0)
    decay = tl.exp(tl.minimum(reached[None, :] - sums[:, None], 0.0))
    mix = tl.where(j[:, None] <= 8 + i[None, :], overlaps * decay * steps[:, None], 0.0)
    mix += tl.where(j[:, None] == 8 + i[None, :], skip.to(tl.float32), 0.0)
    return tl.exp(total), weights, pieces(mix, 2), tl.exp(reached) * unit


@triton.jit
def chunk_row(
    inputs, past, ahead, blocks, out, row, share, keys, clamp, strides, shape, place,
    dot_type: tl.constexpr,
):  # fmt: skip
    """Arguments as of `verify_row`; stores no snapshot. dot_type: of the products' operands."""
    HEADS: tl.constexpr = shape.HEADS
    DIM: tl.constexpr = shape.DIM
    STATE: tl.constexpr = shape.STATE
    RUN: tl.constexpr = shape.RUN
    TILE: tl.constexpr = shape.TILE
    CHUNK: tl.constexpr = shape.CHUNK
    PARTS: tl.constexpr = shape.PARTS
    groups: tl.constexpr = HEADS // shape.HEADS_PER_GROUP
    # Rounded stochastically, what two leave would change some bits.
    PIECES: tl.constexpr = 2 if place is None else 3
    state_type: tl.constexpr = blocks.read.dtype.element_ty
    n = tl.arange(0, 32)
    j = tl.arange(0, 16)
    i = tl.arange(0, 8)
    is_old = j < 8
    live = (j < row.fold) | ((j >= 8) & (j - 8 < row.scheduled))
    guess = (j - 8 >= row.certain) & (j - 8 < row.scheduled)
    queried = i < row.scheduled
    folds = live & (j < 8 + row.certain)

    p = share.p + tl.arange(0, CHUNK)
    cell = p[:, None] * STATE + n[None, :]
    from_first = blocks.read + share.head * (DIM * STATE) + cell
    x_first = tl.where(
        is_old[:, None],
        past.x + j[:, None] * (HEADS * DIM) + (share.head * DIM + p)[None, :],
        inputs.x
        + (j - 8)[:, None] * strides.x_token
        + share.head * strides.x_head
        + p[None, :] * strides.x_dim,
    )
    x_next = tl.where(is_old[:, None], DIM, strides.x_head)
    x_step = tl.where(is_old[:, None], CHUNK, CHUNK * strides.x_dim)
    # All loads before anything that waits for one, those of far memory first. Only what a loop
    # loads can be on its way meanwhile otherwise.
    early_h = ()
    if RUN == 1:
        for q in tl.static_range(TILE // CHUNK):
            for s in tl.static_range(PARTS):
                inside = (p + q * CHUNK < DIM)[:, None] & (n + s * 32 < STATE)[None, :] & row.reads
                at = from_first + (q * CHUNK * STATE + s * 32)
                early_h += (tl.load(at, mask=inside, other=0.0),)
    raws = load_steps(inputs, past, share.head, j, row, strides, shape)
    Bs, certain_Bs, Cs = load_group(inputs, past, i, j, n, row, strides, shape)
    early_x = ()
    if RUN == 1:
        for q in tl.static_range(TILE // CHUNK):
            mask = live[:, None] & (p + q * CHUNK < DIM)[None, :]
            early_x += (tl.load(x_first + q * x_step, mask=mask, other=0.0),)

    folded_Bs = ()
    queries = ()
    most = tl.zeros((8,), tl.float32)
    overlaps = tl.zeros((16, 8), tl.float32)
    for s in tl.static_range(PARTS):
        folded_Bs += (rename(certain_Bs[s]),)
        queries += (tl.trans(rename(Cs[s])),)
        most = tl.maximum(most, tl.max(tl.abs(Cs[s].to(tl.float32)), axis=1))
        overlaps = product(rename(Bs[s]), queries[s], overlaps, dot_type)
        at = ahead.B + (j - 8 - row.certain)[:, None] * (groups * STATE) + (n + s * 32)[None, :]
        written = (guess & share.writes_B)[:, None] & (n + s * 32 < STATE)[None, :]
        tl.store(at, Bs[s], mask=written)
    unit = tl.full((8,), 1.0, tl.float32)
    if state_type == tl.float16:
        queries, unit = into_range(queries, most)

    for r in tl.range(RUN, num_stages=shape.STAGES):
        head = share.head + r
        across = head * DIM
        now = raws
        beyond = tl.minimum(head + 1, HEADS - 1)
        raws = load_steps(inputs, past, beyond, j, row, strides, shape)
        steps = token_steps(now, ahead, head, j, row, share, clamp, shape)
        total, weights, mixes, carries = head_weights(now, steps, overlaps, unit, i, j, row)

        # Addresses as one pointer per lane and head, the rest constants that cost nothing.
        from_head = from_first + r * (DIM * STATE)
        to_head = blocks.write + across * STATE + cell
        x_spot = x_first + r * x_next
        next_spot = ahead.x + (j - 8 - row.certain)[:, None] * (HEADS * DIM) + (across + p)[None, :]
        out_spot = out + i[:, None] * (HEADS * DIM) + (across + p)[None, :]
        for q in tl.static_range(TILE // CHUNK):
            in_dim = p + q * CHUNK < DIM
            if DIM % TILE == 0:
                in_dim = tl.full((CHUNK,), True, tl.int1)
            if RUN == 1:
                xs = early_x[q]
            else:
                spot = x_spot + q * x_step
                xs = tl.load(spot, mask=live[:, None] & in_dim[None, :], other=0.0)
            tl.store(next_spot + q * CHUNK, xs, mask=guess[:, None] & in_dim[None, :])
            xs = tl.trans(xs)
            certain_xs = tl.where(folds[None, :], xs, 0.0).to(tl.float32)
            us = pieces(certain_xs * weights[None, :], PIECES)
            ys = tl.zeros((CHUNK, 8), tl.float32)
            for s in tl.static_range(PARTS):
                offset = q * CHUNK * STATE + s * 32
                inside = in_dim[:, None] & (n + s * 32 < STATE)[None, :]
                if RUN == 1:
                    h = early_h[q * PARTS + s]
                elif (DIM % TILE == 0) & (STATE == PARTS * 32):
                    h = tl.load(from_head + offset, mask=row.reads, other=0.0)
                else:
                    h = tl.load(from_head + offset, mask=inside & row.reads, other=0.0)
                if (DIM % TILE == 0) & (STATE == PARTS * 32):
                    inside = tl.full((CHUNK, 32), True, tl.int1)
                h = rename(h)
                ys = product(h, queries[s], ys, dot_type)
                h = h.to(tl.float32)
                element = across * STATE + offset + cell
                g = h * total
                for k in tl.static_range(PIECES):
                    g = product(us[k], folded_Bs[s], g, dot_type)
                g = rename(g)
                store_at(to_head + offset, g, element, inside, keys.write, place)
            ys *= carries[None, :]
            for k in tl.static_range(2):
                ys = product(xs, mixes[k], ys, dot_type)
            ys = tl.trans(ys).to(out.dtype.element_ty)
            tl.store(out_spot + q * CHUNK, ys, mask=queried[:, None] & in_dim[None, :])
