"""Copies states from column to column, of all layers, in one launch.

Part of kernels that decide themselves which rows move. Each program first decides for all listed
rows at once (a few loads per row), then takes tiles of the rows that act in turn, so that a launch
with nothing to do costs its decision and not rows x layers x tiles empty programs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.types import WORD_TYPES
from hybrid_runtime.kernels.step.state_table import (
    ADDRESS_FIELDS,
    BASE_CONV_STATE,
    BASE_MATRIX,
    BASE_TABLE,
    STRIDE_CONV_STATE,
    STRIDE_MATRIX,
    STRIDE_TABLE,
    StateTable,
)


def move_reference(
    states: StateTable, slot: Tensor, source: Tensor, offset: Tensor, target: Tensor
) -> None:
    """Copy the state at `offset` of column `source` to column `target`.

    The conv_state's `taps` inputs at `offset` go to offset 0 of the target's conv_state; the matrix
    of column `source + offset` goes to the target's. All reads of a row come before its writes, so
    a shift within one conv_state is safe.

    Args:
        states: all layers' states; changed.
        slot: int `[rows]`, rows of the block tables.
        source, offset: int `[rows]`.
        target: int `[rows]`, -1 = the row moves nothing.
    """
    acts = target >= 0
    slot, source, offset, target = (v[acts].long() for v in (slot, source, offset, target))
    tap = torch.arange(states.taps, device=slot.device)
    for conv_state, matrix, table in zip(
        states.conv_states, states.matrices, states.tables, strict=True
    ):
        to = table[slot, target].long()
        inputs = conv_state[table[slot, source].long()[:, None], offset[:, None] + tap]
        conv_state[to[:, None], tap] = inputs
        matrix[to] = matrix[table[slot, source + offset].long()]


class CopyTiling(NamedTuple):
    """How states are cut into tiles, and how words of memory are copied.

    word: Triton type of the words of a matrix. tap: that of a conv_state's inputs.
    taps: inputs of a conv_state that move. matrix_words: words of a matrix.
    matrix_tiles, conv_tiles: turns that a layer's state and its conv_state take.
    matrix_tile: words copied at once. matrix_parts: how often in a turn.
    conv_tile: channels copied in a turn.
    vector: all matrix addresses are multiples of 16 bytes.
    """

    word: tl.dtype
    tap: tl.dtype
    taps: int
    matrix_words: int
    matrix_tiles: int
    matrix_tile: int
    matrix_parts: int
    conv_tiles: int
    conv_tile: int
    vector: bool


@triton.jit
def _pick(values, chosen):
    return tl.sum(tl.where(chosen, values, 0), axis=0)


@triton.jit
def _copy_matrix(p_layer, i_from, i_to, i_tile, TILING: tl.constexpr):
    """One turn's words of a matrix, from block to block."""
    PARTS: tl.constexpr = TILING.matrix_parts
    base = tl.load(p_layer + BASE_MATRIX)
    stride = tl.load(p_layer + STRIDE_MATRIX)
    p_read = (base + i_from * stride).to(tl.pointer_type(TILING.word))
    p_write = (base + i_to * stride).to(tl.pointer_type(TILING.word))
    if TILING.vector:  # what the compiler cannot know of an address that it loads
        p_read = tl.multiple_of(p_read, 16)
        p_write = tl.multiple_of(p_write, 16)
    for part in tl.static_range(PARTS):
        o_word = (i_tile * PARTS + part) * TILING.matrix_tile + tl.arange(0, TILING.matrix_tile)
        within = (o_word < TILING.matrix_words) & (i_from != i_to)
        b_state = tl.load(p_read + o_word, mask=within)
        tl.store(p_write + o_word, b_state, mask=within)


@triton.jit
def _copy_conv_state(
    p_layer,
    i_from,
    i_to,
    i_tile,
    offset,
    channels,
    position_stride,
    channel_stride,
    TILING: tl.constexpr,
):
    """One turn's channels of a conv_state, from `offset` of a block to offset 0 of another. One
    thread owns a channel and copies its taps from low to high: both may be the same block."""
    TAPS: tl.constexpr = TILING.taps
    base = tl.load(p_layer + BASE_CONV_STATE)
    stride = tl.load(p_layer + STRIDE_CONV_STATE)
    o_channel = i_tile * TILING.conv_tile + tl.arange(0, TILING.conv_tile)
    inside = o_channel < channels
    across = o_channel.to(tl.int64) * channel_stride
    p_read = (base + i_from * stride).to(tl.pointer_type(TILING.tap)) + across
    p_write = (base + i_to * stride).to(tl.pointer_type(TILING.tap)) + across
    p_read += tl.cast(offset, tl.int64) * position_stride
    for tap in tl.static_range(TAPS):
        b_inputs = tl.load(p_read + tap * position_stride, mask=inside)
        tl.store(p_write + tap * position_stride, b_inputs, mask=inside)


