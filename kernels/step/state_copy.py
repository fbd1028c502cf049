"""Moving states between columns: the post-copy after a step and the pre-copy before it.

Both are one mover with two ways to decide. Each program first decides for all listed rows at once
(a few loads per row), then takes tiles of the rows that act in turn, so that a launch with nothing
to do costs its decision and not rows x layers x tiles empty programs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs, runs_triton
from hybrid_runtime.kernels.common.types import WORD_TYPES
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
from hybrid_runtime.kernels.step.state_table import (
    ADDRESS_FIELDS,
    BASE_SSM,
    BASE_TABLE,
    BASE_WINDOW,
    STRIDE_SSM,
    STRIDE_TABLE,
    STRIDE_WINDOW,
    StateTable,
)


def move_reference(
    states: StateTable, slot: Tensor, source: Tensor, offset: Tensor, target: Tensor
) -> None:
    """Copy state `offset` of column `source` to column `target`, for rows with `target >= 0`.

    slot, source, offset, target: int `[rows]`. The window's `taps` inputs at `offset` go to offset
    0 of the target's window; the SSM state of column `source + offset` goes to the target's. All
    reads of a row come before its writes, so a shift within one window is safe.
    """
    acts = target >= 0
    slot, source, offset, target = (v[acts].long() for v in (slot, source, offset, target))
    tap = torch.arange(states.taps, device=slot.device)
    for window, ssm, table in zip(states.windows, states.ssm, states.tables, strict=True):
        to = table[slot, target].long()
        inputs = window[table[slot, source].long()[:, None], offset[:, None] + tap]
        window[to[:, None], tap] = inputs
        ssm[to] = ssm[table[slot, source + offset].long()]


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

    entries: int32 `[lines, ENTRY_FIELDS]` of the step; placed: int32 `[4, rows]` from `advance`;
    accepted: int32 `[rows]`. Decides for rows `0 .. count-1` if `every_row`, else for the `count`
    rows listed in the CANDIDATE column. Same arithmetic as `state.align.postcopy`.
    """
    row = torch.arange(count, device=entries.device)
    if not every_row:
        row = entries[:count, CANDIDATE].long()
    line = entries[row].long()
    slot = line[:, SLOT]
    certain, column, draft, _ = placed[:, row].long()
    a = torch.minimum(accepted[row].long(), draft + 1)
    boundary, offset, target = last_boundary_reference(certain, certain + a - 1, block_size)
    acts = (slot >= 0) & (column >= 0) & (a > 0) & (draft > 0) & (offset >= 0)
    acts &= (boundary > 0) & keeps_reference(boundary, line)
    acts &= (offset > 0) | (target != column)
    move_reference(states, slot, column, offset, torch.where(acts, target, -1))


def precopy_reference(states: StateTable, entries: Tensor, moves: Tensor, count: int) -> None:
    """Carry out `advance`'s `moves` (int32 `[3, rows]`) for the rows of the PRECANDIDATE column."""
    row = entries[:count, PRECANDIDATE].long()
    source, offset, target = moves[:, row]
    move_reference(states, entries[row, SLOT], source, offset, target)


@triton.jit
def _pick(values, chosen):
    return tl.sum(tl.where(chosen, values, 0), axis=0)


