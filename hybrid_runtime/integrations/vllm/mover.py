"""Uploads a step's candidates and launches for them: one copy to the device in a step that has
any, one kernel per phase, and nothing otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Staging
from hybrid_runtime.integrations.vllm.bounds import Bounds, Plan
from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.kernels.step.vllm_decide import AFTER, BEFORE, REQUEST, Counts, decide_and_move


class Step:
    """Candidates of one step on the device: `before` lines first, then `after`."""

    __slots__ = ("after", "before", "entries", "rows")

    def __init__(self, rows: Tensor, entries: Tensor | None, before: int, after: int) -> None:
        self.rows, self.entries, self.before, self.after = rows, entries, before, after


class Mover:
    """Moves states for the rows that a plan names.

    by_slot: the block tables' rows are request slots, not rows of the batch. depth: steps whose
    entries must stay on the device at a time.
    """

    def __init__(
        self, states: StateTable, bounds: Bounds, max_requests: int, by_slot: bool, depth: int
    ) -> None:
        device = states.addresses.device
        self.states = states
        self.by_slot = by_slot
        self.waits = Waits()
        self.moves = torch.full((3, max_requests), -1, dtype=torch.int32, device=device)
        self.totals = torch.zeros(2, dtype=torch.int64, device=device)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self._bounds = bounds
        self._staging = Staging(2 * max_requests, fields.ENTRY_FIELDS, depth, device, self.waits)

    def stage(self, rows: Tensor, plan: Plan, slot: NDArray[Any], scheduled: NDArray[Any]) -> Step:
        """Upload the candidates of a plan. rows: vLLM's own tensor of the step's slots, by which
        its end is recognised."""
        before, after = len(plan.moving), len(plan.crossing)
        if not before + after:
            return Step(rows, None, 0, 0)
        index, packed = self._staging.take()
        stop = before + after
        listed = np.concatenate((plan.moving, plan.crossing))
        lines = packed[:stop]
        lines[:, REQUEST] = slot[listed]
        lines[:, fields.SLOT] = lines[:, REQUEST] if self.by_slot else listed
        lines[:, fields.SCHEDULED] = scheduled[listed]
        lines[:, fields.EVERY] = self._bounds.every
        lines[:, fields.FIRST] = plan.first[listed] if len(plan.first) else 0
        lines[:, fields.SECOND] = 0
        return Step(rows, self._staging.upload(index, stop), before, after)

    def run(self, step: Step, counts: Counts, phase: int) -> None:
        """Decide on a phase's candidates and move what acts."""
        count = step.before if phase == BEFORE else step.after
        if not count or step.entries is None:
            return
        entries = step.entries if phase == BEFORE else step.entries[step.before :]
        self._launch(entries, count, counts, phase)

    def warm_up(self, counts: Counts) -> None:
        """Compile for lists of any length, on entries that decide and move nothing."""
        one = torch.ones_like(counts.computed)
        scratch = Counts(torch.zeros_like(one), one.clone(), one)
        totals, most = self.totals.clone(), self.moves.shape[1]
        entries = torch.zeros((most, fields.ENTRY_FIELDS), dtype=torch.int32, device=totals.device)
        for power in range(4, max(most - 1, 15).bit_length() + 1):
            for phase in (BEFORE, AFTER):
                self._launch(entries, min(1 << power, most), scratch, phase)
        self.totals.copy_(totals)

    def _launch(self, entries: Tensor, count: int, counts: Counts, phase: int) -> None:
        decide_and_move(
            self.states,
            entries,
            count,
            counts,
            self.moves,
            self.totals,
            self._arrived,
            self._bounds.block_size,
            phase,
        )
