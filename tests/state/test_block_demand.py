"""`block_demand` names every column that a step may touch, whatever legal bounds it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from helpers.hash_model import HashRunner
from helpers.plain_manager import (
    BLOCK,
    SLOTS,
    K,
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

WIDTH, LONGEST = 48, 100


def wide(k: int, block: int, **options: Any) -> HybridStateManager:
    layout = StateLayout(HASH.recurrence, k, block)
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
    cuts = made.positions.cuts
    cut = -1 if cuts is None else int(cuts.column[row])
    reads = {read, read + int(step.read_offset[row])}
    return reads, {*range(write, write + int(step.rows.draft[row]) + 1), cut}


def check(made: HybridStateManager, demand: BlockDemand, step: Step, row: int) -> None:
    first, fresh, last, kept = (int(part[row]) for part in demand)
    reads, writes = touched(made, step, row)
    writes |= {s.column for s in made.published(step) if s.slot == step.rows.slot[row]}
    assert writes <= {*range(fresh, last + 1)} | {-1}, (writes, fresh, last)
    assert last <= kept
    if step.read_column[row] >= 0:
        assert reads <= {*range(first, kept + 1)} | {-1}, (reads, first, kept)


@given(
    data=st.data(),
    k=st.integers(0, 4),
    larger=st.integers(1, 5),
    prompt_cuts=st.booleans(),
    filed=st.booleans(),
)
@settings(max_examples=60)
def test_every_column_that_a_step_touches_is_demanded(
    data: st.DataObject, k: int, larger: int, prompt_cuts: bool, filed: bool
) -> None:
    """For any bounds around the exact counts; without `known` as with it."""
    block = k + larger
    made = wide(k, block, prompt_cuts=prompt_cuts)
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
