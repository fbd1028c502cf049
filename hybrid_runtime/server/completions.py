"""`/v1/completions`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hybrid_runtime.engine import Completion, Delta
from hybrid_runtime.server import logprobs
from hybrid_runtime.server.answers import Answer
from hybrid_runtime.server.errors import ApiError
from hybrid_runtime.server.generation import Batch, Job
from hybrid_runtime.server.params import sampling_params
from hybrid_runtime.server.schemas import CompletionBody
from hybrid_runtime.server.service import Here

DEFAULT_TOKENS = 16
"""Of a completion whose body does not say, as OpenAI's."""

router = APIRouter()


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """echoes: by choice, what stands in front of its text. with_ids: show token ids. spell: the
    text of one token. shown: characters of tokens that were shown, by choice."""

    echoes: list[str]
    with_ids: bool
    spell: logprobs.Spell
    shown: Counter[int] = field(default_factory=Counter)
    whole: ClassVar[str] = "text_completion"
    part: ClassVar[str] = "text_completion"
    prefix: ClassVar[str] = "cmpl"

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return self._choice(index, self.echoes[index] + completion.text, completion)

    def parts(self, index: int, delta: Delta, first: bool) -> Iterator[dict[str, Any]]:
        text = (self.echoes[index] if first else "") + delta.text
        if text or delta.finish_reason or self.with_ids or delta.logprobs:
            yield self._choice(index, text, delta)

    def _choice(self, index: int, text: str, piece: Completion | Delta) -> dict[str, Any]:
        told = None
        if piece.logprobs is not None:
            told = logprobs.of_completion(
                piece.tokens, piece.logprobs, self.spell, self.shown[index]
            )
            self.shown[index] += sum(map(len, told["tokens"]))
        choice = {
            "index": index, "text": text, "logprobs": told, "finish_reason": piece.finish_reason,
        }  # fmt: skip
        return choice | ({"token_ids": piece.tokens} if self.with_ids else {})


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, service: Here) -> Response:
    """Complete one or many prompts."""
    service.check_model(body.model)
    service.check_choices(len(body.prompt) * (body.n or 1), "n")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo is true; it must be false with logprobs", param="echo")
    prompts = await service.encode(body.prompt, "prompt")
    max_tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    for prompt in prompts:
        service.check_length(len(prompt), max_tokens, "prompt")
    params = sampling_params(body, service.default_params, max_tokens, body.logprobs)
    tenant = service.tenant(request, body.cache_salt)
    jobs = [Job(prompt, each, tenant, body.deadline) for prompt in prompts for each in params]
    echoes = [service.text(prompt) if body.echo else "" for prompt in body.prompt for _ in params]
    form = CompletionForm(echoes, body.return_token_ids, service.spell)
    batch = Batch(service.engine, service.metrics, jobs)
    return await Answer(body, service.options.model_name, batch, form).respond(request)
