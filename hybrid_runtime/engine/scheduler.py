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
    """Rows of one step; update rows (at most K + 1 tokens) stand first."""

    requests: list[Request]
    rows: StepRows
    num_update_rows: int


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
    ) -> None:
        self.manager, self.kv, self.state = manager, kv, state
        self.block_size = manager.layout.block_size
        self.num_draft = manager.num_speculative_tokens
        self.max_tokens_per_step, self.max_length = max_tokens_per_step, max_length
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots = list(range(max_requests - 1, -1, -1))

    def footprint(self, prompt_tokens: int, max_tokens: int) -> tuple[int, int]:
        """The most KV blocks and state blocks that such a request can own at once."""
        longest = min(prompt_tokens + max_tokens, self.max_length) + self.num_draft
        # Running column and drafts, one column below for a snapshot's copy, and one for the step
        # in which the running column has moved on but the previous one is still read.
        return -(-longest // self.block_size), self.num_draft + 3

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
        self.manager.release(request.slot)
        for table, count in ((self.kv, kv), (self.state, state)):
            table.clear(request.slot)
            table.pool.release(count)
        self._slots.append(request.slot)
        request.slot = -1

    def schedule(self) -> Schedule | None:
        """Rows of the next step, with their blocks handed out; None when nobody runs."""
        budget = self.max_tokens_per_step
        chosen: list[tuple[Request, int, int]] = []
        decoding = [r for r in self.running if r.length - r.computed == 1]
        prefilling = [r for r in self.running if r.length - r.computed > 1]
        for request in decoding:
            draft = min(request.drafts, request.remaining - 1, self.max_length - request.length)
            draft = max(min(draft, budget - 1), 0)
            if budget > 0:
                chosen.append((request, draft + 1, draft))
                budget -= draft + 1
        for request in prefilling:
            if budget > 0:
                chunk = self._chunk(request, budget)
                chosen.append((request, chunk, 0))
                budget -= chunk
        if not chosen:
            return None
        chosen.sort(key=lambda row: row[1] > self.num_draft + 1)
        rows = StepRows.exact(
            [r.slot for r, _, _ in chosen],
            [r.computed for r, _, _ in chosen],
            [scheduled for _, scheduled, _ in chosen],
            [draft for _, _, draft in chosen],
        )
        self._hand_out(rows)
        updates = int((rows.scheduled <= self.num_draft + 1).sum())
        return Schedule([r for r, _, _ in chosen], rows, updates)

    def _chunk(self, request: Request, budget: int) -> int:
        """Prompt tokens to run: a chunk ends at a block boundary, so that the state there is the
        boundary's, except the last one and where the budget is less than a block."""
        start, block = request.computed, self.block_size
        end = min(request.length, start + budget)
        boundary = end // block * block
        return (boundary if boundary > start else end) - start

    def _hand_out(self, rows: StepRows) -> None:
        first, last = self.manager.columns_needed(rows)
        # Drafts of the step and the K that the drafter's own passes look ahead.
        end = rows.computed_max + rows.scheduled + max(self.num_draft - 1, 0)
        columns = np.minimum((end - 1) // self.block_size, self.kv.columns - 1)
        fresh: list[int] = []
        for slot, low, high, kv in zip(rows.slot, first, last, columns, strict=True):
            fresh += self.state.hold(int(slot), int(low), int(high))
            self.kv.hold(int(slot), 0, int(kv))
        self.kv.upload()
        self.state.upload()
        if fresh:
            self.manager.zero(fresh)
