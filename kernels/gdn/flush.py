"""Flush: the exact state of chosen rows of the replay layout, in all layers at once.

The last tokens of a request may be pending. Where its whole state is needed (it ends or is
preempted, a boundary is to be shared), they are folded in here, token by token.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.types import FLOAT_TYPES, WORD_TYPES
from hybrid_runtime.kernels.gdn.checks import check_memory, check_records
from hybrid_runtime.kernels.gdn.naive import fold_reference
from hybrid_runtime.kernels.gdn.records import Records
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
    listed: Tensor,
    slot: Tensor,
    positions: ReplayPositions,
    rounding: Rounding | None = None,
    transposed: bool = False,
) -> None:
    """Write conv_state and matrix of the listed rows after their pending tokens.

    The matrix of the read column after `pending` tokens of the ring goes to the write column, the
    conv_state's inputs at `offset` to offset 0 there. If that is the live block, the row must not
    run on from there, unless the caller notes it. A read column of -1 gives zeros. No listed row
    may read a block that another one writes.

    Args:
        table: states of all layers, changed in place.
        records: of all layers.
        listed: int32 [count], rows to flush; -1 = none. It indexes the arguments below.
        slot: int32 [rows]; -1 = padded row. With row i for slot i, rows are slots.
        positions: int32 [rows] each; a write column of -1 leaves the row out. `writes` and the
            checkpoints' are not used.
        rounding: seed by slot; its layer is the number of the first layer. None: to nearest.
        transposed: matrices of the table are [Hv, K, V], not [Hv, V, K].
    """
    picked = listed[listed >= 0].long()
    slot, positions = slot[picked], ReplayPositions(*(part[picked] for part in positions))
    layers = enumerate(zip(_by_value(table.matrices, transposed), table.tables, strict=True))
    for layer, (states, blocks) in layers:
        own = None if rounding is None else rounding._replace(layer=rounding.layer + layer)
        fold_reference(states, records.layer(layer), blocks, slot, positions, own)
        roll_conv_states_reference(table, layer, slot, positions)


def _by_value(matrices: Sequence[Tensor], transposed: bool) -> list[Tensor]:
    """As `[blocks, Hv, V, K]`."""
    return [matrix.mT if transposed else matrix for matrix in matrices]


class FlushShape(NamedTuple):
    """What the kernel is compiled for.

    HEADS, GROUP, KEY, VALUE: Hv, Hv // Hk, K and V.
    KEY_STRIDE, VALUE_STRIDE: elements from one column (k) or row (v) of a state to the next.
    RING: L, tokens of a slot's ring.
    TILE: rows of V per program.
    PART: columns of K at a time, in registers.
    """

    HEADS: tl.constexpr
    GROUP: tl.constexpr
    KEY: tl.constexpr
    VALUE: tl.constexpr
    KEY_STRIDE: tl.constexpr
    VALUE_STRIDE: tl.constexpr
    RING: tl.constexpr
    TILE: tl.constexpr
    PART: tl.constexpr


TILE, PART, CONV_TILE, WARPS = 16, 32, 1024, 4
"""Rows and columns of a share of a state, channels of a conv_state per program, warps per program.
Not swept."""


@functools.cache
def flush_shape(
    heads: int, key_heads: int, key: int, value: int, strides: tuple[int, int], ring: int
) -> FlushShape:
    """Kept, because Triton finds a compiled kernel by the hash of its constants. strides: of V and
    K."""
    tile = min(TILE, triton.next_power_of_2(value))
    part = min(PART, triton.next_power_of_2(key))
    sizes = (heads, heads // key_heads, key, value, strides[1], strides[0], ring, tile, part)
    return FlushShape(*(tl.constexpr(size) for size in sizes))


@triton.jit
def fold_pending(b_h, p_u, p_k, p_g, p_rk, first, count, in_value, in_key, shape):
    """Part of a state `[TILE, PART]` after `count` tokens of the ring, from index `first` on."""
    at = first
    left = count
    while left > 0:
        b_u = tl.load(p_u + at * shape.VALUE, mask=in_value, other=0.0)
        b_k = tl.load(p_k + at * shape.KEY, mask=in_key, other=0.0).to(tl.float32)
        b_k *= tl.load(p_rk + at)
        b_h = b_h * tl.exp(tl.load(p_g + at)) + b_u[:, None] * b_k[None, :]
        at = tl.where(at + 1 == shape.RING, 0, at + 1)
        left -= 1
    return b_h


# Pointers to rows are arguments of their own: a tuple's would be specialised on their alignment.
@triton.jit(
    do_not_specialize=["slots", "layer"],
    do_not_specialize_on_alignment=[
        "g_ring", "rk_ring", "listed", "slot", "read_column", "offset", "pending", "cursor",
        "write_column", "certain", "seed",
    ],
)  # fmt: skip
def _flush_kernel(
    addresses,
    u_ring,
    k_ring,
    g_ring,
    rk_ring,
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
    HEADS: tl.constexpr = shape.HEADS
    KEY: tl.constexpr = shape.KEY
    VALUE: tl.constexpr = shape.VALUE
    RING: tl.constexpr = shape.RING
    tiles: tl.constexpr = (VALUE + shape.TILE - 1) // shape.TILE
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
        if (i_item < HEADS * tiles) & (moves | (count > 0)):
            state_pointer: tl.constexpr = tl.pointer_type(state_type)
            base = tl.load(p_layer + BASE_MATRIX)
            read = (base + block * tl.load(p_layer + STRIDE_MATRIX)).to(state_pointer)
            write = (base + to * tl.load(p_layer + STRIDE_MATRIX)).to(state_pointer)
            if VECTOR:  # what the compiler cannot know of an address that it loads
                read = tl.multiple_of(read, 16)
                write = tl.multiple_of(write, 16)
            i_head = i_item // tiles
            o_v = i_item % tiles * shape.TILE + tl.arange(0, shape.TILE)
            o_k = tl.arange(0, shape.PART)
            in_value = o_v < VALUE
            index = i_layer.to(tl.int64) * slots + row_slot
            i_ring = (index * HEADS + i_head) * RING
            i_key_ring = (index * (HEADS // shape.GROUP) + i_head // shape.GROUP) * RING
            first = tl.load(cursor + i_row)
            key = row_slot.to(tl.uint32)
            if place is not None:
                position = tl.load(certain + i_row)
                key = rounding_key(tl.load(seed + row_slot), layer + i_layer, position)
            for s in tl.static_range((KEY + shape.PART - 1) // shape.PART):
                o_part = o_k + s * shape.PART
                in_key = o_part < KEY
                at = o_v[:, None] * shape.VALUE_STRIDE + o_part[None, :] * shape.KEY_STRIDE
                at += i_head * (VALUE * KEY)
                inside = in_value[:, None] & in_key[None, :]
                b_h = tl.load(read + at, mask=inside & reads, other=0.0).to(tl.float32)
                b_h = fold_pending(
                    b_h, u_ring + i_ring * VALUE + o_v, k_ring + i_key_ring * KEY + o_part,
                    g_ring + i_ring, rk_ring + i_key_ring, first, count, in_value, in_key, shape,
                )  # fmt: skip
                if place is not None:
                    element = (i_head * VALUE + o_v)[:, None] * KEY + o_part[None, :]
                    b_h = round_state(b_h, element, key, place)
                tl.store(write + at, b_h.to(state_type), mask=inside)
        if (i_item >= HEADS * tiles) & (moves | (shift > 0)):
            roll_conv_state(
                addresses, i_layer, i_item - HEADS * tiles, block, to, shift, reads, conv_channels,
                conv_position_stride, conv_channel_stride, tap_type, TAPS, CONV_TILE,
            )  # fmt: skip


def replay_flush(
    table: StateTable,
    records: Records,
    listed: Tensor,
    slot: Tensor,
    positions: ReplayPositions,
    rounding: Rounding | None = None,
    transposed: bool = False,
) -> None:
    """`replay_flush_reference` by one launch where Triton runs; fp64 states and decays per channel
    (KDA) go to the reference.

    Raises:
        ValueError: states and records don't fit, or the records are not contiguous.
    """
    states = _by_value(table.matrices, transposed)[0]
    layers = len(table.matrices)
    if records.u.dim() != 5 or len(records.u) != layers:
        raise ValueError(
            f"records.u is {tuple(records.u.shape)}, must be [{layers}, slots, Hv, length, V]"
        )
    k, u = records.k.transpose(2, 3), records.u.transpose(2, 3)
    check_records(k, u, states, records.layer(0))
    for name, part in zip(records._fields, records, strict=True):
        if len(part) != layers:
            raise ValueError(f"records.{name} has {len(part)} layers, must have {layers}")
    wide = states.dtype == torch.float64 or records.u.dtype == torch.float64
    if not runs_triton(listed) or wide or records.g.dim() == 5:
        replay_flush_reference(table, records, listed, slot, positions, rounding, transposed)
        return
    if len(listed) == 0:
        return
    check_memory(states, records.layer(0), records.k.dtype)
    (heads, value), (key_heads, key) = u.shape[3:], k.shape[3:]
    conv_states = table.conv_states[0]
    if rounding is None or states.dtype not in LAST_PLACE:
        seed, layer, place = None, 0, None
    else:
        seed, layer, place = *rounding, last_place(states.dtype)
    items = heads * triton.cdiv(value, min(TILE, triton.next_power_of_2(value)))
    items += triton.cdiv(conv_states.shape[2], CONV_TILE)
    _flush_kernel[(items, len(listed), layers)](
        addresses=table.addresses,
        u_ring=records.u,
        k_ring=records.k,
        g_ring=records.g,
        rk_ring=records.rk,
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
        slots=records.rk.shape[1],
        conv_channels=conv_states.shape[2],
        conv_position_stride=conv_states.stride(1),
        conv_channel_stride=conv_states.stride(2),
        shape=flush_shape(heads, key_heads, key, value, states.stride()[2:], records.length),
        place=place,
        state_type=FLOAT_TYPES[states.dtype],
        tap_type=WORD_TYPES[conv_states.element_size()],
        TAPS=table.taps,
        CONV_TILE=CONV_TILE,
        VECTOR=table.vector,
        num_warps=WARPS,
    )
