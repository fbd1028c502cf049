"""Causal depthwise convolution over an extended window (reference)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import (
    gather_rows,
    physical_blocks,
    row_tokens,
    scatter_rows,
)


def conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: Tensor,
    block_table: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    draft: Tensor,
    read_column: Tensor,
    read_offset: Tensor,
    write_column: Tensor,
    max_scheduled: int,
) -> Tensor:
    """Convolve the tokens of every row with the inputs before them, apply silu, keep the window.

    A window block holds the last ``W - 1`` certain inputs and behind them the inputs of the
    guesses, so the window after ``R + j`` tokens starts at offset ``j``. All windows are read
    before the first one is written, so read and write columns may overlap between and within rows.

    Args:
        x: [tokens, C] inputs, rows one after another.
        weight: [C, W] taps, the last one for the current token.
        bias: [C] or None.
        windows: [blocks, W - 1 + K, C] with any strides, changed in place; K is the largest
            number of drafts.
        block_table: int32 [slots, columns] of physical blocks.
        slot: int32 [rows]; -1 = padded row.
        cu_seqlens: int32 [rows + 1]; row i owns tokens [cu_seqlens[i], cu_seqlens[i + 1]).
        draft: int32 [rows], how many of the row's last tokens are guesses.
        read_column: int32 [rows]; -1 = zeros before the first token, nothing is read.
        read_offset: int32 [rows], where in the read block the ``W - 1`` inputs start.
        write_column: int32 [rows]; positions 0 .. W - 2 + draft of that block get the last
            W - 1 + draft inputs. -1 = padded row.
        max_scheduled: upper bound of tokens per row.

    Returns:
        [tokens, C] in x's dtype, 0 for padded rows and tokens that belong to no row. Sums are
        formed in fp32, or fp64 for fp64 inputs.

    Raises:
        ValueError: the windows are too short for the taps or have another channel count.
    """
    channels, taps = weight.shape
    history = taps - 1
    if x.shape[1] != channels:
        raise ValueError(f"x has {x.shape[1]} channels, must have weight's {channels}")
    if windows.shape[1] < history or windows.shape[2] != channels:
        raise ValueError(
            f"windows is {tuple(windows.shape)}, must be [blocks, at least {history}, {channels}]"
        )
    acc = torch.promote_types(x.dtype, torch.float32)
    active = (slot >= 0) & (write_column >= 0)
    index, valid = row_tokens(cu_seqlens, max_scheduled, x.shape[0], active)
    rows, width = index.shape

    reads = active & (read_column >= 0)
    block = physical_blocks(block_table, slot, read_column, reads)
    start = torch.where(reads, read_offset, 0).long()
    offset = start[:, None] + torch.arange(history, device=x.device)
    old = windows[block[:, None], offset].to(acc)
    old = torch.where(reads[:, None, None], old, torch.zeros((), dtype=acc, device=x.device))
    inputs = torch.cat([old, gather_rows(x, index, valid).to(acc)], dim=1)

    y = torch.zeros(rows, width, channels, dtype=acc, device=x.device)
    for tap in range(taps):
        y += inputs[:, tap : tap + width] * weight[:, tap].to(acc)
    if bias is not None:
        y += bias.to(acc)
    y = F.silu(y)

    scheduled = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    position = torch.arange(windows.shape[1], device=x.device)
    kept = (active & (scheduled > 0))[:, None] & (position < history + draft.long()[:, None])
    source = (scheduled - draft.long())[:, None] + position
    source = source.clamp(min=0, max=max(inputs.shape[1] - 1, 0))
    target = physical_blocks(block_table, slot, write_column, active)
    if inputs.shape[1]:
        values = inputs.gather(1, source[:, :, None].expand(-1, -1, channels))
        row, at = kept.nonzero(as_tuple=True)
        windows[target[row], at] = values[row, at].to(windows.dtype)
    return scatter_rows(y.to(x.dtype), index, valid, x.shape[0])
