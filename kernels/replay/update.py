"""Mamba-2 state update of the replay layout: one read of the state, one write.

Memory bound, but only if enough of the state is on its way all the time and a thread spends few
instructions on an element. A program takes several heads of a group in turn. Rows in steady decode
go through `verify_row`, or through `chunk_row` where the state has 16 bits and the inputs are
bfloat16; others (a snapshot, more tokens) token by token through `walk_row`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs, runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.common.types import operand_type
from hybrid_runtime.kernels.replay.launch import (
    input_strides,
    replay_shape,
    replay_tiling,
    spread,
)
from hybrid_runtime.kernels.replay.naive import replay_update_reference
from hybrid_runtime.kernels.replay.program import (
    Blocks,
    Clamp,
    Inputs,
    Keys,
    Row,
    Share,
)
from hybrid_runtime.kernels.replay.rounding import LAST_PLACE, Rounding, last_place, rounding_key
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.replay.rows_fp32 import verify_row
from hybrid_runtime.kernels.replay.rows_mma import chunk_row
from hybrid_runtime.kernels.replay.rows_sequential import walk_row
from hybrid_runtime.kernels.replay.tile import guesses_of
from hybrid_runtime.kernels.replay.window_cache import (
    WindowCache,
    check_contiguous,
    check_window_cache,
)

MAX_CACHED = 7
"""Guesses per slot of the window cache that the kernel unrolls; with more the reference runs."""


@triton.jit
def zero_heads(out, first, last, i_head, o_p, shape):
    """Zero the program's share of the outputs of tokens `first .. last - 1`. `zero_unowned` once
    per head would be unrolled into so many loops, and double the kernel."""
    zeros = tl.zeros_like(o_p).to(out.dtype.element_ty)
    p_out = out + i_head * shape.DIM + o_p
    token = first
    while token < last:
        for r in range(shape.RUN):
            at = p_out + token.to(tl.int64) * (shape.HEADS * shape.DIM) + r * shape.DIM
            tl.store(at, zeros, mask=o_p < shape.DIM)
        token += 1


# Pointers to rows are arguments of their own: a tuple's would be specialised on their alignment.
@triton.jit(
    do_not_specialize=["tokens", "slots", "layer"],
    do_not_specialize_on_alignment=[
        "dt", "A_log", "D", "dt_bias", "dt_cache", "block_table", "slot", "cu_seqlens", "draft",
        "read_column", "fold", "turn", "write_column", "snapshot_column", "snapshot_after",
        "certain", "seed",
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
    certain,
    seed,
    layer,
    out,
    tokens,
    slots,
    table_stride,
    state_stride,
    dt_min,
    dt_max,
    strides,
    shape,
    place,
    dot_type: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL, False)
    tiles: tl.constexpr = (shape.DIM + shape.TILE - 1) // shape.TILE
    i_item = tl.program_id(0)
    i_row = tl.program_id(1)
    i_head = i_item // tiles * shape.RUN
    i_group = i_head // shape.HEADS_PER_GROUP
    top = i_item % tiles * shape.TILE
    o_n = tl.arange(0, shape.PART)

    row_slot = tl.load(slot + i_row)
    start = tl.load(cu_seqlens + i_row)
    end = tl.load(cu_seqlens + i_row + 1)
    guesses = tl.load(draft + i_row)
    source = tl.load(read_column + i_row)
    folds = tl.load(fold + i_row)
    half = tl.load(turn + i_row)
    target = tl.load(write_column + i_row)
    kept = tl.load(snapshot_column + i_row)
    after = tl.load(snapshot_after + i_row)
    active = (row_slot >= 0) & (target >= 0)

    # Tokens of padded rows, and those before and behind all rows.
    o_p = top + tl.arange(0, shape.TILE)
    zero_heads(out, tl.where(i_row == 0, 0, start), start, i_head, o_p, shape)
    last = tl.where(i_row == tl.num_programs(1) - 1, tokens, end)
    zero_heads(out, tl.where(active, end, start), last, i_head, o_p, shape)

    if active & (end > start):
        reads = source >= 0
        scheduled = end - start
        row = Row(
            fold=tl.where(reads, folds, 0),
            scheduled=scheduled,
            certain=scheduled - guesses,
            reads=reads,
            snapshots=kept >= 0,
            snapshot_after=after,
        )
        table = block_table + row_slot.to(tl.int64) * table_stride
        block = tl.load(table + source, mask=reads, other=0).to(tl.int64)
        p_write = states + tl.load(table + target).to(tl.int64) * state_stride
        begin = start.to(tl.int64)
        inputs = Inputs(
            x=x + begin * strides.x_token,
            dt=dt + begin * strides.dt_token,
            A_log=A_log,
            B=B + begin * strides.B_token + i_group * strides.B_group,
            C=C + begin * strides.C_token + i_group * strides.C_group,
            D=D,
            dt_bias=dt_bias,
        )
        out += begin * (shape.HEADS * shape.DIM)
        past = guesses_of(x_cache, B_cache, dt_cache, half, slots, row_slot, i_group, shape)
        ahead = guesses_of(x_cache, B_cache, dt_cache, 1 - half, slots, row_slot, i_group, shape)
        writes_dt = i_item % tiles == 0
        share = Share(
            head=i_head,
            p=top,
            o_n=o_n,
            writes_dt=writes_dt,
            writes_B=writes_dt & (i_head % shape.HEADS_PER_GROUP == 0),
        )
        key = row_slot.to(tl.uint32)
        early = key
        snapshot = tl.load(table + kept, mask=row.snapshots, other=0).to(tl.int64)
        if place is not None:
            position = tl.load(certain + i_row)
            key = rounding_key(tl.load(seed + row_slot), layer, position)
            position += row.snapshot_after - row.fold - row.certain
            early = rounding_key(tl.load(seed + row_slot), layer, position)
        blocks = Blocks(
            read=states + block * state_stride,
            write=p_write,
            snapshot=states + snapshot * state_stride,
        )
        keys = Keys(write=key, snapshot=early)
        clamp = Clamp(low=dt_min, high=dt_max)
        # With narrow states or more tokens there are no registers left for the snapshot's share.
        roomy: tl.constexpr = shape.HOLD and states.dtype.element_ty.primitive_bitwidth == 32
        if dot_type is not None:
            if (scheduled <= 8) & (kept < 0):
                chunk_row(
                    inputs, past, ahead, blocks, out, row, share, keys, clamp, strides, shape,
                    place, dot_type,
                )  # fmt: skip
            else:
                walk_row(
                    inputs, past, ahead, blocks, out, row, share, keys, clamp, strides, shape,
                    place, 8,
                )  # fmt: skip
        elif (row.certain == 1) & (kept < 0):
            verify_row(
                inputs, past, ahead, blocks, out, row, share, keys, clamp, strides, shape, place,
                False,
            )  # fmt: skip
        elif (row.certain == 1) & roomy:
            verify_row(
                inputs, past, ahead, blocks, out, row, share, keys, clamp, strides, shape, place,
                True,
            )  # fmt: skip
        else:
            walk_row(
                inputs, past, ahead, blocks, out, row, share, keys, clamp, strides, shape, place,
                shape.CHUNK,
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
    out: Tensor | None = None,
) -> Tensor:
    """`replay_update_reference` by one launch where Triton runs.

    The outputs go to `out` if it is given, contiguous and of x's shape and dtype.


    Each block of `states` and the window cache must be contiguous, the cache's x and B of x's
    dtype, and no row may read or write a block that another row of the same call writes. A cache of
    more than `MAX_CACHED` guesses and fp64 go to the reference.

    Raises:
        ValueError: as the reference, or a tensor is not contiguous or has another dtype.
    """
    drafts = window_cache.dt.shape[2]
    if not runs_triton(x) or drafts > MAX_CACHED or torch.float64 in (x.dtype, states.dtype):
        y = replay_update_reference(
            x, dt, A_log, B, C, D, dt_bias, states, window_cache, rows, max_scheduled, rounding,
            dt_min, dt_max,
        )  # fmt: skip
        return y if out is None else out.copy_(y)
    tokens, heads, dim = x.shape
    groups, state = B.shape[1:]
    check_window_cache(x, B, states, window_cache)
    check_contiguous(states, window_cache, x.dtype)
    for name, part in (("B", B), ("C", C)):
        if part.dtype != x.dtype:
            raise ValueError(f"{name} is {part.dtype}, must be x's {x.dtype}")
    num_rows = rows.slot.shape[0]
    if out is None:
        out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if num_rows == 0 or max_scheduled == 0:
        return out.zero_()
    dot_type = None
    if x.dtype == torch.bfloat16 and states.element_size() == 2:
        dot_type = operand_type(x.dtype, x)
    if rounding is None or states.dtype not in LAST_PLACE:
        seed, layer, place = None, 0, None
    else:
        seed, layer, place = *rounding, last_place(states.dtype)
    products = dot_type is not None
    tiling = replay_tiling(dim, state, states.element_size(), products)
    tiling = tiling._replace(run=math.gcd(tiling.run, heads // groups))
    tiling = spread(tiling, dim, num_rows * heads, num_programs(x, tiling.programs))
    most = min(max_scheduled, drafts + 1)
    _replay_update_kernel[(heads // tiling.run * triton.cdiv(dim, tiling.tile), num_rows)](
        x=x,
        dt=dt,
        A_log=A_log,
        B=B,
        C=C,
        D=D,
        dt_bias=dt_bias,
        states=states,
        x_cache=window_cache.x,
        B_cache=window_cache.B,
        dt_cache=window_cache.dt,
        block_table=rows.block_table,
        slot=rows.slot,
        cu_seqlens=rows.cu_seqlens,
        draft=rows.draft,
        **rows.positions._asdict(),
        seed=seed,
        layer=layer,
        out=out,
        tokens=tokens,
        slots=window_cache.dt.shape[1],
        table_stride=rows.block_table.stride(0),
        state_stride=states.stride(0),
        dt_min=float(dt_min),
        dt_max=float(dt_max),
        strides=input_strides(x.stride(), dt.stride(), B.stride(), C.stride()),
        shape=replay_shape(heads, groups, dim, state, most, drafts, tiling),
        place=place,
        dot_type=dot_type,
        num_warps=1,
        **pdl(x),
    )
    return out
