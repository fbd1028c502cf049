"""The launch that begins a step: it folds the last ended step's counts in and places the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.device.transfer import Staging
from hybrid_runtime.state.base import LayoutPolicy
from hybrid_runtime.state.ledger import Ledger
from hybrid_runtime.state.pack import pack_unfinished
from hybrid_runtime.state.stats import Stats
from hybrid_runtime.state.step import Step


class Placement:
    """Where the device has put the rows of each step, and the counts that it does not know yet.

    pending: the last ended step, whose counts the next launch folds in; None: there is none.
    """

    def __init__(
        self,
        policy: LayoutPolicy,
        ledger: Ledger,
        staging: Staging,
        stats: Stats,
        depth: int,
        device: torch.device,
    ) -> None:
        self._policy, self._ledger = policy, ledger
        self._staging, self._stats = staging, stats
        n = ledger.max_rows
        self._placed = [
            torch.full((4, n), -1, dtype=torch.int32, device=device) for _ in range(depth)
        ]
        self._no_counts = torch.ones(n, dtype=torch.int32, device=device)
        self.reset()

    def reset(self) -> None:
        """No step has ended whose counts are still to be folded in."""
        self.pending: Step | None = None
        self._counts = self._no_counts

    def place(self, number: int, entries: Tensor, lines: int, num_rows: int) -> Tensor:
        """Place the first `num_rows` of `lines` packed lines as step `number`, in one launch; its
        table, see `Step.placed`."""
        placed = self._placed[number % len(self._placed)]
        self._launch(entries, lines, num_rows, placed, self._policy.outputs)
        return placed

    def ended(self, step: Step, counts: Tensor) -> None:
        """`step` has ended with `counts`, int32 `[rows]` or longer; the pending one is finished.
        The counts must stay unchanged until the next launch."""
        self.pending, self._counts = step, counts if len(step.rows) else self._no_counts

    def finish_pending(self) -> None:
        """Fold the pending step, if any, in by a launch of its own: a second one ends before a step
        begins."""
        if self.pending is None:
            return
        index, packed = self._staging.take()
        lines = pack_unfinished(packed, self._ledger, 0)
        entries = self._staging.upload(index, lines)
        self._stats.uploads += 1
        # Not into the step's outputs: the runner may still be about to read the youngest step's.
        self._launch(entries, lines, 0, self.pending.placed, self._policy.nowhere)
        self._ledger.unfinished[:] = -1

    def previous(self) -> tuple[Tensor, Tensor]:
        """What the pending step placed, and its counts; where there is none, any such tensors."""
        placed = self._placed[0] if self.pending is None else self.pending.placed
        return placed, self._counts

    def _launch(
        self, entries: Tensor, lines: int, num_rows: int, placed: Tensor, outputs: Any
    ) -> None:
        previous, counts = self.previous()
        slots = self._policy.slots
        self._policy.advance(entries, lines, num_rows, previous, counts, placed, slots, outputs)
        self.pending, self._counts = None, self._no_counts
