"""Filling whole state blocks: zeros when one is handed out, NaN to poison one that was freed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs, runs_triton
from hybrid_runtime.kernels.common.types import FLOAT_TYPES
from hybrid_runtime.kernels.step.state_table import (
    ADDRESS_FIELDS,
    BASE_SSM,
    BASE_WINDOW,
    STRIDE_SSM,
    STRIDE_WINDOW,
    StateTable,
)

TILE = 4096
"""Elements per program and turn."""


def fill_blocks_reference(states: StateTable, blocks: Tensor, value: float) -> None:
    """Set window and SSM state of `blocks` (int `[n]`) to `value` in every layer."""
    for window, ssm in zip(states.windows, states.ssm, strict=True):
        window.index_fill_(0, blocks.long(), value)
        ssm.index_fill_(0, blocks.long(), value)


@triton.jit
def _fill_kernel(
    blocks,
    count,
    addresses,
    num_layers,
    value,
    window_type: tl.constexpr,
    ssm_type: tl.constexpr,
    WINDOW: tl.constexpr,
    SSM: tl.constexpr,
    WINDOW_TILES: tl.constexpr,
    SSM_TILES: tl.constexpr,
    TILE: tl.constexpr,
):
    tiles: tl.constexpr = WINDOW_TILES + SSM_TILES
    item = tl.program_id(0)
    total = count * num_layers * tiles
    while item < total:
        block = tl.load(blocks + item // (num_layers * tiles)).to(tl.int64)
        layer = addresses + item // tiles % num_layers * ADDRESS_FIELDS
        tile = item % tiles
        if tile < SSM_TILES:
            at = tl.load(layer + BASE_SSM) + block * tl.load(layer + STRIDE_SSM)
            index = tile * TILE + tl.arange(0, TILE)
            state = tl.full((TILE,), value, tl.float32).to(ssm_type)
            tl.store(at.to(tl.pointer_type(ssm_type)) + index, state, mask=index < SSM)
        else:
            at = tl.load(layer + BASE_WINDOW) + block * tl.load(layer + STRIDE_WINDOW)
            index = (tile - SSM_TILES) * TILE + tl.arange(0, TILE)
            inputs = tl.full((TILE,), value, tl.float32).to(window_type)
            tl.store(at.to(tl.pointer_type(window_type)) + index, inputs, mask=index < WINDOW)
        item += tl.num_programs(0)


def fill_blocks(states: StateTable, blocks: Tensor, value: float) -> None:
    """`fill_blocks_reference` by one launch where Triton runs. Blocks must be dense."""
    if not runs_triton(blocks):
        fill_blocks_reference(states, blocks, value)
        return
    window, ssm = states.windows[0], states.ssm[0]
    _fill_kernel[(num_programs(blocks, 4),)](
        blocks,
        blocks.shape[0],
        states.addresses,
        len(states.windows),
        value,
        window_type=FLOAT_TYPES[window.dtype],
        ssm_type=FLOAT_TYPES[ssm.dtype],
        WINDOW=window[0].numel(),
        SSM=ssm[0].numel(),
        WINDOW_TILES=triton.cdiv(window[0].numel(), TILE),
        SSM_TILES=triton.cdiv(ssm[0].numel(), TILE),
        TILE=TILE,
    )
