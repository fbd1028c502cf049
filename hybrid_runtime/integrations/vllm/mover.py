"""Uploads a step's candidates and launches for them: one copy to the device in a step that has
any, one kernel per phase, and nothing otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Staging
from hybrid_runtime.integrations.vllm.bounds import Bounds, Candidates
from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.kernels.step.vllm_decide import (
    POSTCOPY,
    PRECOPY,
    REQUEST,
    VllmCounts,
    decide_and_move,
)


@dataclass(slots=True, eq=False)
class StagedStep:
    """Candidates of one step on the device.

    rows: vLLM's tensor of the step's slots, by which the end of the step is recognised.
    entries: int32 `[lines, ENTRY_FIELDS]`, candidates of the pre-copy, then of the post-copy; None
        when there are none.
    precopy, postcopy: how many there are of each.
    """

    rows: Tensor
    entries: Tensor | None
    precopy: int
    postcopy: int

    def count(self, phase: int) -> int:
        """Candidates of a phase."""
        return self.precopy if phase == PRECOPY else self.postcopy

    def lines(self, phase: int) -> Tensor | None:
        """Entries of a phase's candidates, and whatever lies behind them."""
        if self.entries is None or phase == PRECOPY:
            return self.entries
        return self.entries[self.precopy :]


class Mover:
    """Moves states for the candidates of each step.

    bounds: whose candidates they are; gives the block size and the retention rule.
    by_slot: the block tables' rows are request slots, not rows of the batch.
    depth: steps whose entries must stay on the device at a time.
    """

    replays = False
    """Whether accepted guesses are no part of the states."""

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

    def stage(
        self, rows: Tensor, candidates: Candidates, slot: NDArray[Any], scheduled: NDArray[Any]
    ) -> StagedStep:
        """Upload a step's candidates; `slot` and `scheduled` are of all its rows."""
        precopy, postcopy = len(candidates.precopy), len(candidates.postcopy)
        stop = precopy + postcopy
        if not stop:
            return StagedStep(rows, None, 0, 0)
        index, packed = self._staging.take()
        listed = np.concatenate((candidates.precopy, candidates.postcopy))
        lines = packed[:stop]
        lines[:, REQUEST] = slot[listed]
        lines[:, fields.SLOT] = lines[:, REQUEST] if self.by_slot else listed
        lines[:, fields.SCHEDULED] = scheduled[listed]
        lines[:, fields.EVERY] = self._bounds.every
        lines[:, fields.FIRST] = candidates.first[listed] if len(candidates.first) else 0
        lines[:, fields.SECOND] = 0
        return StagedStep(rows, self._staging.upload(index, stop), precopy, postcopy)

    def run(self, step: StagedStep, counts: VllmCounts, phase: int) -> None:
        """Decide on a phase's candidates and move what acts."""
        count, lines = step.count(phase), step.lines(phase)
        if count and lines is not None:
            self._launch(lines, count, counts, phase)

    def warm_up(self, counts: VllmCounts) -> None:
        """Compile for lists of any length, on entries that decide and move nothing."""
        one = torch.ones_like(counts.computed)
        scratch = VllmCounts(torch.zeros_like(one), one.clone(), one)
        totals, most = self.totals.clone(), self.moves.shape[1]
        entries = torch.zeros((most, fields.ENTRY_FIELDS), dtype=torch.int32, device=totals.device)
        for power in range(4, max(most - 1, 15).bit_length() + 1):
            for phase in (PRECOPY, POSTCOPY):
                self._launch(entries, min(1 << power, most), scratch, phase)
        self.totals.copy_(totals)

    def _launch(self, entries: Tensor, count: int, counts: VllmCounts, phase: int) -> None:
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
            self.replays,
        )
