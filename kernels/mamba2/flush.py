"""Flush: the exact state of chosen rows of the replay layout, in all layers at once.

The last tokens of a request may be pending. Where its whole state is needed (it ends or is
preempted, a boundary is to be shared), they are folded in here.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.types import FLOAT_TYPES, WORD_TYPES
from hybrid_runtime.kernels.mamba2.checks import check_contiguous, check_records
from hybrid_runtime.kernels.mamba2.naive import fold_reference
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.replay.flush import roll_conv_state, roll_conv_states_reference
from hybrid_runtime.kernels.replay.rounding import (
    LAST_PLACE,
    Rounding,
    last_place,
    round_state,
    rounding_key,
)
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.kernels.step.state_table import (
    ADDRESS_FIELDS,
    BASE_MATRIX,
    BASE_TABLE,
    STRIDE_MATRIX,
    STRIDE_TABLE,
    StateTable,
)


def replay_flush_reference(
    table: StateTable,
    records: Records,
    A_log: Tensor,
    listed: Tensor,
    slot: Tensor,
    positions: ReplayPositions,
    rounding: Rounding | None = None,
) -> None:
    """Write conv_state and matrix of the listed rows after their pending tokens.

    The matrix of the read column after `pending` tokens of the ring goes to the write column, the
    conv_state's inputs at `offset` to offset 0 there. If that is the live block, the row must not
    run on from there, unless the caller notes it. A read column of -1 gives zeros. No listed row
    may read a block that another one writes.

    Args:
        table: states of all layers, changed in place.
        records: of all layers.
        A_log: [layers, H].
        listed: int32 [count], rows to flush; -1 = none. It indexes the arguments below.
        slot: int32 [rows]; -1 = padded row. With row i for slot i, rows are slots.
        positions: int32 [rows] each; a write column of -1 leaves the row out. `writes` and the
            checkpoints' are not used.
        rounding: seed by slot; its layer is the number of the first layer. None: to nearest.
    """
    picked = listed[listed >= 0].long()
    slot, positions = slot[picked], ReplayPositions(*(part[picked] for part in positions))
    for layer, (states, blocks) in enumerate(zip(table.matrices, table.tables, strict=True)):
        own = None if rounding is None else rounding._replace(layer=rounding.layer + layer)
        ring = records.layer(layer)
        fold_reference(states, ring, A_log[layer], blocks, slot, positions, own)
        roll_conv_states_reference(table, layer, slot, positions)


class FlushShape(NamedTuple):
    """What the kernel is compiled for.

    HEADS, HEADS_PER_GROUP, DIM, STATE: H, H // G, P and N.
    RING: L, tokens of a slot's ring.
    TILE: rows of P per program.
    PART: columns of N at a time, in registers.
    """

    HEADS: tl.constexpr
    HEADS_PER_GROUP: tl.constexpr
    DIM: tl.constexpr
    STATE: tl.constexpr
    RING: tl.constexpr
    TILE: tl.constexpr
    PART: tl.constexpr


@functools.cache
def flush_shape(heads: int, groups: int, dim: int, state: int, ring: int) -> FlushShape:
    """Kept, because Triton finds a compiled kernel by the hash of its constants."""
    sizes = (heads, heads // groups, dim, state, ring)
    tile = min(TILE, triton.next_power_of_2(dim))
    part = min(PART, triton.next_power_of_2(state))
    return FlushShape(*(tl.constexpr(size) for size in (*sizes, tile, part)))


@triton.jit
def fold_pending(b_h, p_x, p_B, p_dt, first, count, rate, in_dim, in_state, shape):
    """Part of a state `[TILE, PART]` after `count` tokens of the ring, from index `first` on."""
    at = first
    left = count
    while left > 0:
        step = tl.load(p_dt + at)
        b_x = tl.load(p_x + at * shape.DIM, mask=in_dim, other=0.0).to(tl.float32)
        b_B = tl.load(p_B + at * shape.STATE, mask=in_state, other=0.0).to(tl.float32)
        b_h = b_h * tl.exp(step * rate) + (step * b_x)[:, None] * b_B[None, :]
        at = tl.where(at + 1 == shape.RING, 0, at + 1)
        left -= 1
    return b_h


# Pointers to rows are arguments of their own: a tuple's would be specialised on their alignment.
@triton.jit(
    do_not_specialize=["slots", "layer"],
    do_not_specialize_on_alignment=[
        "A_log", "dt_ring", "listed", "slot", "read_column", "offset", "pending", "cursor",
        "write_column", "certain", "seed",
    ],
)  # fmt: skip
def _flush_kernel(
    addresses,
    x_ring,
    B_ring,
    dt_ring,
    A_log,
    listed,
    slot,
    read_column,
    offset,
    pending,
    cursor,
    write_column,
    certain,
    seed,
    layer,
    slots,
    A_layer,
    A_head,
    conv_channels,
    conv_position_stride,
    conv_channel_stride,
    shape,
    place,
    state_type: tl.constexpr,
    tap_type: tl.constexpr,
    TAPS: tl.constexpr,
    CONV_TILE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    STATE: tl.constexpr = shape.STATE
    DIM: tl.constexpr = shape.DIM
    RING: tl.constexpr = shape.RING
    groups: tl.constexpr = shape.HEADS // shape.HEADS_PER_GROUP
    tiles: tl.constexpr = (DIM + shape.TILE - 1) // shape.TILE
    i_item = tl.program_id(0)
    i_row = tl.load(listed + tl.program_id(1))
    row_slot = tl.load(slot + i_row, mask=i_row >= 0, other=-1)
    target = tl.load(write_column + i_row, mask=row_slot >= 0, other=-1)
    if target >= 0:
        source = tl.load(read_column + i_row)
        reads = source >= 0
        count = tl.where(reads, tl.load(pending + i_row), 0)
        shift = tl.where(reads, tl.load(offset + i_row), 0)
        i_layer = tl.program_id(2)
        p_layer = addresses + i_layer * ADDRESS_FIELDS
        table = tl.load(p_layer + BASE_TABLE).to(tl.pointer_type(tl.int32))
        table += row_slot.to(tl.int64) * tl.load(p_layer + STRIDE_TABLE)
        block = tl.load(table + source, mask=reads, other=0).to(tl.int64)
        to = tl.load(table + target).to(tl.int64)
        moves = (block != to) | (source < 0)
        if (i_item < shape.HEADS * tiles) & (moves | (count > 0)):
            state_pointer: tl.constexpr = tl.pointer_type(state_type)
            base = tl.load(p_layer + BASE_MATRIX)
            read = (base + block * tl.load(p_layer + STRIDE_MATRIX)).to(state_pointer)
            write = (base + to * tl.load(p_layer + STRIDE_MATRIX)).to(state_pointer)
            if VECTOR:  # what the compiler cannot know of an address that it loads
                read = tl.multiple_of(read, 16)
                write = tl.multiple_of(write, 16)
            i_head = i_item // tiles
            o_p = i_item % tiles * shape.TILE + tl.arange(0, shape.TILE)
            o_n = tl.arange(0, shape.PART)
            in_dim = o_p < DIM
            index = i_layer.to(tl.int64) * slots + row_slot
            i_ring = index * shape.HEADS + i_head
            i_group = index * groups + i_head // shape.HEADS_PER_GROUP
            p_x = x_ring + i_ring * (RING * DIM) + o_p
            p_B = B_ring + i_group * (RING * STATE) + o_n
            p_dt = dt_ring + i_ring * RING
            first = tl.load(cursor + i_row)
            rate = -tl.exp(tl.load(A_log + i_layer * A_layer + i_head * A_head).to(tl.float32))
            key = row_slot.to(tl.uint32)
            if place is not None:
                position = tl.load(certain + i_row)
                key = rounding_key(tl.load(seed + row_slot), layer + i_layer, position)
            for s in tl.static_range((STATE + shape.PART - 1) // shape.PART):
                in_state = o_n + s * shape.PART < STATE
                element = (i_head * DIM + o_p)[:, None] * STATE + (o_n + s * shape.PART)[None, :]
                inside = in_dim[:, None] & in_state[None, :]
                b_h = tl.load(read + element, mask=inside & reads, other=0.0).to(tl.float32)
                b_h = fold_pending(
                    b_h, p_x, p_B + s * shape.PART, p_dt, first, count, rate, in_dim, in_state,
                    shape,
                )  # fmt: skip
                if place is not None:
                    b_h = round_state(b_h, element, key, place)
                tl.store(write + element, b_h.to(state_type), mask=inside)
        if (i_item >= shape.HEADS * tiles) & (moves | (shift > 0)):
            roll_conv_state(
                addresses, i_layer, i_item - shape.HEADS * tiles, block, to, shift, reads,
                conv_channels, conv_position_stride, conv_channel_stride, tap_type, TAPS, CONV_TILE,
            )  # fmt: skip


TILE, PART, CONV_TILE, WARPS = 16, 32, 1024, 4
"""Rows and columns of a share of a state, channels of a conv_state per program, warps per program.
Not swept."""


def replay_flush(
    table: StateTable,
    records: Records,
    A_log: Tensor,
    listed: Tensor,
    slot: Tensor,
    positions: ReplayPositions,
    rounding: Rounding | None = None,
) -> None:
    """`replay_flush_reference` by one launch where Triton runs; fp64 states go to the reference.

    Raises:
        ValueError: states, records and A_log don't fit, or the records are not contiguous.
    """
    states = table.matrices[0]
    x, B = records.x.transpose(2, 3), records.B.transpose(2, 3)
    layers = len(table.matrices)
    if x.dim() != 5 or len(x) != layers or tuple(A_log.shape) != (layers, states.shape[1]):
        raise ValueError(
            f"records.x is {tuple(records.x.shape)} and A_log {tuple(A_log.shape)}, must "
            f"be of {layers} layers and {states.shape[1]} heads"
        )
    check_records(x, B, states, records.layer(0))
    if not runs_triton(listed) or states.dtype == torch.float64:
        replay_flush_reference(table, records, A_log, listed, slot, positions, rounding)
        return
    if len(listed) == 0:
        return
    check_contiguous(states, records, x.dtype)
    (heads, dim), (groups, state) = x.shape[3:], B.shape[3:]
    conv_states = table.conv_states[0]
    if rounding is None or states.dtype not in LAST_PLACE:
        seed, layer, place = None, 0, None
    else:
        seed, layer, place = *rounding, last_place(states.dtype)
    items = heads * triton.cdiv(dim, min(TILE, triton.next_power_of_2(dim)))
    items += triton.cdiv(conv_states.shape[2], CONV_TILE)
    _flush_kernel[(items, len(listed), len(table.matrices))](
        addresses=table.addresses,
        x_ring=records.x,
        B_ring=records.B,
        dt_ring=records.dt,
        A_log=A_log,
        listed=listed,
        slot=slot,
        read_column=positions.read_column,
        offset=positions.offset,
        pending=positions.pending,
        cursor=positions.cursor,
        write_column=positions.write_column,
        certain=positions.certain,
        seed=seed,
        layer=layer,
        slots=records.dt.shape[1],
        A_layer=A_log.stride(0),
        A_head=A_log.stride(1),
        conv_channels=conv_states.shape[2],
        conv_position_stride=conv_states.stride(1),
        conv_channel_stride=conv_states.stride(2),
        shape=flush_shape(heads, groups, dim, state, records.length),
        place=place,
        state_type=FLOAT_TYPES[states.dtype],
        tap_type=WORD_TYPES[conv_states.element_size()],
        TAPS=table.taps,
        CONV_TILE=CONV_TILE,
        VECTOR=table.vector,
        num_warps=WARPS,
    )
