"""The engine for asyncio: a thread of its own runs the steps, coroutines get the tokens."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Self

import torch
from torch import Tensor

from hybrid_runtime.device.process import OneProcess
from hybrid_runtime.engine.client import Client, Delta, deliver
from hybrid_runtime.engine.engine import Engine, QueueFull
from hybrid_runtime.engine.owner import EngineClosed
from hybrid_runtime.engine.pooler import Pooling, stacked
from hybrid_runtime.engine.request import Completion, Request
from hybrid_runtime.engine.tokenize import Prompt, prompt_list
from hybrid_runtime.specdecode.sampling import SamplingParams

logger = logging.getLogger(__name__)


class AsyncEngine(OneProcess):
    """Serves any number of coroutines from one engine.

    engine: used by the thread of this object from `async with` on, until that is left; its `stats`
    may be asked for any time. Prompts are encoded by other threads, so that no step waits for it.

    All calls raise what `Engine.submit` raises (`ValueError`, `QueueFull`), and `EngineClosed` once
    `close` has been called. Cancelling one ends its request.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._clients: dict[Request, Client] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = self._stopping = self._over = False
        self._broken: EngineClosed | None = None

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
        checkpoints_at: Sequence[int] = (),
    ) -> AsyncGenerator[Delta, None]:
        """One completion as it comes; arguments as of `Engine.submit`.

        The last delta has a `finish_reason`. What the request's step raised is raised instead of
        it. Closing the iterator ends the request. Who reads slowly gets fewer, longer deltas.
        """
        request = await self._prepared(
            partial(
                self.engine.prepare, prompt, params, tenant=tenant, deadline=deadline,
                checkpoints_at=checkpoints_at,
            )
        )  # fmt: skip
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
        checkpoints_at: Sequence[int] = (),
    ) -> Completion:
        """One completion as a whole; arguments as of `Engine.submit`. Raises what the request's
        step raised."""
        completion: Completion | None = None
        async for delta in self.stream(
            prompt, params, tenant=tenant, deadline=deadline, checkpoints_at=checkpoints_at
        ):
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
        clients: list[Client] = []
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
        return stacked(requests, self.engine.model.hidden_size, normalize)

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
            raise self._broken
        if self._thread is None:
            raise EngineClosed("the engine does not run yet; use `async with`")
        if self._closed:
            raise EngineClosed("the engine is closed")

    async def _open(self, request: Request) -> Client:
        """Queue a request; who gets its deltas."""
        self._check_open()
        client = Client(request)
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

    async def _open_in_turn(self, request: Request, before: Sequence[Client]) -> Client:
        """Queue a request, if need be when others of the same call have ended."""
        while True:
            try:
                return await self._open(request)
            except QueueFull:
                running = next((client for client in before if not client.ended), None)
                if running is None:
                    raise
                await running.end()

    def _leave(self, client: Client) -> None:
        """This request has no caller any more."""
        if not client.ended:
            self._inbox.put(partial(self._abort, client.request))

    # -- on the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        """Serve until `close`."""
        if self.engine.model.device.type == "cuda":
            torch.cuda.set_device(self.engine.model.device)
        try:
            while not (self._stopping and self.engine.idle):
                if self.engine.idle:
                    self._inbox.get()()
                self._listen()
                self._obey()
                if not self.engine.idle:
                    self._step()
        except BaseException as error:
            logger.exception("the engine has failed and takes no more requests")
            self._broken = EngineClosed(f"the engine has failed: {error!r}")
            self._fail_all(error if isinstance(error, Exception) else self._broken)
        finally:
            self._closed = self._over = True
            self._obey()
            self.engine.hand_over()

    def _listen(self) -> None:
        """Do what the event loop asks for as long as the device is busy anyway."""
        while spare := self.engine.spare_time:
            try:
                act = self._inbox.get(timeout=spare)
            except Empty:
                return
            act()

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
                self._loop.call_soon_threadsafe(deliver, news)
            except RuntimeError:  # the loop is closed: no caller is left
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
            try:
                self.engine.fail(request, error)
            except Exception:  # nothing works any more, but no caller may wait for ever
                request.error, request.finish_reason = error, "error"
        self._publish(requests)

    def _stop(self) -> None:
        self._stopping = True
