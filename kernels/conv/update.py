"""Causal convolution of decode and verify rows over the extended conv_state."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.math import silu
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.common.strides import ChannelStrides, ConvStateStrides
from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.common.zero_fill import zero_unowned
from hybrid_runtime.kernels.conv.naive import check_conv_shapes, conv1d_reference

MAX_TOKENS = 16
"""Tokens per row that the kernel unrolls; longer rows go to the reference."""


@triton.jit(
    do_not_specialize=["tokens", "conv_length"],
    do_not_specialize_on_alignment=[
        "block_table", "slot", "cu_seqlens", "draft", "read_column", "read_offset", "write_column",
        "checkpoint_column", "checkpoint_after",
    ],
)  # fmt: skip
def _conv1d_update_kernel(
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
    checkpoint_column,
    checkpoint_after,
    out,
    tokens,
    x_stride,
    weight_channel,
    weight_tap,
    bias_channel,
    conv_stride,
    conv_length,
    table_stride,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL)
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(1)
    inside = channel < CHANNELS
    given = out + channel
    out_type = out.dtype.element_ty
    history: tl.constexpr = TAPS - 1

    row_slot = tl.load(slot + row)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    drafts = tl.load(draft + row)
    source = tl.load(read_column + row)
    offset = tl.load(read_offset + row)
    target = tl.load(write_column + row)
    active = (row_slot >= 0) & (target >= 0)

    zero_unowned(given, inside, row, start, end, active, tokens, CHANNELS)
    if active & (end > start):
        table = block_table + row_slot.to(tl.int64) * table_stride
        reads = source >= 0
        block = tl.load(table + source, mask=reads, other=0).to(tl.int64)
        to = tl.load(table + target).to(tl.int64)
        across = channel.to(tl.int64) * conv_stride.channel
        taken = conv_states + block * conv_stride.block + across
        inputs = ()
        for j in tl.static_range(history):
            at = (offset + j).to(tl.int64) * conv_stride.position
            inputs += (tl.load(taken + at, mask=inside & reads, other=0.0),)
        for i in tl.static_range(TOKENS):
            at = (start + i).to(tl.int64) * x_stride.token
            live = inside & (start + i < end)
            inputs += (tl.load(x + at + channel * x_stride.channel, mask=live, other=0.0),)
        taps = ()
        for tap in tl.static_range(TAPS):
            at = channel * weight_channel + tap * weight_tap
            taps += (tl.load(weight + at, mask=inside, other=0.0).to(tl.float32),)

        # Before the first store, behind which loads would wait.
        added = tl.zeros((TILE,), tl.float32)
        if bias is not None:
            added = tl.load(bias + channel * bias_channel, mask=inside, other=0.0).to(tl.float32)

        for i in tl.static_range(TOKENS):
            y = tl.zeros((TILE,), tl.float32)
            for tap in tl.static_range(TAPS):
                y += inputs[i + tap].to(tl.float32) * taps[tap]
            y += added
            written = given + (start + i).to(tl.int64) * CHANNELS
            tl.store(written, silu(y).to(out_type), mask=inside & (start + i < end))

        if checkpoint_column is not None:
            kept = tl.load(checkpoint_column + row)
            if kept >= 0:
                to_saved = tl.load(table + kept).to(tl.int64)
                saved = conv_states + to_saved * conv_stride.block + across
                known = tl.where(reads, offset, 0)  # inputs that the old conv_state has before ours
                behind = known + tl.load(checkpoint_after + row)
                for j in tl.static_range(history):
                    before = inside & (behind + j < known)
                    from_old = taken + (behind + j).to(tl.int64) * conv_stride.position
                    early = tl.load(from_old, mask=before, other=0.0)
                    tl.store(saved + j * conv_stride.position, early, mask=before)
                for i in tl.static_range(history + TOKENS):
                    place = i + known - behind
                    stays = (place >= 0) & (place < history) & (i < history + end - start)
                    late = inputs[i].to(conv_states.dtype.element_ty)
                    given_at = saved + place.to(tl.int64) * conv_stride.position
                    tl.store(given_at, late, mask=inside & stays)
        # Threads own the same channels in all these accesses only if the compiler vectorises
        # them alike; the barrier keeps every load of the old conv_state before the first store.
        tl.debug_barrier()
        written = conv_states + to * conv_stride.block + across
        certain = end - start - drafts
        for i in tl.static_range(history + TOKENS):
            position = i - certain
            kept = (position >= 0) & (i < history + end - start) & (position < conv_length)
            value = inputs[i].to(conv_states.dtype.element_ty)
            at = position.to(tl.int64) * conv_stride.position
            tl.store(written + at, value, mask=inside & kept)


def conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    rows: StateRows,
    max_scheduled: int,
    checkpoint_column: Tensor | None = None,
    checkpoint_after: Tensor | None = None,
) -> Tensor:
    """`conv1d_reference` for rows of few tokens, by one launch where Triton runs.

    No row may read a block that another row of the same call writes. Rows of more than
    `MAX_TOKENS` tokens and fp64 go to the reference. The checkpoint arguments are those of
    `replay_conv1d_update`, which is the one to call with them.

    Raises:
        ValueError: as the reference.
    """
    if (
        not runs_triton(x)
        or max_scheduled > MAX_TOKENS
        or torch.float64 in (x.dtype, conv_states.dtype)
    ):
        return conv1d_reference(
            x,
            weight,
            bias,
            conv_states,
            rows,
            max_scheduled,
        )
    tokens = x.shape[0]
    channels, taps = weight.shape
    check_conv_shapes(x, weight, conv_states)
    num_rows = rows.slot.shape[0]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if num_rows == 0 or max_scheduled == 0:
        return out.zero_()
    tile = TILE if num_rows < MANY_ROWS else TILE_MANY_ROWS
    _conv1d_update_kernel[(triton.cdiv(channels, tile), num_rows)](
        x=x,
        weight=weight,
        bias=bias,
        conv_states=conv_states,
        **rows._asdict(),
        checkpoint_column=checkpoint_column,
        checkpoint_after=checkpoint_after,
        out=out,
        tokens=tokens,
        x_stride=ChannelStrides(*x.stride()),
        weight_channel=weight.stride(0),
        weight_tap=weight.stride(1),
        bias_channel=1 if bias is None else bias.stride(0),
        conv_stride=ConvStateStrides(*conv_states.stride()),
        conv_length=conv_states.shape[1],
        table_stride=rows.block_table.stride(0),
        CHANNELS=channels,
        TAPS=taps,
        TOKENS=max_scheduled,
        TILE=tile,
        num_warps=WARPS,
        **pdl(x),
    )
    return out


# Channels per program; swept on an H200.
TILE, TILE_MANY_ROWS, MANY_ROWS, WARPS = 256, 512, 32, 4
