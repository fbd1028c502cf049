"""Filling whole state blocks: zeros when one is handed out, NaN to poison one that was freed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs, runs_triton
from hybrid_runtime.kernels.common.types import FLOAT_TYPES
from hybrid_runtime.kernels.step.state_table import (
    ADDRESS_FIELDS,
    BASE_CONV_STATE,
    BASE_MATRIX,
    STRIDE_CONV_STATE,
    STRIDE_MATRIX,
    StateTable,
)

TILE = 4096
"""Elements per program and turn."""


def fill_blocks_reference(states: StateTable, blocks: Tensor, value: float) -> None:
    """Set conv_state and matrix of `blocks` (int `[n]`) to `value` in every layer."""
    for conv_state, matrix in zip(states.conv_states, states.matrices, strict=True):
        conv_state.index_fill_(0, blocks.long(), value)
        matrix.index_fill_(0, blocks.long(), value)


@triton.jit
def _fill_kernel(
    blocks,
    count,
    addresses,
    num_layers,
    value,
    conv_type: tl.constexpr,
    matrix_type: tl.constexpr,
    CONV_STATE: tl.constexpr,
    MATRIX: tl.constexpr,
    CONV_TILES: tl.constexpr,
    MATRIX_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    tiles: tl.constexpr = CONV_TILES + MATRIX_TILES
    item = tl.program_id(0)
    total = count * num_layers * tiles
    while item < total:
        block = tl.load(blocks + item // (num_layers * tiles)).to(tl.int64)
        layer = addresses + item // tiles % num_layers * ADDRESS_FIELDS
        tile = item % tiles
        if tile < MATRIX_TILES:
            at = tl.load(layer + BASE_MATRIX) + block * tl.load(layer + STRIDE_MATRIX)
            index = tile * TILE + tl.arange(0, TILE)
            state = tl.full((TILE,), value, tl.float32).to(matrix_type)
            tl.store(at.to(tl.pointer_type(matrix_type)) + index, state, mask=index < MATRIX)
        else:
            at = tl.load(layer + BASE_CONV_STATE) + block * tl.load(layer + STRIDE_CONV_STATE)
            index = (tile - MATRIX_TILES) * TILE + tl.arange(0, TILE)
            inputs = tl.full((TILE,), value, tl.float32).to(conv_type)
            tl.store(at.to(tl.pointer_type(conv_type)) + index, inputs, mask=index < CONV_STATE)
        item += tl.num_programs(0)


def fill_blocks(states: StateTable, blocks: Tensor, value: float) -> None:
    """`fill_blocks_reference` by one launch where Triton runs. Blocks must be dense."""
    if not runs_triton(blocks):
        fill_blocks_reference(states, blocks, value)
        return
    conv_state, matrix = states.conv_states[0], states.matrices[0]
    _fill_kernel[(num_programs(blocks, 4),)](
        blocks,
        blocks.shape[0],
        states.addresses,
        len(states.conv_states),
        value,
        conv_type=FLOAT_TYPES[conv_state.dtype],
        matrix_type=FLOAT_TYPES[matrix.dtype],
        CONV_STATE=conv_state[0].numel(),
        MATRIX=matrix[0].numel(),
        CONV_TILES=triton.cdiv(conv_state[0].numel(), TILE),
        MATRIX_TILES=triton.cdiv(matrix[0].numel(), TILE),
        TILE=TILE,
    )
