"""What happens in a step of the engine: requests are scheduled, their step is queued, results of an
earlier one are read and handed out."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from tokenizers import Tokenizer
from torch import Tensor

from hybrid_runtime.device.sync import allowed
from hybrid_runtime.engine.pooler import Pooler
from hybrid_runtime.engine.request import FinishReason, Request
from hybrid_runtime.engine.scheduler import Schedule, Scheduler
from hybrid_runtime.specdecode.acceptance import Acceptance
from hybrid_runtime.specdecode.runner import SpecDecodeRunner
from hybrid_runtime.state.step import Step


@dataclass(slots=True)
class Counts:
    """Steps that were read and tokens that they emitted; of rows with drafts apart."""

    steps: int = 0
    emitted: int = 0
    draft_steps: int = 0
    draft_emitted: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        return self.draft_emitted / self.draft_steps if self.draft_steps else float("nan")


class EngineCore:
    """Up to `ahead` steps are queued beyond the one whose results are read.

    greedy: acceptance of steps in which no row samples; sampling: of the others. pooler: None until
    somebody wants an embedding.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        loop: SpecDecodeRunner,
        tokenizer: Tokenizer | None,
        eos: Iterable[int],
        greedy: Acceptance,
        sampling: Acceptance,
        ahead: int,
    ) -> None:
        self.ahead = ahead
        self.pooler: Pooler | None = None
        self.counts = Counts()
        self._scheduler, self._runner = scheduler, loop
        self._tokenizer, self._eos = tokenizer, frozenset(eos)
        self._greedy, self._sampling = greedy, sampling
        self._deadlines: list[tuple[float, int, Request]] = []
        self._queue: deque[tuple[Schedule, Step]] = deque()
        self._launched = False

    @property
    def idle(self) -> bool:
        """Nobody runs, and no results are on their way."""
        return not (self._scheduler.running or self._queue)

    def add(self, request: Request, deadline: float | None) -> None:
        """Let a request wait for its turn, and end it `deadline` seconds from now at the latest."""
        request.submitted = time.perf_counter()
        self._scheduler.add(request)
        if deadline is not None:
            request.deadline = request.submitted + deadline
            heappush(self._deadlines, (request.deadline, request.id, request))

    def step(self) -> list[Request]:
        """Queue one step and read the results of the one before (with `ahead` 0: of this one); the
        requests that got tokens or ended."""
        late = self._expire()
        touched = self._launch()
        if touched:  # by a failure; what was queued before it stands
            while self._queue:
                touched = touched + self._read()
        elif len(self._queue) > self.ahead or (self._queue and not self._launched):
            touched = self._read()
        return late + touched

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request now."""
        self._scheduler.retire(request)
        request.finish_reason = reason

    def _expire(self) -> list[Request]:
        """End the requests whose time is over."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= time.perf_counter():
            *_, request = heappop(self._deadlines)
            if request.finish_reason is None:
                self.finish(request, "deadline")
                late.append(request)
        return late

    def _launch(self) -> list[Request]:
        """Queue the next step, if anybody can run; the requests that failed in it."""
        admitted = self._scheduler.admit()
        if admitted:
            self._runner.sequences.admit(
                [(r.slot, r.device_tokens, r.params, r.seed) for r in admitted]
            )
        schedule = self._scheduler.schedule()
        self._launched = schedule is not None
        if schedule is None:
            return []
        cold = all(r.params.temperature == 0 for r in schedule.requests)
        accept = self._greedy if cold else self._sampling
        watch = None if self.pooler is None else partial(self.pooler.add, schedule)
        try:
            step = self._runner.step(
                schedule.rows, schedule.num_decoding, accept if schedule.samples else None, watch
            )
        except Exception as error:
            # The forward pass may have half written these requests' state; the others' is exact.
            for request in schedule.requests:
                request.error = error
                self.finish(request, "error")
            return schedule.requests
        for request, scheduled, draft in zip(
            schedule.requests,
            schedule.rows.scheduled.tolist(),
            schedule.rows.draft.tolist(),
            strict=True,
        ):
            request.queued.append((scheduled, draft))
        self._queue.append((schedule, step))
        return []

    def _read(self) -> list[Request]:
        """Hand out the oldest results."""
        schedule, step = self._queue.popleft()
        why = "tokens handed to the caller" + ("" if self._queue else ", nothing queued behind")
        embeddings: dict[int, Tensor] = {}
        with allowed(why):
            emitted = self._runner.read(step, why)
            if self.pooler is not None:
                embeddings = self.pooler.read(schedule, step, why)
        now = time.perf_counter()
        self.counts.steps += 1
        touched: list[Request] = []
        ended: list[tuple[Request, FinishReason]] = []
        cache, snapshots = self._scheduler.cache, defaultdict(list)
        if cache is not None:
            for snapshot in self._runner.manager.published(step):
                snapshots[snapshot.slot].append(snapshot)
        rows = zip(schedule.requests, schedule.epochs, emitted.tolist(), strict=True)
        for row, (request, epoch, tokens) in enumerate(rows):
            if request.finish_reason is not None or request.epoch != epoch:
                continue  # it ended or was preempted while this row was queued
            count = tokens[-1]
            scheduled, draft = request.queued.popleft()
            request.computed += scheduled - draft + max(count, 1) - 1
            if not count:
                if cache is not None:
                    cache.file(request, snapshots[request.slot])
                if row in embeddings:
                    request.embedding = embeddings[row]
                    self.finish(request, "embedded")
                    touched.append(request)
                continue
            if draft:
                self.counts.draft_steps += 1
                self.counts.draft_emitted += count
            before = len(request.output)
            try:
                reason = request.append(
                    tokens[:count], self._tokenizer, self._eos, self._scheduler.max_length
                )
            except Exception as error:
                request.error, reason = error, "error"
            if cache is not None:
                cache.file(request, snapshots[request.slot])
            if reason is not None:
                ended.append((request, reason))
            new = len(request.output) - before
            self.counts.emitted += new
            if new:
                request.times.append((now, new))
            touched.append(request)
        self._scheduler.close([request for request, reason in ended if reason != "error"])
        for request, reason in ended:
            self.finish(request, reason)
        return touched
