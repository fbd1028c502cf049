"""The post-copy after a step and the pre-copy before it: `move_rows` with two ways to decide."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs, runs_triton
from hybrid_runtime.kernels.step.boundary import (
    keeps,
    keeps_reference,
    last_boundary,
    last_boundary_reference,
    load_rule,
)
from hybrid_runtime.kernels.step.entry import (
    CANDIDATE,
    CERTAIN,
    COLUMN,
    ENTRY_FIELDS,
    OFFSET,
    PLACED_DRAFT,
    PRECANDIDATE,
    SLOT,
    SOURCE,
    TARGET,
)
from hybrid_runtime.kernels.step.move_rows import (
    PROGRAMS,
    PROGRAMS_EVERY_ROW,
    WARPS,
    listed_rows,
    move_arguments,
    move_reference,
    move_rows,
)
from hybrid_runtime.kernels.step.state_table import StateTable


def postcopy_reference(
    states: StateTable,
    entries: Tensor,
    placed: Tensor,
    accepted: Tensor,
    count: int,
    every_row: bool,
    block_size: int,
) -> None:
    """Put boundary states where prefix hits look for them, deciding from exact accepted counts.

    Args:
        states: all layers' states; changed.
        entries: int32 `[lines, ENTRY_FIELDS]` of the step.
        placed: int32 `[4, rows]` from `advance`.
        accepted: int32 `[rows]`.
        count: rows decided for: rows `0 .. count - 1` if `every_row`, else those that the CANDIDATE
            fields of the first `count` lines list.
        every_row: see `count`.
        block_size: tokens of a block.
    """
    row = torch.arange(count, device=entries.device)
    if not every_row:
        row = entries[:count, CANDIDATE].long()
    line = entries[row].long()
    slot = line[:, SLOT]
    certain, column, draft, _ = placed[:, row].long()
    a = torch.minimum(accepted[row].long(), draft + 1)
    boundary, offset, target = last_boundary_reference(certain, certain + a - 1, block_size)
    acts = (slot >= 0) & (column >= 0) & (draft > 0) & (offset >= 0)
    acts &= (boundary > 0) & keeps_reference(boundary, line)
    move_reference(states, slot, column, offset, torch.where(acts, target, -1))


def precopy_reference(states: StateTable, entries: Tensor, moves: Tensor, count: int) -> None:
    """Carry out `advance`'s `moves` (int32 `[3, rows]`) for the rows of the PRECANDIDATE column."""
    row = entries[:count, PRECANDIDATE].long()
    source, offset, target = moves[:, row]
    move_reference(states, entries[row, SLOT], source, offset, target)


@triton.jit(do_not_specialize=["count", "step_stride"], do_not_specialize_on_alignment=["accepted"])
def _move_kernel(
    entries,
    step,
    step_stride,
    accepted,
    count,
    addresses,
    num_layers,
    conv_channels,
    conv_position_stride,
    conv_channel_stride,
    POST: tl.constexpr,
    EVERY_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILING: tl.constexpr,
):
    """`step` is `placed` of the post-copy, `moves` of the pre-copy."""
    index = tl.arange(0, ROWS)
    listed = index < count
    row = index
    if not EVERY_ROW:
        p_list = entries + (CANDIDATE if POST else PRECANDIDATE)
        row = tl.load(p_list + index * ENTRY_FIELDS, mask=listed, other=0)
    p_entry = entries + row * ENTRY_FIELDS
    if POST:
        certain = tl.load(step + CERTAIN * step_stride + row, mask=listed, other=0)
        draft = tl.load(step + PLACED_DRAFT * step_stride + row, mask=listed, other=0)
        a = tl.minimum(tl.load(accepted + row, mask=listed, other=0), draft + 1)
        boundary, offset, target = last_boundary(certain, certain + a - 1, BLOCK_SIZE)
        # What most rows fail comes first: the loads below are masked, and cost the others nothing.
        # A dead row (a = 0) falls short of R, so its offset is negative.
        crosses = listed & (draft > 0) & (offset >= 0) & (boundary > 0)
        source = tl.load(step + COLUMN * step_stride + row, mask=crosses, other=-1)
        every, first, second = load_rule(p_entry, crosses)
        kept = keeps(boundary, every, first, second)
        acts = crosses & kept & (source >= 0)
    else:
        source = tl.load(step + SOURCE * step_stride + row, mask=listed, other=-1)
        offset = tl.load(step + OFFSET * step_stride + row, mask=listed, other=0)
        target = tl.load(step + TARGET * step_stride + row, mask=listed, other=-1)
        acts = listed & (target >= 0)
    slot = tl.load(p_entry + SLOT, mask=acts, other=-1)
    move_rows(
        acts & (slot >= 0), slot, source, offset, target, addresses, num_layers, conv_channels,
        conv_position_stride, conv_channel_stride, TILING,
    )  # fmt: skip


def _launch(
    states: StateTable,
    entries: Tensor,
    step: Tensor,
    accepted: Tensor,
    count: int,
    *,
    post: bool,
    every_row: bool,
    block_size: int,
) -> None:
    _move_kernel[(num_programs(entries, PROGRAMS_EVERY_ROW if every_row else PROGRAMS),)](
        entries=entries,
        step=step,
        step_stride=step.stride(0),
        accepted=accepted,
        count=count,
        **move_arguments(states),
        POST=post,
        EVERY_ROW=every_row,
        BLOCK_SIZE=block_size,
        ROWS=listed_rows(count),
        num_warps=WARPS,
    )


def postcopy(
    states: StateTable,
    entries: Tensor,
    placed: Tensor,
    accepted: Tensor,
    count: int,
    every_row: bool,
    block_size: int,
) -> None:
    """`postcopy_reference` by one launch where Triton runs."""
    if not runs_triton(entries):
        postcopy_reference(states, entries, placed, accepted, count, every_row, block_size)
        return
    _launch(
        states,
        entries,
        placed,
        accepted,
        count,
        post=True,
        every_row=every_row,
        block_size=block_size,
    )


def precopy(states: StateTable, entries: Tensor, moves: Tensor, count: int) -> None:
    """`precopy_reference` by one launch where Triton runs."""
    if not runs_triton(entries):
        precopy_reference(states, entries, moves, count)
        return
    _launch(states, entries, moves, moves, count, post=False, every_row=False, block_size=1)


def compile_moves(states: StateTable, max_rows: int, block_size: int, in_place: bool) -> None:
    """Launch every variant of the kernel on rows that move nothing, so that none is compiled in
    the step that first crosses a boundary."""
    device = states.addresses.device
    entries = torch.zeros((max_rows, ENTRY_FIELDS), dtype=torch.int32, device=device)
    nothing = torch.full((4, max_rows), -1, dtype=torch.int32, device=device)
    for power in range(4, max(max_rows - 1, 15).bit_length() + 1):
        count = min(1 << power, max_rows)
        for every_row in (False, True):
            postcopy(states, entries, nothing, nothing[0], count, every_row, block_size)
        if in_place:
            precopy(states, entries, nothing, count)
