"""What a caller gets of its request, from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_runtime.engine.logprobs import TokenLogprobs
from hybrid_runtime.engine.request import Completion, FinishReason, Request


@dataclass(frozen=True, slots=True)
class Delta:
    """What a request has got since its last delta.

    text: characters that no stop string can cut off any more.
    tokens: ids, those of a stop string included.
    finish_reason: why it ended, None until then.
    completion: the whole answer, with the last delta.
    logprobs: of each of the tokens, if asked for.
    prompt_logprobs: with the first delta, as of `Completion`.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Client:
    """Who waits for a request. The engine's thread calls `news`, the event loop the others."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._tokens = self._text = 0
        self._begun = False
        self._pending: list[Delta] = []
        self._arrived = asyncio.Event()
        self.ended = False

    def news(self) -> Delta:
        """What the request has got since the last call."""
        request = self.request
        tokens, ready = request.output[self._tokens :], request.settled
        logprobs = request.output_logprobs
        logprobs = None if logprobs is None else logprobs[self._tokens :]
        text = request.text[self._text : ready]
        self._tokens, self._text = len(request.output), max(self._text, ready)
        reason = request.finish_reason
        prompt_logprobs = None if self._begun else request.all_prompt_logprobs
        self._begun = True
        completion = Completion.of(request) if reason else None
        return Delta(text, tokens, reason, completion, logprobs, prompt_logprobs)

    def deliver(self, delta: Delta) -> None:
        """Let `next` give it."""
        self._pending.append(delta)
        self._arrived.set()

    async def next(self) -> Delta:
        """All that has arrived since the last call, as one; waits until something has."""
        await self._arrived.wait()
        self._arrived.clear()
        pending, self._pending = self._pending, []
        text = "".join(delta.text for delta in pending)
        tokens = [token for delta in pending for token in delta.tokens]
        logprobs = [one for delta in pending for one in delta.logprobs or ()]
        last = pending[-1]
        self.ended = last.finish_reason is not None
        return Delta(
            text, tokens, last.finish_reason, last.completion,
            None if last.logprobs is None else logprobs, pending[0].prompt_logprobs,
        )  # fmt: skip

    async def end(self) -> None:
        """Wait until the request has ended."""
        while not self.ended:
            await self.next()


def deliver(news: Sequence[tuple[Client, Delta]]) -> None:
    """Hand out the news of a step, on the event loop."""
    for client, delta in news:
        client.deliver(delta)
