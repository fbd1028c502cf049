"""Gated DeltaNet's state update of the replay layout: outputs from states that are seldom written.

Memory bound, if enough of the state is on its way all the time and a thread spends few instructions
on an element: a step that does not write reads each element once, and does with it one conversion
and two products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs, runs_triton
from hybrid_runtime.kernels.common.outputs import check_out
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.common.types import operand_type
from hybrid_runtime.kernels.common.zero_fill import zero_unowned
from hybrid_runtime.kernels.gdn.checks import check_inputs, check_memory, check_records
from hybrid_runtime.kernels.gdn.naive import replay_update_reference
from hybrid_runtime.kernels.gdn.records import Records
from hybrid_runtime.kernels.gdn.replay_launch import (
    ROWS,
    Inputs,
    Ring,
    Row,
    Share,
    Target,
    input_strides,
    prepares,
    update_shape,
)
from hybrid_runtime.kernels.gdn.replay_tiles import prepare, update_tile
from hybrid_runtime.kernels.replay.ring import LONG_RING_TOKENS, MAX_TOKENS
from hybrid_runtime.kernels.replay.rounding import LAST_PLACE, Rounding, last_place, rounding_key
from hybrid_runtime.kernels.replay.rows import ReplayRows


# Pointers to rows are arguments of their own: a tuple's would be specialised on their alignment.
@triton.jit(
    do_not_specialize=["tokens", "layer"],
    do_not_specialize_on_alignment=[
        "a", "b", "A_log", "dt_bias", "g_ring", "rk_ring", "block_table", "slot", "cu_seqlens",
        "draft", "read_column", "pending", "cursor", "write_column", "writes", "checkpoint_column",
        "checkpoint_after", "certain", "seed",
    ],
)  # fmt: skip
def _replay_update_kernel(
    q,
    k,
    v,
    a,
    b,
    A_log,
    dt_bias,
    states,
    u_ring,
    k_ring,
    g_ring,
    rk_ring,
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
    lines,
    out,
    tokens,
    table_stride,
    state_stride,
    strides,
    shape,
    place,
    dot_type: tl.constexpr,
    PREPARES: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL, False)
    HEADS: tl.constexpr = shape.HEADS
    VALUE: tl.constexpr = shape.VALUE
    MATRIX: tl.constexpr = VALUE * shape.KEY
    ROWS: tl.constexpr = shape.ROWS
    PER_HEAD: tl.constexpr = 1 if PREPARES else (VALUE + ROWS - 1) // ROWS
    i_item = tl.program_id(0)
    i_row = tl.program_id(1)
    i_head = i_item // PER_HEAD
    i_key_head = i_head // shape.GROUP
    first = i_item % PER_HEAD * ROWS

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

    if not PREPARES:
        o_v = first + tl.arange(0, ROWS)
        p_zeros = out + i_head * VALUE + o_v
        zero_unowned(p_zeros, o_v < VALUE, i_row, start, end, active, tokens, HEADS * VALUE)

    if active & (end > start):
        reads = source >= 0
        own = end - start - drafts
        table = block_table + row_slot.to(tl.int64) * table_stride
        head = states + i_head * MATRIX
        block = tl.load(table + source, mask=reads, other=0).to(tl.int64)
        begin = start.to(tl.int64)
        inputs = Inputs(
            q=q + begin * strides.q_token + i_key_head * strides.q_head,
            k=k + begin * strides.k_token + i_key_head * strides.k_head,
            v=v + begin * strides.v_token + i_head * strides.v_head,
            a=a + begin * strides.a_token + i_head * strides.a_head,
            b=b + begin * strides.b_token + i_head * strides.b_head,
            A_log=A_log + i_head,
            dt_bias=dt_bias + i_head,
        )
        ring = (row_slot.to(tl.int64) * HEADS + i_head) * shape.RING
        key_ring = (row_slot.to(tl.int64) * (HEADS // shape.GROUP) + i_key_head) * shape.RING
        records = Ring(
            u=u_ring + ring * VALUE,
            k=k_ring + key_ring * shape.KEY,
            g=g_ring + ring,
            rk=rk_ring + key_ring,
        )
        row = Row(
            scheduled=end - start,
            certain=own,
            pending=tl.where(reads, before, 0),
            cursor=ring_start,
            first_recorded=tl.where(stores == 0, 0, own),
            reads=reads,
        )
        share = Share(
            head=i_head,
            value=first,
            writes_g=first == 0,
            writes_k=(first == 0) & (i_head % shape.GROUP == 0),
        )
        key = row_slot.to(tl.uint32)
        kept_key = key
        if place is not None:
            position = tl.load(certain + i_row)
            key = rounding_key(tl.load(seed + row_slot), layer, position)
            kept_key = rounding_key(tl.load(seed + row_slot), layer, position - own + after)
        written = tl.load(table + target).to(tl.int64)
        keeps = (stores != 0) & (kept >= 0)
        copy = tl.load(table + kept, mask=keeps, other=0).to(tl.int64)
        state = Target(state=head + written * state_stride, after=own, key=key)
        checkpoint = Target(state=head + copy * state_stride, after=after, key=kept_key)
        line = None
        if lines is not None:
            line = lines + (i_row.to(tl.int64) * HEADS + i_head) * shape.LINE
        if PREPARES:
            prepare(
                inputs, records, state, checkpoint, line, row, share, strides, shape, dot_type
            )  # fmt: skip
        else:
            update_tile(
                inputs,
                records,
                head + block * state_stride,
                state,
                checkpoint,
                tl.where(stores == 0, 0, tl.where(keeps, 2, 1)),
                line,
                out + begin * (HEADS * VALUE) + i_head * VALUE,
                row,
                share,
                strides,
                shape,
                place,
                dot_type,
            )


def replay_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    records: Records,
    rows: ReplayRows,
    max_scheduled: int,
    rounding: Rounding | None = None,
    out: Tensor | None = None,
    prepared: bool | None = None,
) -> Tensor:
    """`replay_update_reference` by one or two launches where Triton runs.

    The outputs go to `out` if it is given, contiguous and of v's shape and dtype. `prepared`: by
    two launches, see `replay_launch`; None: as is faster.

    Each block of `states` must be dense, as [Hv, V, K] or as [Hv, K, V]; the records contiguous,
    their k of v's dtype; and no row may read or write a block that another row of the same call
    writes. Rows of more than `MAX_TOKENS` tokens, rings for more than `LONG_RING_TOKENS` pending
    ones, decays per channel (KDA) and fp64 go to the reference. Inputs other than bfloat16 are
    multiplied in fp32, without matrix units.

    Raises:
        ValueError: as the reference, or a tensor does not lie in memory as said or has another
            dtype, or the rings are not as long as those that `rows` were placed for.
    """
    check_inputs(q, k, v, a, b, A_log, dt_bias)
    check_records(k, v, states, records)
    check_out(out, v)
    ring = records.length
    if rows.ring_length not in (None, ring):
        raise ValueError(
            f"records has rings of {ring} tokens, must be rows.ring_length, {rows.ring_length}, by "
            "which rows.positions were made"
        )
    small = max_scheduled <= MAX_TOKENS and ring <= LONG_RING_TOKENS + MAX_TOKENS
    wide = torch.float64 in (v.dtype, states.dtype)
    if not runs_triton(v) or not small or wide or a.dim() == 3:
        y = replay_update_reference(
            q, k, v, a, b, A_log, dt_bias, states, records, rows, max_scheduled, rounding
        )
        return y if out is None else out.copy_(y)
    check_memory(states, records, v.dtype)
    for name, part in (("q", q), ("k", k)):
        if part.dtype != v.dtype:
            raise ValueError(f"{name} is {part.dtype}, must be v's {v.dtype}")
    tokens, heads, value = v.shape
    key_heads, key = k.shape[1:]
    num_rows = rows.slot.shape[0]
    if out is None:
        out = torch.empty((tokens, heads, value), dtype=v.dtype, device=v.device)
    if num_rows == 0 or max_scheduled == 0:
        return out.zero_()
    if rounding is None or states.dtype not in LAST_PLACE:
        seed, layer, place = None, 0, None
    else:
        seed, layer, place = *rounding, last_place(states.dtype)
    if prepared is None:
        prepared = prepares(num_rows, heads, value, num_programs(v, 1))
    shape = update_shape(
        heads, key_heads, key, value, states.stride()[2:], ring, max_scheduled,
        states.element_size(),
    )  # fmt: skip
    positions = rows.positions
    lines = None
    if prepared:
        lines = torch.empty((num_rows, heads, shape.LINE.value), device=v.device)

    def launch(tiles: int, preparing: bool) -> None:
        _replay_update_kernel[(heads * tiles, num_rows)](
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            A_log=A_log,
            dt_bias=dt_bias,
            states=states,
            u_ring=records.u,
            k_ring=records.k,
            g_ring=records.g,
            rk_ring=records.rk,
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
            lines=lines,
            out=out,
            tokens=tokens,
            table_stride=rows.block_table.stride(0),
            state_stride=states.stride(0),
            strides=input_strides(q.stride(), k.stride(), v.stride(), a.stride(), b.stride()),
            shape=shape,
            place=place,
            dot_type=operand_type(torch.bfloat16, v) if v.dtype == torch.bfloat16 else tl.float32,
            PREPARES=preparing,
            num_warps=1,
            **pdl(v),
        )

    if prepared:
        launch(1, preparing=True)
    launch(triton.cdiv(value, ROWS), preparing=False)
    return out
