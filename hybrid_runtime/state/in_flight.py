"""Results of steps on their way to the host: in step order, by slot and generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.transfer import Readback
from hybrid_runtime.state.boundaries import Bools, Ints
from hybrid_runtime.state.checks import check_resolved
from hybrid_runtime.state.ledger import Ledger
from hybrid_runtime.state.placement import NO_ROWS, LayoutPolicy, Outcome
from hybrid_runtime.state.step import Checkpoint, Step

Book = Callable[[NDArray[np.int32]], None]
"""Takes the accepted counts of one step, int32 `[rows]`."""


class Prepared(NamedTuple):
    """What is known of the oldest step before its counts are.

    current: bool `[rows]`, whose requests still hold their slots.
    version: of the slot table then.
    certain: tokens certain after the step, exactly, `[rows]`.
    outcome: what the layout leaves behind, from the counts.
    inside: checkpoints that it leaves inside rows.
    """

    current: Bools
    version: int
    certain: Ints
    outcome: Callable[[NDArray[np.int32]], Outcome | None]
    inside: list[Checkpoint]


class InFlightSteps:
    """Steps whose accepted counts the host has not seen yet, oldest first.

    Counts settle in step order, so that `ledger.computed` is exact when a step's turn comes.
    """

    def __init__(
        self,
        ledger: Ledger,
        readback: Readback | None,
        policy: LayoutPolicy,
        cuts: bool,
    ) -> None:
        self._ledger = ledger
        self._readback = readback
        self._policy = policy
        self._cuts = cuts
        self._open: list[Step] = []
        self.rows_copied = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def queued(self) -> list[Step]:
        """Steps whose counts have not been read, oldest first."""
        return [step for step in self._open if step.accepted is None]

    def of(self, slot: int) -> list[Step]:
        """Those that the request in `slot` has a row in."""
        generation = self._ledger.generation[slot]

        def runs(step: Step) -> bool:
            return bool(((step.rows.slot == slot) & (step.generation == generation)).any())

        return [step for step in self.queued if runs(step)]

    def require(self, step: Step, ended: bool | None = None) -> None:
        """Raise `ValueError` unless `step` is outstanding here, and has ended or has not."""
        if step in self._open and step.ended is (step.ended if ended is None else ended):
            return
        if not isinstance(step, Step):
            raise ValueError(f"step is {step!r}; it must be one outstanding in this manager")
        what = "is not outstanding in this manager"
        if step.accepted is not None:
            what = "whose results have been read; it is over"
        if ended is False and step.ended:
            what = "which has ended; a step ends once"
        elif ended and step in self._open:
            what = "which has not ended; it has no counts"
        raise ValueError(f"step is {step.number}, {what}")

    def has_settled(self, step: Step) -> bool:
        """Whether the counts of `step` are known; refuses one of another manager."""
        if not isinstance(step, Step) or step.accepted is None:
            return False
        if step.positions is not self._policy.positions:  # each manager has its own
            raise ValueError(f"step is {step.number}, which another manager began")
        return True

    def reset(self) -> None:
        """No step is outstanding."""
        self._open.clear()

    def append(self, step: Step) -> None:
        """A step was begun."""
        self._open.append(step)

    def make_room(self, most: int) -> None:
        """Settle the oldest steps until at most `most` are outstanding."""
        while len(self._open) > most:
            oldest = self._open[0]
            if not oldest.ended:
                raise ValueError(
                    f"{len(self._open)} steps are outstanding and step {oldest.number} has not "
                    f"ended; at most steps_in_flight ({most}) may be"
                )
            self.settle_until(oldest, "too many steps in flight")

    def check_turn(self, step: Step) -> None:
        """Raise `ValueError` if an older step has not ended, whose counts `step` builds on."""
        for older in self._open[: self._open.index(step)]:
            if not older.ended:
                raise ValueError(
                    f"step is {step.number}; step {older.number} must end first, because the host "
                    "decides on their counts in step order"
                )

    def start(self, step: Step, counts: Tensor) -> bool:
        """Start the counts of `step`, the first of `counts`, on their way; whether there is one."""
        if self._readback is None:
            return False
        self._readback.start(step.number, counts[: len(step.rows)])
        return True

    def decide(self, step: Step, reason: str) -> None:
        """Wait for the counts of `step`, which has just ended; if they are refused, it has not."""
        try:
            self.settle_until(step, reason)
        except ValueError:
            step.ended = False
            raise

    def prepare_settle(self, step: Step) -> Book:
        """All of settling `step` that needs no counts; what settles it by counts that the runner
        fetched itself."""
        if self._readback is not None:
            raise ValueError("readback is True; it must be False if counts come through resolve()")
        if self.has_settled(step):
            return lambda accepted: None  # abandoned, or resolved before
        self.require(step)
        prepared, rows = self._prepare(step), len(step.rows)
        return lambda accepted: self._book(step, prepared, check_resolved(accepted, rows))

    def settle_until(self, step: Step, reason: str) -> None:
        """Settle everything up to `step`, waiting if it must."""
        if self._readback is None:
            raise ValueError("readback is False; counts reach the manager through resolve()")
        while step.accepted is None:
            oldest = self._open[0]
            if not oldest.ended:
                raise ValueError(
                    f"step {oldest.number} has not ended; results settle in step order"
                )
            prepared = self._prepare(oldest)
            self._book(oldest, prepared, self._readback.read(oldest.number, reason))

    def _prepare(self, step: Step) -> Prepared:
        """What is known of the oldest step; changes nothing."""
        if not self._open or self._open[0] is not step or not step.ended:
            raise ValueError(f"step is {step.number}; counts must be handed in in step order")
        ledger, rows, policy = self._ledger, step.rows, self._policy
        current = step.current(ledger.generation, ledger.live)
        if ledger.ended:
            current &= ~np.isin(rows.slot, list(ledger.ended))
        computed = np.where(current, ledger.computed[rows.slot], 0).astype(np.int64)
        certain = computed + rows.certain
        inside: list[Checkpoint] = []
        if self._cuts and rows.chunked:
            cut = policy.inside(computed, certain, rows.draft, step.kept)
            inside = self._checkpoints(step, cut, current & (cut > 0))
        outcome = policy.prepare_settle(step, computed, certain, current)
        return Prepared(current, ledger.version, certain, outcome, inside)

    def _book(self, step: Step, prepared: Prepared, accepted: NDArray[np.int32]) -> None:
        """Book the counts of the oldest step: exact positions, copies made, checkpoints
        published."""
        ledger, rows = self._ledger, step.rows
        current, version, certain, outcome, inside = prepared
        ended = NO_ROWS
        if self._policy.ends_texts and accepted.min(initial=0) < 0:
            ended, accepted = np.flatnonzero(current & (accepted < 0)), np.abs(accepted)
        if self._open[:1] != [step] or ledger.version != version:
            raise ValueError(f"step is {step.number}; no other call may come before its counts")
        bad = current & ((accepted < 0) | (accepted > rows.draft + 1))
        if np.count_nonzero(bad):
            i = int(bad.argmax())
            raise ValueError(
                f"num_accepted[{i}] is {accepted[i]} in step {step.number}; it must be in "
                f"0..{rows.draft[i] + 1}, drafts plus the bonus token"
            )
        left = outcome(accepted)
        dead = NO_ROWS
        if np.count_nonzero(accepted) < accepted.size:
            dead = np.flatnonzero(current & (accepted == 0) & (rows.draft > 0))
        step.copied, step.published = NO_ROWS, inside
        if left is not None:
            copied = left.copied & current
            copied[dead] = False
            step.copied = np.flatnonzero(copied)
            self.rows_copied += len(step.copied)
            step.published = inside + self._checkpoints(
                step, left.position, left.complete & current
            )
        for checkpoint in step.published:
            ledger.stored[checkpoint.slot] = checkpoint[2:]
        ledger.ended.update(rows.slot[ended].tolist())
        final = certain + np.maximum(accepted, 1) - 1
        ledger.computed[rows.index[current]] = final[current]
        self._open.pop(0)
        self._shed()
        step.accepted = accepted
        for row in dead:
            ledger.release(int(rows.slot[row]))

    def _checkpoints(self, step: Step, position: Ints, stored: Bools) -> list[Checkpoint]:
        """At each `position`, `[rows]`, that is `stored`."""
        if not np.count_nonzero(stored):
            return []
        columns = self._policy.column(step.rows, position)
        return [
            Checkpoint(
                int(step.rows.slot[i]), int(step.generation[i]), int(position[i]), int(columns[i])
            )
            for i in np.flatnonzero(stored)
        ]

    def abandon(self, step: Step) -> None:
        step.ended = True
        step.accepted = np.zeros(len(step.rows), np.int32)
        self._shed()

    def _shed(self) -> None:
        """Drop abandoned steps, but only once they are the oldest: buffers go round by step number,
        so the numbers of outstanding steps must not lie further apart than there are buffers."""
        while self._open and self._open[0].accepted is not None:
            self._open.pop(0)
