"""Mamba-2 state update of the replay layout: one read of the state, one write.

Memory bound, so a thread should spend few instructions per element of state. The recorded and the
certain tokens are folded in by one multiply-add each. The guesses leave the state alone: with the
decays a, y_i = a_(c..i) C_i h + sum over guesses j <= i of a_(j+1..i) dt_j (C_i B_j) x_j. A tile
is held as parts of few columns, so that few lanes share a row and sums take few shuffles, and so
that loads of B and C are small enough for the compiler to repeat them where they are used instead
of passing them on through shared memory.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.backend import runs_triton
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
    fold_part,
    load_parts,
    load_records,
    rounding_key,
    step_parts,
    store_part,
    time_step,
)

MAX_RECORDS = 7
"""Guesses per row that the kernel unrolls; with more the reference runs."""


class Shape(NamedTuple):
    """Of a launch: rows of a head's state per program, warps, columns per part of a tile, and a
    bound on the registers of a thread."""

    tile: int
    warps: int
    low: int
    registers: int | None = None


def shape_of(dim: int, state: int, itemsize: int) -> Shape:
    """The launch for states `[dim, state]` per head."""
    shape = SHAPES[itemsize]
    return shape._replace(
        tile=min(shape.tile, triton.next_power_of_2(dim)),
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
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    LOW: tl.constexpr,
    ROUND: tl.constexpr,
    DIGITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    tiles: tl.constexpr = (DIM + TILE - 1) // TILE
    groups: tl.constexpr = HEADS // HEADS_PER_GROUP
    item = tl.program_id(0)
    row = tl.program_id(1)
    head = item // tiles
    group = head // HEADS_PER_GROUP
    p = item % tiles * TILE + tl.arange(0, TILE)
    n = tl.arange(0, LOW)
    in_dim = p < DIM
    across = head * DIM + p
    out_type = out.dtype.element_ty
    given = out + across

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
    token = tl.where(row == 0, 0, start)
    while token < start:
        tl.store(given + token.to(tl.int64) * (HEADS * DIM), tl.zeros_like(p).to(out_type), in_dim)
        token += 1
    token = tl.where(active, end, start)
    last = tl.where(row == tl.num_programs(1) - 1, tokens, end)
    while token < last:
        tl.store(given + token.to(tl.int64) * (HEADS * DIM), tl.zeros_like(p).to(out_type), in_dim)
        token += 1

    if active & (end > start):
        scheduled = end - start
        certain = scheduled - guesses
        reads = source >= 0
        count = tl.where(reads, count, 0)
        table = block_table + row_slot.to(tl.int64) * table_stride
        block = tl.load(table + source, mask=reads, other=0).to(tl.int64)
        to = states + tl.load(table + target).to(tl.int64) * state_stride
        elements = ()
        insides = ()
        for s in tl.static_range(SPLIT):
            part = n + s * LOW
            elements += (across[:, None] * STATE + part[None, :],)
            if (DIM % TILE == 0) & (STATE == SPLIT * LOW):  # a constant: this mask costs nothing
                insides += (tl.full((TILE, LOW), True, tl.int1),)
            else:
                insides += (in_dim[:, None] & (part < STATE)[None, :],)
        # Each thread overwrites only what it has read itself: parts are loaded and stored alike.
        held = ()
        for s in tl.static_range(SPLIT):
            taken = states + block * state_stride + elements[s]
            held += (tl.load(taken, mask=insides[s] & reads, other=0.0),)
        begin = start.to(tl.int64)
        dt += begin * dt_token + head * dt_head
        row_x = x + begin * x_token + head * x_head + p * x_dim
        B += begin * B_token + group * B_group
        C += begin * C_token + group * C_group
        given += begin * (HEADS * DIM)
        index = half.to(tl.int64) * slots + row_slot
        past_x = x_records + index * (RECORDS * HEADS * DIM) + across
        past_B = B_records + index * (RECORDS * groups * STATE) + group * STATE
        past_dt = dt_records + index * (RECORDS * HEADS) + head
        index = (1 - half).to(tl.int64) * slots + row_slot
        next_x = x_records + index * (RECORDS * HEADS * DIM) + across
        next_B = B_records + index * (RECORDS * groups * STATE) + group * STATE
        next_dt = dt_records + index * (RECORDS * HEADS) + head
        keeps_dt = item % tiles == 0  # of the programs that share a value, one records it
        keeps_B = keeps_dt & (head % HEADS_PER_GROUP == 0)
        bias = tl.load(dt_bias + head).to(tl.float32)
        rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
        skip = tl.load(D + head).to(tl.float32)
        key = row_slot.to(tl.uint32)
        if ROUND:
            key = rounding_key(tl.load(seed + row), layer, tl.load(position + row))

        if (certain == 1) & (kept < 0):
            xs, Bs, steps = load_records(
                past_x, past_B, past_dt, count, n, in_dim,
                HEADS, DIM, groups, STATE, RECORDS, SPLIT, LOW,
            )  # fmt: skip
            # What lies beyond the row's end is undefined: nothing that is stored depends on it.
            new_x = ()
            new_steps = ()
            for i in tl.static_range(TOKENS):
                live = i < scheduled
                raw = tl.load(dt + i * dt_token, mask=live, other=0.0).to(tl.float32)
                new_steps += (time_step(raw + bias, dt_min, dt_max),)
                new_x += (tl.load(row_x + i * x_token, mask=in_dim & live),)
            xs += (new_x[0],)
            Bs += (load_parts(B, n, B_state, True, STATE, SPLIT, LOW),)
            steps += (new_steps[0],)

            # What the guesses add to each other's outputs: weights that need no state.
            weights = ()
            for j in tl.static_range(1, TOKENS):
                Bj = load_parts(B + j * B_token, n, B_state, j < scheduled, STATE, SPLIT, LOW)
                weight = new_steps[j]
                for i in tl.static_range(j, TOKENS):
                    Ci = load_parts(C + i * C_token, n, C_state, i < scheduled, STATE, SPLIT, LOW)
                    overlap = tl.zeros((LOW,), tl.float32)
                    for s in tl.static_range(SPLIT):
                        overlap += Ci[s].to(tl.float32) * Bj[s].to(tl.float32)
                    if i > j:
                        weight *= tl.exp(new_steps[i] * rate)
                    weights += (weight * tl.sum(overlap, axis=0),)

            h = ()
            for s in tl.static_range(SPLIT):
                h += (fold_part(held[s], xs, Bs, steps, rate, s, RECORDS + 1),)
            carry = rate * 0 + 1.0
            for i in tl.static_range(TOKENS):
                Ci = load_parts(C + i * C_token, n, C_state, i < scheduled, STATE, SPLIT, LOW)
                product = tl.zeros((TILE, LOW), tl.float32)
                for s in tl.static_range(SPLIT):
                    product += h[s] * Ci[s].to(tl.float32)[None, :]
                if i > 0:
                    carry *= tl.exp(new_steps[i] * rate)
                y = carry * tl.sum(product, axis=1) + skip * new_x[i].to(tl.float32)
                for j in tl.static_range(1, i + 1):
                    # Of guess 1 in the outputs of tokens 1 .., then of guess 2 in 2 .., ...
                    y += weights[(j - 1) * (2 * TOKENS - j) // 2 + i - j] * new_x[j].to(tl.float32)
                tl.store(given + i * (HEADS * DIM), y.to(out_type), mask=in_dim & (i < scheduled))
            for s in tl.static_range(SPLIT):
                store_part(to, h[s], elements[s], insides[s], key, ROUND, DIGITS, LEAST)
            for j in tl.static_range(1, TOKENS):
                if j < scheduled:
                    tl.store(next_x + (j - 1) * (HEADS * DIM), new_x[j], mask=in_dim)
                    if keeps_dt:
                        tl.store(next_dt + (j - 1) * HEADS, new_steps[j])
                    if keeps_B:
                        Bj = load_parts(B + j * B_token, n, B_state, True, STATE, SPLIT, LOW)
                        for s in tl.static_range(SPLIT):
                            part = n + s * LOW
                            written = next_B + (j - 1) * (groups * STATE) + part
                            tl.store(written, Bj[s], mask=part < STATE)
        else:
            # Few rows: they need states in between, and are stepped token by token.
            walk = ()
            for s in tl.static_range(SPLIT):
                walk += (held[s].to(tl.float32),)
            keeps = kept >= 0
            snapshot = (
                states + tl.load(table + kept, mask=keeps, other=0).to(tl.int64) * state_stride
            )
            early = key
            if ROUND:
                after = tl.load(position + row) + behind - count - certain
                early = rounding_key(tl.load(seed + row), layer, after)
            if keeps & (behind == 0):
                for s in tl.static_range(SPLIT):
                    store_part(
                        snapshot, walk[s], elements[s], insides[s], early, ROUND, DIGITS, LEAST
                    )
            k = begin * 0
            while k < count:
                xk = tl.load(past_x + k * (HEADS * DIM), mask=in_dim, other=0.0)
                Bk = load_parts(past_B + k * (groups * STATE), n, 1, True, STATE, SPLIT, LOW)
                walk = step_parts(walk, xk, Bk, tl.load(past_dt + k * HEADS), rate, SPLIT)
                k += 1
                if keeps & (behind == k):
                    for s in tl.static_range(SPLIT):
                        store_part(
                            snapshot, walk[s], elements[s], insides[s], early, ROUND, DIGITS, LEAST
                        )
            k = begin * 0
            while k < scheduled:
                xk = tl.load(row_x + k * x_token, mask=in_dim, other=0.0)
                Bk = load_parts(B + k * B_token, n, B_state, True, STATE, SPLIT, LOW)
                Ck = load_parts(C + k * C_token, n, C_state, True, STATE, SPLIT, LOW)
                step = time_step(tl.load(dt + k * dt_token).to(tl.float32) + bias, dt_min, dt_max)
                walk = step_parts(walk, xk, Bk, step, rate, SPLIT)
                sums = tl.zeros((TILE, LOW), tl.float32)
                for s in tl.static_range(SPLIT):
                    sums += walk[s] * Ck[s].to(tl.float32)[None, :]
                output = tl.sum(sums, axis=1) + skip * xk.to(tl.float32)
                tl.store(given + k * (HEADS * DIM), output.to(out_type), mask=in_dim)
                guess = k - certain
                if guess >= 0:
                    tl.store(next_x + guess * (HEADS * DIM), xk, mask=in_dim)
                    if keeps_dt:
                        tl.store(next_dt + guess * HEADS, step)
                    if keeps_B:
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
                            snapshot, walk[s], elements[s], insides[s], early, ROUND, DIGITS, LEAST
                        )


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
    _replay_update_kernel[(heads * triton.cdiv(dim, shape.tile), rows)](
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
        TILE=shape.tile,
        SPLIT=triton.next_power_of_2(state) // shape.low,
        LOW=shape.low,
        ROUND=narrow,
        DIGITS=digits,
        LEAST=least,
        num_warps=shape.warps,
        maxnreg=shape.registers,
    )
    return out


# By the bytes of a state's element; swept on an H200 over 1 to 128 rows.
SHAPES = {4: Shape(64, 4, 32, 168), 2: Shape(32, 2, 32, 168)}
