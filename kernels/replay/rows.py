"""The rows of a step in the replay layout, as its kernels take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hybrid_runtime.kernels.step.advance_replay import ReplayPositions


class ReplayRows(NamedTuple):
    """Which tokens each row has, and what becomes of its state.

    block_table: int32 `[slots, columns]` of physical blocks.
    slot: int32 `[rows]`; -1 = padded row.
    cu_seqlens: int32 `[rows + 1]`, index of each row's first token.
    draft: int32 `[rows]`, how many of the row's last tokens are drafts.
    positions: where its state is read and written, `[rows]` each.
    ring_length: tokens of a slot's ring by which `positions` were made, of a manager
        `layout.ring_length`; `replay_update` refuses records of another. None: that of the records.
    """

    block_table: Tensor
    slot: Tensor
    cu_seqlens: Tensor
    draft: Tensor
    positions: ReplayPositions
    ring_length: int | None = None
