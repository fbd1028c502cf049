"""Mamba-2 state update of the replay layout: one read of the state, one write.

Memory bound, but only if enough of the state is on its way all the time and a thread spends few
instructions on an element. A program takes several heads of a group in turn; the states of the
next ones are copied to shared memory meanwhile, which takes no registers. B and C of all tokens
stay in registers as fp32, converted once for all heads. A head's state is taken in chunks of few
rows, so that they fit beside them, while a head's scalars are computed once for all chunks. The
recorded and the certain tokens are folded in by one multiply-add each. The guesses leave the state
alone: with the decays a, y_i = a_(c..i) C_i h + sum over guesses j <= i of a_(j+1..i) dt_j (C_i
B_j) x_j, and C_i B_j is common to the heads of a group.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.backend import num_programs, runs_triton
from hybrid_runtime.kernels.replay import (
    LAST_PLACE,
    Records,
    Replay,
    Rounding,
    check_dense,
    check_shapes,
    replay_update_reference,
)
from hybrid_runtime.kernels.replay_tile import (
    load_parts,
    load_scalars,
    rounding_key,
    step_parts,
    store_at,
    store_part,
    time_step,
    widen,
)

MAX_RECORDS = 7
"""Guesses per row that the kernel unrolls; with more the reference runs."""


class Shape(NamedTuple):
    """Of a launch: rows of a head's state per program, warps, columns per part of a tile, a bound
    on the registers of a thread, heads that a program takes one after another, at most, rows of a
    chunk, heads whose state is on its way or in use at a time, and programs per multiprocessor
    below which a program takes fewer heads."""

    tile: int
    warps: int
    low: int
    registers: int | None = None
    run: int = 1
    high: int = 16
    stages: int = 3
    programs: int = 3


def shape_of(dim: int, state: int, itemsize: int) -> Shape:
    """The launch for states `[dim, state]` per head."""
    shape = SHAPES[itemsize]
    tile = min(shape.tile, triton.next_power_of_2(dim))
    return shape._replace(
        tile=tile,
        high=min(shape.high, tile),
        low=min(shape.low, triton.next_power_of_2(state)),
    )


@triton.jit(
    do_not_specialize=["tokens", "slots", "layer"],
    do_not_specialize_on_alignment=[
        "dt", "A_log", "D", "dt_bias", "dt_records", "block_table", "slot", "row_start", "draft",
        "read_column", "fold", "turn", "write_column", "snapshot_column", "snapshot_after", "seed",
        "position",
    ],
)  # fmt: skip
def _replay_update_kernel(
    x,
    dt,
    A_log,
    B,
    C,
    D,
    dt_bias,
    states,
    x_records,
    B_records,
    dt_records,
    block_table,
    slot,
    row_start,
    draft,
    read_column,
    fold,
    turn,
    write_column,
    snapshot_column,
    snapshot_after,
    seed,
    position,
    layer,
    out,
    tokens,
    slots,
    table_stride,
    state_stride,
    dt_min,
    dt_max,
    x_token: tl.constexpr,
    x_head: tl.constexpr,
    x_dim: tl.constexpr,
    dt_token: tl.constexpr,
    dt_head: tl.constexpr,
    B_token: tl.constexpr,
    B_group: tl.constexpr,
    B_state: tl.constexpr,
    C_token: tl.constexpr,
    C_group: tl.constexpr,
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
    ROUND: tl.constexpr,
    DIGITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    tiles: tl.constexpr = (DIM + TILE - 1) // TILE
    chunks: tl.constexpr = TILE // HIGH
    groups: tl.constexpr = HEADS // HEADS_PER_GROUP
    item = tl.program_id(0)
    row = tl.program_id(1)
    first = item // tiles * RUN
    group = first // HEADS_PER_GROUP
    top = item % tiles * TILE
    n = tl.arange(0, LOW)
    out_type = out.dtype.element_ty

    row_slot = tl.load(slot + row)
    start = tl.load(row_start + row)
    end = tl.load(row_start + row + 1)
    guesses = tl.load(draft + row)
    source = tl.load(read_column + row)
    count = tl.load(fold + row)
    half = tl.load(turn + row)
    target = tl.load(write_column + row)
    kept = tl.load(snapshot_column + row)
    behind = tl.load(snapshot_after + row)
    active = (row_slot >= 0) & (target >= 0)

    # What nobody computes is 0: tokens of a padded row, and those before and behind all rows.
    wide = top + tl.arange(0, TILE)
    nothing = tl.zeros_like(wide).to(out_type)
    given = out + first * DIM + wide
    token = tl.where(row == 0, 0, start)
    while token < start:
        for r in range(RUN):
            at = given + token.to(tl.int64) * (HEADS * DIM) + r * DIM
            tl.store(at, nothing, mask=wide < DIM)
        token += 1
    token = tl.where(active, end, start)
    last = tl.where(row == tl.num_programs(1) - 1, tokens, end)
    while token < last:
        for r in range(RUN):
            at = given + token.to(tl.int64) * (HEADS * DIM) + r * DIM
            tl.store(at, nothing, mask=wide < DIM)
        token += 1

    if active & (end > start):
        scheduled = end - start
        certain = scheduled - guesses
        reads = source >= 0
        count = tl.where(reads, count, 0)
        table = block_table + row_slot.to(tl.int64) * table_stride
        block = tl.load(table + source, mask=reads, other=0).to(tl.int64)
        to = states + tl.load(table + target).to(tl.int64) * state_stride
        taken = states + block * state_stride
        begin = start.to(tl.int64)
        x += begin * x_token
        dt += begin * dt_token
        B += begin * B_token + group * B_group
        C += begin * C_token + group * C_group
        out += begin * (HEADS * DIM)
        index = half.to(tl.int64) * slots + row_slot
        past_x = x_records + index * (RECORDS * HEADS * DIM)
        past_B = B_records + index * (RECORDS * groups * STATE) + group * STATE
        past_dt = dt_records + index * (RECORDS * HEADS)
        index = (1 - half).to(tl.int64) * slots + row_slot
        next_x = x_records + index * (RECORDS * HEADS * DIM)
        next_B = B_records + index * (RECORDS * groups * STATE) + group * STATE
        next_dt = dt_records + index * (RECORDS * HEADS)
        keeps_dt = item % tiles == 0  # of the programs that share a value, one records it
        keeps_B = keeps_dt & (first % HEADS_PER_GROUP == 0)
        key = row_slot.to(tl.uint32)
        if ROUND:
            key = rounding_key(tl.load(seed + row), layer, tl.load(position + row))

        if (certain == 1) & (kept < 0):
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
                    us = (inflows[0] * xs[0].to(tl.float32),)
                    for j in tl.static_range(RECORDS):
                        spot = past_head + ((RECORDS - 1 - j) * (HEADS * DIM) + q * HIGH)
                        past = tl.load(spot, mask=in_dim & (RECORDS - 1 - j < count), other=0.0)
                        us += (inflows[j + 1] * past.to(tl.float32),)
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
                        tl.store(spot, y.to(out_type), mask=in_dim & (i < scheduled))
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
        else:
            # Few rows: they need states in between, and are stepped token by token.
            keeps = kept >= 0
            snapshot = (
                states + tl.load(table + kept, mask=keeps, other=0).to(tl.int64) * state_stride
            )
            early = key
            if ROUND:
                after = tl.load(position + row) + behind - count - certain
                early = rounding_key(tl.load(seed + row), layer, after)
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
                        store_part(
                            snapshot, walk[s], elements[s], insides[s], early, ROUND, DIGITS, LEAST
                        )
                k = begin * 0
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
                k = begin * 0
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
                    tl.store(out + across + k * (HEADS * DIM), output.to(out_type), mask=in_dim)
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
                            store_part(
                                to, walk[s], elements[s], insides[s], key, ROUND, DIGITS, LEAST
                            )
                    if keeps & (k <= certain) & (behind == count + k):
                        for s in tl.static_range(SPLIT):
                            store_part(
                                snapshot, walk[s], elements[s], insides[s], early, ROUND, DIGITS,
                                LEAST,
                            )  # fmt: skip


def replay_update(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    records: Records,
    block_table: Tensor,
    slot: Tensor,
    row_start: Tensor,
    draft: Tensor,
    replay: Replay,
    max_scheduled: int,
    rounding: Rounding | None = None,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
) -> Tensor:
    """`replay_update_reference` by one launch where Triton runs.

    Each block of `states` and all records must be contiguous, the records' x and B of x's dtype,
    and no row may read or write a block that another row of the same call writes. Records of more
    than `MAX_RECORDS` guesses and fp64 go to the reference.

    Raises:
        ValueError: as the reference, or a tensor is not contiguous or has another dtype.
    """
    drafts = records.dt.shape[2]
    if not runs_triton(x) or drafts > MAX_RECORDS or torch.float64 in (x.dtype, states.dtype):
        return replay_update_reference(
            x, dt, A_log, B, C, D, dt_bias, states, records, block_table, slot, row_start, draft,
            replay, max_scheduled, rounding, dt_min, dt_max,
        )  # fmt: skip
    tokens, heads, dim = x.shape
    groups, state = B.shape[1:]
    check_shapes(x.shape[1:], B.shape[1:], states, records)
    check_dense(states, records, x.dtype)
    rows = slot.shape[0]
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if rows == 0 or max_scheduled == 0:
        return out.zero_()
    shape = shape_of(dim, state, states.element_size())
    narrow = rounding is not None and states.element_size() < 4
    digits, least = LAST_PLACE.get(states.dtype, (0, 0))
    tiles = triton.cdiv(dim, shape.tile)
    run = math.gcd(shape.run, heads // groups)
    while run > 1 and rows * tiles * heads // run < num_programs(x, shape.programs):
        run //= 2
    _replay_update_kernel[(heads // run * tiles, rows)](
        x,
        dt,
        A_log,
        B,
        C,
        D,
        dt_bias,
        states,
        *records,
        block_table,
        slot,
        row_start,
        draft,
        *replay,
        *((None, None, 0) if rounding is None else rounding),
        out,
        tokens,
        records.dt.shape[1],
        block_table.stride(0),
        states.stride(0),
        float(dt_min),
        float(dt_max),
        *x.stride(),
        *dt.stride(),
        *B.stride(),
        *C.stride(),
        HEADS=heads,
        HEADS_PER_GROUP=heads // groups,
        DIM=dim,
        STATE=state,
        TOKENS=min(max_scheduled, drafts + 1),
        RECORDS=drafts,
        RUN=run,
        TILE=shape.tile,
        SPLIT=triton.next_power_of_2(state) // shape.low,
        LOW=shape.low,
        HIGH=shape.high,
        STAGES=shape.stages,
        KEEP=min(max_scheduled, drafts + 1) + drafts < 8,
        ROUND=narrow,
        DIGITS=digits,
        LEAST=least,
        num_warps=shape.warps,
        maxnreg=shape.registers,
    )
    return out


# By the bytes of a state's element.
SHAPES = {4: Shape(32, 2, 32, None, 8, 16, 3, 3), 2: Shape(32, 1, 64, None, 16, 8, 3, 6)}
