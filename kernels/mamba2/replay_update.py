"""Mamba-2 state update of the replay layout: outputs from states that are seldom written.

Memory bound, but only if enough of the state is on its way all the time and a thread spends few
instructions on an element. A program takes several heads of a group in turn.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs, runs_triton
from hybrid_runtime.kernels.common.outputs import check_out
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.common.types import operand_type
from hybrid_runtime.kernels.mamba2.checks import check_contiguous, check_records
from hybrid_runtime.kernels.mamba2.naive import replay_update_reference
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.mamba2.replay_heads import update_heads
from hybrid_runtime.kernels.mamba2.replay_launch import (
    Clamp,
    Inputs,
    Ring,
    Row,
    Share,
    choose_tile,
    input_strides,
    update_shape,
)
from hybrid_runtime.kernels.replay.ring import LONG_RING_TOKENS, MAX_TOKENS
from hybrid_runtime.kernels.replay.rounding import LAST_PLACE, Rounding, last_place, rounding_key
from hybrid_runtime.kernels.replay.rows import ReplayRows


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
    do_not_specialize=["tokens", "layer"],
    do_not_specialize_on_alignment=[
        "dt", "A_log", "D", "dt_bias", "dt_ring", "block_table", "slot", "cu_seqlens", "draft",
        "read_column", "pending", "cursor", "write_column", "writes", "checkpoint_column",
        "checkpoint_after", "certain", "seed",
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
    x_ring,
    B_ring,
    dt_ring,
    block_table,
    slot,
    cu_seqlens,
    draft,
    read_column,
    pending,
    cursor,
    write_column,
    writes,
    checkpoint_column,
    checkpoint_after,
    certain,
    seed,
    layer,
    out,
    tokens,
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
    tiles: tl.constexpr = (shape.DIM + shape.ROWS - 1) // shape.ROWS
    groups: tl.constexpr = shape.HEADS // shape.HEADS_PER_GROUP
    i_item = tl.program_id(0)
    i_row = tl.program_id(1)
    i_head = i_item // tiles * shape.RUN
    i_group = i_head // shape.HEADS_PER_GROUP
    top = i_item % tiles * shape.ROWS

    row_slot = tl.load(slot + i_row)
    start = tl.load(cu_seqlens + i_row)
    end = tl.load(cu_seqlens + i_row + 1)
    drafts = tl.load(draft + i_row)
    source = tl.load(read_column + i_row)
    before = tl.load(pending + i_row)
    ring_start = tl.load(cursor + i_row)
    target = tl.load(write_column + i_row)
    stores = tl.load(writes + i_row)
    kept = tl.load(checkpoint_column + i_row)
    after = tl.load(checkpoint_after + i_row)
    active = (row_slot >= 0) & (target >= 0)

    # Tokens of padded rows, and those before and behind all rows.
    o_p = top + tl.arange(0, shape.ROWS)
    zero_heads(out, tl.where(i_row == 0, 0, start), start, i_head, o_p, shape)
    last = tl.where(i_row == tl.num_programs(1) - 1, tokens, end)
    zero_heads(out, tl.where(active, end, start), last, i_head, o_p, shape)

    if active & (end > start):
        reads = source >= 0
        scheduled = end - start
        own = scheduled - drafts
        before = tl.where(reads, before, 0)
        table = block_table + row_slot.to(tl.int64) * table_stride
        block = tl.load(table + source, mask=reads, other=0).to(tl.int64)
        p_read = states + block * state_stride
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
        ring = row_slot.to(tl.int64) * shape.RING
        records = Ring(
            x=x_ring + ring * (shape.HEADS * shape.DIM),
            B=B_ring + (ring * groups + i_group * shape.RING) * shape.STATE,
            dt=dt_ring + ring * shape.HEADS,
        )
        writes_dt = i_item % tiles == 0
        share = Share(
            head=i_head,
            p=top,
            writes_dt=writes_dt,
            writes_B=writes_dt & (i_head % shape.HEADS_PER_GROUP == 0),
        )
        clamp = Clamp(low=dt_min, high=dt_max)
        # What is too much at once is folded in two passes: the pending tokens first.
        apart = before + own > shape.POSITIONS
        # Outputs of certain tokens before the last come from a state that is not written. The
        # others, perhaps more than there are positions, follow below.
        if (stores == 0) | ((own > 1) & (apart == 0)):
            row = Row(
                scheduled=scheduled - tl.maximum(before + scheduled - shape.POSITIONS, 0),
                pending=before,
                cursor=ring_start,
                unfolded=before,
                tokens_folded=0,
                own_folded=0,
                first_recorded_token=tl.where(stores == 0, 0, scheduled),
                first_output_token=0,
                reads=reads,
            )
            update_heads(
                inputs, records, p_read, p_read, out, row, share, 0, clamp, strides, shape, place,
                dot_type, False,
            )  # fmt: skip
        if stores != 0:
            # First the checkpoint, if there is one: the state is read from where it is written
            # next.
            checkpoint = tl.where(before + after > shape.POSITIONS, 1, 0)
            checkpoint = tl.where(kept >= 0, checkpoint, -1)
            passes = 1 + apart.to(tl.int32) + tl.where(kept >= 0, 1, 0)
            # Of two passes the first has all outputs: the second reads a state that was rounded.
            certain_before = tl.where(apart, 0, own - 1)
            unfolded = before
            done = 0
            while done < passes:
                is_last = done == passes - 1
                is_checkpoint = done == checkpoint
                column = tl.where(is_checkpoint, kept, target)
                upto = tl.where(is_last, own, tl.where(is_checkpoint, after, 0))
                p_write = states + tl.load(table + column).to(tl.int64) * state_stride
                key = row_slot.to(tl.uint32)
                if place is not None:
                    position = tl.load(certain + i_row) - own + upto
                    key = rounding_key(tl.load(seed + row_slot), layer, position)
                row = Row(
                    scheduled=scheduled,
                    pending=before,
                    cursor=ring_start,
                    unfolded=unfolded,
                    tokens_folded=unfolded + upto,
                    own_folded=upto,
                    first_recorded_token=tl.where(is_last, own, scheduled),
                    first_output_token=tl.where(
                        is_checkpoint | (is_last & apart), scheduled, certain_before
                    ),
                    reads=reads,
                )
                update_heads(
                    inputs, records, p_read, p_write, out, row, share, key, clamp, strides, shape,
                    place, dot_type, True,
                )  # fmt: skip
                done += 1
                if (is_last == 0) & (is_checkpoint == 0):
                    p_read = p_write
                    unfolded = 0
                    tl.debug_barrier()  # other lanes read it


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
    rows: ReplayRows,
    max_scheduled: int,
    rounding: Rounding | None = None,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    out: Tensor | None = None,
) -> Tensor:
    """`replay_update_reference` by one launch where Triton runs.

    The outputs go to `out` if it is given, contiguous and of x's shape and dtype.

    Each block of `states` and the records must be contiguous, their x and B of x's dtype, and no
    row may read or write a block that another row of the same call writes. Rows of more than
    `MAX_TOKENS` tokens, rings for more than `LONG_RING_TOKENS` pending ones, and fp64 go to the
    reference. Inputs other than bfloat16 are multiplied in fp32, without matrix units.

    At most `UpdateShape.POSITIONS` tokens are folded at once, and outputs are sums over as many. So
    a row that does not write has no more tokens than that, pending and own. One that writes, and
    has more that are certain, is folded in two passes; a state of 16 bits is rounded after each.

    Raises:
        ValueError: as the reference, or a tensor is not contiguous or has another dtype, or the
            rings are not as long as those that `rows` were placed for.
    """
    check_out(out, x)
    ring = records.length
    if rows.ring_length not in (None, ring):
        raise ValueError(
            f"records has rings of {ring} tokens, must be rows.ring_length, {rows.ring_length}, by "
            "which rows.positions were made"
        )
    small = max_scheduled <= MAX_TOKENS and ring <= LONG_RING_TOKENS + MAX_TOKENS
    if not runs_triton(x) or not small or torch.float64 in (x.dtype, states.dtype):
        y = replay_update_reference(
            x, dt, A_log, B, C, D, dt_bias, states, records, rows, max_scheduled, rounding,
            dt_min, dt_max,
        )  # fmt: skip
        return y if out is None else out.copy_(y)
    tokens, heads, dim = x.shape
    groups, state = B.shape[1:]
    check_records(x, B, states, records)
    check_contiguous(states, records, x.dtype)
    for name, part in (("B", B), ("C", C)):
        if part.dtype != x.dtype:
            raise ValueError(f"{name} is {part.dtype}, must be x's {x.dtype}")
    num_rows = rows.slot.shape[0]
    if out is None:
        out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if num_rows == 0 or max_scheduled == 0:
        return out.zero_()
    if rounding is None or states.dtype not in LAST_PLACE:
        seed, layer, place = None, 0, None
    else:
        seed, layer, place = *rounding, last_place(states.dtype)
    itemsize = states.element_size()
    tile = choose_tile(
        num_rows, heads, heads // groups, dim, itemsize, max_scheduled, num_programs(x, 1)
    )
    shape = update_shape(heads, groups, dim, state, ring, max_scheduled, itemsize, tile)
    positions = rows.positions
    _replay_update_kernel[(heads // tile.run * triton.cdiv(dim, tile.rows), num_rows)](
        x=x,
        dt=dt,
        A_log=A_log,
        B=B,
        C=C,
        D=D,
        dt_bias=dt_bias,
        states=states,
        x_ring=records.x,
        B_ring=records.B,
        dt_ring=records.dt,
        block_table=rows.block_table,
        slot=rows.slot,
        cu_seqlens=rows.cu_seqlens,
        draft=rows.draft,
        read_column=positions.read_column,
        pending=positions.pending,
        cursor=positions.cursor,
        write_column=positions.write_column,
        writes=positions.writes,
        checkpoint_column=positions.checkpoint_column,
        checkpoint_after=positions.checkpoint_after,
        certain=positions.certain,
        seed=seed,
        layer=layer,
        out=out,
        tokens=tokens,
        table_stride=rows.block_table.stride(0),
        state_stride=states.stride(0),
        dt_min=float(dt_min),
        dt_max=float(dt_max),
        strides=input_strides(x.stride(), dt.stride(), B.stride(), C.stride()),
        shape=shape,
        place=place,
        dot_type=operand_type(torch.bfloat16, x) if x.dtype == torch.bfloat16 else tl.float32,
        num_warps=1,
        **pdl(x),
    )
    return out
