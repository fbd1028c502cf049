"""Making the exact state of chosen rows of the replay layout, in all layers at once.

Between steps a live state lacks the accepted guesses of the last step. Whoever needs it whole (a
request ends or is preempted, a boundary is to be shared) has them folded in here.
"""

# mypy: disable-error-code="assignment,var-annotated"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.types import FLOAT_TYPES, WORD_TYPES
from hybrid_runtime.kernels.replay.naive import fold_reference
from hybrid_runtime.kernels.replay.rounding import LAST_PLACE, LastPlace, Rounding, rounding_key
from hybrid_runtime.kernels.replay.tile import fold_part, load_window_cache, store_part
from hybrid_runtime.kernels.replay.update import MAX_CACHED
from hybrid_runtime.kernels.replay.window_cache import (
    WindowCache,
    check_contiguous,
    check_window_cache,
)
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.kernels.step.state_table import StateTable


def replay_flush_reference(
    table: StateTable,
    window_cache: WindowCache,
    A_log: Tensor,
    rows: Tensor,
    slot: Tensor,
    positions: ReplayPositions,
    rounding: Rounding | None = None,
) -> None:
    """Write window and state of the listed rows, with what was accepted, to their write columns.

    The state of the read column after `fold` records goes to the write column (-1 leaves the row
    out), the window's W - 1 inputs at offset `fold` to offset 0 there. If that is the live block,
    the row's `fold` is 0 from then on, which is for the caller to note. A read column of -1 gives
    zeros. No listed row may read a block that another one writes.

    Args:
        table: states of all layers, changed in place.
        records: stacked, [layers, 2, slots, K, ...]; of the slots' last steps.
        A_log: [layers, H].
        rows: int32 [count]; -1 = none. The arguments below are indexed by its entries.
        slot: int32 [n]; -1 = padded row. With n = slots and slot i at i, rows are slots.
        replay: int32 [n] each; the snapshot fields are not used.
        rounding: seed by slot, position int32 [n]; layer is the number of the first layer.
    """
    picked = rows[rows >= 0].long()
    slot, positions = slot[picked], ReplayPositions(*(part[picked] for part in positions))
    tap = torch.arange(table.taps, device=slot.device)
    active = (slot >= 0) & (positions.write_column >= 0)
    positions = positions._replace(write_column=torch.where(active, positions.write_column, -1))
    at, reads = active.nonzero()[:, 0], positions.read_column[active] >= 0
    for layer, (windows, states, blocks) in enumerate(
        zip(table.windows, table.ssm, table.tables, strict=True)
    ):
        own = None if rounding is None else rounding._replace(layer=rounding.layer + layer)
        cache = window_cache.layer(layer)
        fold_reference(states, cache, A_log[layer], blocks, slot, positions, own)
        column = torch.where(reads, positions.read_column[at], 0).long()
        source = blocks[slot[at].long(), column].long()
        offset = torch.where(reads, positions.fold[at], 0).long()
        inputs = windows[source[:, None], offset[:, None] + tap]
        inputs = torch.where(reads[:, None, None], inputs, torch.zeros((), dtype=inputs.dtype))
        target = blocks[slot[at].long(), positions.write_column[at].long()].long()
        windows[target[:, None], tap] = inputs


