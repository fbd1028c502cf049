"""A request, from submission to its last token."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from hybrid_runtime.specdecode.sampling import SamplingParams

FinishReason = Literal["stop", "length", "embedded", "abort", "deadline", "error"]


ShortHit = Literal["short_prompt", "pooled", "no_snapshot", "evicted_keys", "evicted_snapshot"]


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request found in the prefix cache.

    tokens: whose keys, values and state are there. keys: their blocks. state: block of the
    snapshot, None without a hit. known: tokens whose keys and values are there, so that others
    share them. short: why `tokens` is not more: the prompt does not fill a block and one token
    more; an embedding needs the hidden states behind it; keys and values go on beyond the last
    snapshot; either was there and had to make room; None: no more of it was ever there.
    """

    tokens: int = 0
    keys: tuple[int, ...] = ()
    state: int | None = None
    known: int = 0
    short: ShortHit | None = None


@dataclass(slots=True, eq=False)
class Request:
    """What the engine knows of a request.

    computed: tokens whose KV and state are final, as far as results have been read. queued: tokens
    scheduled and guesses among them, of each step whose results have not been read.
    text: decoded output so far (empty without a tokenizer). times: (seconds of perf_counter, tokens
    that arrived then). deadline: of perf_counter. prefill: tokens known when it was admitted last,
    which are run before it decodes. epoch: how often it was preempted; results of steps queued
    before that are void. hit: what it found in the prefix cache then; hashes: of its full blocks;
    filed: leading blocks whose keys and values others can find. pooled_from: position of the first
    token whose hidden state goes into an embedding, None where text is wanted. embedding: float32
    `[hidden]` on the CPU, the mean of those hidden states, once it has ended as "embedded".
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    stream: DecodeStream
    slot: int = -1
    computed: int = 0
    queued: deque[tuple[int, int]] = field(default_factory=deque)
    output: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    submitted: float = 0.0
    times: list[tuple[float, int]] = field(default_factory=list)
    tenant: str = ""
    deadline: float | None = None
    prefill: int = 0
    epoch: int = 0
    hit: Hit = field(default_factory=Hit)
    hashes: list[bytes] = field(default_factory=list)
    filed: int = 0
    pooled_from: int | None = None
    embedding: Tensor | None = None

    @property
    def tokens(self) -> list[int]:
        """All tokens known."""
        return self.prompt + self.output

    @property
    def length(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def computed_min(self) -> int:
        """Tokens computed once all that is queued has run, if every guess fails."""
        return self.computed + sum(scheduled - draft for scheduled, draft in self.queued)

    @property
    def computed_max(self) -> int:
        """The same if every guess is accepted."""
        return self.computed + sum(scheduled for scheduled, _ in self.queued)

    @property
    def prompt_left(self) -> int:
        """Tokens to run before it decodes that no step has been scheduled for."""
        return self.prefill - self.computed_min

    @property
    def most_hit(self) -> int:
        """Tokens that a prefix hit may cover at the most. One is left to run, because what comes
        next needs its hidden state; of an embedding all are that are pooled, because the cache
        keeps keys, values and states, and no hidden states."""
        return self.length - 1 if self.pooled_from is None else self.pooled_from

    @property
    def max_tokens(self) -> int:
        """Most tokens of output."""
        return self.params.max_tokens if self.pooled_from is None else 0

    @property
    def device_tokens(self) -> list[int]:
        """Tokens known, as the device is told. It takes a row for a prompt's chunk, which brings no
        token and no drafts, as long as more are known: so an embedding's text ends in one that
        never runs."""
        return self.tokens if self.pooled_from is None else [*self.prompt, self.prompt[-1]]

    @property
    def sure_output(self) -> int:
        """Tokens emitted, and to be emitted by what is queued, at the least."""
        return len(self.output) + max(self.computed_min + 1 - self.length, 0)

    @property
    def settled(self) -> int:
        """Characters of the text that no stop string can still cut off."""
        if self.finish_reason is not None:
            return len(self.text)
        longest = 0
        for stop in self.params.stop:
            for n in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:n]):
                    longest = n
                    break
        return len(self.text) - longest

    def append(
        self,
        tokens: list[int],
        tokenizer: Tokenizer | None,
        eos: Collection[int],
        max_length: int,
    ) -> FinishReason | None:
        """Take emitted tokens up to where the request ends; why it ends, if it does."""
        params = self.params
        for token in tokens:
            if token in params.stop_token_ids or (token in eos and not params.ignore_eos):
                return "stop"
            self.output.append(token)
            if tokenizer is not None:
                self.text += self.stream.step(tokenizer, token) or ""
            found = [at for at in (self.text.find(s) for s in params.stop) if at >= 0]
            if found:
                self.text = self.text[: min(found)]
                return "stop"
            if len(self.output) >= params.max_tokens or self.length >= max_length:
                return "length"
        return None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt.

    finish_reason: "stop" (end of text, stop token or stop string), "length", "abort", or "error"
    (then `error` says what went wrong; other requests are not affected), or "deadline". itl:
    seconds per token, one entry per token after the first step's; a step's time is shared by the
    tokens it emitted. hit: what of the prompt did not have to be computed, and why not more.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    time_to_first_token: float
    itl: list[float]
    error: Exception | None = None
    hit: Hit = Hit()

    @classmethod
    def of(cls, request: Request) -> Completion:
        assert request.finish_reason is not None
        times = request.times
        itl = []
        for (before, _), (now, count) in pairwise(times):
            itl += [(now - before) / count] * count
        return cls(
            text=request.text,
            tokens=request.output,
            finish_reason=request.finish_reason,
            prompt_tokens=len(request.prompt),
            time_to_first_token=times[0][0] - request.submitted if times else float("nan"),
            itl=itl,
            error=request.error,
            hit=request.hit,
        )
