"""Plain-torch specification of the causal convolution over conv_states in blocks."""

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import (
    Cuts,
    StateRows,
    gather_rows,
    physical_blocks,
    row_tokens,
    scatter_rows,
)


def conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    rows: StateRows,
    max_scheduled: int,
    cuts: Cuts | None = None,
) -> Tensor:
    """Convolve the tokens of every row with the inputs before them, apply silu, and keep the last.

    A conv_state block holds the last ``W - 1`` certain inputs and behind them the inputs of the
    drafts, so the conv_state after the certain tokens and ``j`` drafts starts at offset ``j``. The
    ``W - 1`` inputs before a row's tokens are read at ``read_offset`` of its read block; positions
    0 .. W - 2 + draft of its write block get its last ``W - 1 + draft`` inputs. All conv_states are
    read before the first one is written, so read and write columns may overlap between and within
    rows.

    Args:
        x: [tokens, C] inputs, rows one after another.
        weight: [C, W] taps, the last one for the current token.
        bias: [C] or None.
        conv_states: [blocks, W - 1 + K, C] with any strides, changed in place; K is the largest
            number of drafts.
        rows: the rows, with read offsets in positions.
        max_scheduled: upper bound of tokens per row.
        cuts: the ``W - 1`` inputs before each cut also go to its column; None: there are none.

    Returns:
        [tokens, C] in x's dtype, 0 for padded rows and tokens that belong to no row. Sums are
        formed in fp32, or fp64 for fp64 inputs.

    Raises:
        ValueError: the conv_states are too short for the taps or have another channel count.
    """
    check_conv_shapes(x, weight, conv_states)
    history = weight.shape[1] - 1
    acc = torch.promote_types(x.dtype, torch.float32)
    index, valid = row_tokens(rows.cu_seqlens, max_scheduled, x.shape[0], rows.active)

    reads = rows.active & (rows.read_column >= 0)
    block = physical_blocks(rows.block_table, rows.slot, rows.read_column, reads)
    start = torch.where(reads, rows.read_offset, 0).long()
    offset = start[:, None] + torch.arange(history, device=x.device)
    old = conv_states[block[:, None], offset].to(acc)
    old = torch.where(reads[:, None, None], old, old.new_zeros(()))
    inputs = torch.cat([old, gather_rows(x, index, valid).to(acc)], dim=1)

    y = x.new_zeros(*index.shape, x.shape[1], dtype=acc)
    for tap, scale in enumerate(weight.to(acc).unbind(1)):
        y += inputs[:, tap : tap + index.shape[1]] * scale
    if bias is not None:
        y += bias.to(acc)
    scheduled = rows.cu_seqlens.diff()
    runs = rows.active & (scheduled > 0)
    certain, length = scheduled - rows.draft, rows.draft + history
    _keep_conv_states(conv_states, inputs, rows, runs, certain, length, rows.write_column)
    if cuts is not None:
        length = torch.full_like(rows.draft, history)
        _keep_conv_states(
            conv_states, inputs, rows, runs & (cuts.after > 0), cuts.after, length, cuts.column
        )
    return scatter_rows(F.silu(y).to(x.dtype), index, valid, x.shape[0])


def _keep_conv_states(
    conv_states: Tensor,
    inputs: Tensor,
    rows: StateRows,
    kept: Tensor,
    start: Tensor,
    length: Tensor,
    column: Tensor,
) -> None:
    """Store `length` inputs from `start` on in `column` of each row that is `kept`, `[rows]` each.

    `inputs` is [rows, history + max_scheduled, C]: the inputs before a row's tokens, then its own.
    """
    if not inputs.shape[1]:
        return
    position = torch.arange(conv_states.shape[1], device=conv_states.device)
    source = (start.long()[:, None] + position).clamp(min=0, max=inputs.shape[1] - 1)
    values = inputs.gather(1, repeat(source, "r p -> r p c", c=inputs.shape[2]))
    target = physical_blocks(rows.block_table, rows.slot, column, kept)
    row, at = (kept[:, None] & (position < length[:, None])).nonzero(as_tuple=True)
    conv_states[target[row], at] = values[row, at].to(conv_states.dtype)


def check_conv_shapes(x: Tensor, weight: Tensor, conv_states: Tensor) -> None:
    """Raise `ValueError` where x `[..., C]` or the conv_states don't fit the weight `[C, W]`."""
    channels, taps = weight.shape
    if x.shape[-1] != channels:
        raise ValueError(f"x has {x.shape[-1]} channels, must have weight's {channels}")
    if conv_states.shape[1] < taps - 1 or conv_states.shape[2] != channels:
        raise ValueError(
            f"conv_states is {tuple(conv_states.shape)}, must be [blocks, at least {taps - 1}, "
            f"{channels}]"
        )
