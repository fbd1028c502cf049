"""Rows of the replay layout on vLLM's block tables: the kernels against their specification."""

import pytest
import torch
from helpers.interpreter import CUDA, kernels, plain

from hybrid_runtime.kernels.replay.ring import ring_length
from hybrid_runtime.kernels.step.entry import ENTRY_FIELDS, EVERY, FIRST, SECOND
from hybrid_runtime.kernels.step.vllm_decide import REQUEST, VllmCounts
from hybrid_runtime.kernels.step.vllm_rows import (
    BELOW,
    RUNNING,
    BlockTables,
    FlushRows,
    StepRows,
    decide_flush,
    decide_flush_reference,
    place_rows,
    place_rows_reference,
)

SLOTS, GROUPS, B, K, COLUMNS = 140, 3, 8, 3, 12
RING = ring_length(K, 0)
DEVICE = "cuda" if CUDA else "cpu"


def ints(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32).to(DEVICE)


def flat(parts: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Tensors of a tuple that holds tuples."""
    return [t for p in parts for t in (flat(p) if isinstance(p, tuple) else [p])]


@kernels
@pytest.mark.parametrize("by_slot", [False, True])
def test_rows_are_placed_as_specified(by_slot: bool) -> None:
    torch.manual_seed(by_slot)
    one, other = (StepRows.allocate(SLOTS, GROUPS, DEVICE) for _ in range(2))
    for rows in (1, SLOTS, 7):
        slot = torch.randperm(SLOTS)[:rows].int().to(DEVICE)
        start = torch.cat([ints(0, 1, 1), ints(1, K + 2, rows).cumsum(0).int()])
        lines = SLOTS if by_slot else rows
        tables = BlockTables.build([ints(1, 999, lines, COLUMNS) for _ in range(GROUPS)], by_slot)
        counts = VllmCounts(ints(0, 1), ints(1, K + 2, SLOTS), ints(K, (COLUMNS - 1) * B, SLOTS))
        place_rows(one, tables, slot, start, counts, B, RING)
        place_rows_reference(other, tables, slot, start, counts, B, RING)
        assert all(torch.equal(a, b) for a, b in zip(flat(one), flat(other), strict=True))


@plain
def test_a_placed_row() -> None:
    """By hand: 17 tokens computed, 2 drafts accepted before, a step of one certain and 3 drafts
    in blocks of 8: column 2, below it column 1."""
    rows = StepRows.allocate(4, 1, "cpu")
    table = torch.tensor([[11, 12, 13, 14]], dtype=torch.int32)
    counts = VllmCounts(
        torch.zeros(4), torch.tensor([1, 1, 3, 1]).int(), torch.tensor([0, 0, 17, 0]).int()
    )
    given = torch.tensor([2]).int(), torch.tensor([0, 4]).int()
    place_rows_reference(rows, BlockTables.build([table], False), *given, counts, 8, RING)
    assert rows.slot.tolist() == [2, -1, -1, -1]
    assert rows.tables[0, 2].tolist() == [12, 13]
    at = rows.positions
    fields = (rows.draft, at.offset, at.pending, at.cursor, at.writes, at.certain)
    assert [int(v[0]) for v in fields] == [3, 2, 2, 15 % RING, 1, 18]
    assert rows.positions.read_column[0] == rows.positions.write_column[0] == RUNNING


@kernels
@pytest.mark.parametrize("count", [1, 130])
def test_flushes_are_decided_as_specified(count: int) -> None:
    torch.manual_seed(count)
    given = VllmCounts(ints(0, 4, SLOTS), ints(1, K + 2, SLOTS), ints(K + 2, 4 * B, SLOTS))
    sides = []
    for decide in (decide_flush, decide_flush_reference):
        torch.manual_seed(7)
        counts = VllmCounts(*(value.clone() for value in given))
        flush = FlushRows.allocate(SLOTS, DEVICE)
        totals = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        for _ in range(3):
            entries = torch.zeros((count, ENTRY_FIELDS), dtype=torch.int32, device=DEVICE)
            entries[:, REQUEST] = torch.randperm(SLOTS)[:count].int().to(DEVICE)
            entries[:, EVERY] = ints(0, 2, count) * B
            entries[:, FIRST], entries[:, SECOND] = ints(0, 3, count) * B, 0
            decide(entries, count, counts, flush, totals, B, RING)
        sides.append([*counts, *flat(flush), totals])
    assert all(torch.equal(a, b) for a, b in zip(*sides, strict=True))
    assert count == 1 or sides[0][-1][1] > 0


@plain
@pytest.mark.parametrize(
    ("column", "accepted", "computed", "fold", "into", "offset"),
    [
        # Blocks of 8; the step ran in `column`, and left `computed` tokens, of which `accepted`.
        (2, 3, 17, 1, BELOW, 3),  # the boundary lies one draft behind the certain token
        (2, 1, 16, 0, BELOW, 1),  # the certain token ends on it, drafts ran beyond
        (1, 3, 16, 2, RUNNING, 1),  # all drafts accepted: in place, nothing left to fold
        (1, 1, 16, 0, -1, 1),  # the running column's state is the boundary's
        (2, 2, 20, 0, -1, 2),  # no boundary
    ],
)
def test_a_boundary_by_hand(
    column: int, accepted: int, computed: int, fold: int, into: int, offset: int
) -> None:
    counts = VllmCounts(*(torch.tensor([v]).int() for v in (column, accepted, computed)))
    entries = torch.zeros((1, ENTRY_FIELDS), dtype=torch.int32)
    entries[:, EVERY] = 8
    flush, totals = FlushRows.allocate(1, "cpu"), torch.zeros(2, dtype=torch.int64)
    decide_flush_reference(entries, 1, counts, flush, totals, 8, RING)
    at = flush.positions
    found = (at.offset, at.pending, at.write_column, at.cursor)
    assert [int(value) for value in found] == [fold, fold, into, (computed - accepted + 1) % RING]
    assert counts.accepted.item() == offset
    assert totals[1] == (into >= 0)
