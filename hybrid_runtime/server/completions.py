"""`/v1/completions`."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hybrid_runtime.engine import Completion, Delta, TokenLogprobs
from hybrid_runtime.server import logprobs
from hybrid_runtime.server.answers import Answer
from hybrid_runtime.server.generation import Batch, Job
from hybrid_runtime.server.schemas import CompletionBody, sampling_params
from hybrid_runtime.server.service import Here

DEFAULT_TOKENS = 16
"""`max_tokens` where a body has none, as OpenAI's."""

router = APIRouter()


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """Answers of completions.

    body: the request.
    echoes: by choice, the text in front of its completion; "" without `echo`.
    prompts: by choice, the token ids of its prompt.
    spell: the text of one token.
    shown: by choice, characters of the tokens whose log-probabilities were sent.
    """

    body: CompletionBody
    echoes: Sequence[str]
    prompts: Sequence[Sequence[int]]
    spell: logprobs.Spell
    shown: Counter[int] = field(default_factory=Counter)
    whole: ClassVar[str] = "text_completion"
    part: ClassVar[str] = "text_completion"
    prefix: ClassVar[str] = "cmpl"

    def beside(self, _: Completion) -> dict[str, Any]:
        return {}

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        choice = self._choice(index, self.echoes[index] + completion.text, completion)
        most = self.body.prompt_logprobs
        if most is None:
            return choice
        entries = completion.prompt_logprobs or []
        shown = logprobs.of_prompt(self.prompts[index], entries, most, self.spell)
        return choice | {"prompt_logprobs": shown}

    def parts(self, index: int, delta: Delta, first: bool) -> Iterator[dict[str, Any]]:
        text = (self.echoes[index] if first else "") + delta.text
        if text or delta.finish_reason or self.body.return_token_ids or delta.logprobs:
            yield self._choice(index, text, delta)

    def _choice(self, index: int, text: str, piece: Completion | Delta) -> dict[str, Any]:
        shown = None
        if piece.logprobs is not None:
            tokens, entries = self._entries(index, piece)
            shown = logprobs.of_completion(tokens, entries, self.spell, self.shown[index])
            self.shown[index] += sum(map(len, shown["tokens"]))
        choice = {
            "index": index, "text": text, "logprobs": shown, "finish_reason": piece.finish_reason,
        }  # fmt: skip
        return choice | ({"token_ids": piece.tokens} if self.body.return_token_ids else {})

    def _entries(
        self, index: int, piece: Completion | Delta
    ) -> tuple[Sequence[int], list[TokenLogprobs | None]]:
        """Tokens whose log-probabilities are sent, and these: with `echo`, of the prompt first."""
        known: list[TokenLogprobs | None] = [*(piece.logprobs or ())]
        if not self.body.echo or piece.prompt_logprobs is None:
            return piece.tokens, known
        most = self.body.logprobs or 0  # the prompt's may be more, for `prompt_logprobs`
        front = [each and each._replace(top=each.top[:most]) for each in piece.prompt_logprobs]
        return [*self.prompts[index][: len(front)], *piece.tokens], front + known


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, service: Here) -> Response:
    """Complete one or many prompts."""
    service.check_model(body.model)
    service.check_choices(len(body.prompt) * (body.n or 1), "n")
    prompts = await service.encode(body.prompt, "prompt")
    max_tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    for prompt in prompts:
        service.check_length(len(prompt), max_tokens, "prompt")
    params = sampling_params(
        body, service.default_params, max_tokens, body.logprobs, _prompt_logprobs(body)
    )
    tenant = service.tenant(request, body.cache_salt)
    jobs = [Job(prompt, each, tenant, body.deadline) for prompt in prompts for each in params]
    await service.check(jobs[:: len(params)], "prompt")
    echoes = [service.text(prompt) if body.echo else "" for prompt in body.prompt for _ in params]
    ids = [tokens for tokens in (prompt.tolist() for prompt in prompts) for _ in params]
    form = CompletionForm(body, echoes, ids, service.spell)
    batch = Batch(service.engine, service.metrics, jobs)
    return await Answer(body, service.options.model_name, batch, form).respond(request)


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """Likely tokens to list beside each token of the prompt; None = no log-probabilities."""
    asked = (body.prompt_logprobs, body.logprobs if body.echo else None)
    return max((most for most in asked if most is not None), default=None)
