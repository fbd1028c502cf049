"""The replay layout on vLLM's block tables: where each row of a step finds its state, and which
states are flushed to a boundary's block after the sampler.

vLLM hands a layer the batch; drafts are kept by the request's slot. Two columns of a row's block
table matter in a step: the running one, and the one below it, in which a boundary may lie that the
step passes. They are noted by slot, so that the kernels of the replay layout take them as tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.constant import Constant
from hybrid_runtime.kernels.step.advance_replay import IDLE, ReplayPositions
from hybrid_runtime.kernels.step.boundary import (
    keeps,
    keeps_reference,
    last_boundary,
    last_boundary_reference,
    load_rule,
    running_column,
    running_column_reference,
)
from hybrid_runtime.kernels.step.entry import ENTRY_FIELDS
from hybrid_runtime.kernels.step.vllm_decide import POSTCOPY, REQUEST, VllmCounts

BELOW, RUNNING = Constant(0), Constant(1)
"""Columns of `StepRows.tables`: block of the column below the running one, and of that one."""


class StepRows(NamedTuple):
    """What the layers read of a step, at addresses that never change.

    slot: int32 `[rows]`, request slot of each row of the batch; -1 = padded or dummy row.
    draft: int32 `[rows]`, its drafts.
    positions: `[rows]` each; reads and writes column RUNNING, in every step.
    tables: int32 `[groups, slots, 2]`, blocks of each cache group, columns BELOW and RUNNING.
    """

    slot: Tensor
    draft: Tensor
    positions: ReplayPositions
    tables: Tensor

    @classmethod
    def allocate(cls, slots: int, groups: int, device: torch.device | str) -> StepRows:
        """For up to `slots` rows, none of which runs yet."""

        def ints(value: int) -> Tensor:
            return torch.full((slots,), value, dtype=torch.int32, device=device)

        positions = ReplayPositions(*map(ints, IDLE))
        return cls(
            slot=ints(-1),
            draft=ints(0),
            positions=positions._replace(
                read_column=ints(RUNNING), write_column=ints(RUNNING), writes=ints(1)
            ),
            tables=torch.zeros((groups, slots, 2), dtype=torch.int32, device=device),
        )

    def first(self, rows: int) -> StepRows:
        """Views of the first rows; slots and tables stay whole."""
        return self._replace(
            slot=self.slot[:rows],
            draft=self.draft[:rows],
            positions=ReplayPositions(*(part[:rows] for part in self.positions)),
        )


class BlockTables(NamedTuple):
    """vLLM's block tables.

    tables: int32 `[rows, columns]` of each Mamba cache group.
    addresses: int64 `[groups, 2]` on the device, base address and row stride in entries.
    by_slot: their rows are request slots, not rows of the batch.
    """

    tables: tuple[Tensor, ...]
    addresses: Tensor
    by_slot: bool

    @classmethod
    def build(cls, tables: list[Tensor], by_slot: bool) -> BlockTables:
        lines = [[table.data_ptr(), table.stride(0)] for table in tables]
        addresses = torch.tensor(lines, dtype=torch.int64).to(tables[0].device)
        return cls(tuple(tables), addresses, by_slot)


def place_rows_reference(
    step: StepRows,
    tables: BlockTables,
    slot: Tensor,
    cu_seqlens: Tensor,
    counts: VllmCounts,
    block_size: int,
    ring: int,
) -> None:
    """Note where the rows of a step find their state, before its forward pass.

    Args:
        step: written; rows behind the step's own become padded rows.
        tables: of the Mamba cache groups.
        slot: int32 [rows], slots of the batch.
        cu_seqlens: int32 [rows + 1], index of each row's first token.
        counts: vLLM's own; the column is not used.
        block_size: tokens of a Mamba block.
        ring: tokens of a slot's ring of records.
    """
    rows = len(slot)
    step.slot.fill_(-1)
    step.slot[:rows] = slot
    at = slot.long()
    scheduled = cu_seqlens[1:] - cu_seqlens[:-1]
    step.draft[:rows] = scheduled - 1
    ahead = counts.accepted[at] - 1
    step.positions.offset[:rows] = ahead
    step.positions.pending[:rows] = ahead
    step.positions.cursor[:rows] = (counts.computed[at] - ahead) % ring
    step.positions.certain[:rows] = counts.computed[at] + 1
    column = running_column_reference(counts.computed[at] + scheduled, block_size).long()
    row = at if tables.by_slot else torch.arange(rows, device=slot.device)
    for group, table in enumerate(tables.tables):
        below = table[row, (column - 1).clamp(min=0)]
        step.tables[group, at, BELOW] = torch.where(column > 0, below, 0)
        step.tables[group, at, RUNNING] = table[row, column]


@triton.jit(
    do_not_specialize=["rows", "slots", "ring"],
    do_not_specialize_on_alignment=["slot", "cu_seqlens", "accepted", "computed"],
)
def _place_rows_kernel(
    slot,
    cu_seqlens,
    accepted,
    computed,
    addresses,
    row_slot,
    row_draft,
    row_offset,
    row_pending,
    row_cursor,
    row_certain,
    tables,
    rows,
    slots,
    ring,
    BLOCK_SIZE: tl.constexpr,
    BY_SLOT: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = i_row < rows
    i_slot = tl.load(slot + i_row, mask=here, other=-1)
    tl.store(row_slot + i_row, i_slot, mask=i_row < slots)
    start = tl.load(cu_seqlens + i_row, mask=here, other=0)
    scheduled = tl.load(cu_seqlens + i_row + 1, mask=here, other=1) - start
    a = tl.load(accepted + i_slot, mask=here, other=1)
    n = tl.load(computed + i_slot, mask=here, other=0)
    tl.store(row_draft + i_row, scheduled - 1, mask=here)
    tl.store(row_offset + i_row, a - 1, mask=here)
    tl.store(row_pending + i_row, a - 1, mask=here)
    tl.store(row_cursor + i_row, (n - a + 1) % ring, mask=here)
    tl.store(row_certain + i_row, n + 1, mask=here)
    column = running_column(n + scheduled, BLOCK_SIZE)
    table_row = (i_slot if BY_SLOT else i_row).to(tl.int64)
    for group in tl.static_range(GROUPS):
        base = tl.load(addresses + 2 * group).to(tl.pointer_type(tl.int32))
        p_block = base + table_row * tl.load(addresses + 2 * group + 1) + column
        p_noted = tables + (group * slots + i_slot) * 2
        block = tl.load(p_block, mask=here, other=0)
        below = tl.load(p_block - 1, mask=here & (column > 0), other=0)
        tl.store(p_noted + RUNNING, block, mask=here)
        tl.store(p_noted + BELOW, below, mask=here)


ROWS = 128
"""Rows per program. Not swept."""


def place_rows(
    step: StepRows,
    tables: BlockTables,
    slot: Tensor,
    cu_seqlens: Tensor,
    counts: VllmCounts,
    block_size: int,
    ring: int,
) -> None:
    """`place_rows_reference` by one launch where Triton runs."""
    if not runs_triton(slot):
        place_rows_reference(step, tables, slot, cu_seqlens, counts, block_size, ring)
        return
    slots = step.slot.shape[0]
    _place_rows_kernel[(triton.cdiv(slots, ROWS),)](
        slot=slot,
        cu_seqlens=cu_seqlens,
        accepted=counts.accepted,
        computed=counts.computed,
        addresses=tables.addresses,
        row_slot=step.slot,
        row_draft=step.draft,
        row_offset=step.positions.offset,
        row_pending=step.positions.pending,
        row_cursor=step.positions.cursor,
        row_certain=step.positions.certain,
        tables=step.tables,
        rows=slot.shape[0],
        slots=slots,
        ring=ring,
        BLOCK_SIZE=block_size,
        BY_SLOT=tables.by_slot,
        GROUPS=len(tables.tables),
        ROWS=ROWS,
        num_warps=4,
    )


class FlushRows(NamedTuple):
    """Rows for `replay_flush`, `[lines]` each: whose boundary is flushed after a step.

    slot: int32, request slot.
    positions: writes column BELOW or RUNNING; -1 = nothing to flush.
    """

    slot: Tensor
    positions: ReplayPositions

    @classmethod
    def allocate(cls, lines: int, device: torch.device | str) -> FlushRows:
        def ints(value: int) -> Tensor:
            return torch.full((lines,), value, dtype=torch.int32, device=device)

        positions = ReplayPositions(*map(ints, IDLE))
        return cls(ints(-1), positions._replace(read_column=ints(RUNNING)))


def decide_flush_reference(
    entries: Tensor,
    count: int,
    counts: VllmCounts,
    flush: FlushRows,
    totals: Tensor,
    block_size: int,
    ring: int,
) -> None:
    """Decide after a step which of its candidates have passed a boundary that is kept.

    A boundary's block then gets the state at it: the running column's with as many drafts as lie
    before the boundary. Is that the running column itself, no draft is left to fold.

    Args:
        entries, count, counts: as of `decide_reference`; accepted counts are updated.
        flush: its first `count` lines are written.
        totals: int64 [2], states moved, by phase; the second is added to.
        block_size: tokens of a Mamba block.
        ring: tokens of a slot's ring of records.
    """
    line = entries[:count].long()
    slot = line[:, REQUEST]
    held, accepted, computed = (value[slot].long() for value in counts)
    certain = computed - accepted + 1
    boundary, fold, target = last_boundary_reference(certain, computed, block_size)
    reached = (fold >= 0) & keeps_reference(boundary, line)
    acts = reached & ((fold > 0) | (target != held))
    positions = flush.positions
    flush.slot[:count] = slot.int()
    positions.offset[:count] = torch.where(acts, fold, 0).int()
    positions.pending[:count] = torch.where(acts, fold, 0).int()
    positions.cursor[:count] = (certain % ring).int()
    into = torch.where(target == held, RUNNING, BELOW)
    positions.write_column[:count] = torch.where(acts, into, -1).int()
    positions.certain[:count] = boundary.int()
    counts.accepted[slot[reached & (target == held)]] = 1
    totals[POSTCOPY] += acts.sum()


@triton.jit(do_not_specialize=["count", "ring"])
def _decide_flush_kernel(
    entries,
    count,
    column,
    accepted,
    computed,
    totals,
    flush_slot,
    flush_offset,
    flush_pending,
    flush_cursor,
    flush_column,
    flush_certain,
    ring,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    i_line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = i_line < count
    p_entry = entries + i_line * ENTRY_FIELDS
    slot = tl.load(p_entry + REQUEST, mask=here, other=0)
    held = tl.load(column + slot, mask=here, other=-1)
    a = tl.load(accepted + slot, mask=here, other=1)
    n = tl.load(computed + slot, mask=here, other=0)
    boundary, fold, target = last_boundary(n - a + 1, n, BLOCK_SIZE)
    reached = here & (fold >= 0)
    every, first, second = load_rule(p_entry, reached)
    reached = reached & keeps(boundary, every, first, second)
    acts = reached & ((fold > 0) | (target != held))
    into = tl.where(target == held, RUNNING, BELOW)
    tl.store(flush_slot + i_line, slot, mask=here)
    tl.store(flush_offset + i_line, tl.where(acts, fold, 0), mask=here)
    tl.store(flush_pending + i_line, tl.where(acts, fold, 0), mask=here)
    tl.store(flush_cursor + i_line, (n - a + 1) % ring, mask=here)
    tl.store(flush_column + i_line, tl.where(acts, into, -1), mask=here)
    tl.store(flush_certain + i_line, boundary, mask=here)
    tl.store(accepted + slot, 1, mask=reached & (target == held))
    tl.atomic_add(totals + POSTCOPY, tl.sum(acts.to(tl.int64), axis=0))


def decide_flush(
    entries: Tensor,
    count: int,
    counts: VllmCounts,
    flush: FlushRows,
    totals: Tensor,
    block_size: int,
    ring: int,
) -> None:
    """`decide_flush_reference` by one launch where Triton runs."""
    if not runs_triton(entries):
        decide_flush_reference(entries, count, counts, flush, totals, block_size, ring)
        return
    _decide_flush_kernel[(triton.cdiv(count, ROWS),)](
        entries=entries,
        count=count,
        **counts._asdict(),
        totals=totals,
        flush_slot=flush.slot,
        flush_offset=flush.positions.offset,
        flush_pending=flush.positions.pending,
        flush_cursor=flush.positions.cursor,
        flush_column=flush.positions.write_column,
        flush_certain=flush.positions.certain,
        ring=ring,
        BLOCK_SIZE=block_size,
        ROWS=ROWS,
        num_warps=4,
    )
