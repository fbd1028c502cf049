"""Who runs in the next step, and how much of each: continuous batching, first come first served."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from hybrid_runtime.engine.block_pool import BlockTable
from hybrid_runtime.engine.request import Request
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.rows import StepRows


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows of one step; rows that decode (one certain token and K guesses) stand first."""

    requests: list[Request]
    rows: StepRows
    num_decoding: int


class Scheduler:
    """Waiting queue, running set, and the blocks of both caches.

    A request is admitted when the most blocks it can ever own are free, so a running one never has
    to stop for lack of memory.
    """

    def __init__(
        self,
        manager: HybridStateManager,
        kv: BlockTable,
        state: BlockTable,
        max_requests: int,
        max_tokens_per_step: int,
        max_length: int,
        steps_ahead: int,
    ) -> None:
        self.manager, self.kv, self.state = manager, kv, state
        self.block_size = manager.layout.block_size
        self.num_draft = manager.num_speculative_tokens
        self.steps_ahead = steps_ahead
        self.max_tokens_per_step, self.max_length = max_tokens_per_step, max_length
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots = list(range(max_requests - 1, -1, -1))

    def footprint(self, prompt_tokens: int, max_tokens: int) -> tuple[int, int]:
        """The most KV blocks and state blocks that such a request can own at once."""
        longest = min(prompt_tokens + max_tokens, self.max_length)
        longest += overshoot(self.num_draft, self.steps_ahead)
        if self.manager.layout.replays:
            # The live state, a snapshot that is read, and one or two that may be stored.
            state = 3 + (self.steps_ahead > 0)
        else:
            # Running column and drafts, one column below for a snapshot's copy, one for the step in
            # which the running column has moved on but the previous one is still read, and one
            # where guesses in flight leave open which column it is.
            state = self.num_draft + 3 + (self.steps_ahead > 0 and self.num_draft > 0)
        return -(-longest // self.block_size), state

    def add(self, request: Request) -> None:
        """Queue a request; `ValueError` at once for one that can never run."""
        kv, state = self.footprint(len(request.prompt), request.params.max_tokens)
        if len(request.prompt) >= self.max_length:
            raise ValueError(
                f"prompt has {len(request.prompt)} tokens; with at least one of output it must fit "
                f"max_model_len ({self.max_length})"
            )
        for name, need, have in (
            ("KV", kv, self.kv.pool.size),
            ("state", state, self.state.pool.size),
        ):
            if need > have:
                raise ValueError(
                    f"prompt of {len(request.prompt)} tokens with max_tokens="
                    f"{request.params.max_tokens} needs {need} {name} blocks; it must need at most "
                    f"{have}, all that there are"
                )
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Move waiting requests into free slots, in order, while their blocks are free."""
        admitted = []
        while self.waiting and self._slots:
            request = self.waiting[0]
            kv, state = self.footprint(len(request.prompt), request.params.max_tokens)
            if kv > self.kv.pool.unreserved or state > self.state.pool.unreserved:
                break
            self.waiting.popleft()
            self.kv.pool.reserve(kv)
            self.state.pool.reserve(state)
            request.slot = self._slots.pop()
            self.manager.admit(request.slot)
            self.running.append(request)
            admitted.append(request)
        return admitted

    def retire(self, request: Request) -> None:
        """Take a request out of its slot, or out of the queue; all it owned is free again."""
        if request.slot < 0:
            self.waiting.remove(request)
            return
        kv, state = self.footprint(len(request.prompt), request.params.max_tokens)
        self.running.remove(request)
        if self.manager.holds(request.slot):
            self.manager.release(request.slot)
        for table, count in ((self.kv, kv), (self.state, state)):
            table.clear(request.slot)
            table.pool.release(count)
        self._slots.append(request.slot)
        request.slot = -1

    def schedule(self) -> Schedule | None:
        """Rows of the next step, with their blocks handed out; None when nobody can run.

        Positions are bounds as long as results are in flight. A request that may have ended, but
        is not known to, runs on: at worst one row is wasted.
        """
        budget = self.max_tokens_per_step
        chosen: list[tuple[Request, int, int]] = []
        width = self.num_draft + 1
        prefilling: list[tuple[Request, int]] = []
        for request in self.running:
            left = request.prompt_left
            if left > 0:
                prefilling.append((request, left))
            elif budget >= width and request.sure_output < self._most_output(request):
                chosen.append((request, width, self.num_draft))
                budget -= width
        num_decoding = len(chosen)
        for request, left in prefilling:
            if budget > 0:
                chunk = self._chunk(request, min(left, budget))
                chosen.append((request, chunk, 0))
                budget -= chunk
        if not chosen:
            return None
        low = np.array([r.computed_min for r, _, _ in chosen], np.int32)
        high = np.array([r.computed_max for r, _, _ in chosen], np.int32)
        rows = StepRows(
            np.array([r.slot for r, _, _ in chosen], np.int32),
            low,
            low if (low == high).all() else high,
            np.array([scheduled for _, scheduled, _ in chosen], np.int32),
            np.array([draft for _, _, draft in chosen], np.int32),
        )
        self._hand_out(rows)
        return Schedule([r for r, _, _ in chosen], rows, num_decoding)

    def _most_output(self, request: Request) -> int:
        return min(request.params.max_tokens, self.max_length - len(request.prompt))

    def _chunk(self, request: Request, most: int) -> int:
        """Prompt tokens to run: a chunk ends at a block boundary, so that the state there is the
        boundary's, except the last one and where there is not a whole block to run."""
        start, block = request.computed_min, self.block_size
        end = start + most
        boundary = end // block * block
        return (boundary if boundary > start else end) - start

    def _hand_out(self, rows: StepRows) -> None:
        first, last = self.manager.columns_needed(rows)
        # A row that runs through several blocks at once reads the column that it ran in last, and
        # those between stay empty.
        if self.manager.layout.replays:
            begins = last - (rows.draft > 0)
        else:
            last = last - self.num_draft + rows.draft  # a row without guesses writes one column
            begins = (rows.computed_min + rows.scheduled - 1) // self.block_size - 1
        fresh = self.state.hold(rows.slot, first, np.maximum(first, begins), last)
        # The drafter's own passes look K - 1 tokens further than the step.
        end = rows.computed_max + rows.scheduled + max(self.num_draft - 1, 0)
        zero = np.zeros(len(rows), np.int64)
        self.kv.hold(rows.slot, zero, zero, (end - 1) // self.block_size)
        self.kv.upload()
        self.state.upload()
        if fresh:
            self.manager.zero(fresh)


def overshoot(num_draft: int, steps_ahead: int) -> int:
    """Positions beyond a request's last token that may be written: by guesses of its last step and
    of those that were queued before it was known to be the last, and by the drafter after them."""
    return num_draft * (steps_ahead + 2)
