"""`block_demand` names every column that a step may touch, whatever legal bounds it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.plain_manager import (
    BLOCK,
    SLOTS,
    K,
    between,
    exact,
    manager,
    run,
)
from helpers.replay_model import ReplayRunner
from helpers.toy_recurrences import HASH
from hypothesis import given, settings

from hybrid_runtime.state import (
    BlockDemand,
    HybridStateManager,
    StateLayout,
    Step,
    StepRows,
)
from hybrid_runtime.state.align.columns import ColumnsPolicy

WIDTH, LONGEST = 48, 100
layouts = pytest.mark.parametrize("kind", ["columns", "replay"])


def wide(kind: Any, k: int, block: int, **options: Any) -> HybridStateManager:
    layout = StateLayout(HASH.recurrence, k, block, kind=kind)
    made = HybridStateManager(layout, SLOTS, k, "cpu", max_rows=SLOTS + 1, **options)
    table = torch.arange(SLOTS * WIDTH, dtype=torch.int32).view(SLOTS, WIDTH)
    made.bind({0: layout.allocate(SLOTS * WIDTH, "cpu")}, table)
    return made


@dataclass
class Row:
    """Of a step: exact counts, how much lower and higher its bounds are, and what is accepted."""

    slot: int
    computed: int
    certain: int
    draft: int
    below: int
    above: int
    accepted: int


@dataclass
class Request:
    """What is exactly known of a slot."""

    computed: int = 0
    draft: int = 0  # of its last step


def touched(made: HybridStateManager, step: Step, row: int) -> tuple[set[int], set[int]]:
    """Columns that a placed row reads and writes by the device's exact counts, without what the
    counts of this step will have copied."""
    read, write = int(step.read_column[row]), int(step.write_column[row])
    if isinstance(made._policy, ColumnsPolicy):
        cuts = made.positions.cuts
        cut = -1 if cuts is None else int(cuts.column[row])
        reads = {read, read + int(step.read_offset[row])}
        return reads, {*range(write, write + int(step.rows.draft[row]) + 1), cut}
    replay = made.positions.replay
    assert replay is not None
    return {read}, {write, int(replay.checkpoint_column[row])}


def check(made: HybridStateManager, demand: BlockDemand, step: Step, row: int) -> None:
    always = {-1, WIDTH - 1} if made.layout.replays else {-1}
    first, fresh, last, kept = (int(part[row]) for part in demand)
    reads, writes = touched(made, step, row)
    writes |= {s.column for s in made.published(step) if s.slot == step.rows.slot[row]}
    assert writes <= {*range(fresh, last + 1)} | always, (writes, fresh, last)
    assert last <= kept
    if step.read_column[row] >= 0:
        assert reads <= {*range(first, kept + 1)} | always, (reads, first, kept)


@layouts
@given(
    data=st.data(),
    k=st.integers(0, 4),
    larger=st.integers(1, 5),
    prompt_cuts=st.booleans(),
    filed=st.booleans(),
)
@settings(max_examples=60)
def test_every_column_that_a_step_touches_is_demanded(
    kind: str, data: st.DataObject, k: int, larger: int, prompt_cuts: bool, filed: bool
) -> None:
    """For any bounds around the exact counts; without `known` as with it."""
    block = k + larger
    made = wide(kind, k, block, prompt_cuts=prompt_cuts)
    requests = [Request() for _ in range(SLOTS)]
    for slot in range(SLOTS):
        made.admit(slot)
        every, pins = data.draw(st.tuples(st.integers(0, 2), st.lists(st.integers(1, 6))))
        if data.draw(st.booleans()):
            made.retain(slot, every * block, tuple(p * block for p in pins[:2]))
    for _ in range(data.draw(st.integers(1, 8))):
        rows = [_row(data, slot, requests[slot], k, block) for slot in range(SLOTS)]
        rows = data.draw(st.permutations(rows))[: data.draw(st.integers(1, SLOTS))]
        rows.insert(data.draw(st.integers(0, len(rows))), Row(-1, 0, 1, 0, 0, 0, 1))
        fields = [
            (r.slot, r.computed - r.below, r.computed + r.above, r.certain + r.draft, r.draft)
            for r in rows
        ]
        given_rows = StepRows(*(np.array(field, np.int32) for field in zip(*fields, strict=True)))
        known = given_rows.computed_min.astype(np.int64) if filed else None
        demand = made.block_demand(given_rows, known)
        step = made.begin_step(given_rows)
        made.end_step(step, torch.tensor([r.accepted for r in rows], dtype=torch.int32))
        for i, row in enumerate(rows):
            if row.slot < 0:
                assert [int(part[i]) for part in demand] == [0, 0, -1, -1]
                continue
            check(made, demand, step, i)
            request = requests[row.slot]
            assert row.computed == made.computed[row.slot]
            request.computed, request.draft = (
                row.computed + row.certain + row.accepted - 1,
                row.draft,
            )


def _row(data: st.DataObject, slot: int, request: Request, k: int, block: int) -> Row:
    draft = data.draw(st.integers(0, k))
    chunk = not draft and not request.draft and request.computed < LONGEST
    certain = data.draw(st.integers(1, 2 * block)) if chunk else 1
    below = data.draw(st.integers(0, min(request.computed, 3 * block)))
    above = data.draw(st.integers(0, 3 * block))
    accepted = data.draw(st.integers(1, draft + 1))
    return Row(slot, request.computed, certain, draft, below, above, accepted)


def test_wide_bounds_own_the_lowest_boundary_that_may_be_stored() -> None:
    """Between 5 and 40 tokens: the drafts of the last step may have passed any of four
    boundaries, and it was the first one."""
    made = wide("replay", 3, 8)
    made.admit(0)
    for n, s, d in ((0, 5, 0), (5, 4, 3)):
        step = made.begin_step(between([n], [n + 35 * (d > 0)], [s], [d]))
        made.end_step(step, torch.tensor([d + 1], dtype=torch.int32))
    rows = between([5], [40], [4], [3])
    demand = made.block_demand(rows)
    made.begin_step(rows)
    assert made.positions.replay is not None
    assert made.positions.replay.checkpoint_column[0] == 0
    assert [int(part[0]) for part in demand] == [0, 0, 4, 4]


@pytest.mark.parametrize("draft", [0, 3])
def test_exact_counts_own_no_more_than_one_checkpoints_column(draft: int) -> None:
    """However long the request, and whether or not its checkpoints are still to be filed."""
    made, n = wide("replay", 3, 8), 0
    made.admit(0)
    while n < LONGEST:
        scheduled = 4 if n else 5
        rows = StepRows.exact([0], [n], [draft + 1 if n else scheduled], [draft if n else 0])
        for known in (None, rows.computed_min.astype(np.int64)):
            _, fresh, last, _ = made.block_demand(rows, known)
            assert last[0] - fresh[0] < 1
        step = made.begin_step(rows)
        made.end_step(step, torch.tensor([min(3, draft + 1) if n else 1], dtype=torch.int32))
        n += int(rows.certain[0]) + (min(3, draft + 1) - 1 if n else 0)


def test_a_chunk_that_begins_at_a_boundary_owns_no_column_for_it() -> None:
    """The chunk before has stored that checkpoint."""
    made = wide("replay", 3, 8, prompt_cuts=True)
    made.admit(0)
    made.end_step(made.begin_step(StepRows.exact([0], [0], [8], [0])), torch.tensor([1]).int())
    _, fresh, last, _ = made.block_demand(StepRows.exact([0], [8], [8], [0]))
    assert (fresh[0], last[0]) == (1, 1)


def test_a_state_in_a_boundarys_column_is_all_that_is_owned_below() -> None:
    """A step that stores nothing reads it there."""
    made = wide("replay", 3, 8)
    made.admit(0)
    made.end_step(made.begin_step(StepRows.exact([0], [0], [24], [0])), torch.tensor([1]).int())
    demand = made.block_demand(StepRows.exact([0], [24], [1], [0]))
    assert [int(part[0]) for part in demand] == [2, 0, -1, 2]


def test_a_state_beside_drafts_holds_no_checkpoints_column() -> None:
    """It is in the live column, although the step ended on a boundary, and a row beside it did so
    without drafts."""
    made = manager(0, 1, kind="replay")
    run(made, exact([0, 0], [7, 7], [0, 0]), 1, 1)
    run(made, exact([7, 7], [4, 1], [3, 0]), 1, 1)
    demand = made.block_demand(exact([8, 8], [4, 4], [3, 3]))
    assert demand.kept.tolist() == [-1, 0]


def test_a_state_in_a_boundarys_column_is_held_beside_the_next_boundarys() -> None:
    made = manager(0, kind="replay")
    run(made, exact([0], [BLOCK], [0]), 1)
    demand = made.block_demand(exact([BLOCK], [BLOCK], [0]))
    assert (demand.first.tolist(), demand.last.tolist()) == ([0], [1])


def test_columns_held_are_bounded() -> None:
    """A running request owns its running column, K more, and at most two below (#55450)."""
    runs = HashRunner(num_draft=K, max_requests=1, block_size=BLOCK, columns=40)
    runs.admit(0, list(range(20)))
    runs.step([(0, 8, [], 0)])
    runs.step([(0, 8, [], 0)])
    runs.step([(0, 4, [], 1)])
    for i in range(60):
        runs.step([(0, 1, [1] * (i % (K + 1)), 1 + i % (i % (K + 1) + 1))])
        assert len(runs.requests[0].blocks[0]) <= 2 + 1 + K


def test_blocks_per_request_are_bounded() -> None:
    """The live block, and at most a checkpoint's that is being written or read beside it."""
    runs = ReplayRunner(num_draft=K, max_requests=1, block_size=BLOCK, columns=40)
    runs.admit(0, list(range(20)))
    for certain in (8, 8, 4):
        runs.step([(0, certain, [], int(certain == 4))])
        assert len(runs.requests[0].blocks[0]) <= 3
    for i in range(60):
        runs.step([(0, 1, [1] * (i % (K + 1)), 1 + i % (i % (K + 1) + 1))])
        assert len(runs.requests[0].blocks[0]) <= 2
    assert runs.copies
    assert runs.direct
