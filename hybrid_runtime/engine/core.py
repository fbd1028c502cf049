"""The engine's step: requests are scheduled, their rows are run, results are handed out."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from hybrid_runtime.device.sync import allowed, forget_declarations
from hybrid_runtime.engine.logprobs import unpack
from hybrid_runtime.engine.pooler import Pooler
from hybrid_runtime.engine.prompt_logprobs import PromptLogprobs
from hybrid_runtime.engine.request import BrokenLogits, FinishReason, Request
from hybrid_runtime.engine.scheduler import Schedule, Scheduler
from hybrid_runtime.specdecode.acceptance import Acceptance, Adjusted
from hybrid_runtime.specdecode.runner import SpecDecodeRunner
from hybrid_runtime.state.step import Snapshot, Step

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Counts:
    """Results read so far.

    steps: steps. emitted: tokens added to texts. draft_steps, draft_emitted: rows with drafts, and
    the tokens that they emitted.
    """

    steps: int = 0
    emitted: int = 0
    draft_steps: int = 0
    draft_emitted: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        return self.draft_emitted / self.draft_steps if self.draft_steps else float("nan")


class EngineCore:
    """Runs requests step by step, and reads the results of a step while the device runs the next.

    An exception may come at any point of any call (Ctrl-C does): the books are then *torn*, and the
    next step begins by writing them anew. Only requests and what they have emitted are believed;
    those that have not ended are computed again, and the prefix cache is empty.

    eos: tokens that end a text. greedy, sampling: how drafts are judged in steps in which no row
    samples, and in the others. steps_ahead: steps that stay queued when `step` returns. pooler,
    prompt_logprobs: None until somebody wants an embedding, or log-probabilities of a prompt, and
    then what `make_pooler` and `make_prompt_logprobs` give.
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
        self._tokenizer, self.eos = tokenizer, frozenset(eos)
        self._greedy, self._sampling = greedy, sampling
        self._adjusting: dict[tuple[bool, bool, bool], Acceptance] = {}
        self._live: dict[int, Request] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._queue: deque[tuple[Schedule, Step]] = deque()
        # Something changes the books, or has been interrupted while it did.
        self._torn = False
        # Ended by others while a step was under way.
        self._leaving: list[Request] = []

    @property
    def idle(self) -> bool:
        """No request waits or runs, and no results are on their way."""
        return not (self._live or self._queue or self._torn)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn; `ValueError` if it has done so before."""
        if request.submitted:
            raise ValueError(f"request {request.id} was queued before; it must be a new one")
        if request.pooled_from is not None and self.pooler is None:
            self.pooler = self._make_pooler()
        if request.prompt_untold and self.prompt_logprobs is None:
            self.prompt_logprobs = self._make_prompt_logprobs()
        torn, self._torn = self._torn, True
        request.submitted = time.perf_counter()
        if request.due is not None:
            heappush(self._deadlines, (request.due, request.id))
        self._scheduler.add(request)
        self._live[request.id] = request
        self._torn = torn

    def step(self) -> list[Request]:
        """Queue one step and read the results of the one before (with `steps_ahead` 0: of this
        one); the requests that got tokens or ended."""
        changed = self._recover() if self._torn else []
        self._torn = True
        late, schedule = self._schedule()
        failed = self._run(schedule)
        changed += late + failed
        changed += self._postprocess(stopped=schedule is None or bool(failed))
        while self._leaving:
            self._retire(self._leaving.pop())
        self._torn = False
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
        torn, self._torn = self._torn, True
        request.error, request.finish_reason = error, reason
        if torn:
            self._leaving.append(request)
        else:
            self._retire(request)
        self._torn = torn

    def end_all(self) -> None:
        """End all requests as "abort", and read what is on its way."""
        for request in list(self._live.values()):
            self.finish(request, "abort")
        while not self.idle:
            self.step()

    def change(self, act: Callable[[], None]) -> None:
        """Do something to slots, blocks or caches. While the books are torn nothing is done: they
        are written anew."""
        if self._torn:
            return
        self._torn = True
        act()
        self._torn = False

    # -- after an interruption -------------------------------------------------------------------

    def _recover(self) -> list[Request]:
        """Write the books anew, from what requests have emitted; those that have ended by it. It
        may be interrupted itself, and is then done again."""
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
        ended = [request for request in live if request.finish_reason is not None]
        self._live = {r.id: r for r in live if r.finish_reason is None}
        self._deadlines = [(r.due, r.id) for r in self._live.values() if r.due is not None]
        heapify(self._deadlines)
        self._scheduler.reset(self._live.values())
        return ended

    # -- schedule --------------------------------------------------------------------------------

    def _schedule(self) -> tuple[list[Request], Schedule | None]:
        """The requests whose time is over, and the rows of the next step, if anybody can run."""
        late = self._expire()
        admitted = self._scheduler.admit()
        if admitted:
            self._runner.sequences.admit(
                [
                    (r.slot, r.device_tokens, len(r.prompt), r.params, r.seed, r.bans)
                    for r in admitted
                ]
            )
        return late, self._scheduler.schedule()

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
        watched = self.pooler is not None or schedule.told
        watch = partial(self._verified, schedule) if watched else None
        try:
            step = self._runner.step(
                schedule.rows, schedule.shape, self._acceptance(schedule), watch
            )
        except Exception as error:
            # The forward pass may have half written these requests' state; the others' is exact.
            logger.error("a step failed; its %d requests end", len(schedule.rows), exc_info=error)
            for request in schedule.requests:
                request.error = error
                self._end(request, "error")
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

    def _verified(self, schedule: Schedule, step: int, hidden: Tensor, first_token: Tensor) -> None:
        """Queue what is made of a step's hidden states, see `OnVerified`."""
        if self.pooler is not None:
            self.pooler.pool(schedule, step, hidden, first_token)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.tell(schedule, step, hidden, first_token)

    def _acceptance(self, schedule: Schedule) -> Acceptance | None:
        """How the step's drafts are judged; None where no row brings a token."""
        if not schedule.samples:
            return None
        requests = schedule.requests
        penalises = any(r.bans or r.params.adjusts for r in requests)
        tells = _tells(schedule)
        if penalises or tells:
            allows = any(r.params.allowed_token_ids is not None for r in requests)
            return self._adjusted(penalises, allows, tells)
        if all(r.params.temperature == 0 for r in requests):
            return self._greedy
        return self._sampling

    def _adjusted(self, penalises: bool, allows: bool, tells: bool) -> Acceptance:
        """The acceptance of steps with other logits or log-probabilities; always the same one, as
        graphs are filed under it."""
        key = penalises, allows, tells
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
        emitted, embeddings, told, prompts_told = self._read(schedule, step)
        snapshots = self._snapshots(step)
        now = time.perf_counter()
        self.counts.steps += 1
        changed: list[Request] = []
        ended: list[tuple[Request, FinishReason]] = []
        rows = zip(schedule.requests, schedule.epochs, emitted, strict=True)
        for row, (request, epoch, (*tokens, count)) in enumerate(rows):
            if request.finish_reason is not None or request.epoch != epoch:
                continue  # it ended or was preempted while this row was queued
            scheduled, draft = request.queued.popleft()
            request.computed += scheduled - draft + max(count, 1) - 1
            reason: FinishReason | None = None
            if row in prompts_told:
                reason = self._tell_prompt(request, prompts_told[row])
            if reason is None and count:
                if told is not None and request.params.logprobs is not None:
                    request.tell(unpack(told[row, :count], request.params.logprobs))
                reason = self._append(request, tokens[:count], draft, now)
            elif reason is None and row in embeddings:
                reason = self._embedded(request, embeddings[row])
            elif reason is None and not request.max_tokens and request.computed == request.prefill:
                reason = "length"
            if self._scheduler.cache is not None and reason != "error":
                self._scheduler.cache.file(request, snapshots.get(request.slot, ()))
            if reason is not None:
                ended.append((request, reason))
            if count or reason is not None:
                changed.append(request)
        # The last state of a prompt without output has been filed; after an error it may be
        # anything.
        self._scheduler.close([r for r, reason in ended if r.max_tokens and reason != "error"])
        for request, reason in ended:
            self._end(request, reason)
        return changed

    def _read(
        self, schedule: Schedule, step: Step
    ) -> tuple[
        list[list[int]], dict[int, Tensor], NDArray[np.int32] | None, dict[int, NDArray[np.int32]]
    ]:
        """Per row the tokens that it emitted (tail -1) and their count; embeddings by row; what is
        told of the tokens, if anything; what is told of prompts, by row. Waits until the device has
        them."""
        why = "tokens handed to the caller" + ("" if self._queue else ", nothing queued behind")
        with allowed(why):
            emitted = self._runner.read(step, why).tolist()
            embeddings = {} if self.pooler is None else self.pooler.read(schedule, step, why)
            told = self._runner.read_logprobs(step, why) if _tells(schedule) else None
            scores = self.prompt_logprobs
            prompts_told = {} if scores is None else scores.read(schedule, step, why)
        return emitted, embeddings, told, prompts_told

    def _snapshots(self, step: Step) -> dict[int, list[Snapshot]]:
        """The states that a step has saved, by slot; none where nobody would look for them."""
        by_slot: dict[int, list[Snapshot]] = {}
        if self._scheduler.cache is not None:
            for snapshot in self._runner.manager.published(step):
                by_slot.setdefault(snapshot.slot, []).append(snapshot)
        return by_slot

    def _tell_prompt(self, request: Request, words: NDArray[np.int32]) -> FinishReason | None:
        """Note what a step told of a request's prompt; why it ends, if it does."""
        told = unpack(words, request.params.prompt_logprobs or 0)
        broken = sum(not math.isfinite(one.logprob) for one in told)
        if broken:
            return self._broken(request, f"{broken} log-probabilities of its prompt")
        request.prompt_logprobs += told
        return None

    def _embedded(self, request: Request, embedding: Tensor) -> FinishReason:
        """Give a request its embedding; why it ends."""
        broken = int((~embedding.isfinite()).sum())
        if broken:
            return self._broken(request, f"{broken} numbers of its embedding")
        request.embedding = embedding
        return "embedded"

    def _append(
        self, request: Request, tokens: list[int], draft: int, now: float
    ) -> FinishReason | None:
        """Add emitted tokens to a request's text; why it ends, if it does."""
        if draft:
            self.counts.draft_steps += 1
            self.counts.draft_emitted += len(tokens)
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
        """End a request whose numbers are none; nobody finds what it has computed, or found."""
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


def _tells(schedule: Schedule) -> bool:
    """Some row of the step brings a token, and somebody wants log-probabilities."""
    return schedule.samples and any(r.params.logprobs is not None for r in schedule.requests)
