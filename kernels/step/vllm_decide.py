"""Pre- and post-copies decided from vLLM's own counts, for the listed rows only.

One launch before the forward pass or after the sampler decides and moves. For the rows listed it
does what vLLM's kernels do for the whole batch; for any other row theirs would change nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs, runs_triton
from hybrid_runtime.kernels.common.constant import Constant
from hybrid_runtime.kernels.step.boundary import (
    keeps,
    keeps_reference,
    last_boundary,
    last_boundary_reference,
    load_rule,
    running_column,
    running_column_reference,
)
from hybrid_runtime.kernels.step.entry import (
    ENTRY_FIELDS,
    OFFSET,
    PREVIOUS,
    SCHEDULED,
    SLOT,
    SOURCE,
    TARGET,
)
from hybrid_runtime.kernels.step.move_rows import (
    PROGRAMS,
    WARPS,
    copy_tiling,
    listed_rows,
    move_arguments,
    move_reference,
    move_rows,
)
from hybrid_runtime.kernels.step.state_table import StateTable

REQUEST = PREVIOUS
"""Field of an entry with the request's slot; `SLOT` is the row of the block tables to use."""
PRECOPY, POSTCOPY = Constant(0), Constant(1)
"""Phases of a step: before its forward pass, and after its sampler."""


class VllmCounts(NamedTuple):
    """vLLM's own tensors, int32 `[max_requests]` by slot.

    column: running column.
    accepted: tokens accepted by the last step; 1 where the state is read at offset 0.
    computed: tokens computed.
    """

    column: Tensor
    accepted: Tensor
    computed: Tensor


def decide_reference(
    entries: Tensor,
    count: int,
    counts: VllmCounts,
    moves: Tensor,
    totals: Tensor,
    block_size: int,
    phase: int,
    replays: bool = False,
) -> None:
    """Decide which states move, and keep vLLM's counts up to date.

    PRECOPY, before a step of SCHEDULED tokens: the running column becomes cdiv(n + s, B) - 1. When
    it changes, the state moves there and is read at offset 0 from then on. POSTCOPY, after the
    step: the state at a retained boundary among the accepted tokens moves to the boundary's column.

    Args:
        entries: int32 `[lines, ENTRY_FIELDS]`, a line per candidate.
        count: candidates.
        counts: read and updated.
        moves: int32 `[3, lines]`, see `entry`; written.
        totals: int64 `[2]`, states moved, by phase; added to.
        block_size: tokens of a block.
        phase: PRECOPY or POSTCOPY.
        replays: the layout is replay: the accepted drafts are no part of the running column's
            state. A block moves as it is, and is read at the same offset as before.
    """
    line = entries[:count].long()
    slot = line[:, REQUEST]
    held, accepted, computed = (value[slot].long() for value in counts)
    if phase == PRECOPY:
        target = running_column_reference(computed + line[:, SCHEDULED], block_size)
        offset = torch.zeros_like(accepted) if replays else (accepted - 1).clamp(min=0)
        acts = (held >= 0) & (held != target)
        counts.column[slot] = target.int()
        rebased = acts & (not replays)
    else:
        certain = computed - accepted + 1
        boundary, offset, target = last_boundary_reference(certain, computed, block_size)
        reached = (offset >= 0) & keeps_reference(boundary, line)
        acts = reached & ((offset > 0) | (target != held))
        rebased = reached & (target == held)
    counts.accepted[slot[rebased]] = 1
    moves[:, :count] = torch.stack([held, offset, torch.where(acts, target, -1)]).int()
    totals[phase] += acts.sum()


@triton.jit(do_not_specialize=["count"])
def _decide_move_kernel(
    entries,
    count,
    column,
    accepted,
    computed,
    moves,
    moves_stride,
    totals,
    arrived,
    addresses,
    num_layers,
    conv_channels,
    conv_position_stride,
    conv_channel_stride,
    BLOCK_SIZE: tl.constexpr,
    PHASE: tl.constexpr,
    REPLAYS: tl.constexpr,
    ROWS: tl.constexpr,
    TILING: tl.constexpr,
):
    i_line = tl.arange(0, ROWS)
    here = i_line < count
    p_entry = entries + i_line * ENTRY_FIELDS
    slot = tl.load(p_entry + REQUEST, mask=here, other=0)
    held = tl.load(column + slot, mask=here, other=-1)
    a = tl.load(accepted + slot, mask=here, other=1)
    n = tl.load(computed + slot, mask=here, other=0)
    if PHASE == PRECOPY:
        scheduled = tl.load(p_entry + SCHEDULED, mask=here, other=1)
        target = running_column(n + scheduled, BLOCK_SIZE)
        offset = tl.zeros_like(a) if REPLAYS else tl.maximum(a - 1, 0)
        acts = here & (held >= 0) & (held != target)
        rebased = acts & (not REPLAYS)
    else:
        boundary, offset, target = last_boundary(n - a + 1, n, BLOCK_SIZE)
        reached = here & (offset >= 0)
        every, first, second = load_rule(p_entry, reached)
        reached = reached & keeps(boundary, every, first, second)
        acts = reached & ((offset > 0) | (target != held))
        rebased = reached & (target == held)
    table_row = tl.load(p_entry + SLOT, mask=acts, other=0)
    move_rows(
        acts, table_row, held, offset, target, addresses, num_layers, conv_channels,
        conv_position_stride, conv_channel_stride, TILING,
    )  # fmt: skip
    # Every program decides on all rows, so what it decides from may change only when all of them
    # have read it: the last one writes the counts. Behind the moves, where no program waits for
    # thousands of others to be counted.
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1) == tl.num_programs(0) - 1:
        tl.store(arrived, 0)
        if PHASE == PRECOPY:
            tl.store(column + slot, target, mask=here)
        tl.store(accepted + slot, 1, mask=rebased)
        tl.store(moves + SOURCE * moves_stride + i_line, held, mask=here)
        tl.store(moves + OFFSET * moves_stride + i_line, offset, mask=here)
        tl.store(moves + TARGET * moves_stride + i_line, tl.where(acts, target, -1), mask=here)
        moved = tl.sum(acts.to(tl.int64), axis=0)
        tl.store(totals + PHASE, tl.load(totals + PHASE) + moved)


def decide_and_move(
    states: StateTable,
    entries: Tensor,
    count: int,
    counts: VllmCounts,
    moves: Tensor,
    totals: Tensor,
    arrived: Tensor,
    block_size: int,
    phase: int,
    replays: bool = False,
) -> None:
    """`decide_reference`, and `move_reference` of what it decided, by one launch where Triton runs.

    arrived: int32 `[1]`, 0 between launches: programs that have decided.
    """
    if not runs_triton(entries):
        decide_reference(entries, count, counts, moves, totals, block_size, phase, replays)
        move_reference(states, entries[:count, SLOT], *moves[:, :count])
        return
    tiling = copy_tiling(states)
    most = count * len(states.conv_states) * (tiling.matrix_tiles + tiling.conv_tiles)
    _decide_move_kernel[(min(num_programs(entries, PROGRAMS), most),)](
        entries=entries,
        count=count,
        **counts._asdict(),
        moves=moves,
        moves_stride=moves.stride(0),
        totals=totals,
        arrived=arrived,
        **move_arguments(states),
        BLOCK_SIZE=block_size,
        PHASE=phase,
        REPLAYS=replays,
        ROWS=listed_rows(count),
        num_warps=WARPS,
    )
