"""A bound manager of four slots, by default in the columns layout, and steps of it: to test the
interface."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from helpers.toy_recurrences import HASH
from numpy.typing import NDArray

from hybrid_runtime.state import HybridStateManager, StateLayout, Step, StepRows

K, SLOTS, COLUMNS, BLOCK = 3, 4, 12, 8
LAYOUT = StateLayout(HASH.recurrence, K, BLOCK)


def tables(columns: int = COLUMNS) -> torch.Tensor:
    return torch.arange(SLOTS * columns, dtype=torch.int32).view(SLOTS, columns)


def manager(
    *slots: int, kind: Any = "columns", columns: int = COLUMNS, **options: Any
) -> HybridStateManager:
    """A manager in which `slots` have been admitted."""
    layout = StateLayout(HASH.recurrence, K, BLOCK, kind=kind)
    made = HybridStateManager(layout, SLOTS, K, "cpu", **options)
    made.bind({0: layout.allocate(SLOTS * columns, "cpu")}, tables(columns))
    for slot in slots:
        made.admit(slot)
    return made


def started(*slots: int, prompt: int = 5, **options: Any) -> HybridStateManager:
    """A manager whose `slots` have read their prompts."""
    made, n = manager(*slots, **options), len(slots)
    run(made, StepRows.exact(slots, [0] * n, [prompt] * n, [0] * n), 1)
    return made


def run(made: HybridStateManager, rows: StepRows, *accepted: int) -> Step:
    """A whole step; one count is that of all rows."""
    step = begin(made, rows)
    made.end_step(step, counts(*np.full(len(rows), accepted)))
    return step


def begin(made: HybridStateManager, rows: StepRows) -> Step:
    """Begin a step whose rows want a checkpoint at each boundary, as they do in the columns
    layout where nothing else is said."""
    return made.begin_step(wanting(rows) if made.layout.replays and not rows.saves else rows)


def wanting(rows: StepRows) -> StepRows:
    """Rows of the replay layout that name the last two boundaries of blocks that they may reach,
    and as columns those of the blocks."""
    pairs = []
    for low, certain, draft in zip(rows.computed_min, rows.certain_max, rows.draft, strict=True):
        low -= K if draft or certain - low == 1 else 0
        reached = [b for b in range(BLOCK, certain + draft + 1, BLOCK) if b > low]
        pairs.append((*reached[-2:], 0, 0)[:2])
    save_at = np.array(pairs, np.int32).reshape(-1, 2)
    save_to = np.where(save_at > 0, save_at // BLOCK - 1, -1)
    return replace(rows, save_at=save_at, save_to=save_to)


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def between(low: Any, high: Any, scheduled: Any, draft: Any) -> StepRows:
    """Rows of slots 0 .. that have computed `low .. high` tokens; one number is that of all."""
    n = len(low)
    values = range(n), low, high, scheduled, draft
    return StepRows(*(np.full(n, value, np.int32) for value in values))


def exact(computed: list[int], scheduled: Any, draft: Any) -> StepRows:
    return between(computed, computed, scheduled, draft)


def rows(**changes: Any) -> StepRows:
    """A decode step of slots 0 and 1 after 5 tokens each, with changes."""
    fields = {"slot": [0, 1], "computed_min": [5, 5], "computed_max": [5, 5]}
    fields |= {"scheduled": [4, 4], "draft": [3, 3]} | changes
    return StepRows(**{name: np.array(value, np.int32) for name, value in fields.items()})


def checkpoint(made: HybridStateManager) -> list[Any]:
    """Everything that a refused call must leave as it was."""
    slot_table, stats = made._ledger, made.stats()
    device = [t.clone() for t in (*made._policy.slots, *made._policy.outputs)]
    host: list[NDArray[Any]] = [
        slot_table.live, slot_table.known, slot_table.computed, slot_table.certain,
        slot_table.written, slot_table.held, slot_table.stored, slot_table.lines,
    ]  # fmt: skip
    return [*(t.tolist() for t in device), *(a.tolist() for a in host), stats.steps, stats.uploads]
