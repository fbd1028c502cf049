"""Who runs in the next step, and how much of each: continuous batching."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.engine.block_pool import BlockTable
from hybrid_runtime.engine.prefix_cache import PrefixCache
from hybrid_runtime.engine.request import Hit, Request
from hybrid_runtime.specdecode.shape import PROMPT_ROWS, StepShape
from hybrid_runtime.state.demand import BlockDemand
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Snapshot


@dataclass(frozen=True, slots=True)
class Schedule:
    """Rows of one step; rows that decode (one certain token and K guesses) stand first. epochs:
    of the requests, by which to know results of those that were preempted meanwhile. samples: some
    row brings a token. pooled: rows whose embedding is complete after the step. told: rows of whose
    prompts log-probabilities are told, and the positions from and to (exclusive) which the hidden
    states tell of the tokens behind them."""

    requests: list[Request]
    epochs: list[int]
    rows: StepRows
    shape: StepShape
    samples: bool
    pooled: list[int]
    told: list[tuple[int, int, int]]

    @classmethod
    def of(cls, requests: list[Request], rows: StepRows, shape: StepShape) -> Schedule:
        """Of requests that none of this has been queued for yet."""
        samples, pooled, told = shape.decode_rows > 0, [], []
        for row in range(shape.decode_rows, len(requests)):
            request, scheduled = requests[row], int(rows.scheduled[row])
            if request.prompt_left == scheduled:
                if request.max_tokens:
                    samples = True
                elif request.pooled_from is not None:
                    pooled.append(row)
            if request.prompt_untold:
                first = max(request.computed_min, len(request.prompt_logprobs))
                last = min(request.computed_min + scheduled, len(request.prompt) - 1)
                if first < last:
                    told.append((row, first, last))
        epochs = [r.epoch for r in requests]
        return cls(requests, epochs, rows, shape, samples, pooled, told)


class Scheduler:
    """Waiting queue, running set, and the blocks of both caches.

    Requests are admitted in the order in which they came. Their prompts then share the steps'
    tokens: first comes the one that would be done first if, from when it was admitted, all tokens
    were its own. So a short prompt overtakes a long one, but not once as many prompt tokens have
    run since the long one was admitted as that has itself.

    A request is admitted when there are blocks for all tokens that it and those who run are known
    to need. Where blocks run out later, the youngest gives its own back and waits again, in front
    of the queue: what it has computed is computed again, from its last snapshot that is still
    there, and its text goes on as if nothing had happened. The oldest always comes through, because
    `check` refuses whoever could need more than there is.
    """

    def __init__(
        self,
        manager: HybridStateManager,
        kv: BlockTable,
        state: BlockTable,
        max_requests: int,
        max_tokens_per_step: int,
        max_prompt_tokens: int,
        max_length: int,
        steps_ahead: int,
        cache: PrefixCache | None,
        max_waiting: int | None,
    ) -> None:
        self.manager, self.kv, self.state = manager, kv, state
        self.block_size = manager.layout.block_size
        self.num_draft = manager.num_speculative_tokens
        self.steps_ahead, self.cache = steps_ahead, cache
        self._state_budget = manager.layout.block_budget(steps_ahead)
        self.preemptions = 0
        # Prompt tokens run so far: the clock of `Request.turn`.
        self._prompt_tokens = 0
        self.max_tokens_per_step, self.max_length = max_tokens_per_step, max_length
        self.max_prompt_tokens = max_prompt_tokens
        self._max_waiting = max_waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots = list(range(max_requests - 1, -1, -1))

    def reset(self, requests: Iterable[Request]) -> None:
        """After an exception anywhere: `requests` wait, in this order, to be computed again, and
        nobody else is known. The device must have run all that was launched."""
        self.manager.reset()
        self.kv.reset()
        self.state.reset()
        if self.cache is not None:
            self.cache.reset()
        self.running.clear()
        self._slots = list(range(self.manager.max_requests - 1, -1, -1))
        self.waiting = deque(requests)
        for request in self.waiting:
            request.forget()

    def footprint(self, prompt_tokens: int, max_tokens: int) -> tuple[int, int]:
        """The most KV blocks and state blocks that such a request can own at once."""
        longest = min(prompt_tokens + max_tokens, self.max_length)
        longest += overshoot(self.num_draft, self.steps_ahead)
        return -(-longest // self.block_size), self._state_budget.most

    @property
    def full(self) -> bool:
        """As many requests wait as may."""
        return self._max_waiting is not None and len(self.waiting) >= self._max_waiting

    def check(self, request: Request) -> None:
        """Raises `ValueError` for a request that can never run."""
        kv, state = self.footprint(len(request.prompt), request.max_tokens)
        if len(request.prompt) + bool(request.max_tokens) > self.max_length:
            one = "with at least one of output " if request.max_tokens else ""
            raise ValueError(
                f"prompt has {len(request.prompt)} tokens; {one}it must fit max_model_len "
                f"({self.max_length})"
            )
        for name, need, have in (
            ("KV", kv, self.kv.pool.size),
            ("state", state, self.state.pool.size),
        ):
            if need > have:
                raise ValueError(
                    f"prompt of {len(request.prompt)} tokens with max_tokens="
                    f"{request.max_tokens} needs {need} {name} blocks; it must need at most "
                    f"{have}, all that there are"
                )

    def add(self, request: Request) -> None:
        """Queue a checked request."""
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Move waiting requests into free slots, in order, while there is room for them."""
        admitted = []
        while self.waiting and self._slots:
            request = self.waiting[0]
            hit = Hit() if self.cache is None else self.cache.find(request)
            if self.running and not self._room(request, hit):
                break
            self.waiting.popleft()
            if self.cache is not None:
                hit = self.cache.promote(request, hit)
            request.slot = self._slots.pop()
            request.prefill, request.computed = request.length, hit.tokens
            request.turn = self._prompt_tokens + request.prefill - hit.tokens
            request.hit, request.filed = hit, hit.tokens // self.block_size
            column = hit.tokens // self.block_size - 1 if hit.tokens else None
            self.manager.admit(request.slot, hit.tokens, column)
            if self.cache is None:
                self.manager.retain(request.slot, 0)
            else:
                self.cache.adopt(request)
                rule = self.cache.rule(request)
                if rule is not None:
                    self.manager.retain(request.slot, *rule)
            self.running.append(request)
            admitted.append(request)
        return admitted

    def close(self, requests: list[Request]) -> None:
        """Before these requests are retired: file what no later results will tell of, the tokens
        that queued steps run for certain and the snapshots behind the last guesses."""
        if self.cache is None:
            return
        last: dict[int, Snapshot] = {}
        for request in requests:
            request.computed = request.computed_min
            snapshot = self.manager.last_snapshot(request.slot)
            if snapshot is not None and self.cache.lacks(request, snapshot):
                last[request.slot] = snapshot
        self.manager.flush(list(last.values()))
        for request in requests:
            self.cache.file(request, [last[request.slot]] if request.slot in last else [])

    def retire(self, request: Request) -> None:
        """Take a request out of its slot, or out of the queue; what it owned is free again."""
        if request.slot < 0:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        # An abandoned step has released its slots.
        if self.manager.holds(request.slot):
            self.manager.release(request.slot)
        for table in (self.kv, self.state):
            table.free(request.slot)
        self._slots.append(request.slot)
        request.slot = -1

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks and let it begin again when there is room. Steps that are
        queued may still write them; whoever gets them is launched later on the same stream."""
        self.close([request])
        self.retire(request)
        request.forget()
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _room(self, request: Request, hit: Hit) -> bool:
        """Blocks for a request beside those who run, and what these may need any time."""
        keys = self._known_keys(request, request.length) - len(hit.keys)
        keys += self.kv.pool.unowned(hit.keys) + sum(map(self._owed, self.running))
        # Those admitted a moment ago have not taken theirs yet.
        unborn = sum(not r.queued and r.computed == r.hit.tokens for r in self.running)
        state = self._state_budget.admission * (1 + unborn)
        if hit.state is not None:
            state += self.state.pool.unowned([hit.state])
        return keys <= self.kv.pool.free and state <= self.state.pool.free

    def _owed(self, request: Request) -> int:
        """KV blocks that a running request may take any time: for the tokens it is known to need,
        and one more if it can get that long."""
        have = -(-request.computed_max // self.block_size)
        known = max(self._known_keys(request, request.prefill), have)
        most, _ = self.footprint(len(request.prompt), request.max_tokens)
        return known - have + (known < most)

    def _known_keys(self, request: Request, tokens: int) -> int:
        """KV blocks for so many tokens of a request, and for the one that follows in a text."""
        return -(-(tokens + bool(request.max_tokens)) // self.block_size)

    def schedule(self) -> Schedule | None:
        """Rows of the next step, with their blocks handed out; None when nobody can run.

        Positions are bounds as long as results are in flight. A request that may have ended, but
        is not known to, runs on: at worst one row is wasted. Where blocks are short, no chunk
        leaves a snapshot on the way, and then the youngest requests give way.
        """
        while True:
            for passes in (True, False):
                chosen, num_decoding = self._choose(passes)
                if not chosen:
                    return None
                schedule = self._with_blocks(chosen, num_decoding)
                if schedule is not None:
                    return schedule
            if len(self.running) == 1:
                raise RuntimeError("a request needs more blocks than check() lets it")
            self.preempt(self.running[-1])

    def _with_blocks(
        self, chosen: list[tuple[Request, int, int]], num_decoding: int
    ) -> Schedule | None:
        """What was chosen, with its blocks handed out; None if there are too few."""
        low = np.array([r.computed_min for r, _, _ in chosen], np.int32)
        high = np.array([r.computed_max for r, _, _ in chosen], np.int32)
        rows = StepRows(
            np.array([r.slot for r, _, _ in chosen], np.int32),
            low,
            low if (low == high).all() else high,
            np.array([scheduled for _, scheduled, _ in chosen], np.int32),
            np.array([draft for _, _, draft in chosen], np.int32),
        )
        requests = [r for r, _, _ in chosen]
        if not self._allocate(rows, np.array([self._known(r) for r in requests], np.int32)):
            return None
        shape = StepShape.of(rows, num_decoding)
        self._prompt_tokens += shape.prompt_tokens
        return Schedule.of(requests, rows, shape)

    def _known(self, request: Request) -> int:
        """What `block_demand` takes: tokens computed as of the last results. In a prompt no guesses
        have been accepted, so that everything up to there has been filed."""
        return request.computed + (self.num_draft if request.prompt_left > 0 else 0)

    def _choose(self, passes: bool) -> tuple[list[tuple[Request, int, int]], int]:
        """Request, tokens and guesses of each row, those that decode first, and how many do.
        passes: as of `_chunk`."""
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
        budget = min(budget, self.max_prompt_tokens)
        prefilling.sort(key=lambda waits: waits[0].turn)
        for request, left in prefilling[:PROMPT_ROWS]:
            if budget > 0:
                chunk = self._chunk(request, min(left, budget), passes)
                chosen.append((request, chunk, 0))
                budget -= chunk
        return chosen, num_decoding

    def _most_output(self, request: Request) -> int:
        return min(request.max_tokens, self.max_length - len(request.prompt))

    def _chunk(self, request: Request, most: int, passes: bool) -> int:
        """Prompt tokens to run: a chunk leaves one snapshot on the way, if it passes a boundary
        where one is wanted, and ends at most a block behind it, or, unless it `passes`, there."""
        start = request.computed_min
        if self.cache is not None:
            behind = self.block_size if passes else 0
            most = min(most, self.cache.next_cut(request, start) + behind - start)
        return most

    def _allocate(self, rows: StepRows, known: NDArray[np.int32]) -> bool:
        """Give a step's rows their blocks; False, and nothing happens, where there are too few.
        known: tokens computed as far as results have been read, `[rows]`."""
        state = self.state.changes(rows.slot, self.manager.block_demand(rows, known))
        kv = self.kv.changes(rows.slot, self._kv_demand(rows))
        if not (self.kv.can_allocate(kv) and self.state.can_allocate(state)):
            return False
        new_state, new_kv = self.state.allocate(state), self.kv.allocate(kv)
        if self.cache is not None:
            self.cache.order_reuse(new_kv, new_state)
        self.kv.tables.upload()  # the state's table among them
        return True

    def _kv_demand(self, rows: StepRows) -> BlockDemand:
        """All blocks up to where the drafter looks: its own passes reach K - 1 tokens further than
        the step."""
        end = rows.computed_max + rows.scheduled + max(self.num_draft - 1, 0)
        last = (end - 1) // self.block_size
        zero = np.zeros(len(rows), np.int64)
        return BlockDemand(zero, zero, last, last)


def overshoot(num_draft: int, steps_ahead: int) -> int:
    """Positions beyond a request's last token that may be written: by guesses of its last step and
    of those that were queued before it was known to be the last, and by the drafter after them."""
    return num_draft * (steps_ahead + 2)