@triton.jit(
    do_not_specialize=["slots", "layer"],
    do_not_specialize_on_alignment=[
        "A_log", "dt_cache", "rows", "slot", "read_column", "fold", "turn", "write_column",
        "seed", "position",
    ],
)  # fmt: skip
def _flush_kernel(
    addresses,
    x_cache,
    B_cache,
    dt_cache,
    A_log,
    rows,
    slot,
    read_column,
    fold,
    turn,
    write_column,
    seed,
    position,
    layer,
    slots,
    A_layer,
    A_head,
    window_channels,
    window_position_stride,
    window_channel_stride,
    state_type: tl.constexpr,
    tap_type: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    RECORDS: tl.constexpr,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    LOW: tl.constexpr,
    WINDOW_TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    ROUND: tl.constexpr,
    DIGITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    tiles: tl.constexpr = (DIM + TILE - 1) // TILE
    groups: tl.constexpr = HEADS // HEADS_PER_GROUP
    item = tl.program_id(0)
    row = tl.load(rows + tl.program_id(1))
    row_slot = tl.load(slot + row, mask=row >= 0, other=-1)
    target = tl.load(write_column + row, mask=row_slot >= 0, other=-1)
    if target >= 0:
        source = tl.load(read_column + row)
        reads = source >= 0
        count = tl.where(reads, tl.load(fold + row), 0)
        own = tl.program_id(2)
        entry = addresses + own * 6
        table = tl.load(entry + 4).to(tl.pointer_type(tl.int32))
        table += row_slot.to(tl.int64) * tl.load(entry + 5)
        block = tl.load(table + source, mask=reads, other=0).to(tl.int64)
        to = tl.load(table + target).to(tl.int64)
        moves = (block != to) | (count > 0) | (source < 0)
        if (item < HEADS * tiles) & moves:
            read = (tl.load(entry + 2) + block * tl.load(entry + 3)).to(tl.pointer_type(state_type))
            write = (tl.load(entry + 2) + to * tl.load(entry + 3)).to(tl.pointer_type(state_type))
            if VECTOR:  # what the compiler cannot know of an address that it loads
                read = tl.multiple_of(read, 16)
                write = tl.multiple_of(write, 16)
            head = item // tiles
            group = head // HEADS_PER_GROUP
            p = item % tiles * TILE + tl.arange(0, TILE)
            n = tl.arange(0, LOW)
            in_dim = p < DIM
            across = head * DIM + p
            half = tl.load(turn + row)
            index = (own * 2 + half).to(tl.int64) * slots + row_slot
            xs, Bs, steps = load_window_cache(
                x_cache + index * (RECORDS * HEADS * DIM) + across,
                B_cache + index * (RECORDS * groups * STATE) + group * STATE,
                dt_cache + index * (RECORDS * HEADS) + head,
                count, n, in_dim, HEADS, DIM, groups, STATE, RECORDS, SPLIT, LOW,
            )  # fmt: skip
            rate = -tl.exp(tl.load(A_log + own * A_layer + head * A_head).to(tl.float32))
            key = row_slot.to(tl.uint32)
            if ROUND:
                key = rounding_key(tl.load(seed + row_slot), layer + own, tl.load(position + row))
            for s in tl.static_range(SPLIT):
                part = n + s * LOW
                element = across[:, None] * STATE + part[None, :]
                inside = in_dim[:, None] & (part < STATE)[None, :]
                h = tl.load(read + element, mask=inside & reads, other=0.0)
                h = fold_part(h, xs, Bs, steps, rate, s, RECORDS)
                store_part(write, h, element, inside, key, ROUND, DIGITS, LEAST)
        if (item >= HEADS * tiles) & moves:
            channel = (item - HEADS * tiles) * WINDOW_TILE + tl.arange(0, WINDOW_TILE)
            inner = channel < window_channels
            base = tl.load(entry)
            old = (base + block * tl.load(entry + 1)).to(tl.pointer_type(tap_type))
            new = (base + to * tl.load(entry + 1)).to(tl.pointer_type(tap_type))
            old += channel.to(tl.int64) * window_channel_stride
            new += channel.to(tl.int64) * window_channel_stride
            inputs = ()
            for tap in tl.static_range(TAPS):
                at = (count + tap).to(tl.int64) * window_position_stride
                inputs += (tl.load(old + at, mask=inner & reads, other=0),)
            # Source and target may be the same window, shifted.
            tl.debug_barrier()
            for tap in tl.static_range(TAPS):
                tl.store(new + tap * window_position_stride, inputs[tap], mask=inner)


TILE, LOW, WINDOW_TILE, WARPS = 16, 32, 1024, 4
"""Rows of a head's state and columns of its parts, channels, warps per program. Not swept."""


def replay_flush(
    table: StateTable,
    window_cache: WindowCache,
    A_log: Tensor,
    rows: Tensor,
    slot: Tensor,
    positions: ReplayPositions,
    rounding: Rounding | None = None,
) -> None:
    """`replay_flush_reference` by one launch where Triton runs.

    fp64 states, and records of more than `MAX_CACHED` guesses, go to the reference.

    Raises:
        ValueError: states and records of a layer don't fit, or records are not contiguous.
    """
    states, drafts = table.ssm[0], window_cache.dt.shape[3]
    if not runs_triton(rows) or drafts > MAX_CACHED or states.dtype == torch.float64:
        replay_flush_reference(table, window_cache, A_log, rows, slot, positions, rounding)
        return
    if len(rows) == 0:
        return
    inner, outer = window_cache.x.shape[4:], window_cache.B.shape[4:]
    ratio = check_window_cache(inner, outer, states, window_cache.layer(0))
    check_contiguous(states, window_cache, window_cache.x.dtype)
    (heads, dim), (_, state) = inner, outer
    windows = table.windows[0]
    tile = min(TILE, triton.next_power_of_2(dim))
    width = triton.next_power_of_2(state)
    digits, least = LAST_PLACE.get(states.dtype, LastPlace(0, 0))
    items = heads * triton.cdiv(dim, tile) + triton.cdiv(windows.shape[2], WINDOW_TILE)
    _flush_kernel[(items, len(rows), len(table.ssm))](
        table.addresses,
        *window_cache,
        A_log,
        rows,
        slot,
        *positions[:4],
        *(
            (None, None, 0)
            if rounding is None
            else (rounding.seed, positions.certain, rounding.layer)
        ),
        window_cache.dt.shape[2],
        *A_log.stride(),
        windows.shape[2],
        windows.stride(1),
        windows.stride(2),
        state_type=FLOAT_TYPES[states.dtype],
        tap_type=WORD_TYPES[windows.element_size()],
        HEADS=heads,
        HEADS_PER_GROUP=ratio,
        DIM=dim,
        STATE=state,
        RECORDS=drafts,
        TAPS=table.taps,
        TILE=tile,
        SPLIT=triton.cdiv(width, LOW),
        LOW=min(LOW, width),
        WINDOW_TILE=WINDOW_TILE,
        VECTOR=table.vector,
        ROUND=rounding is not None and states.element_size() < 4,
        DIGITS=digits,
        LEAST=least,
        num_warps=WARPS,
    )
