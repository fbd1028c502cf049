"""State blocks of running requests: which each owns, and in which columns its rows find them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.engine.block_pool import BlockPool, BlockTable
from hybrid_runtime.engine.device_tables import FREE, DeviceTables
from hybrid_runtime.engine.request import Hit
from hybrid_runtime.engine.wanted import Wanted
from hybrid_runtime.state.boundaries import Ints
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Checkpoint


class StateBlocks(Protocol):
    """What scheduler and prefix cache know of either layout's blocks.

    anywhere: checkpoints may lie at any position, not only at multiples of `block_size`.
    pool: that they are taken from.
    device_table: int32 `[slots, columns]`, which block a column is, as of the last upload.
    """

    @property
    def anywhere(self) -> bool: ...

    @property
    def pool(self) -> BlockPool: ...

    @property
    def device_table(self) -> Tensor: ...

    def admit(self, manager: HybridStateManager, slot: int, hit: Hit, wanted: Wanted) -> None:
        """A request begins in a free slot, with its hit."""

    def changes(self, manager: HybridStateManager, rows: StepRows, known: Ints) -> Any:
        """What must change before a step of these rows. known: tokens computed as far as results
        have been read, `[rows]`."""

    def can_allocate(self, changes: Any) -> bool:
        """Whether there are enough free blocks for them."""

    def allocate(self, changes: Any) -> list[int]:
        """Make changes for which there is room; the blocks newly taken."""

    def named(self, rows: StepRows) -> StepRows:
        """The rows, with the checkpoints that they may store."""

    def block(self, checkpoint: Checkpoint) -> int:
        """The block that holds it, FREE if its request does not own that any more."""

    def filed(self, checkpoint: Checkpoint) -> None:
        """Others can find it, or nobody wants it."""

    def free(self, slot: int) -> None:
        """Give all blocks of a slot back."""

    def reset(self) -> None:
        """No block has an owner, whatever was before; their content is forgotten."""


class ColumnBlocks:
    """Of the columns layout: the manager says which columns a request must own."""

    anywhere = False

    def __init__(self, table: BlockTable, block_size: int) -> None:
        self._table, self._block_size = table, block_size
        self.pool, self.device_table = table.pool, table.device_table
        self.can_allocate, self.allocate = table.can_allocate, table.allocate
        self.free, self.reset = table.free, table.reset

    def admit(self, manager: HybridStateManager, slot: int, hit: Hit, wanted: Wanted) -> None:
        column = None
        if hit.state is not None:
            column = hit.tokens // self._block_size - 1
            self._table.adopt(slot, column, [hit.state])
        manager.admit(slot, hit.tokens, column)
        rule = wanted.every, wanted.places
        if rule != (self._block_size, ()):  # which is the manager's own
            manager.retain(slot, *rule)

    def changes(self, manager: HybridStateManager, rows: StepRows, known: Ints) -> Any:
        return self._table.changes(rows.index, manager.block_demand(rows, known))

    def named(self, rows: StepRows) -> StepRows:
        return rows

    def block(self, checkpoint: Checkpoint) -> int:
        return self._table.block(checkpoint.slot, checkpoint.column)

    def filed(self, checkpoint: Checkpoint) -> None:
        return None


@dataclass(slots=True)
class Owned:
    """Blocks of one request in the replay layout, as (column, block), by position.

    certain: fewest tokens that are certain after its queued steps, drafts aside.
    live: block of its state; FREE before its first step.
    source: what it starts from, by the tokens of its hit.
    named: checkpoints that a step may still store.
    stored: those that queued steps have stored.
    filed: positions of those whose blocks are not needed for filing any more.
    """

    wanted: Wanted
    certain: int
    live: int = FREE
    source: dict[int, tuple[int, int]] = field(default_factory=dict)
    named: dict[int, tuple[int, int]] = field(default_factory=dict)
    stored: dict[int, tuple[int, int]] = field(default_factory=dict)
    filed: set[int] = field(default_factory=set)

    def blocks(self) -> list[int]:
        pairs = (*self.source.values(), *self.named.values(), *self.stored.values())
        return [block for _, block in pairs] + [self.live] * (self.live != FREE)


class Change(NamedTuple):
    """What one request needs before a step.

    certain: as of `Owned`, after the step.
    positions: of the checkpoints that it is going to name besides.
    columns: that they go to.
    live: it needs its live block.
    ahead: the first wanted position behind them.
    """

    slot: int
    certain: int
    positions: list[int]
    columns: list[int]
    live: bool
    ahead: int


class RoleBlocks:
    """Of the replay layout. A request's row of the table has four columns: the last one for the
    live state, the others in turn for the checkpoint that it starts from and two that a step may
    store. A column may change hands as soon as the step that stores its checkpoint is queued,
    because later steps are launched behind it; the block stays the request's until the checkpoint
    is filed and no step starts from it."""

    LIVE = 3
    anywhere = True

    def __init__(self, pool: BlockPool, tables: DeviceTables, index: int) -> None:
        self.pool, self._tables, self._index = pool, tables, index
        self.device_table, self._start = tables.device[index], tables.start[index]
        slots = len(tables.host[index])
        self._owned: list[Owned | None] = [None] * slots
        self._save_at: NDArray[np.int32] = np.zeros((slots, 2), np.int32)
        self._save_to: NDArray[np.int32] = np.full((slots, 2), FREE, np.int32)
        # A row that reaches this position must be looked at.
        self._attend: NDArray[np.int64] = np.zeros(slots, np.int64)

    def admit(self, manager: HybridStateManager, slot: int, hit: Hit, wanted: Wanted) -> None:
        self._owned[slot] = owned = Owned(wanted, hit.tokens)
        self._save_at[slot], self._attend[slot] = 0, 0
        if hit.state is not None:
            self.pool.share([hit.state])
            owned.source[hit.tokens] = 0, hit.state
            self._write(slot, [0], [hit.state])
        manager.admit(slot, hit.tokens, 0 if owned.source else None)

    def changes(self, manager: HybridStateManager, rows: StepRows, known: Ints) -> list[Change]:
        most = rows.computed_max + rows.scheduled
        due = (most >= self._attend[rows.index]).nonzero()[0]
        return [
            self._change(int(rows.index[i]), int(rows.certain_min[i]), int(most[i])) for i in due
        ]

    def can_allocate(self, changes: list[Change]) -> bool:
        return sum(len(c.positions) + c.live for c in changes) <= self.pool.free

    def allocate(self, changes: list[Change]) -> list[int]:
        taken: list[int] = []
        for slot, certain, positions, columns, live, ahead in changes:
            owned = self._of(slot)
            owned.certain = certain
            blocks = self.pool.take(len(positions) + live)
            taken += blocks
            if live:
                owned.live = blocks[-1]
            owned.named.update(zip(positions, zip(columns, blocks, strict=False), strict=True))
            self._write(slot, [*columns, *[self.LIVE] * live], blocks)
            self._note(slot, owned, ahead)
        return taken

    def named(self, rows: StepRows) -> StepRows:
        save_at = self._save_at[rows.index]
        if not np.count_nonzero(save_at):
            return rows
        return replace(rows, save_at=save_at, save_to=self._save_to[rows.index])

    def block(self, checkpoint: Checkpoint) -> int:
        owned = self._owned[checkpoint.slot]
        if owned is None:
            return FREE
        if checkpoint.column == self.LIVE:
            return owned.live
        found = owned.stored.get(checkpoint.position) or owned.named.get(checkpoint.position)
        return FREE if found is None else found[1]

    def filed(self, checkpoint: Checkpoint) -> None:
        owned = self._owned[checkpoint.slot]
        if owned is not None and checkpoint.column != self.LIVE:
            owned.filed.add(checkpoint.position)

    def free(self, slot: int) -> None:
        owned = self._owned[slot]
        if owned is not None:
            self.pool.put(owned.blocks())
            self._write(slot, [*range(self.LIVE + 1)], FREE)
        self._owned[slot] = None

    def reset(self) -> None:
        self.pool.reset()
        self._tables.clear(self._index)
        self._owned = [None] * len(self._owned)

    def _of(self, slot: int) -> Owned:
        owned = self._owned[slot]
        assert owned is not None
        return owned

    def _change(self, slot: int, certain: int, most: int) -> Change:
        """Before a step after which `certain` tokens or more are certain, and which ends at `most`
        or less, drafts and all: let go of what earlier steps have stored, and name what this one
        may reach."""
        owned = self._of(slot)
        passed = owned.certain
        for position in [at for at in owned.named if at <= passed]:
            owned.stored[position] = owned.named.pop(position)
        # Where a step ended on a position, the state may lie in the checkpoint's own block.
        for held in (owned.source, owned.stored):
            for position in [at for at in held if at < passed]:
                if held is owned.source or position in owned.filed:
                    self.pool.put([held.pop(position)[1]])
                    owned.filed.discard(position)
        read = (*owned.source.values(), *(owned.stored[at] for at in owned.stored if at == passed))
        busy = {column for column, _ in (*read, *owned.named.values())}
        columns = [column for column in range(self.LIVE) if column not in busy]
        room, positions = min(2 - len(owned.named), len(columns)), list[int]()
        position = owned.wanted.next(max([passed, *owned.named]))
        while position <= most and len(positions) < room:
            positions.append(position)
            position = owned.wanted.next(position)
        live = owned.live == FREE
        return Change(slot, certain, positions, columns[: len(positions)], live, position)

    def _note(self, slot: int, owned: Owned, ahead: int) -> None:
        """Write down what the slot's rows name from now on, and when to look again."""
        pairs = sorted((at, column) for at, (column, _) in owned.named.items())
        pairs += [(0, FREE)] * (2 - len(pairs))
        self._save_at[slot] = [at for at, _ in pairs]
        self._save_to[slot] = [column for _, column in pairs]
        self._attend[slot] = 0 if owned.source or owned.named or owned.stored else ahead

    def _write(self, slot: int, columns: list[int], blocks: list[int] | int) -> None:
        first = self._start + slot * (self.LIVE + 1)
        self._tables.write([first + column for column in columns], blocks)
