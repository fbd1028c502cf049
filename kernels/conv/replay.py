"""Causal convolution of the replay layout: one conv_state per request, rolled by what was accepted.

Every step writes it, whether or not it writes the matrix. `conv1d_update` can do that as it is: it
reads the conv_state at an offset and writes it to offset 0 of the same block. Only a checkpoint
needs more: it must be taken before the conv_state rolls.
"""

import torch
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.varlen import StateRows, physical_blocks
from hybrid_runtime.kernels.conv.naive import check_conv_shapes, conv1d_reference
from hybrid_runtime.kernels.conv.update import MAX_TOKENS, conv1d_update
from hybrid_runtime.kernels.replay.rows import ReplayRows


def replay_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    rows: ReplayRows,
    max_scheduled: int,
) -> Tensor:
    """Save the conv_states that belong to checkpoints, then :func:`conv1d_reference`.

    The conv_state of a checkpoint is the W - 1 inputs from `offset + checkpoint_after` on, in the
    old conv_state followed by the row's tokens. It goes to offset 0 of the checkpoint's block,
    which no row of the call may read or write otherwise.

    Args:
        rows: as in `ReplayRows`; what becomes of the matrix is not used.

    Returns:
        [tokens, C], as `conv1d_reference`, whose arguments the others are.
    """
    check_conv_shapes(x, weight, conv_states)
    positions = rows.positions
    reads = (rows.slot >= 0) & (positions.read_column >= 0)
    offset = torch.where(reads, positions.offset, 0)
    if weight.shape[1] > 1:
        _store_checkpoints(x, weight.shape[1] - 1, conv_states, rows, reads, offset)
    return conv1d_reference(x, weight, bias, conv_states, _state_rows(rows, offset), max_scheduled)


def _state_rows(rows: ReplayRows, offset: Tensor) -> StateRows:
    """The rows as the convolution sees them, which read the old conv_state at `offset`."""
    positions = rows.positions
    return StateRows(
        rows.block_table,
        rows.slot,
        rows.cu_seqlens,
        rows.draft,
        read_column=positions.read_column,
        read_offset=offset,
        write_column=positions.write_column,
    )


def _store_checkpoints(
    x: Tensor, history: int, conv_states: Tensor, rows: ReplayRows, reads: Tensor, offset: Tensor
) -> None:
    """reads: bool `[rows]`, rows with an old state. offset: `[rows]`, where in it they start."""
    positions = rows.positions
    saves = (rows.slot >= 0) & (positions.write_column >= 0) & (positions.checkpoint_column >= 0)
    saves &= rows.cu_seqlens[1:] > rows.cu_seqlens[:-1]
    row = saves.nonzero()[:, 0]
    if not len(row):
        return
    table, zero = rows.block_table, torch.zeros((), dtype=conv_states.dtype)
    source = physical_blocks(table, rows.slot, positions.read_column, reads)[row]
    target = physical_blocks(table, rows.slot, positions.checkpoint_column, saves)[row]
    tap = torch.arange(history, device=x.device)
    at = (offset + positions.checkpoint_after)[row, None].long() + tap
    beyond = at - history - offset[row, None]  # index among the row's tokens
    old = conv_states[source[:, None], at.clamp(max=conv_states.shape[1] - 1)]
    old = torch.where(reads[row, None, None], old, zero)
    token = rows.cu_seqlens[row, None].long() + beyond.clamp(min=0)
    new = x[token.clamp(max=x.shape[0] - 1)].to(old.dtype)
    conv_states[target[:, None], tap] = torch.where((beyond >= 0)[..., None], new, old)


def replay_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    rows: ReplayRows,
    max_scheduled: int,
) -> Tensor:
    """`replay_conv1d_reference` by one launch where Triton runs, `conv1d_update`'s."""
    if (
        not runs_triton(x)
        or max_scheduled > MAX_TOKENS
        or torch.float64 in (x.dtype, conv_states.dtype)
    ):
        return replay_conv1d_reference(x, weight, bias, conv_states, rows, max_scheduled)
    positions = rows.positions
    return conv1d_update(
        x,
        weight,
        bias,
        conv_states,
        _state_rows(rows, positions.offset),
        max_scheduled,
        checkpoint_column=positions.checkpoint_column,
        checkpoint_after=positions.checkpoint_after,
    )
