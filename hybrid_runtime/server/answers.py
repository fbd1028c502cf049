"""Answers of completions and chat completions: whole, or as a stream of server-sent events."""

import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol
from uuid import uuid4

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Send

from hybrid_runtime.engine import Completion, Delta
from hybrid_runtime.server import errors
from hybrid_runtime.server.generation import Batch, unless_gone
from hybrid_runtime.server.schemas import Sampled

logger = logging.getLogger(__name__)

Json = dict[str, Any]


class Form(Protocol):
    """How an endpoint writes its answers.

    whole: `object` of a whole answer.
    part: `object` of a chunk of a stream.
    prefix: of the answers' ids.
    """

    whole: ClassVar[str]
    part: ClassVar[str]
    prefix: ClassVar[str]

    def beside(self, first: Completion) -> Json:
        """Fields of a whole answer beside `choices`, whose first is `first`."""

    def choice(self, index: int, completion: Completion) -> Json:
        """A choice of a whole answer."""

    def parts(self, index: int, delta: Delta, first: bool) -> Iterator[Json]:
        """A choice's chunks in a stream for one delta; `first`: it is the choice's first delta."""


class EventStream(StreamingResponse):
    """Server-sent events, whose generator is closed as soon as the client is gone."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        events: Any = self.body_iterator
        async with aclosing(events):
            await super().stream_response(send)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one request.

    body: the request.
    model: name of the model.
    batch: the jobs, `n` in a row for each prompt.
    form: how the endpoint writes its answers.
    """

    body: Sampled
    model: str
    batch: Batch
    form: Form

    async def respond(self, request: Request) -> Response:
        """Run the batch. A failure before the first token is raised, in a stream too."""
        if not self.body.stream:
            await unless_gone(request, self.batch.finish())
            ended = self.batch.completions
            choices = [self.form.choice(index, ended[index]) for index in range(len(ended))]
            usage = self._usage(sum(len(each.tokens) for each in ended.values()))
            whole = self._head(self.form.whole) | self.form.beside(ended[0])
            return JSONResponse(whole | {"choices": choices, "usage": usage})
        await unless_gone(request, self.batch.begin())
        return EventStream(self._events(), headers={"Cache-Control": "no-cache"})

    async def _events(self) -> AsyncIterator[str]:
        """The stream's events. A failure ends it with an `error` event."""
        options = self.body.stream_options
        counts = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        head = self._head(self.form.part) | ({"usage": None} if counts else {})
        seen: set[int] = set()
        tokens = 0
        try:
            async with aclosing(self.batch.deltas()) as deltas:
                async for index, delta in deltas:
                    tokens += len(delta.tokens)
                    if always:
                        head["usage"] = self._usage(tokens)
                    for part in self.form.parts(index, delta, index not in seen):
                        yield _event(head | {"choices": [part]})
                    seen.add(index)
        except Exception as error:
            status, content = errors.body(error)
            if status >= 500:
                logger.error("a stream failed", exc_info=error)
            yield _event(content)
        else:
            if counts:
                yield _event(head | {"choices": [], "usage": self._usage(tokens)})
        yield "data: [DONE]\n\n"

    def _head(self, name: str) -> Json:
        return {
            "id": f"{self.form.prefix}-{uuid4().hex}",
            "object": name,
            "created": int(time.time()),
            "model": self.model,
        }

    def _usage(self, tokens: int) -> Json:
        """`usage` with this many tokens of completions. A prompt counts once, however many choices
        it has; its cached tokens are known when its first choice has ended."""
        firsts = range(0, len(self.batch.jobs), self.body.n or 1)
        prompt_tokens = sum(len(self.batch.jobs[index].prompt) for index in firsts)
        ended = [self.batch.completions[i] for i in firsts if i in self.batch.completions]
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": sum(each.hit.tokens for each in ended)},
        }


def _event(content: Json) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"
