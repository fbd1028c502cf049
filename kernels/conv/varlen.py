"""Causal convolution of prefill rows: tiles of tokens and channels, all of them at once.

Memory bound: inputs are read and outputs written once; of a tile's inputs only the `W - 1` before
its first token are read by two programs. Which row a tile belongs to is found on the device, so the
grid follows from the numbers of tokens and rows alone.
"""

# Registers are gathered in tuples, which grow in unrolled loops.
# mypy: disable-error-code="assignment, var-annotated"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.math import silu
from hybrid_runtime.kernels.common.strides import ChannelStrides, ConvStateStrides
from hybrid_runtime.kernels.common.tiles import part_of_tile, tile_bound
from hybrid_runtime.kernels.common.varlen import Cuts, StateRows
from hybrid_runtime.kernels.common.zero_fill import zero_tokens
from hybrid_runtime.kernels.conv.naive import check_conv_shapes, conv1d_reference


@triton.jit(
    do_not_specialize=["tokens", "rows"],
    do_not_specialize_on_alignment=[
        "block_table", "slot", "cu_seqlens", "draft", "read_column", "read_offset", "write_column",
        "cut", "cut_column",
    ],
)  # fmt: skip
def _conv1d_varlen_kernel(
    x,
    weight,
    bias,
    conv_states,
    block_table,
    slot,
    cu_seqlens,
    draft,
    read_column,
    read_offset,
    write_column,
    cut,
    cut_column,
    out,
    tokens,
    rows,
    x_stride,
    weight_channel,
    weight_tap,
    bias_channel,
    conv_stride,
    table_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    LENGTH: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    item = tl.program_id(1)
    inside = channel < CHANNELS
    given = out + channel
    out_type = out.dtype.element_ty
    history: tl.constexpr = TAPS - 1
    nothing = tl.zeros((TILE,), out_type)

    # Tokens of no row, those before and behind all rows, are shared out among the tiles.
    zero_tokens(given, inside, item, tl.load(cu_seqlens), tl.num_programs(1), CHANNELS)
    behind = tl.load(cu_seqlens + rows) + item
    zero_tokens(given, inside, behind, tokens, tl.num_programs(1), CHANNELS)

    row, number = part_of_tile(cu_seqlens, None, rows, item, TOKENS)
    if row < 0:
        return
    start = tl.load(cu_seqlens + row)
    scheduled = tl.load(cu_seqlens + row + 1) - start
    low = number * TOKENS
    if low >= scheduled:
        return
    row_slot = tl.load(slot + row)
    target = tl.load(write_column + row)
    if (row_slot < 0) | (target < 0):
        for i in tl.static_range(TOKENS):
            written = given + (start + low + i).to(tl.int64) * CHANNELS
            tl.store(written, nothing, mask=inside & (low + i < scheduled))
        return

    table = block_table + row_slot.to(tl.int64) * table_stride
    source = tl.load(read_column + row)
    offset = tl.load(read_offset + row)
    opens = number == 0
    reads = opens & (source >= 0)
    block = tl.load(table + source, mask=reads, other=0).to(tl.int64)
    across = channel.to(tl.int64) * conv_stride.channel
    old = conv_states + block * conv_stride.block + across
    old += offset.to(tl.int64) * conv_stride.position
    given_x = x + channel.to(tl.int64) * x_stride.channel
    inputs = ()
    # TOKENS >= history: only the first tile needs the conv_state.
    for i in tl.static_range(history):
        at = (start + low - history + i).to(tl.int64) * x_stride.token
        before = tl.load(given_x + at, mask=inside & (number > 0), other=0.0).to(tl.float32)
        past = tl.load(old + i * conv_stride.position, mask=inside & reads, other=0.0)
        inputs += (tl.where(opens, past.to(tl.float32), before),)
    for i in tl.static_range(TOKENS):
        at = (start + low + i).to(tl.int64) * x_stride.token
        live = inside & (low + i < scheduled)
        inputs += (tl.load(given_x + at, mask=live, other=0.0),)
    taps = ()
    for tap in tl.static_range(TAPS):
        at = channel.to(tl.int64) * weight_channel + tap * weight_tap
        taps += (tl.load(weight + at, mask=inside, other=0.0).to(tl.float32),)
    constant = tl.zeros((TILE,), tl.float32)
    if bias is not None:
        constant = tl.load(bias + channel * bias_channel, mask=inside, other=0.0).to(tl.float32)

    for i in tl.static_range(TOKENS):
        y = constant
        for tap in tl.static_range(TAPS):
            y += inputs[i + tap].to(tl.float32) * taps[tap]
        written = given + (start + low + i).to(tl.int64) * CHANNELS
        tl.store(written, silu(y).to(out_type), mask=inside & (low + i < scheduled))

    # The block that is read may be the one that is written. Only a row's first tile reads the old
    # conv_state, so that program also writes the new one, of inputs that are still in x: programs
    # of other tiles may run before or after it. It owns its channels in both, and the barrier keeps
    # all its loads before the first store even where its threads don't own the same channels.
    if opens:
        certain = scheduled - tl.load(draft + row)
        values = ()
        for position in tl.static_range(LENGTH):
            index = certain + position  # among the old conv_state's W - 1 inputs and the row's own
            kept_at = old + index.to(tl.int64) * conv_stride.position
            kept = tl.load(kept_at, mask=inside & reads & (index < history), other=0.0)
            own_at = given_x + (start + index - history).to(tl.int64) * x_stride.token
            own = (index >= history) & (index < history + scheduled)
            fresh = tl.load(own_at, mask=inside & own, other=0.0).to(conv_states.dtype.element_ty)
            values += (tl.where(index < history, kept, fresh),)
        checkpoint = ()
        if cut is not None:
            to_cut = tl.load(cut + row)
            cuts = inside & (to_cut > 0)
            for position in tl.static_range(history):
                index = to_cut + position
                kept_at = old + index.to(tl.int64) * conv_stride.position
                kept = tl.load(kept_at, mask=cuts & reads & (index < history), other=0.0)
                own_at = given_x + (start + index - history).to(tl.int64) * x_stride.token
                fresh = tl.load(own_at, mask=cuts & (index >= history), other=0.0)
                fresh = fresh.to(conv_states.dtype.element_ty)
                checkpoint += (tl.where(index < history, kept, fresh),)
        tl.debug_barrier()
        to = tl.load(table + target).to(tl.int64)
        rolled = conv_states + to * conv_stride.block + across
        for position in tl.static_range(LENGTH):
            known = certain + position < history + scheduled
            tl.store(
                rolled + position * conv_stride.position, values[position], mask=inside & known
            )
        if cut is not None:
            column = tl.load(cut_column + row)
            to = tl.load(table + column, mask=to_cut > 0, other=0).to(tl.int64)
            stored = conv_states + to * conv_stride.block + across
            for position in tl.static_range(history):
                tl.store(stored + position * conv_stride.position, checkpoint[position], mask=cuts)


class ConvTiling(NamedTuple):
    """Launch shape: tokens and channels of a program, its warps."""

    tokens: int = 16
    channels: int = 256
    warps: int = 2


def conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    rows: StateRows,
    max_scheduled: int,
    cuts: Cuts | None = None,
    tiling: ConvTiling | None = None,
) -> Tensor:
    """`conv1d_reference` for rows of any length, by one launch where Triton runs.

    No row may read a block that another row of the same call writes; a row's own read column may be
    that of its cut, or its write column. fp64 goes to the reference.

    Args:
        tiling: launch shape; None = `ConvTiling()`. All other arguments as in the reference.

    Raises:
        ValueError: as the reference.
    """
    if not runs_triton(x) or torch.float64 in (x.dtype, conv_states.dtype):
        return conv1d_reference(
            x,
            weight,
            bias,
            conv_states,
            rows,
            max_scheduled,
            cuts,
        )
    tokens = x.shape[0]
    channels, taps = weight.shape
    check_conv_shapes(x, weight, conv_states)
    num_rows = rows.slot.shape[0]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if num_rows == 0 or tokens == 0 or max_scheduled == 0:
        return out.zero_()
    shape = tiling or ConvTiling()
    length = max(min(shape.tokens, triton.next_power_of_2(max_scheduled)), taps - 1, 1)
    grid = (triton.cdiv(channels, shape.channels), tile_bound(tokens, num_rows, length))
    _conv1d_varlen_kernel[grid](
        x=x,
        weight=weight,
        bias=bias,
        conv_states=conv_states,
        **rows._asdict(),
        cut=None if cuts is None else cuts.after,
        cut_column=None if cuts is None else cuts.column,
        out=out,
        tokens=tokens,
        rows=num_rows,
        x_stride=ChannelStrides(*x.stride()),
        weight_channel=weight.stride(0),
        weight_tap=weight.stride(1),
        bias_channel=1 if bias is None else bias.stride(0),
        conv_stride=ConvStateStrides(*conv_states.stride()),
        table_stride=rows.block_table.stride(0),
        CHANNELS=channels,
        TAPS=taps,
        LENGTH=conv_states.shape[1],
        TOKENS=length,
        TILE=shape.channels,
        num_warps=shape.warps,
    )
    return out
