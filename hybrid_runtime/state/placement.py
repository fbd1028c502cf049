"""Placing a step's rows: how the host packs them, when the lines that were packed last serve again,
and the launch that puts them in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.transfer import Staging
from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.state.boundaries import LONGEST, Bools, Ints, RetentionRule, blocks_below
from hybrid_runtime.state.ledger import Ledger, StateColumns
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.stats import Stats
from hybrid_runtime.state.step import Step, StepPositions

NO_ROWS: NDArray[np.intp] = np.empty(0, np.intp)
Ints2D = NDArray[np.int64]


class BlockDemand(NamedTuple):
    """Columns of its block table that each row's request must own in a step, int `[rows]` each
    (columns layout).

    A request owns all of `fresh .. last`, and keeps what it has of `first .. kept`; it gives back
    all others. Between a column that is read and the first that is written it need own none. In
    padded rows there are none.

    first: lowest column that may still be read, or whose checkpoint the runner may still file.
    fresh: lowest column that may be written.
    last: highest column that may be written; below `fresh` if nothing is.
    kept: highest column that is not given back.
    """

    first: Ints
    fresh: Ints
    last: Ints
    kept: Ints


class StepPlan(NamedTuple):
    """What the host decides before a step, from bounds.

    columns: where the step leaves its rows' states.
    candidates: rows for which a copy of a state cannot be ruled out.
    moving: the same for the copy before the forward pass (in-place runners).
    """

    columns: StateColumns
    candidates: NDArray[np.intp]
    moving: NDArray[np.intp] = NO_ROWS


class Outcome(NamedTuple):
    """What a step with known counts has left, `[rows]`.

    position: in tokens, where it may have left a checkpoint: a wanted position (replay), or the
        last block boundary that it passed or ended on (columns).
    complete: the checkpoint there is in its column.
    copied: that took a copy of a state, unless the row is dead.
    """

    position: Ints
    complete: Bools
    copied: Bools


class LayoutPolicy(Protocol):
    """What each of the two layouts does in its own way.

    ends_texts: counts may be negative, see `HybridStateManager.end_step`.
    """

    ends_texts: bool

    @property
    def slots(self) -> Any:
        """Exact state by slot: a NamedTuple of int32 `[max_requests]`, the first `computed`."""

    @property
    def outputs(self) -> Any:
        """What the launch that places a step writes: a NamedTuple of int32 `[max_rows]`."""

    @property
    def nowhere(self) -> Any:
        """`outputs` of a launch that places no row; never read."""

    @property
    def positions(self) -> StepPositions:
        """`outputs` as kernels read them."""

    def kept(self, rows: StepRows) -> RetentionRule:
        """At which positions the rows' checkpoints are wanted, `[rows]` or for all."""

    def inside(self, computed: Ints, certain: Ints, draft: Ints, kept: RetentionRule) -> Ints:
        """The position strictly inside each row without drafts, from `computed` to `certain`, at
        which it leaves a checkpoint if the runner's kernels can; 0: there is none."""

    def column(self, rows: StepRows, position: Ints) -> Ints:
        """The column that the checkpoint at each row's `position` goes to, `[rows]`; meaningless
        for other positions than those that are kept."""

    def pack(self, packed: NDArray[np.int32], rows: StepRows) -> tuple[StepPlan, int]:
        """Fill `packed` with a step's lines; its plan, and how many lines.

        Raises `ValueError` for rows that contradict their slots; only `packed` has changed then.
        """

    def state_columns(self, rows: StepRows) -> StateColumns:
        """Where a step of `rows` leaves its states."""

    def repeat_range(self, rows: StepRows) -> RepeatRange:
        """Counts of these rows with which nothing can be copied or stored."""

    def repeat(self, rows: StepRows, last: StepRows, kept: RetentionRule) -> StepPlan | None:
        """The plan of `rows`, which differ from those of the last step, `last`, in their counts
        only; None if other lines must be packed for them, or they must be refused."""

    def advance(
        self,
        entries: Tensor,
        lines: int,
        num_rows: int,
        previous: Tensor,
        accepted: Tensor,
        placed: Tensor,
        slots: Any,
        outputs: Any,
    ) -> None:
        """Fold the previous step's counts into `slots` and place this one, in one launch.

        entries: the step's lines, of which the first `num_rows` are rows.
        previous, accepted: what the previous step placed, and the counts that it ended with.
        placed, slots, outputs: written; `slots` and `outputs` as the policy has them.
        """

    def touched(self, rows: StepRows, computed: Ints, outputs: Any) -> tuple[Ints2D, Ints2D]:
        """Columns that a placed step reads and those that it may write, `[rows, ..]`; -1: none.

        computed: exact tokens computed before it. outputs: what the launch that places it wrote.
        """

    def prepare_settle(
        self, step: Step, computed: Ints, certain: Ints, current: Bools
    ) -> Callable[[NDArray[np.int32]], Outcome | None]:
        """What the step leaves, as far as that needs no accepted counts; the call that takes them
        and books. Meaningless in rows that are not `current`.

        computed: tokens before it. certain: after it, drafts aside. Both exact, `[rows]`.
        """


