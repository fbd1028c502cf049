"""`/v1/chat/completions`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from hybrid_runtime.engine import Completion, Delta
from hybrid_runtime.server import logprobs
from hybrid_runtime.server.answers import Answer
from hybrid_runtime.server.errors import ApiError
from hybrid_runtime.server.generation import Batch, Job
from hybrid_runtime.server.schemas import ChatBody, sampling_params
from hybrid_runtime.server.service import Here

router = APIRouter()


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Answers of chat completions.

    body: the request.
    prompt: token ids of the conversation.
    spell: the text of one token.
    """

    body: ChatBody
    prompt: Sequence[int]
    spell: logprobs.Spell
    whole: ClassVar[str] = "chat.completion"
    part: ClassVar[str] = "chat.completion.chunk"
    prefix: ClassVar[str] = "chatcmpl"

    def beside(self, first: Completion) -> dict[str, Any]:
        most, entries = self.body.prompt_logprobs, first.prompt_logprobs or []
        if most is None:
            return {}
        return {"prompt_logprobs": logprobs.of_prompt(self.prompt, entries, most, self.spell)}

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text, "refusal": None}
        choice = {
            "index": index,
            "message": message,
            "logprobs": self._shown(completion),
            "finish_reason": completion.finish_reason,
        }
        return choice | ({"token_ids": completion.tokens} if self.body.return_token_ids else {})

    def parts(self, index: int, delta: Delta, first: bool) -> Iterator[dict[str, Any]]:
        """As OpenAI, in separate chunks: the role, the text, the finish reason."""
        empty = Delta("", [])
        if first:
            yield self._part(index, {"role": "assistant", "content": ""}, empty)
        if delta.text or delta.logprobs or (self.body.return_token_ids and delta.tokens):
            yield self._part(index, {"content": delta.text}, delta)
        if delta.finish_reason:
            yield self._part(index, {}, empty) | {"finish_reason": delta.finish_reason}

    def _part(self, index: int, shown: dict[str, Any], delta: Delta) -> dict[str, Any]:
        part = {
            "index": index, "delta": shown, "logprobs": self._shown(delta), "finish_reason": None,
        }  # fmt: skip
        return part | ({"token_ids": delta.tokens} if self.body.return_token_ids else {})

    def _shown(self, piece: Completion | Delta) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        return logprobs.of_chat(piece.tokens, piece.logprobs, self.spell)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, service: Here) -> Response:
    """The next message of a chat."""
    service.check_model(body.model)
    service.check_choices(body.n or 1, "n")
    tokens, checkpoints_at = await service.conversation(
        [message.rendered() for message in body.messages], body.chat_template_kwargs
    )
    prompt = tokens.tolist()
    given = (body.max_completion_tokens, body.max_tokens)
    asked = next((most for most in given if most is not None), None)
    # As OpenAI's: where nothing is given, all that there is room for.
    max_tokens = max(service.max_model_len - len(prompt), 1) if asked is None else asked
    service.check_length(len(prompt), max_tokens, "messages")
    params = sampling_params(
        body, service.default_params, max_tokens, _logprobs(body), body.prompt_logprobs
    )
    tenant = service.tenant(request, body.cache_salt)
    jobs = [Job(tokens, each, tenant, body.deadline, checkpoints_at) for each in params]
    await service.check(jobs[:1], "messages")
    batch = Batch(service.engine, service.metrics, jobs)
    form = ChatForm(body, prompt, service.spell)
    return await Answer(body, service.options.model_name, batch, form).respond(request)


def _logprobs(body: ChatBody) -> int | None:
    """Likely tokens to list beside each token of the output; None = no log-probabilities."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise ApiError(
            400, f"top_logprobs is {body.top_logprobs}; it must be 0 unless logprobs is true",
            param="top_logprobs",
        )  # fmt: skip
    return None
