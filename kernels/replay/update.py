"""Mamba-2 state update of the replay layout: one read of the state, one write.

Memory bound, but only if enough of the state is on its way all the time and a thread spends few
instructions on an element. A program takes several heads of a group in turn. Rows in steady decode
go through `replay_verify`, or through `replay_chunk` where the state has 16 bits and the inputs are
bfloat16; others (a snapshot, more tokens) token by token through `replay_walk`.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs, runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.common.types import operand_type
from hybrid_runtime.kernels.common.zero_fill import zero_unowned
from hybrid_runtime.kernels.replay.launch import shape_of, spread
from hybrid_runtime.kernels.replay.naive import replay_update_reference
from hybrid_runtime.kernels.replay.rounding import LAST_PLACE, LastPlace, Rounding, rounding_key
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.replay.rows_fp32 import verify_row
from hybrid_runtime.kernels.replay.rows_mma import chunk_row
from hybrid_runtime.kernels.replay.rows_sequential import walk_row
from hybrid_runtime.kernels.replay.window_cache import (
    WindowCache,
    check_contiguous,
    check_window_cache,
)

MAX_CACHED = 7
"""Guesses per row that the kernel unrolls; with more the reference runs."""


@triton.jit(
    do_not_specialize=["tokens", "slots", "layer"],
    do_not_specialize_on_alignment=[
        "dt", "A_log", "D", "dt_bias", "dt_cache", "block_table", "slot", "cu_seqlens", "draft",
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
    x_cache,
    B_cache,
    dt_cache,
    block_table,
    slot,
    cu_seqlens,
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
    dot_type: tl.constexpr,
    ROUND: tl.constexpr,
    DIGITS: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL, False)
    tiles: tl.constexpr = (DIM + TILE - 1) // TILE
    groups: tl.constexpr = HEADS // HEADS_PER_GROUP
    item = tl.program_id(0)
    row = tl.program_id(1)
    first = item // tiles * RUN
    group = first // HEADS_PER_GROUP
    top = item % tiles * TILE
    n = tl.arange(0, LOW)

    row_slot = tl.load(slot + row)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    guesses = tl.load(draft + row)
    source = tl.load(read_column + row)
    count = tl.load(fold + row)
    half = tl.load(turn + row)
    target = tl.load(write_column + row)
    kept = tl.load(snapshot_column + row)
    behind = tl.load(snapshot_after + row)
    active = (row_slot >= 0) & (target >= 0)

    o_p = top + tl.arange(0, TILE)
    p_out = out + first * DIM + o_p
    for r in range(RUN):
        zero_unowned(p_out + r * DIM, o_p < DIM, row, start, end, active, tokens, HEADS * DIM)
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
        inputs = (
            x + begin * x_token,
            dt + begin * dt_token,
            A_log,
            B + begin * B_token + group * B_group,
            C + begin * C_token + group * C_group,
            D,
            dt_bias,
        )
        out += begin * (HEADS * DIM)
        index = half.to(tl.int64) * slots + row_slot
        past = (
            x_cache + index * (RECORDS * HEADS * DIM),
            B_cache + index * (RECORDS * groups * STATE) + group * STATE,
            dt_cache + index * (RECORDS * HEADS),
        )
        index = (1 - half).to(tl.int64) * slots + row_slot
        ahead = (
            x_cache + index * (RECORDS * HEADS * DIM),
            B_cache + index * (RECORDS * groups * STATE) + group * STATE,
            dt_cache + index * (RECORDS * HEADS),
        )
        keeps_dt = item % tiles == 0  # of the programs that share a value, one records it
        keeps_B = keeps_dt & (first % HEADS_PER_GROUP == 0)
        key = row_slot.to(tl.uint32)
        if ROUND:
            key = rounding_key(tl.load(seed + row_slot), layer, tl.load(position + row))

        # With narrow states or more tokens there are no registers left for the snapshot's share.
        roomy: tl.constexpr = KEEP and states.dtype.element_ty.primitive_bitwidth == 32
        keeps = kept >= 0
        snapshot = states + tl.load(table + kept, mask=keeps, other=0).to(tl.int64) * state_stride
        early = key
        if ROUND:
            after = tl.load(position + row) + behind - count - certain
            early = rounding_key(tl.load(seed + row_slot), layer, after)
        if dot_type is not None:
            if (scheduled <= 8) & (kept < 0):
                chunk_row(
                    inputs, past, ahead, taken, to, out, count, scheduled, certain, reads, first,
                    top, keeps_dt, keeps_B, key, dt_min, dt_max, dot_type, x_token, x_head, x_dim,
                    dt_token, dt_head, B_token, B_state, C_token, C_state, HEADS, HEADS_PER_GROUP,
                    DIM, STATE, RUN, TILE, SPLIT, HIGH, STAGES, ROUND, DIGITS, LEAST,
                )  # fmt: skip
            else:
                walk_row(
                    inputs, past, ahead, taken, to, snapshot, out, count, scheduled, certain,
                    behind, keeps, reads, first, top, n, keeps_dt, keeps_B, key, early, dt_min,
                    dt_max, x_token, x_head, x_dim, dt_token, dt_head, B_token, B_state, C_token,
                    C_state, HEADS, HEADS_PER_GROUP, DIM, STATE, RUN, TILE, SPLIT, LOW, 8, ROUND,
                    DIGITS, LEAST,
                )  # fmt: skip
        elif (certain == 1) & (kept < 0):
            verify_row(
                inputs, past, ahead, taken, to, snapshot, out, count, scheduled, behind, reads,
                first, top, n, keeps_dt, keeps_B, key, early, dt_min, dt_max,
                x_token, x_head, x_dim, dt_token, dt_head, B_token, B_state, C_token, C_state,
                HEADS, HEADS_PER_GROUP, DIM, STATE, TOKENS, RECORDS, RUN, TILE, SPLIT, LOW, HIGH,
                STAGES, KEEP, False, ROUND, DIGITS, LEAST,
            )  # fmt: skip
        elif (certain == 1) & roomy:
            verify_row(
                inputs, past, ahead, taken, to, snapshot, out, count, scheduled, behind, reads,
                first, top, n, keeps_dt, keeps_B, key, early, dt_min, dt_max,
                x_token, x_head, x_dim, dt_token, dt_head, B_token, B_state, C_token, C_state,
                HEADS, HEADS_PER_GROUP, DIM, STATE, TOKENS, RECORDS, RUN, TILE, SPLIT, LOW, HIGH,
                STAGES, KEEP, True, ROUND, DIGITS, LEAST,
            )  # fmt: skip
        else:
            walk_row(
                inputs, past, ahead, taken, to, snapshot, out, count, scheduled, certain, behind,
                keeps, reads, first, top, n, keeps_dt, keeps_B, key, early, dt_min, dt_max,
                x_token, x_head, x_dim, dt_token, dt_head, B_token, B_state, C_token, C_state,
                HEADS, HEADS_PER_GROUP, DIM, STATE, RUN, TILE, SPLIT, LOW, HIGH, ROUND, DIGITS,
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
    window_cache: WindowCache,
    rows: ReplayRows,
    max_scheduled: int,
    rounding: Rounding | None = None,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
) -> Tensor:
    """`replay_update_reference` by one launch where Triton runs.

    Each block of `states` and all records must be contiguous, the records' x and B of x's dtype,
    and no row may read or write a block that another row of the same call writes. Records of more
    than `MAX_CACHED` guesses and fp64 go to the reference.

    Raises:
        ValueError: as the reference, or a tensor is not contiguous or has another dtype.
    """
    drafts = window_cache.dt.shape[2]
    if not runs_triton(x) or drafts > MAX_CACHED or torch.float64 in (x.dtype, states.dtype):
        return replay_update_reference(
            x, dt, A_log, B, C, D, dt_bias, states, window_cache, rows, max_scheduled, rounding,
            dt_min, dt_max,
        )  # fmt: skip
    tokens, heads, dim = x.shape
    groups, state = B.shape[1:]
    check_window_cache(x.shape[1:], B.shape[1:], states, window_cache)
    check_contiguous(states, window_cache, x.dtype)
    for name, part in (("B", B), ("C", C)):
        if part.dtype != x.dtype:
            raise ValueError(f"{name} is {part.dtype}, must be x's {x.dtype}")
    num_rows = rows.slot.shape[0]
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if num_rows == 0 or max_scheduled == 0:
        return out.zero_()
    dot_type = None
    if x.dtype == torch.bfloat16 and states.element_size() == 2:
        dot_type = operand_type(x.dtype, x)
    narrow = rounding is not None and states.element_size() < 4
    digits, least = LAST_PLACE.get(states.dtype, LastPlace(0, 0))
    shape = shape_of(dim, state, states.element_size(), dot_type is not None)
    shape = shape._replace(run=math.gcd(shape.run, heads // groups))
    shape = spread(shape, dim, num_rows * heads, num_programs(x, shape.programs))
    _replay_update_kernel[(heads // shape.run * triton.cdiv(dim, shape.tile), num_rows)](
        x,
        dt,
        A_log,
        B,
        C,
        D,
        dt_bias,
        states,
        *window_cache,
        rows.block_table,
        rows.slot,
        rows.cu_seqlens,
        rows.draft,
        *rows.positions[:6],
        *(
            (None, None, 0)
            if rounding is None
            else (rounding.seed, rows.positions.certain, rounding.layer)
        ),
        out,
        tokens,
        window_cache.dt.shape[1],
        rows.block_table.stride(0),
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
        RUN=shape.run,
        TILE=shape.tile,
        SPLIT=triton.cdiv(triton.next_power_of_2(state), shape.low),
        LOW=shape.low,
        HIGH=shape.high,
        STAGES=shape.stages,
        KEEP=min(max_scheduled, drafts + 1) + drafts < 8,
        dot_type=dot_type,
        ROUND=narrow,
        DIGITS=digits,
        LEAST=least,
        num_warps=1,
        **pdl(x),
    )
    return out
