"""A bound manager of four slots, by default in the columns layout, and steps of it: to test the
interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from helpers.toy_recurrences import HASH
from numpy.typing import NDArray

from hybrid_runtime.state import HybridStateManager, StateLayout, StepRows

K, SLOTS, COLUMNS, BLOCK = 3, 4, 12, 8
LAYOUT = StateLayout(HASH.recurrence, K, BLOCK)


def manager(layout: StateLayout = LAYOUT, **options: Any) -> HybridStateManager:
    made = HybridStateManager(layout, SLOTS, K, "cpu", **options)
    made.bind({0: layout.allocate(SLOTS * COLUMNS, "cpu")}, tables())
    return made


def tables() -> torch.Tensor:
    return torch.arange(SLOTS * COLUMNS, dtype=torch.int32).view(SLOTS, COLUMNS)


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def started(*slots: int, prompt: int = 5, **options: Any) -> HybridStateManager:
    """A manager whose `slots` have read their prompts."""
    made = manager(**options)
    for slot in slots:
        made.admit(slot)
    n = len(slots)
    step = made.begin_step(StepRows.exact(slots, [0] * n, [prompt] * n, [0] * n))
    made.end_step(step, counts(*[1] * n))
    return made


def checkpoint(made: HybridStateManager) -> list[Any]:
    """Everything that a refused call must leave as it was."""
    slot_table, stats = made._ledger, made.stats()
    device = [t.clone() for t in (*made._policy.slots, *made._policy.outputs)]
    host: list[NDArray[Any]] = [
        slot_table.live, slot_table.known, slot_table.computed, slot_table.certain,
        slot_table.written, slot_table.held, slot_table.stored,
    ]  # fmt: skip
    return [*(t.tolist() for t in device), *(a.tolist() for a in host), stats.steps, stats.uploads]


def rows(**changes: Any) -> StepRows:
    """A decode step of slots 0 and 1 after 5 tokens each, with changes."""
    fields = {"slot": [0, 1], "computed_min": [5, 5], "computed_max": [5, 5]}
    fields |= {"scheduled": [4, 4], "draft": [3, 3]} | changes
    return StepRows(**{name: np.array(value, np.int32) for name, value in fields.items()})