@triton.jit
def move_rows(
    acts,
    slot,
    source,
    offset,
    target,
    addresses,
    num_layers,
    conv_channels,
    conv_position_stride,
    conv_channel_stride,
    TILING: tl.constexpr,
):
    """This program's share of the tiles of all rows that act, as `move_reference` moves them."""
    TILES: tl.constexpr = TILING.matrix_tiles + TILING.conv_tiles
    acting = acts.to(tl.int32)
    rank = tl.cumsum(acting, axis=0) - 1
    per_row = num_layers * TILES
    total = tl.sum(acting, axis=0) * per_row

    i_item = tl.program_id(0)
    i_current = -1
    row_slot = 0
    row_source = 0
    row_offset = 0
    row_target = 0
    while i_item < total:
        i_row = i_item // per_row
        if i_row != i_current:
            chosen = acts & (rank == i_row)
            row_slot = _pick(slot, chosen)
            row_source = _pick(source, chosen)
            row_offset = _pick(offset, chosen)
            row_target = _pick(target, chosen)
            i_current = i_row
        rest = i_item - i_row * per_row
        p_layer = addresses + (rest // TILES) * ADDRESS_FIELDS
        i_tile = rest % TILES
        p_table = tl.load(p_layer + BASE_TABLE).to(tl.pointer_type(tl.int32))
        p_table += tl.cast(row_slot, tl.int64) * tl.load(p_layer + STRIDE_TABLE)
        i_to = tl.load(p_table + row_target).to(tl.int64)
        if i_tile < TILING.matrix_tiles:
            i_from = tl.load(p_table + row_source + row_offset).to(tl.int64)
            _copy_matrix(p_layer, i_from, i_to, i_tile, TILING)
        else:
            i_from = tl.load(p_table + row_source).to(tl.int64)
            _copy_conv_state(
                p_layer, i_from, i_to, i_tile - TILING.matrix_tiles, row_offset, conv_channels,
                conv_position_stride, conv_channel_stride, TILING,
            )  # fmt: skip
        i_item += tl.num_programs(0)


MATRIX_TILE, MATRIX_PARTS, CONV_TILE, WARPS = 8192, 2, 1024, 8
"""Words that a program copies at once, how often in a turn, and channels in a turn; swept on an
H200 together with the programs per multiprocessor below."""
PROGRAMS, PROGRAMS_EVERY_ROW = 16, 8
"""Programs per multiprocessor; fewer where most launches find nothing to do, because each program
decides for all rows."""


def listed_rows(count: int) -> int:
    """Rows that a program decides for at once: a power of two, of which few are ever compiled."""
    return triton.next_power_of_2(max(count, 16))


def move_arguments(states: StateTable) -> dict[str, Any]:
    """Arguments of `move_rows` beside the rows."""
    conv_state = states.conv_states[0]
    return {
        "addresses": states.addresses,
        "num_layers": len(states.conv_states),
        "conv_channels": conv_state.shape[2],
        "conv_position_stride": conv_state.stride(1),
        "conv_channel_stride": conv_state.stride(2),
        "TILING": copy_tiling(states),
    }


def copy_tiling(states: StateTable) -> CopyTiling:
    """Tiles of one layer's state."""
    conv_state = states.conv_states[0]
    words = states.matrix_bytes // states.word
    return CopyTiling(
        word=WORD_TYPES[states.word],
        tap=WORD_TYPES[conv_state.element_size()],
        taps=states.taps,
        matrix_words=words,
        matrix_tiles=triton.cdiv(words, MATRIX_TILE * MATRIX_PARTS),
        matrix_tile=MATRIX_TILE,
        matrix_parts=MATRIX_PARTS,
        conv_tiles=triton.cdiv(conv_state.shape[2], CONV_TILE),
        conv_tile=CONV_TILE,
        vector=states.vector,
    )