def pack_rows(packed: NDArray[np.int32], ledger: Ledger, rows: StepRows) -> NDArray[np.int32]:
    """Fill the first lines of `packed` `[lines, ENTRY_FIELDS]` with this step's rows; what the host
    knows of their slots, `[rows, KNOWN_FIELDS]`, meaningless in padded rows."""
    entry = packed[: len(rows)]
    ledger.lines.take(rows.index, axis=0, out=entry, mode="wrap")
    entry[:, fields.SCHEDULED] = rows.scheduled
    entry[:, fields.DRAFT] = rows.draft
    return ledger.known.take(rows.index, axis=0, mode="wrap")


def pack_unfinished(packed: NDArray[np.int32], ledger: Ledger, start: int) -> int:
    """Add a line from `start` on for each slot of the pending step that the lines before it do not
    name; the number of lines now used."""
    left = ledger.unfinished >= 0
    named = packed[:start, fields.SLOT]
    left[named[named >= 0] if np.count_nonzero(named < 0) else named] = False
    slot = left.nonzero()[0]
    stop = start + len(slot)
    if len(slot):
        packed[start:stop] = 0
        packed[start:stop, fields.SLOT] = slot
        packed[start:stop, fields.PREVIOUS] = ledger.unfinished[slot]
    return stop


def unfiled_column(known: Ints, num_draft: int, block_size: int) -> Ints:
    """Lowest column with a checkpoint that the runner may still file, from the tokens computed as
    of the results that it has read, `known`: it lies no deeper than the last one that a step could
    still fold drafts beyond."""
    return blocks_below(np.maximum(known - num_draft, 0), block_size)


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


class RepeatRange(NamedTuple):
    """Counts with which repeated rows can neither copy nor store a state.

    first: int32 `[rows]`, the least tokens computed. length: uint32 `[rows]`, so many more counts.
    """

    first: NDArray[np.int32]
    length: NDArray[np.uint32]

    @classmethod
    def of(cls, first: Ints, end: Ints) -> RepeatRange:
        """`first` up to but without `end`, both `[rows]`."""
        first, end = np.minimum(first, LONGEST), np.minimum(end, LONGEST)
        return cls(first.astype(np.int32), np.maximum(end - first, 0).astype(np.uint32))

    def holds(self, rows: StepRows) -> bool:
        """Whether all counts of `rows` are among them."""
        # As an unsigned integer what lies before the first one is too large, too.
        outside = (rows.computed_max - self.first).view(np.uint32) >= self.length
        if not rows.exact_counts:
            outside |= (rows.computed_min - self.first).view(np.uint32) >= self.length
            outside |= rows.computed_min > rows.computed_max
        return not np.count_nonzero(outside)


class SavedUpload:
    """Steady decode: the same rows again, only further on. The device has their packed lines and
    the exact counts, so nothing is sent."""

    def __init__(self, ledger: Ledger, policy: LayoutPolicy) -> None:
        self._ledger, self._policy = ledger, policy
        self._last: Step | None = None
        self._version = -1
        self._range: RepeatRange | None = None

    def keep(self, step: Step, lines: int) -> None:
        """Remember a step that was packed in full, if it can be repeated as it is."""
        rows, n = step.rows, len(step.rows)
        self._last = self._range = None
        if not n or lines != n or rows.padded:
            return
        if np.count_nonzero(step.packed[:n, fields.ADMIT]):
            return
        if np.count_nonzero(step.packed[:n, fields.PREVIOUS] != np.arange(n)):
            return
        if rows.chunked and np.count_nonzero((rows.certain > 1) & (rows.draft > 0)):
            return
        self._last, self._version = step, self._ledger.version

    def match(self, rows: StepRows, pending: Step | None) -> tuple[Step, StepPlan] | None:
        """The step whose lines serve `rows` as well, and the plan of `rows`; None: they must be
        packed, or refused by name.

        pending: the last ended step, whose counts the next launch folds in.
        """
        last = self._last
        if last is None or pending is not last or self._version != self._ledger.version:
            return None
        if rows.key != last.rows.key:
            return None
        if self._range is not None and self._range.holds(rows):
            return last, StepPlan(self._policy.state_columns(rows), NO_ROWS)
        # What `check_rows` has not checked with the saved step: the counts.
        high = rows.computed_max.view(np.uint32)  # negative ones are too large as well
        if np.count_nonzero(high >= LONGEST):
            return None
        if not rows.exact_counts and np.count_nonzero(rows.computed_min.view(np.uint32) > high):
            return None
        plan = self._policy.repeat(rows, last.rows, last.kept)
        if plan is None:
            return None
        self._range = self._policy.repeat_range(rows)
        return last, plan

    def undisturbed(self, step: Step) -> bool:
        """Whether `step` is the last one begun, and all of its requests still hold their slots."""
        return step is self._last and self._version == self._ledger.version

    def repeated(self, step: Step) -> None:
        """`step` was begun with the saved lines."""
        self._last = step
