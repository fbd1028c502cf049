"""The completions of one HTTP request, run side by side in the engine."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from hybrid_runtime.engine import AsyncEngine, Completion, Delta, QueueFull, SamplingParams
from hybrid_runtime.engine.tokenize import Tokens
from hybrid_runtime.server.metrics import Metrics

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """One completion.

    prompt: token ids.
    params: for sampling.
    tenant: whose cached prefixes it may use.
    deadline: seconds after which it ends with what it has; None = none.
    checkpoints_at: positions of the prompt at which others may go on.
    """

    prompt: Tokens | list[int]
    params: SamplingParams
    tenant: str
    deadline: float | None
    checkpoints_at: Sequence[int] = ()


@dataclass(slots=True)
class Batch:
    """The jobs of one request: `begin`, then `deltas`, which must be read to the end or closed, so
    that nothing is left in the engine.

    engine: runs the jobs.
    metrics: counts their ends.
    jobs: what to run.
    completions: of the jobs that have ended, by index.
    """

    engine: AsyncEngine
    metrics: Metrics
    jobs: Sequence[Job]
    completions: dict[int, Completion] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _news: asyncio.Queue[tuple[int, Delta] | Exception] = field(default_factory=asyncio.Queue)
    _first: tuple[int, Delta] | None = None
    _submitted: int = 0
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def begin(self) -> None:
        """Start all jobs and wait for the first delta; a failure before that is raised."""
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(len(self.jobs))]
        try:
            self._first = await self._next()
        except BaseException:
            await self._end()
            raise

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Index of a job and its delta, as they come, until all jobs have ended. The first failure
        is raised and ends the other jobs."""
        assert self._first is not None, "begin() comes first"
        left, news = len(self.jobs), self._first
        try:
            while True:
                left -= news[1].completion is not None
                yield news
                if not left:
                    return
                news = await self._next()
        finally:
            await self._end()

    async def finish(self) -> None:
        """Run all jobs to their end."""
        await self.begin()
        async with aclosing(self.deltas()) as deltas:
            async for _ in deltas:
                pass

    async def _next(self) -> tuple[int, Delta]:
        news = await self._news.get()
        if isinstance(news, Exception):
            raise news
        return news

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, index: int) -> None:
        """Queue one job's deltas, or its failure."""
        reason = "abort"
        try:
            while not await self._submit(index):
                await self._room.acquire()
            reason = self.completions[index].finish_reason
        except Exception as error:
            reason = "refused" if isinstance(error, QueueFull) else "error"
            self._news.put_nowait(error)
        finally:
            self.metrics.ended.labels(reason).inc()

    async def _submit(self, index: int) -> bool:
        """Queue one job's deltas. False if the engine's queue is full and another job of this batch
        will make room; `QueueFull` if there is no other job."""
        job, refused = self.jobs[index], False
        self._submitted += 1
        stream = self.engine.stream(
            job.prompt, job.params, tenant=job.tenant, deadline=job.deadline,
            checkpoints_at=job.checkpoints_at,
        )  # fmt: skip
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    if delta.completion is not None:
                        self.completions[index] = delta.completion
                        self.metrics.completed(delta.completion)
                    self._news.put_nowait((index, delta))
        except QueueFull:
            if self._submitted == 1:
                raise
            refused = True
        finally:
            self._submitted -= 1
            if not refused:
                self._room.release()
        return not refused


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. If the client leaves before, `work` is cancelled and `ClientDisconnect`
    raised. The request's body must have been read."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
