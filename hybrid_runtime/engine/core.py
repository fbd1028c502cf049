"""The engine's step: requests are scheduled, their rows are run, results are handed out."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from heapq import heapify, heappop, heappush

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from hybrid_runtime.device.sync import allowed, forget_declarations
from hybrid_runtime.engine.ledger import ADJUSTED, ALLOWED, SAMPLED, Bools, Ints
from hybrid_runtime.engine.logprobs import unpack
from hybrid_runtime.engine.pooler import Pooler
from hybrid_runtime.engine.prompt_logprobs import PromptLogprobs
from hybrid_runtime.engine.request import BrokenLogits, FinishReason, Request
from hybrid_runtime.engine.results import Results
from hybrid_runtime.engine.scheduler import Schedule, Scheduler
from hybrid_runtime.engine.stats import Counts
from hybrid_runtime.specdecode.acceptance import Acceptance, Adjusted
from hybrid_runtime.specdecode.runner import SpecDecodeRunner
from hybrid_runtime.specdecode.sequences import Admission
from hybrid_runtime.state.step import Checkpoint, Step

logger = logging.getLogger(__name__)


class EngineCore:
    """Runs requests step by step, and reads the results of a step while the device runs the next.

    An exception may come at any point of any call (Ctrl-C does): the scheduler's state is then
    inconsistent, and is rebuilt at the next step. Only requests and what they have emitted are
    believed; those that have not ended are computed again, and the prefix cache is empty.

    eos: tokens that end a text.
    greedy, sampling: how drafts are verified in steps in which no row samples, and in the others.
    steps_ahead: steps that stay queued when `step` returns.
    pooler, prompt_logprobs: made when first needed, by `make_pooler` and `make_prompt_logprobs`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: SpecDecodeRunner,
        tokenizer: Tokenizer | None,
        eos: Collection[int],
        greedy: Acceptance,
        sampling: Acceptance,
        steps_ahead: int,
        make_pooler: Callable[[], Pooler],
        make_prompt_logprobs: Callable[[], PromptLogprobs],
    ) -> None:
        self.steps_ahead = steps_ahead
        self.pooler: Pooler | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self._make_pooler, self._make_prompt_logprobs = make_pooler, make_prompt_logprobs
        self.counts = Counts()
        self._scheduler, self._runner = scheduler, runner
        self._ledger = scheduler.ledger
        self._tokenizer, self.eos = tokenizer, frozenset(eos)
        self._greedy, self._sampling = greedy, sampling
        self._adjusting: dict[tuple[bool, bool, bool], Acceptance] = {}
        self._live: dict[int, Request] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._queue: deque[tuple[Schedule, Step]] = deque()
        # Something changes the scheduler's state, or has been interrupted while it did.
        self._inconsistent = False
        # Ended by others while a step was under way.
        self._leaving: list[Request] = []

    @property
    def idle(self) -> bool:
        """No request waits or runs, and no results are on their way."""
        return not (self._live or self._queue or self._inconsistent)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn; `ValueError` if it has done so before."""
        if request.submitted:
            raise ValueError(f"request {request.id} was queued before; it must be a new one")
        if request.pooled_from is not None and self.pooler is None:
            self.pooler = self._make_pooler()
        if request.wants_prompt_logprobs and self.prompt_logprobs is None:
            self.prompt_logprobs = self._make_prompt_logprobs()
        was, self._inconsistent = self._inconsistent, True
        request.submitted = time.perf_counter()
        if request.due is not None:
            heappush(self._deadlines, (request.due, request.id))
        self._scheduler.add(request)
        self._live[request.id] = request
        self._inconsistent = was

    def step(self) -> list[Request]:
        """Queue one step and read the results of the one before (with `steps_ahead` 0: of this
        one); the requests that got tokens or ended."""
        changed = self._recover() if self._inconsistent else []
        self._inconsistent = True
        late, schedule = self._schedule()
        failed = self._run(schedule)
        changed += late + failed
        changed += self._postprocess(stopped=schedule is None or bool(failed))
        while self._leaving:
            self._retire(self._leaving.pop())
        self._inconsistent = False
        return changed

    def serve(self, requests: Sequence[Request], shown: Callable[[], None]) -> None:
        """Queue prepared requests as there is room, and run until all have ended; none is left
        behind by an exception. shown: called after each step."""
        still, queued = set(requests), 0
        try:
            while still:
                while queued < len(requests) and not self._scheduler.full:
                    self.add(requests[queued])
                    queued += 1
                still.difference_update([r for r in self.step() if r.finish_reason is not None])
                shown()
        except BaseException:
            for request in requests:
                self.finish(request, "abort")
            raise

    def finish(
        self, request: Request, reason: FinishReason, error: Exception | None = None
    ) -> None:
        """End a request now; nothing happens to one that is not here."""
        if self._live.get(request.id) is not request or request.finish_reason is not None:
            return
        was, self._inconsistent = self._inconsistent, True
        request.error, request.finish_reason = error, reason
        if was:
            self._leaving.append(request)
        else:
            self._retire(request)
        self._inconsistent = was

    def end_all(self) -> None:
        """End all requests as "abort", and read what is on its way."""
        for request in list(self._live.values()):
            self.finish(request, "abort")
        while not self.idle:
            self.step()

    def change(self, act: Callable[[], None]) -> None:
        """Do something to slots, blocks or caches. While these are inconsistent nothing is done:
        they are rebuilt."""
        if self._inconsistent:
            return
        self._inconsistent = True
        act()
        self._inconsistent = False

    # -- after an interruption -------------------------------------------------------------------

    def _recover(self) -> list[Request]:
        """Rebuild the scheduler's state from what requests have emitted; those that have ended by
        it. It may be interrupted itself, and is then done again."""
        device = self._runner.manager.device
        forget_declarations()
        if device.type == "cuda":
            with allowed("a step was interrupted"):
                torch.cuda.synchronize(device)
        self._queue.clear()
        self._leaving.clear()
        live = [request for request in self._live.values() if request.finish_reason is None]
        logger.warning("a step was interrupted; requests to compute again: %d", len(live))
        for request in live:
            request.finish_reason = self._emit(request, request.restore)
            if late := len(request.output) - sum(count for _, count in request.times):
                request.times.append((time.perf_counter(), late))  # tokens without their time
        ended = [request for request in live if request.finish_reason is not None]
        self._live = {r.id: r for r in live if r.finish_reason is None}
        self._deadlines = [(r.due, r.id) for r in self._live.values() if r.due is not None]
        heapify(self._deadlines)
        self._scheduler.reset(self._live.values())
        return ended

    # -- schedule --------------------------------------------------------------------------------

    def _schedule(self) -> tuple[list[Request], Schedule | None]:
        """The requests whose time is over, and the rows of the next step, if any can run."""
        late = self._expire()
        admitted = self._scheduler.admit()
        if admitted:
            self._runner.sequences.admit([self._admission(request) for request in admitted])
        return late, self._scheduler.schedule()

    def _admission(self, request: Request) -> Admission:
        """What the device is told of a request; where its text ends if the state is kept there."""
        r, ends = request, self._ledger.expect(request, self.eos, self._tokenizer is not None)
        known = Admission(r.slot, r.device_tokens, len(r.prompt), r.params, r.seed, r.bans)
        if not (self._scheduler.keeps_turn_ends and r.max_tokens):
            return known
        return known._replace(most=int(self._ledger.most[r.slot]), ends=ends, stops=r.stops)

    def _expire(self) -> list[Request]:
        """End the requests whose time is over."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= time.perf_counter():
            request = self._live.get(heappop(self._deadlines)[1])
            if request is not None:
                self._end(request, "deadline")
                late.append(request)
        return late

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request in the middle of a step; one that others have ended meanwhile leaves with
        its end."""
        if request.finish_reason is None:
            request.finish_reason = reason
            self._retire(request)

    def _retire(self, request: Request) -> None:
        self._scheduler.retire(request)
        del self._live[request.id]

    # -- run -------------------------------------------------------------------------------------

    def _run(self, schedule: Schedule | None) -> list[Request]:
        """Queue a step on the device; its requests if it failed, ended by the error."""
        if schedule is None:
            return []
        watched = self.pooler is not None or schedule.prompt_logprobs
        watch = partial(self._verified, schedule) if watched else None
        try:
            step = self._runner.step(
                schedule.rows, schedule.shape, self._acceptance(schedule), watch,
                schedule.drafts.propose,
            )  # fmt: skip
        except Exception as error:
            # The forward pass may have half written these requests' state; the others' is exact.
            logger.error("a step failed; its %d requests end", len(schedule.rows), exc_info=error)
            for request in schedule.requests:
                request.error = error
                self._end(request, "error")
            return schedule.requests
        self._ledger.queue(schedule.rows)
        self._queue.append((schedule, step))
        return []

    def _verified(self, schedule: Schedule, step: int, hidden: Tensor, first_token: Tensor) -> None:
        """Queue what is made of a step's hidden states, see `OnVerified`."""
        if self.pooler is not None:
            self.pooler.pool(schedule, step, hidden, first_token)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.start(schedule, step, hidden, first_token)

    def _acceptance(self, schedule: Schedule) -> Acceptance | None:
        """Which of the step's drafts are accepted; None where no row brings a token."""
        if not schedule.samples:
            return None
        adjusted, wants = schedule.wants & ADJUSTED > 0, schedule.wants
        if adjusted or schedule.has_logprobs:
            return self._adjusted(adjusted, wants & ALLOWED > 0, schedule.has_logprobs)
        return self._sampling if wants & SAMPLED else self._greedy

    def _adjusted(self, penalises: bool, allows: bool, has_logprobs: bool) -> Acceptance:
        """The acceptance of steps with other logits or log-probabilities; always the same one, as
        graphs are filed under it."""
        key = penalises, allows, has_logprobs
        if key not in self._adjusting:
            self._adjusting[key] = Adjusted(self._sampling, self._runner.sequences, *key)
        return self._adjusting[key]

    # -- postprocess -----------------------------------------------------------------------------

    def _postprocess(self, stopped: bool) -> list[Request]:
        """Hand out the results of the oldest queued steps, of all of them if no step was queued
        behind them; the requests that got tokens or ended."""
        changed: list[Request] = []
        while len(self._queue) > (0 if stopped else self.steps_ahead):
            changed += self._hand_out(*self._queue.popleft())
        return changed

    def _hand_out(self, schedule: Schedule, step: Step) -> list[Request]:
        """Read a step's results and give each request its own."""
        why = "tokens handed to the caller" + ("" if self._queue else ", nothing queued behind")
        results = Results.read(step, schedule, self._runner, self.pooler, self.prompt_logprobs, why)
        checkpoints, now = self._checkpoints(step), time.perf_counter()
        requests, index, cache = schedule.requests, schedule.rows.index, self._scheduler.cache
        live = self._settle(schedule, results.emitted)
        plain = self._append_plain(schedule, results.emitted, live, now)
        files = np.zeros(len(index), bool)
        if cache is not None:
            full = self._ledger.computed[index] // cache.block
            files = live & (full > self._ledger.filed[index])
            for slot in checkpoints:
                files |= live & (index == slot)
        changed = live & (results.emitted[:, -1] > 0)
        ended: list[tuple[Request, FinishReason]] = []
        for row in (files | (live & ~plain)).nonzero()[0].tolist():
            request, reason = requests[row], None
            if request.finish_reason is not None:
                continue  # others have ended it since the step was read
            if not plain[row]:
                reason = self._give(request, row, results, now)
                self._ledger.length[request.slot] = request.length
            if cache is not None and files[row] and reason != "error":
                cache.file(request, checkpoints.get(request.slot, ()))
            if reason is not None:
                ended.append((request, reason))
                changed[row] = True
        if ended:
            # That of a prompt without output has been filed; after an error it may be anything.
            closed = [r for r, reason in ended if r.max_tokens and reason != "error"]
            self._scheduler.close(closed, turns=True)
            for request, reason in ended:
                self._end(request, reason)
        for row in (results.held & live).nonzero()[0].tolist():
            if requests[row].finish_reason is None:  # its text says otherwise
                self._scheduler.resume(requests[row])
        return [requests[row] for row in changed.nonzero()[0].tolist()]

    def _settle(self, schedule: Schedule, emitted: Ints) -> Bools:
        """Count what a step has emitted; the rows, bool `[rows]`, whose request has not ended and
        was not preempted while they were queued."""
        rows, count = schedule.rows, emitted[:, -1]
        live = np.array([request.finish_reason is None for request in schedule.requests])
        live &= self._ledger.epoch[rows.index] == schedule.epochs
        self._ledger.settle(rows, count, live)
        drafted = live & (rows.draft > 0) & (count > 0)
        self.counts.steps += 1
        self.counts.draft_steps += int(np.count_nonzero(drafted))
        self.counts.draft_emitted += int(count[drafted].sum())
        if schedule.drafts.made:
            tried = np.minimum(rows.draft[drafted], schedule.drafts.made)
            acceptance = self._scheduler.drafts.acceptance
            acceptance.learn(rows.index[drafted], tried, count[drafted] - 1)
        return live

    def _append_plain(self, schedule: Schedule, emitted: Ints, live: Bools, now: float) -> Bools:
        """Add emitted tokens to the output of all requests for which that is all; their rows."""
        index, requests = schedule.rows.index, schedule.requests
        plain = live & self._ledger.go_on(index, emitted)
        plain[schedule.shape.decode_rows :] = False
        tokens = emitted.tolist()
        arrived = [(now, n) for n in range(emitted.shape[1])]
        for row in plain.nonzero()[0].tolist():
            request, own = requests[row], tokens[row]
            n = own[-1]
            request.output.extend(own[:n])
            request.times.append(arrived[n])
        count = emitted[plain, -1]
        self._ledger.length[index[plain]] += count
        self.counts.emitted += int(count.sum())
        return plain

    def _give(
        self, request: Request, row: int, results: Results, now: float
    ) -> FinishReason | None:
        """Give a request what the step's row has brought; why it ends, if it does."""
        *tokens, count = results.emitted[row].tolist()
        if row in results.prompt_logprobs:
            reason = self._note_prompt_logprobs(request, results.prompt_logprobs[row])
            if reason is not None:
                return reason
        if count:
            asked = request.params.logprobs
            if results.logprobs is not None and asked is not None:
                request.note_logprobs(unpack(results.logprobs[row, :count], asked))
            return self._append(request, tokens[:count], now)
        if row in results.embeddings:
            return self._embedded(request, results.embeddings[row])
        if not request.max_tokens and request.computed == request.prefill:
            return "length"
        return None

    def _checkpoints(self, step: Step) -> dict[int, list[Checkpoint]]:
        """The checkpoints that a step has left, by slot; none without a prefix cache."""
        by_slot: dict[int, list[Checkpoint]] = {}
        if self._scheduler.cache is not None and step.published:
            for checkpoint in self._runner.manager.published(step):
                by_slot.setdefault(checkpoint.slot, []).append(checkpoint)
        return by_slot

    def _note_prompt_logprobs(
        self, request: Request, words: NDArray[np.int32]
    ) -> FinishReason | None:
        """Add log-probabilities of a request's prompt; why it ends, if it does."""
        found = unpack(words, request.params.prompt_logprobs or 0)
        broken = sum(not math.isfinite(one.logprob) for one in found)
        if broken:
            return self._broken(request, f"{broken} log-probabilities of its prompt")
        request.prompt_logprobs += found
        return None

    def _embedded(self, request: Request, embedding: Tensor) -> FinishReason:
        """Give a request its embedding; why it ends."""
        broken = int((~embedding.isfinite()).sum())
        if broken:
            return self._broken(request, f"{broken} numbers of its embedding")
        request.embedding = embedding
        return "embedded"

    def _append(self, request: Request, tokens: list[int], now: float) -> FinishReason | None:
        """Add emitted tokens to a request's text; why it ends, if it does."""
        known, broken = len(request.output), -1 - tokens[-1]
        if broken > 0:
            tokens = tokens[:-1]
        reason = self._emit(request, partial(request.append, tokens))
        new = len(request.output) - known
        if broken > 0 and reason is None:
            reason = self._broken(request, f"{broken} logits of output token {known + new}")
        self.counts.emitted += new
        if new:
            request.times.append((now, new))
        return reason

    def _broken(self, request: Request, what: str) -> FinishReason:
        """End a request whose numbers are none; drop its blocks from the prefix cache."""
        request.error = BrokenLogits(f"{what} are NaN or infinite")
        logger.error("request %d ends: %s", request.id, request.error)
        if self._scheduler.cache is not None:
            self._scheduler.cache.forget(request)
        return "error"

    def _emit(
        self, request: Request, emit: Callable[..., FinishReason | None]
    ) -> FinishReason | None:
        """Add to a request's text; why it ends, if it does. A tokenizer that fails ends it."""
        try:
            return emit(self._tokenizer, self.eos, self._scheduler.max_length)
        except Exception as error:
            logger.error("request %d: its text failed", request.id, exc_info=error)
            request.error = error
            return "error"