@triton.jit
def move_rows(
    acts,
    slot,
    source,
    offset,
    target,
    addresses,
    num_layers,
    window_channels,
    window_position_stride,
    window_channel_stride,
    word_type: tl.constexpr,
    tap_type: tl.constexpr,
    TAPS: tl.constexpr,
    SSM_WORDS: tl.constexpr,
    SSM_TILES: tl.constexpr,
    SSM_TILE: tl.constexpr,
    SSM_PARTS: tl.constexpr,
    WINDOW_TILES: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """This program's share of the tiles of all rows that act, as `move_reference` moves them."""
    acting = acts.to(tl.int32)
    rank = tl.cumsum(acting, axis=0) - 1
    tiles: tl.constexpr = SSM_TILES + WINDOW_TILES
    per_row = num_layers * tiles
    total = tl.sum(acting, axis=0) * per_row

    item = tl.program_id(0)
    current = -1
    row_slot = 0
    row_source = 0
    row_offset = 0
    row_target = 0
    while item < total:
        k = item // per_row
        if k != current:
            chosen = acts & (rank == k)
            row_slot = _pick(slot, chosen)
            row_source = _pick(source, chosen)
            row_offset = _pick(offset, chosen)
            row_target = _pick(target, chosen)
            current = k
        rest = item - k * per_row
        layer = addresses + (rest // tiles) * ADDRESS_FIELDS
        tile = rest % tiles
        table = tl.load(layer + BASE_TABLE).to(tl.pointer_type(tl.int32))
        table += tl.cast(row_slot, tl.int64) * tl.load(layer + STRIDE_TABLE)
        to = tl.load(table + row_target).to(tl.int64)
        if tile < SSM_TILES:
            base = tl.load(layer + BASE_SSM)
            stride = tl.load(layer + STRIDE_SSM)
            at = tl.load(table + row_source + row_offset).to(tl.int64)
            read = (base + at * stride).to(tl.pointer_type(word_type))
            write = (base + to * stride).to(tl.pointer_type(word_type))
            if VECTOR:  # what the compiler cannot know of an address that it loads
                read = tl.multiple_of(read, 16)
                write = tl.multiple_of(write, 16)
            for part in tl.static_range(SSM_PARTS):
                words = (tile * SSM_PARTS + part) * SSM_TILE + tl.arange(0, SSM_TILE)
                within = (words < SSM_WORDS) & (at != to)
                state = tl.load(read + words, mask=within)
                tl.store(write + words, state, mask=within)
        else:
            base = tl.load(layer + BASE_WINDOW)
            stride = tl.load(layer + STRIDE_WINDOW)
            at = tl.load(table + row_source).to(tl.int64)
            # One thread owns a channel and copies its taps from low to high: source and target
            # may be the same window, shifted.
            channel = (tile - SSM_TILES) * WINDOW_TILE + tl.arange(0, WINDOW_TILE)
            inside = channel < window_channels
            across = channel.to(tl.int64) * window_channel_stride
            taken = (base + at * stride).to(tl.pointer_type(tap_type)) + across
            given = (base + to * stride).to(tl.pointer_type(tap_type)) + across
            taken += tl.cast(row_offset, tl.int64) * window_position_stride
            for tap in tl.static_range(TAPS):
                value = tl.load(taken + tap * window_position_stride, mask=inside)
                tl.store(given + tap * window_position_stride, value, mask=inside)
        item += tl.num_programs(0)


@triton.jit(do_not_specialize=["count", "step_stride"], do_not_specialize_on_alignment=["accepted"])
def _move_kernel(
    entries,
    step,
    step_stride,
    accepted,
    count,
    addresses,
    num_layers,
    window_channels,
    window_position_stride,
    window_channel_stride,
    word_type: tl.constexpr,
    tap_type: tl.constexpr,
    POST: tl.constexpr,
    EVERY_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    SSM_WORDS: tl.constexpr,
    SSM_TILES: tl.constexpr,
    SSM_TILE: tl.constexpr,
    SSM_PARTS: tl.constexpr,
    WINDOW_TILES: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    index = tl.arange(0, ROWS)
    listed = index < count
    row = index
    if not EVERY_ROW:
        listing = entries + (CANDIDATE if POST else PRECANDIDATE)
        row = tl.load(listing + index * ENTRY_FIELDS, mask=listed, other=0)
    entry = entries + row * ENTRY_FIELDS
    if POST:
        certain = tl.load(step + CERTAIN * step_stride + row, mask=listed, other=0)
        draft = tl.load(step + PLACED_DRAFT * step_stride + row, mask=listed, other=0)
        a = tl.minimum(tl.load(accepted + row, mask=listed, other=0), draft + 1)
        boundary, offset, target = last_boundary(certain, certain + a - 1, BLOCK_SIZE)
        # What most rows fail comes first: the loads below are masked, and cost the others nothing.
        crosses = listed & (a > 0) & (draft > 0) & (offset >= 0) & (boundary > 0)
        source = tl.load(step + COLUMN * step_stride + row, mask=crosses, other=-1)
        every, first, second = load_rule(entry, crosses)
        kept = keeps(boundary, every, first, second)
        acts = crosses & kept & (source >= 0) & ((offset > 0) | (target != source))
    else:
        source = tl.load(step + SOURCE * step_stride + row, mask=listed, other=-1)
        offset = tl.load(step + OFFSET * step_stride + row, mask=listed, other=0)
        target = tl.load(step + TARGET * step_stride + row, mask=listed, other=-1)
        acts = listed & (target >= 0)
    slot = tl.load(entry + SLOT, mask=acts, other=-1)
    move_rows(
        acts & (slot >= 0),
        slot,
        source,
        offset,
        target,
        addresses,
        num_layers,
        window_channels,
        window_position_stride,
        window_channel_stride,
        word_type,
        tap_type,
        TAPS,
        SSM_WORDS,
        SSM_TILES,
        SSM_TILE,
        SSM_PARTS,
        WINDOW_TILES,
        WINDOW_TILE,
        VECTOR,
    )


SSM_TILE, SSM_PARTS, WINDOW_TILE, WARPS = 8192, 2, 1024, 8
"""Words that a program copies at once, how often in a turn, and channels in a turn; swept on an
H200 together with the programs per multiprocessor below."""
PROGRAMS, PROGRAMS_EVERY_ROW = 16, 8
"""Fewer where most launches find nothing to do: each program decides for all rows."""


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
        entries,
        step,
        step.stride(0),
        accepted,
        count,
        **tile_arguments(states),
        POST=post,
        EVERY_ROW=every_row,
        BLOCK_SIZE=block_size,
        ROWS=listed_rows(count),
        num_warps=WARPS,
    )


def listed_rows(count: int) -> int:
    """Rows that a program decides for at once: a power of two, of which few are ever compiled."""
    return triton.next_power_of_2(max(count, 16))


def tile_arguments(states: StateTable) -> dict[str, Any]:
    """Arguments of `move_rows` beside the rows."""
    window = states.windows[0]
    words = states.ssm_bytes // states.word
    return {
        "addresses": states.addresses,
        "num_layers": len(states.windows),
        "window_channels": window.shape[2],
        "window_position_stride": window.stride(1),
        "window_channel_stride": window.stride(2),
        "word_type": WORD_TYPES[states.word],
        "tap_type": WORD_TYPES[window.element_size()],
        "TAPS": states.taps,
        "SSM_WORDS": words,
        "SSM_TILES": triton.cdiv(words, SSM_TILE * SSM_PARTS),
        "SSM_TILE": SSM_TILE,
        "SSM_PARTS": SSM_PARTS,
        "WINDOW_TILES": triton.cdiv(window.shape[2], WINDOW_TILE),
        "WINDOW_TILE": WINDOW_TILE,
        "VECTOR": states.vector,
    }


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
