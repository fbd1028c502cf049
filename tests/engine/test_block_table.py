"""Which columns slots own after any demands, and that a table that says there is room has it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.engine.block_pool import BlockPool, BlockTable
from hybrid_runtime.engine.device_tables import FREE, DeviceTables
from hybrid_runtime.state.placement import BlockDemand

SLOTS, COLUMNS = 3, 7
LAST = COLUMNS - 2  # the one behind it may be owned throughout, and is in no demand


@st.composite
def demands(draw: st.DrawFn) -> tuple[int, ...]:
    """First, fresh, last and kept column of a row; last below fresh: nothing is written."""
    fresh = draw(st.integers(0, LAST))
    last = draw(st.integers(fresh - 1, LAST))
    return draw(st.integers(0, fresh)), fresh, last, draw(st.integers(last, LAST))


WIDE = 3000
SPAN = st.tuples(st.integers(0, 2 * WIDE), st.integers(0, 3 * WIDE), st.integers(0, 99))
"""First cell, how many, and what is written there."""


@given(changes=st.lists(SPAN | st.none() | st.integers(0, 1), max_size=8))
@example(changes=[(5, 9, 3), None, 0])
def test_the_device_has_what_the_host_has_after_any_uploads(
    changes: list[tuple[int, int, int] | int | None],
) -> None:
    """Cells that are written again before they are sent, and more changes than are sent one by one.
    None: an upload. A number: that table is cleared."""
    tables = DeviceTables(2, (WIDE, WIDE + 1), torch.device("cpu"), 2, Waits())
    for change in changes:
        if change is None:
            tables.upload()
        elif isinstance(change, int):
            tables.clear(change)
        else:
            first, count, block = change
            cells = [*range(first, min(first + count, 4 * WIDE))]
            tables.write(cells, block)
            tables.write(cells[::2], [*range(len(cells[::2]))])
    tables.upload()
    for host, device in zip(tables.host, tables.device, strict=True):
        assert (device.numpy() == host).all()


STEP = st.dictionaries(st.integers(0, SLOTS - 1), demands(), min_size=1)


def test_a_block_that_others_own_too_does_not_become_free() -> None:
    pool = BlockPool(2)
    shared, own = pool.take(2)
    pool.share([shared])
    assert pool.sole([shared, own]) == 1
    pool.put([shared])
    assert (pool.sole([shared, own]), pool.free) == (2, 0)


def test_what_is_forgotten_leaves_a_block_as_any_other() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    for key in (b"one", b"two"):
        assert pool.file(key, block)
        pool.put([block])
        pool.forget(key)
        assert (pool.find(key), pool.free, pool.take(1)) == (None, 1, [block])


def test_giving_back_a_shared_block_makes_no_room() -> None:
    pool = BlockPool(1)
    table = BlockTable(pool, DeviceTables(2, (2,), torch.device("cpu"), 2, Waits()), 0)
    one = BlockDemand(*(np.array([column]) for column in (0, 0, 0, 0)))
    table.allocate(table.changes(np.array([0]), one))
    table.adopt(1, 0, [table.block(0, 0)])
    further = table.changes(np.array([1]), BlockDemand(*(column + 1 for column in one)))
    assert not table.can_allocate(further)
    table.free(0)
    assert table.can_allocate(further)


@given(steps=st.lists(STEP, max_size=8), size=st.integers(4, SLOTS * COLUMNS))
@example(steps=[{0: (0, 0, last, last)} for last in (0, 1, 3, 4, 2, 5)], size=9)
@example(steps=[{0: (0, 0, 2, 2)}, {0: (0, 0, 1, 3)}, {0: (0, 0, 2, 4)}], size=9)
def test_slots_own_what_they_demand(steps: list[dict[int, tuple[int, ...]]], size: int) -> None:
    pool = BlockPool(size)
    # The table in front has an odd size.
    tables = DeviceTables(SLOTS, (COLUMNS + 1, COLUMNS), torch.device("cpu"), 2, Waits())
    table = BlockTable(pool, tables, 1)
    owned: list[set[int]] = [set() for _ in range(SLOTS)]
    for step in steps:
        wanted = [set(columns) for columns in owned]
        for slot, (first, fresh, last, kept) in step.items():
            wanted[slot] &= {*range(first, kept + 1)}
            wanted[slot] |= {*range(fresh, last + 1)}
        changes = table.changes(np.array([*step]), BlockDemand(*np.array([*step.values()]).T))
        room = table.can_allocate(changes)
        assert room == (sum(map(len, wanted)) <= size)
        if room:
            new = sum(len(after - before) for before, after in zip(owned, wanted, strict=True))
            assert len(table.allocate(changes)) == new
            owned = wanted
        tables.upload()
        assert (tables.device[0] == FREE).all()
        rows = table.device_table.tolist()
        assert [{i for i, b in enumerate(row) if b != FREE} for row in rows] == owned
        blocks = [block for row in rows for block in row if block != FREE]
        assert len(set(blocks)) == len(blocks) == size - pool.free
