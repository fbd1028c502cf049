"""Causal convolution of the replay layout: one window per request, rolled by what was accepted.

`conv1d_update` can do that as it is: it reads the window at an offset and writes it to offset
0 of the same block. Only a snapshot needs more: it must be taken before the window rolls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.varlen import physical_blocks
from hybrid_runtime.kernels.mamba.conv1d_update import MAX_TOKENS, conv1d_update
from hybrid_runtime.kernels.mamba.naive_conv1d import conv1d_reference
from hybrid_runtime.kernels.replay.naive import Replay


def replay_conv1d_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: Tensor,
    block_table: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    draft: Tensor,
    replay: Replay,
    max_scheduled: int,
) -> Tensor:
    """Save the windows that belong to snapshots, then :func:`conv1d_reference`.

    The window after `snapshot_after` tokens is the W - 1 inputs from there on in the old window
    followed by the row's tokens. It goes to offset 0 of the snapshot's block, which no row of the
    call may read or write otherwise.

    Args:
        replay: as in `replay_update_reference`; `fold` is the read offset, `turn` is not used.

    Returns:
        [tokens, C], as `conv1d_reference`, whose arguments the others are.
    """
    history = weight.shape[1] - 1
    reads = (slot >= 0) & (replay.read_column >= 0)
    offset = torch.where(reads, replay.fold, 0)
    saves = (slot >= 0) & (replay.write_column >= 0) & (replay.snapshot_column >= 0)
    saves &= cu_seqlens[1:] > cu_seqlens[:-1]
    row = saves.nonzero()[:, 0]
    if history and len(row):
        source = physical_blocks(block_table, slot, replay.read_column, reads)[row]
        target = physical_blocks(block_table, slot, replay.snapshot_column, saves)[row]
        at = replay.snapshot_after[row, None].long() + torch.arange(history, device=x.device)
        beyond = at - history - offset[row, None]  # index among the row's tokens
        old = windows[source[:, None], at.clamp(max=windows.shape[1] - 1)]
        old = torch.where(reads[row, None, None], old, torch.zeros((), dtype=old.dtype))
        token = cu_seqlens[row, None].long() + beyond.clamp(min=0)
        new = x[token.clamp(max=x.shape[0] - 1)].to(old.dtype)
        position = torch.arange(history, device=x.device)
        windows[target[:, None], position] = torch.where((beyond >= 0)[..., None], new, old)
    return conv1d_reference(
        x, weight, bias, windows, block_table, slot, cu_seqlens, draft, replay.read_column, offset,
        replay.write_column, max_scheduled,
    )  # fmt: skip


def replay_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    windows: Tensor,
    block_table: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    draft: Tensor,
    replay: Replay,
    max_scheduled: int,
) -> Tensor:
    """`replay_conv1d_reference` by one launch where Triton runs, within `conv1d_update`'s
    limits."""
    if (
        not runs_triton(x)
        or max_scheduled > MAX_TOKENS
        or torch.float64 in (x.dtype, windows.dtype)
    ):
        return replay_conv1d_reference(
            x, weight, bias, windows, block_table, slot, cu_seqlens, draft, replay, max_scheduled
        )
    return conv1d_update(
        x, weight, bias, windows, block_table, slot, cu_seqlens, draft, replay.read_column,
        replay.fold, replay.write_column, max_scheduled, replay.snapshot_column,
        replay.snapshot_after,
    )  # fmt: skip
