"""The engine for asyncio: a thread of its own runs the steps, coroutines get the tokens."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Self

import torch
from torch import Tensor

from hybrid_runtime.engine.engine import Engine, QueueFull
from hybrid_runtime.engine.logprobs import TokenLogprobs
from hybrid_runtime.engine.owner import EngineClosed
from hybrid_runtime.engine.pooler import Pooling, stacked
from hybrid_runtime.engine.request import Completion, FinishReason, Request
from hybrid_runtime.engine.tokenize import Prompt, prompt_list
from hybrid_runtime.specdecode.sampling import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delta:
    """What a request has got since its last delta.

    text: characters that no stop string can cut off any more. tokens: ids, those of a stop string
    included. finish_reason: why it ended, None until then. completion: the whole answer, with the
    last delta. logprobs: of each of the tokens, if asked for.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    logprobs: list[TokenLogprobs] | None = None


class _Client:
    """Who waits for a request. The engine's thread calls `news`, the event loop the others."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._tokens = self._text = 0
        self._pending: list[Delta] = []
        self._arrived = asyncio.Event()
        self.ended = False

    def news(self) -> Delta:
        """What the request has got since the last call."""
        request = self.request
        tokens, ready = request.output[self._tokens :], request.settled
        told = request.told
        told = None if told is None else told[self._tokens :]
        text = request.text[self._text : ready]
        self._tokens, self._text = len(request.output), max(self._text, ready)
        reason = request.finish_reason
        return Delta(text, tokens, reason, Completion.of(request) if reason else None, told)

    def deliver(self, delta: Delta) -> None:
        self._pending.append(delta)
        self._arrived.set()

    async def next(self) -> Delta:
        """All that has arrived since the last call, as one; waits until something has."""
        await self._arrived.wait()
        self._arrived.clear()
        pending, self._pending = self._pending, []
        last = pending[-1]
        self.ended = last.finish_reason is not None
        return Delta(
            "".join(delta.text for delta in pending),
            [token for delta in pending for token in delta.tokens],
            last.finish_reason,
            last.completion,
            None
            if last.logprobs is None
            else [told for delta in pending for told in delta.logprobs or ()],
        )

    async def end(self) -> None:
        """Wait until the request has ended."""
        while not self.ended:
            await self.next()


class AsyncEngine:
    """Serves any number of coroutines from one engine.

    engine: used by the thread of this object from `async with` on, until that is left; its `stats`
    may be asked for any time. Prompts are encoded by other threads, so that no step waits for it.

    All calls raise what `Engine.submit` raises (`ValueError`, `QueueFull`), and `EngineClosed` once
    `close` has been called. Cancelling one ends its request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._clients: dict[Request, _Client] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = self._stopping = self._over = False
        self._broken: Exception | None = None

    @property
    def closed(self) -> bool:
        """It takes no requests: it has not begun, was closed, or has failed."""
        return self._thread is None or self._closed or self._broken is not None

    async def __aenter__(self) -> Self:
        if self._thread is not None:
            raise RuntimeError("this AsyncEngine runs or has run; it must be entered once")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="AsyncEngine", daemon=True)
        self.engine.hand_over(self._thread)
        self._thread.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(drain=kind is None)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        deadline: float | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """One completion as it comes; arguments as of `Engine.submit`.

        The last delta has a `finish_reason`. What the request's step raised is raised instead of
        it. Closing the iterator ends the request. Who reads slowly gets fewer, longer deltas.
        """
        request = await self._prepared(
            partial(self.engine.prepare, prompt, params, tenant=tenant, deadline=deadline)
        )
        client = await self._open(request)
        try:
            while not client.ended:
                delta = await client.next()
                if request.error is None or not client.ended:
                    yield delta
        finally:
            self._leave(client)
        if request.error is not None:
            raise request.error

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        deadline: float | None = None,
    ) -> Completion:
        """One completion as a whole; arguments as of `Engine.submit`. Raises what the request's
        step raised."""
        completion: Completion | None = None
        async for delta in self.stream(prompt, params, tenant=tenant, deadline=deadline):
            completion = delta.completion
        assert completion is not None
        return completion

    async def embed(
        self,
        prompts: Sequence[Prompt],
        pooling: Pooling = "last",
        instruction: Prompt = "",
        normalize: bool = True,
        *,
        tenant: str = "",
    ) -> Tensor:
        """One vector per prompt, as `Engine.embed`. More prompts than may wait are queued one by
        one; `QueueFull` is raised if not even the first can be."""
        make = self.engine.prepare_embedding
        requests = [
            await self._prepared(partial(make, prompt, pooling, instruction, tenant=tenant))
            for prompt in prompt_list(prompts)
        ]
        clients: list[_Client] = []
        try:
            for request in requests:
                clients.append(await self._open_in_turn(request, clients))
            for client in clients:
                await client.end()
        finally:
            for client in clients:
                self._leave(client)
        if any(request.finish_reason == "abort" for request in requests):
            raise EngineClosed("the engine was closed before all prompts were embedded")
        return stacked(requests, self.engine.model.config.hidden_size, normalize)

    async def close(self, drain: bool = True) -> None:
        """Take no more requests, and stop when those that are there have ended (`drain`), or end
        them now as "abort". Cancelling it ends them too. Another call may follow."""
        self._closed = True
        if self._thread is None:
            return
        if not drain:
            self._inbox.put(self._abort_all)
        self._inbox.put(self._stop)
        try:
            await asyncio.to_thread(self._thread.join)
        except asyncio.CancelledError:
            self._inbox.put(self._abort_all)
            raise

    # -- on the event loop -----------------------------------------------------------------------

    async def _prepared(self, make: Callable[[], Request]) -> Request:
        """A checked request with its prompt encoded, by another thread."""
        self._check_open()
        self.engine.check_queue()
        return await asyncio.to_thread(make)

    def _check_open(self) -> None:
        if self._broken is not None:
            raise EngineClosed("the engine has failed and is closed") from self._broken
        if self._thread is None:
            raise EngineClosed("the engine does not run yet; use `async with`")
        if self._closed:
            raise EngineClosed("the engine is closed")

    async def _open(self, request: Request) -> _Client:
        """Queue a request; who gets its deltas."""
        self._check_open()
        client = _Client(request)
        queued: Future[None] = Future()

        def add() -> None:
            if not queued.set_running_or_notify_cancel():
                return
            try:
                if self._over:
                    raise EngineClosed("the engine is closed")
                self.engine.add(request)
            except Exception as error:
                queued.set_exception(error)
            else:
                self._clients[request] = client
                queued.set_result(None)

        self._inbox.put(add)
        if self._over:  # set before the engine's thread looks into the inbox for the last time
            self._obey()
        try:
            await asyncio.wrap_future(queued)
        except asyncio.CancelledError:
            self._leave(client)
            raise
        return client

    async def _open_in_turn(self, request: Request, before: Sequence[_Client]) -> _Client:
        """Queue a request, if need be when others of the same call have ended."""
        while True:
            try:
                return await self._open(request)
            except QueueFull:
                running = next((client for client in before if not client.ended), None)
                if running is None:
                    raise
                await running.end()

    def _leave(self, client: _Client) -> None:
        """Nobody waits for this request any more."""
        if not client.ended:
            self._inbox.put(partial(self._abort, client.request))

    # -- on the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        """Serve until told to stop."""
        if self.engine.model.device.type == "cuda":
            torch.cuda.set_device(self.engine.model.device)
        try:
            while not (self._stopping and self.engine.idle):
                if self.engine.idle:
                    self._inbox.get()()
                self._obey()
                if not self.engine.idle:
                    self._step()
        except Exception as error:
            logger.exception("the engine has failed and takes no more requests")
            self._broken = error
            self._fail_all(error)
        finally:
            self._closed = self._over = True
            self._obey()
            self.engine.hand_over()

    def _obey(self) -> None:
        """Do what the event loop has asked for."""
        while True:
            try:
                act = self._inbox.get_nowait()
            except Empty:
                return
            act()

    def _step(self) -> None:
        try:
            changed = self.engine.step()
        except Exception as error:
            if not self._clients:
                raise
            logger.exception("a step failed outside the model; all requests end")
            self._fail_all(error)
            return
        self._publish(changed)

    def _publish(self, changed: Sequence[Request]) -> None:
        """Send what has changed to those who wait for it, all in one call."""
        news = []
        for request in changed:
            client = self._clients.get(request)
            if client is None:
                continue
            delta = client.news()
            if request.finish_reason is not None:
                del self._clients[request]
            if delta.tokens or delta.text or delta.finish_reason:
                news.append((client, delta))
        if news:
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(_deliver, news)
            except RuntimeError:  # the loop is closed: nobody waits any more
                self._stop()
                self._abort_all()

    def _abort(self, request: Request) -> None:
        if request in self._clients:
            self.engine.abort(request)
            self._publish([request])

    def _abort_all(self) -> None:
        requests = list(self._clients)
        for request in requests:
            self.engine.abort(request)
        self._publish(requests)

    def _fail_all(self, error: Exception) -> None:
        """End all requests by an error."""
        requests = list(self._clients)
        for request in requests:
            self.engine.fail(request, error)
        self._publish(requests)

    def _stop(self) -> None:
        self._stopping = True


def _deliver(news: list[tuple[_Client, Delta]]) -> None:
    for client, delta in news:
        client.deliver(delta)
