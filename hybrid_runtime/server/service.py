"""What the routes share: the engine, and checks and conversions that need it."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Request

from hybrid_runtime.engine import AsyncEngine, SamplingParams
from hybrid_runtime.engine.conversation import Conversation
from hybrid_runtime.engine.tokenize import Prompt, Tokens, encode
from hybrid_runtime.server.errors import ApiError, refused
from hybrid_runtime.server.generation import Job
from hybrid_runtime.server.metrics import Metrics
from hybrid_runtime.server.options import ServerOptions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    """What a route is handed.

    engine: running.
    options: of the server.
    metrics: of the server and the engine.
    created: Unix time at which the server started.
    """

    engine: AsyncEngine
    options: ServerOptions
    metrics: Metrics
    created: int

    @property
    def max_model_len(self) -> int:
        return self.engine.engine.config.max_model_len

    @property
    def default_params(self) -> SamplingParams:
        """Those of the checkpoint's `generation_config.json`."""
        return self.engine.engine.default_params

    def check_model(self, name: str | None) -> None:
        """`ApiError` for another model than the one served; None means that one."""
        if name not in (None, self.options.model_name):
            raise ApiError(
                404, f"model {name!r} does not exist; it must be {self.options.model_name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip

    async def encode(self, prompts: Sequence[Prompt], param: str) -> list[Tokens]:
        """Token ids of prompts, made in another thread; `ApiError` for one that cannot run."""
        engine = self.engine.engine

        def work() -> list[Tokens]:
            size = engine.model.vocab_size
            return [encode(prompt, engine.tokenizer, size) for prompt in prompts]

        return await _refused(param, work)

    async def conversation(
        self, messages: Sequence[dict[str, str]], template_options: Mapping[str, Any] | None
    ) -> Conversation:
        """A conversation as a prompt, made in another thread; `ApiError` if it cannot run."""
        make = self.engine.engine.conversation
        return await _refused(
            "messages", partial(make, messages, template_options=template_options)
        )

    async def check(self, jobs: Iterable[Job], prompt: str) -> None:
        """`ApiError` for a job that the engine refuses, before any of them starts: later, its error
        would count as a failure of the server. prompt: the field that holds the prompts."""
        prepare = self.engine.engine.prepare

        def work() -> None:
            for job in jobs:
                prepare(job.prompt, job.params, tenant=job.tenant, deadline=job.deadline)

        try:
            await asyncio.to_thread(work)
        except ValueError as error:
            raise refused(error, prompt) from error

    def spell(self, token: int) -> str:
        """The text of one token; U+FFFD where that is only part of a character."""
        return self.text([token])

    def text(self, prompt: str | Sequence[int]) -> str:
        """A prompt as text."""
        if isinstance(prompt, str):
            return prompt
        tokenizer = self.engine.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=False)

    def check_length(self, prompt: int, output: int, param: str) -> None:
        """`ApiError` for a request of more than `max_model_len` tokens."""
        most = self.max_model_len
        if prompt + output > most:
            raise ApiError(
                400, f"this model's context is {most} tokens, but {prompt + output} were asked "
                f"for ({prompt} of the prompt, {output} of the completion)",
                param=param, code="context_length_exceeded",
            )  # fmt: skip

    def check_choices(self, count: int, param: str) -> None:
        """`ApiError` for more results than one request may ask for."""
        most = self.options.max_choices
        if count > most:
            raise ApiError(
                400, f"{param} asks for {count} results; at most {most} are allowed", param=param
            )

    def tenant(self, request: Request, salt: str | None = None) -> str:
        """The name under which a request shares cached prefixes: its key and salt."""
        return f"{request.scope.get('api_key', '')}/{salt or ''}"


async def _refused(param: str, work: Callable[[], T]) -> T:
    """What `work` returns, run in another thread; `ApiError` about `param` for its `ValueError`."""
    try:
        return await asyncio.to_thread(work)
    except ValueError as error:
        raise ApiError(400, str(error), param=param) from error


def _service(request: Request) -> Service:
    return cast(Service, request.app.state.service)


Here = Annotated[Service, Depends(_service)]
"""Type of a route's argument that is the service."""
