"""HybridStateManager: where states are read and written under prefix caching and speculation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hybrid_runtime.device.process import OneProcess
from hybrid_runtime.device.sync import Waits, allowed
from hybrid_runtime.device.transfer import Readback, Staging
from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.state.align.columns import ColumnsPolicy
from hybrid_runtime.state.boundaries import Ints
from hybrid_runtime.state.checks import (
    Strategy,
    check_checkpoints,
    check_counts,
    check_flush_inputs,
    check_options,
    check_rows,
    check_states,
    check_tables,
)
from hybrid_runtime.state.debug import check_accepted, check_step
from hybrid_runtime.state.in_flight import InFlightSteps
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.ledger import Ledger
from hybrid_runtime.state.placement import BlockDemand, Placement, SavedUpload, StepPlan
from hybrid_runtime.state.replay.flush import FlushInputs
from hybrid_runtime.state.replay.live_state import ReplayPolicy
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.stats import Stats
from hybrid_runtime.state.step import Checkpoint, Step, StepPositions


class HybridStateManager(OneProcess):
    """State of every request's Mamba layers, by slot and column.

    layout: of the states.
    max_requests: slots.
    num_speculative_tokens: most drafts of a step, as in `layout`.
    strategy: "blocking" waits for the accepted counts in each step and decides on the host; "defer"
        does so only when a block boundary may be crossed; "always" lets a kernel decide for all
        rows; "auto" launches that kernel for the rows that may cross one and for no others. In the
        replay layout no state is copied, because the runner's verify pass folds and stores:
        strategies differ in their waits only.
    in_place: the runner's kernels read and write one column, so states are moved there before the
        forward pass (columns layout). False: kernels take a column to read and one to write.
    steps_in_flight: steps that may be outstanding (begun, results not yet read) beyond the current.
    readback: whether accepted counts are copied to the host; a runner that fetches them itself
        hands them in through `resolve`.
    debug: `begin_step` waits for the device and checks each step against its exact counts and the
        block tables, see `debug.check_step`; for a runner that is being written.
    prompt_cuts: the runner's prompt kernels also store the states that `StepPositions.cuts` names,
        as those of this package do, and run every row without drafts of two tokens or more. Such
        a row may then pass one wanted position (columns: one retained boundary, and end up to a
        block behind it). False: a row leaves a checkpoint only where it ends.
    max_rows: most rows of a step, padded ones among them. None: as many as there are slots.
    """

    def __init__(
        self,
        layout: StateLayout,
        max_requests: int,
        num_speculative_tokens: int,
        device: torch.device | str,
        strategy: Strategy = "auto",
        in_place: bool = False,
        steps_in_flight: int = 2,
        readback: bool = True,
        debug: bool = False,
        prompt_cuts: bool = False,
        max_rows: int | None = None,
    ) -> None:
        max_rows = max_requests if max_rows is None else max_rows
        check_options(
            layout, max_requests, max_rows, num_speculative_tokens, strategy, in_place,
            prompt_cuts, steps_in_flight, readback,
        )  # fmt: skip
        self.layout, self.max_requests, self.max_rows = layout, max_requests, max_rows
        self.num_speculative_tokens = num_speculative_tokens
        self.device = device = torch.device(device)
        self.strategy, self.in_place = strategy, in_place
        self.prompt_cuts, self.readback, self.debug = prompt_cuts, readback, debug
        self._steps_in_flight = steps_in_flight
        self._waits, self._stats = Waits(), Stats()
        self._ledger = ledger = Ledger(max_requests, max_rows, layout.block_size)
        depth = steps_in_flight + 2
        # A step takes at most four buffers: its own, and one each where it ended out of turn, lost
        # rows, or had its copies decided on the host; its own must outlive its results.
        self._staging = Staging(
            max_requests + max_rows, fields.ENTRY_FIELDS, 4 * depth, device, self._waits
        )
        self._policy = (
            ReplayPolicy(layout, ledger, device, self._waits, depth, prompt_cuts)
            if layout.replays
            else ColumnsPolicy(
                layout, ledger, device, in_place, prompt_cuts, self._staging, self._stats
            )
        )
        with torch.inference_mode():  # outside of which torch refuses to write it in place
            self._computed: Tensor = from_dlpack(self._policy.slots.computed)
        self._saved = SavedUpload(ledger, self._policy)
        counts = Readback(max_rows, steps_in_flight + 1, device, self._waits)
        self._in_flight = InFlightSteps(
            ledger, counts if readback else None, self._policy, prompt_cuts
        )
        self._placement = Placement(self._policy, ledger, self._staging, self._stats, depth, device)
        self._next = 0
        self._chunked: list[Step] = []
        self._states: StateTable | None = None
        self._tables: list[Tensor] = []

    @property
    def computed(self) -> Tensor:
        """Exact tokens computed before the step begun last, int32 `[max_requests]` by slot, on the
        device. Its address never changes. Read-only: an inference tensor over memory of the
        manager's own, which torch refuses to write in place outside `torch.inference_mode()`."""
        return self._computed

    @property
    def positions(self) -> StepPositions:
        """What every step's `positions` are: views of these can be captured in a graph before any
        step has begun."""
        return self._policy.positions

    def bind(
        self,
        states: Mapping[int, tuple[Tensor, Tensor]],
        block_tables: Tensor | Sequence[Tensor],
        groups: Mapping[int, int] | None = None,
        flush_inputs: FlushInputs | None = None,
    ) -> None:
        """Give the manager, once, the memory of states and block tables.

        states: {layer: (conv_states, matrices)} with the shapes of the layout's checkpoint behind
            a leading block dimension.
        block_tables: int32 `[max_requests, columns]`, one per cache group.
        groups: {layer: index into block_tables}; None puts all layers into group 0.
        flush_inputs: what `flush` reads in the replay layout; without it, it stores nothing.
        """
        if self._states is not None:
            raise ValueError("states are bound already; a manager is bound once")
        tables = [block_tables] if isinstance(block_tables, Tensor) else list(block_tables)
        check_tables(tables, self.max_requests, self.device)
        check_states(self.layout, states, groups, len(tables), self.device)
        if flush_inputs is not None:
            check_flush_inputs(
                flush_inputs, self.layout, len(states), self.max_requests, self.device
            )
        own = [tables[0 if groups is None else groups[layer]] for layer in states]
        self._states = self.layout.state_table(states.values(), own)
        self._tables = tables
        columns = min(t.shape[1] for t in tables)
        if isinstance(self._policy, ReplayPolicy):
            self._policy.bind(self._states, columns, flush_inputs)
        else:
            self._policy.bind(self._states, columns)

    # -- requests --------------------------------------------------------------------------------

    def admit(self, slot: int, computed: int = 0, hit_column: int | None = None) -> int:
        """Start a request in `slot`; its generation.

        computed: tokens whose state exists already, in column `hit_column` at offset 0 (a prefix
        hit or a resumed request); 0 starts from the zero state and nothing is read.
        hit_column: any column; in the replay layout the first step overwrites the live one. None
            if `computed` is 0.
        """
        columns = self._policy.columns
        self._ledger.check_admission(slot, computed, hit_column, columns)
        if hit_column is not None:
            self._bound()
        generation = self._ledger.admit(slot, computed, hit_column)
        if isinstance(self._policy, ReplayPolicy):
            self._policy.admit(slot)
        return generation

    def retain(self, slot: int, every: int, positions: tuple[int, ...] = ()) -> None:
        """In the columns layout, keep only checkpoints at multiples of `every` tokens (0: none) and
        at up to 2 positions; all are multiples of the block size. Steps begun before keep the rule
        that they began with. Raises `ValueError` in the replay layout, where each step's rows name
        positions.
        """
        self._columns_only("retain", "rows.save_at says which checkpoints are wanted")
        self._ledger.retain(slot, every, positions)

    def release(self, slot: int) -> None:
        """Finish, abort or preempt the request in `slot`; results still in flight are dropped."""
        self._ledger.release(slot)

    def reset(self) -> None:
        """Release every slot and forget all steps: what helps after an exception in the middle of
        any call, such as Ctrl-C. The device must have run all that was launched."""
        self._ledger.reset()
        self._in_flight.reset()
        self._placement.reset()

    def holds(self, slot: int) -> bool:
        """Whether a request has `slot`; an abandoned step leaves none in its slots."""
        self._ledger.require_slot(slot)
        return bool(self._ledger.live[slot])

    def block_demand(self, rows: StepRows, known: Ints | None = None) -> BlockDemand:
        """Which blocks of states the requests of `rows` must own before the step begins, in the
        columns layout. (In the replay layout these are the live one, those of `rows.save_to`, and
        the one that a row starts from.) Raises `ValueError` in the replay layout.

        known: tokens computed as of the last results that the runner has read, `[rows]`: columns
        whose checkpoints it may still file are kept. None: it files none, or keeps them itself.
        """
        if known is not None:
            known = np.asarray(known)
            if known.shape != rows.slot.shape or known.dtype.kind not in "iu":
                raise ValueError(
                    f"known is {known.dtype} {known.shape}; it must be integers {rows.slot.shape}"
                )
        policy = self._columns_only("block_demand", "rows name their columns")
        return policy.block_demand(rows, known)

    # -- a step ----------------------------------------------------------------------------------

    def begin_step(self, rows: StepRows) -> Step:
        """Place a step's rows, before the forward pass: one small launch, one host-to-device copy
        unless the rows are those of the last step, and with `in_place` the moves that may be due.

        Raises `ValueError` for rows that break the contract, before anything is changed.
        """
        self._bound()
        if not isinstance(rows, StepRows):
            raise ValueError(f"rows is a {type(rows).__name__}; it must be StepRows")
        self._in_flight.make_room(self._steps_in_flight)
        saved = self._saved.match(rows, self._placement.pending)
        if saved is not None:
            like, plan = saved
            if self.debug:
                self._check(rows, like.entries[: len(rows)])
            placed = self._placement.place(self._next, like.entries, len(rows), len(rows))
            step = like.repeated(self._next, rows, placed, plan.candidates)
            self._saved.repeated(step)
            return self._begun(step, plan)
        check_rows(rows, self._ledger, self.num_speculative_tokens)
        index, packed = self._staging.take()
        plan, lines = self._policy.pack(packed, rows)
        if self.debug:
            self._check(rows, torch.from_numpy(packed[:lines]))
        own = packed[: len(rows)]
        entries = self._staging.upload(index, lines)
        self._stats.uploads += 1
        placed = self._placement.place(self._next, entries, lines, len(rows))
        if isinstance(self._policy, ColumnsPolicy) and len(plan.moving):
            self._policy.precopy(entries, len(plan.moving))
        step = Step(
            self._next, rows, own[:, fields.GENERATION], self._policy.kept(rows),
            self._policy.positions, entries, packed, placed, plan.candidates,
        )  # fmt: skip
        if isinstance(self._policy, ReplayPolicy):
            self._policy.begun(rows, packed)
        if not self.in_place:
            self._saved.keep(step, lines)
        return self._begun(step, plan)

    def end_step(self, step: Step, num_accepted: Tensor) -> None:
        """Take the sampler's counts, on the device; in the columns layout, copy boundary states
        where some are due (in the replay layout the next step stores them).

        num_accepted: int32 `[rows]` or longer; row i belongs to `step.rows.slot[i]`. It must stay
        unchanged until the launches of the next `begin_step` are queued. -a (replay layout): a
        tokens were accepted and the text ends among them; queued steps leave its state as it is.
        """
        self._bound()
        self._in_flight.require(step, ended=False)
        check_counts(num_accepted, len(step.rows), self.device)
        if self.debug:
            check_accepted(step, num_accepted, self._ledger, self._policy.ends_texts)
        candidates, current = step.candidates, None
        if not self._saved.undisturbed(step):
            rows = step.current(self._ledger.generation, self._ledger.live)
            if np.count_nonzero(rows) < len(rows):
                candidates, current = candidates[rows[candidates]], rows
        on_host = self.strategy == "blocking" or (self.strategy == "defer" and len(candidates) > 0)
        if on_host:
            self._in_flight.check_turn(step)
        self._placement.finish_pending()
        if self._in_flight.start(step, num_accepted):
            self._stats.readbacks += 1
        step.ended = True
        if on_host:
            self._in_flight.decide(step, f"{self.strategy}: the host decides on the counts")
        if isinstance(self._policy, ColumnsPolicy):
            every_row = self.strategy == "always"
            self._policy.postcopy(step, num_accepted, candidates, current, on_host, every_row)
        self._ledger.end_step(step.rows, current)
        self._placement.ended(step, num_accepted)
        self._count_lost()

    def abandon(self, step: Step) -> None:
        """Give up a step whose forward pass or drafter failed: its requests are released, because
        their state or drafts may be half written; all others are untouched."""
        self._in_flight.require(step)
        current = step.current(self._ledger.generation, self._ledger.live)
        for slot in step.rows.slot[current]:
            self._ledger.release(int(slot))
        self._in_flight.abandon(step)

    # -- results ---------------------------------------------------------------------------------

    def accepted(self, step: Step) -> NDArray[np.int32]:
        """Accepted counts of an ended step, int32 `[rows]`; waits only if still in flight."""
        if not self._in_flight.has_settled(step):
            self._in_flight.require(step, ended=True)
            with allowed("accepted counts handed to the caller"):
                self._in_flight.settle_until(step, "accepted counts")
        assert step.accepted is not None
        return step.accepted

    def resolve(self, step: Step, accepted: NDArray[np.int32]) -> None:
        """Hand in counts that the runner fetched itself, in step order.

        accepted: integers `[rows]` or more. Raises `ValueError` unless `readback=False`.
        """
        self.prepare_settle(step)(accepted)

    def prepare_settle(self, step: Step) -> Callable[[NDArray[np.int32]], None]:
        """What `resolve` needs no counts for, to be done before a wait for them; the call that
        takes them, with no other call of the manager in between."""
        return self._in_flight.prepare_settle(step)

    def published(self, step: Step) -> list[Checkpoint]:
        """Checkpoints that this step left, their bytes ordered before any launch that comes later
        on this stream. Those of rows released meanwhile are left out."""
        self.accepted(step)
        return [s for s in step.published if self._ledger.holds(s.slot, s.generation)]

    def last_checkpoint(self, slot: int) -> Checkpoint | None:
        """The last checkpoint of a request that is about to be released, in the replay layout: at a
        wanted position among the drafts that its last settled step accepted, or one that its oldest
        queued step ends on or, with `prompt_cuts`, stores on the way; else the last one that a
        settled step stored. None: there is none, or the layout is columns.

        Its bytes are stored by the queued step, or, if its column is the live one, by `flush`: it
        is for launches that come after these.
        """
        self._ledger.require_live(slot)
        if not isinstance(self._policy, ReplayPolicy):
            return None
        return self._policy.last_checkpoint(slot, self._queued(slot))

    @property
    def ends_texts(self) -> bool:
        """Whether counts may be negative, see `end_step`: the layout is replay."""
        return self._policy.ends_texts

    def has_ended(self, slot: int) -> bool:
        """Whether the last count that was read of the request in `slot` was negative."""
        self._ledger.require_live(slot)
        return slot in self._ledger.ended

    def last_state(self, slot: int, most: int) -> Checkpoint | None:
        """The state of a request that is about to be released, in the replay layout, after as many
        of its first `most` tokens as have been computed. Its bytes are stored by `flush`, behind
        the queued step, unless the column is a checkpoint's. None: a queued step goes on behind
        `most` tokens, several steps are queued, or `flush` stores nothing.
        """
        self._ledger.require_live(slot)
        if not isinstance(self._policy, ReplayPolicy):
            return None
        return self._policy.last_state(slot, self._queued(slot), most)

    def flush(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Store last checkpoints or states, just found, in one launch; none if queued steps store
        them all. The states of those in the live column are overwritten: release their slots next.

        Raises `ValueError` for one that is not what `last_checkpoint`, or `last_state` at its
        position, would give now: its request has left the slot or has had a step since, it was
        flushed before, or it was changed."""
        check_checkpoints(checkpoints, self._ledger, self.last_checkpoint, self.last_state)
        if not isinstance(self._policy, ReplayPolicy):
            return
        count = self._policy.flush(checkpoints, self._queued)
        self._stats.rows_flushed += count
        self._stats.flush_launches += count > 0

    def compile_flush(self) -> None:
        """Compile now what `flush` would compile when it is first needed."""
        if isinstance(self._policy, ReplayPolicy):
            self._policy.compile_flush()

    def stats(self) -> Stats:
        """Counters so far."""
        self._count_lost()
        stats = self._stats
        stats.waits, stats.wait_seconds = self._waits.count, self._waits.seconds
        stats.rows_copied = self._in_flight.rows_copied
        stats.bytes_copied = stats.rows_copied * (self._bound().bytes_per_move())
        return stats

    # -- inside ----------------------------------------------------------------------------------

    def _queued(self, slot: int) -> list[Step]:
        """Steps whose results have not been read that run the request in `slot`, oldest first."""
        return [] if slot in self._ledger.ended else self._in_flight.of(slot)

    def _columns_only(self, call: str, instead: str) -> ColumnsPolicy:
        if isinstance(self._policy, ColumnsPolicy):
            return self._policy
        raise ValueError(f"{call}() is of the columns layout; this one is replay, where {instead}")

    def _begun(self, step: Step, plan: StepPlan) -> Step:
        self._ledger.begin_step(step.rows, plan.columns, step.number)
        self._in_flight.append(step)
        self._next += 1
        self._stats.steps += 1
        self._stats.skipped += step.skipped
        self._stats.candidate_rows += len(step.candidates)
        if step.rows.chunked:
            self._chunked.append(step)
        return step

    def _count_lost(self) -> None:
        """Count the checkpoints that chunks have lost; their forward pass need not wait for it."""
        for step in self._chunked:
            inside: Ints | int = 0
            if self.prompt_cuts:
                rows = step.rows
                low, high = rows.computed_min, rows.certain_min
                inside = self._policy.inside(low, high, rows.draft, step.kept)
            self._stats.lost_checkpoints += step.count_lost(inside)
        self._chunked.clear()

    def _check(self, rows: StepRows, lines: Tensor) -> None:
        """Refuse a step if what it would read and write is wrong."""
        previous = self._placement.previous()
        check_step(
            self._next, rows, self._ledger, self._policy, self.prompt_cuts, lines, previous,
            self._tables, self._in_flight.queued,
        )  # fmt: skip

    def _bound(self) -> StateTable:
        if self._states is None:
            raise ValueError("states are not bound; call bind() before the first step")
        return self._states
