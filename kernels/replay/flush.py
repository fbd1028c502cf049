"""The part of a flush that all recurrences share: a conv_state moves to offset 0 of its own block,
or of another one."""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.kernels.step.state_table import (
    ADDRESS_FIELDS,
    BASE_CONV_STATE,
    STRIDE_CONV_STATE,
    StateTable,
)


def roll_conv_states_reference(
    table: StateTable, layer: int, slot: Tensor, positions: ReplayPositions
) -> None:
    """Write the inputs at `offset` of the read column to offset 0 of the write column, for rows
    whose slot and write column are not -1; zeros where the read column is -1."""
    conv_states, blocks = table.conv_states[layer], table.tables[layer]
    tap = torch.arange(table.taps, device=slot.device)
    active = (slot >= 0) & (positions.write_column >= 0)
    at, reads = active.nonzero()[:, 0], positions.read_column[active] >= 0
    column = torch.where(reads, positions.read_column[at], 0).long()
    source = blocks[slot[at].long(), column].long()
    offset = torch.where(reads, positions.offset[at], 0).long()
    inputs = conv_states[source[:, None], offset[:, None] + tap]
    inputs = torch.where(reads[:, None, None], inputs, torch.zeros((), dtype=inputs.dtype))
    target = blocks[slot[at].long(), positions.write_column[at].long()].long()
    conv_states[target[:, None], tap] = inputs


@triton.jit
def roll_conv_state(
    addresses, i_layer, i_tile, block, to, shift, reads, channels, position_stride, channel_stride,
    tap_type: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """TILE channels of a conv_state, from offset `shift` of a block to offset 0 of `to`."""
    channel = i_tile * TILE + tl.arange(0, TILE)
    inner = channel < channels
    p_layer = addresses + i_layer * ADDRESS_FIELDS
    base = tl.load(p_layer + BASE_CONV_STATE)
    stride = tl.load(p_layer + STRIDE_CONV_STATE)
    old = (base + block * stride).to(tl.pointer_type(tap_type))
    new = (base + to * stride).to(tl.pointer_type(tap_type))
    old += channel.to(tl.int64) * channel_stride
    new += channel.to(tl.int64) * channel_stride
    inputs = ()
    for tap in tl.static_range(TAPS):
        at = (shift + tap).to(tl.int64) * position_stride
        inputs += (tl.load(old + at, mask=inner & reads, other=0),)
    # Source and target may be the same conv_state, shifted.
    tl.debug_barrier()
    for tap in tl.static_range(TAPS):
        tl.store(new + tap * position_stride, inputs[tap], mask=inner)
