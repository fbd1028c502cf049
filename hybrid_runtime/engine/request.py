"""A request, from submission to its last token."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from hybrid_runtime.engine import ledger
from hybrid_runtime.engine.ledger import Column
from hybrid_runtime.engine.logprobs import TokenLogprobs
from hybrid_runtime.engine.tokenize import Tokens
from hybrid_runtime.specdecode.logit_tables import Ban
from hybrid_runtime.specdecode.sampling import SamplingParams


class BrokenLogits(ArithmeticError):
    """The model's logits were NaN or infinite: weights, or a kernel's results, must be wrong."""


FinishReason = Literal["stop", "length", "embedded", "abort", "deadline", "error"]


ShortHit = Literal[
    "short_prompt",
    "pooled",
    "prompt_logprobs",
    "no_checkpoint",
    "evicted_keys",
    "evicted_checkpoint",
]


@dataclass(frozen=True, slots=True)
class Hit:
    """What a request found in the prefix cache.

    tokens: leading tokens that need not run, because keys, values and a state are there.
    keys: their KV blocks. state: block of the checkpoint behind them, None without a hit.
    known: leading tokens whose keys and values are there, with a checkpoint or without.
    partial: block of the keys and values behind `keys`, which is copied; None if there are none.
    turn: key of the end of a turn or a message, if that is what was found.
    short: why `tokens` is not more. "short_prompt": the prompt is not longer than `block_size`.
    "pooled", "prompt_logprobs": an embedding, or log-probabilities of the prompt, need the hidden
    states that follow. "no_checkpoint": no state was saved where the known keys and values end.
    "evicted_keys", "evicted_checkpoint": they were there, and made room for others. None: more of
    this prefix was never there.
    """

    tokens: int = 0
    keys: tuple[int, ...] = ()
    state: int | None = None
    known: int = 0
    short: ShortHit | None = None
    partial: int | None = None
    turn: bytes | None = None


@dataclass(slots=True, eq=False)
class Request:
    """What the engine knows of a request. Its numbers are in the ledger.

    id: the engine's number of it.
    prompt, params: as submitted.
    seed: of its random numbers.
    stream: decodes its output; None before the first token.
    slot: row of the batch, -1 while it waits or has ended.
    line: int64 `[columns]`, of the ledger's table while it has a slot; its own when it has left,
        blank while it waits.
    computed, computed_min, computed_max, prefill, filed, turn: its numbers there, see `Ledger`.
    output, text: tokens emitted so far, and their text (empty without a tokenizer).
    finish_reason, error: why it ended; the exception if that is "error".
    submitted: seconds of perf_counter.
    lasts: seconds until it ends with what it has.
    times: per arrival of tokens, seconds of perf_counter and how many arrived.
    tenant: requests of other tenants find nothing that it computed.
    restarts: how often it lost its slot before it ended.
    hit: what it found in the prefix cache when it was last admitted.
    hashes: keys of its full KV blocks in the prefix cache, as far as they were needed.
    checkpoints_at: tokens of its prompt behind which it leaves checkpoints, ascending.
    pinned: tokens of the last one of these that can be found; 0: none.
    goes_on: tokens and key of the deepest checkpoint that it could begin from, had none made room.
    left: tokens and keys of the checkpoints that it has found and left since it was admitted.
    turn_end: tokens behind which the next turn can go on; 0: its state was not kept at its end.
    cut: last tokens of the output that are not wholly in the text, because a stop string ended it
        in front of them; as far as they came with the last ones.
    logprobs: of its output if asked for, perhaps of more; see `output_logprobs`.
    prompt_logprobs: of the leading tokens of its prompt if asked for, without the first's; see
    `all_prompt_logprobs`.
    bans: tokens that it must not emit, for good or for now.
    stops: tokens that end its text because a stop string lies in them, see `StopTokens`.
    pooled_from: position of the first token that goes into an embedding; None: text is wanted.
    embedding: float32 `[hidden]` on the CPU, not normalised, once it has ended as "embedded".
    """

    id: int
    prompt: Tokens
    params: SamplingParams
    seed: int
    stream: DecodeStream | None = None
    slot: int = -1
    line: NDArray[np.int64] = field(default_factory=ledger.blank_line)
    output: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    submitted: float = 0.0
    times: list[tuple[float, int]] = field(default_factory=list)
    tenant: str = ""
    lasts: float | None = None
    restarts: int = 0
    hit: Hit = field(default_factory=Hit)
    hashes: list[bytes] = field(default_factory=list)
    checkpoints_at: tuple[int, ...] = ()
    pinned: int = 0
    goes_on: tuple[int, bytes] = (0, b"")
    left: list[tuple[int, bytes]] = field(default_factory=list)
    turn_end: int = 0
    cut: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    bans: tuple[Ban, ...] = ()
    stops: tuple[int, ...] = ()
    pooled_from: int | None = None
    embedding: Tensor | None = None

    computed = Column(ledger.COMPUTED)
    computed_min = Column(ledger.COMPUTED_MIN)
    computed_max = Column(ledger.COMPUTED_MAX)
    prefill = Column(ledger.PREFILL)
    filed = Column(ledger.FILED)
    turn = Column(ledger.TURN)

    @property
    def tokens(self) -> Tokens:
        """All tokens known."""
        if not self.output:
            return self.prompt
        return np.concatenate([self.prompt, np.array(self.output, np.int32)])

    def span(self, first: int, last: int) -> Tokens:
        """Known tokens from position `first` up to `last`, exclusive."""
        prompt = len(self.prompt)
        if last <= prompt:
            return self.prompt[first:last]
        output = np.array(self.output[max(first - prompt, 0) : last - prompt], np.int32)
        return np.concatenate([self.prompt[first:], output])

    @property
    def length(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def prompt_left(self) -> int:
        """Tokens that must run before it decodes and are in no queued step."""
        return self.prefill - self.computed_min

    @property
    def most_hit(self) -> int:
        """Most tokens that a prefix hit may cover. The cache keeps no hidden states, so a token
        runs if its hidden state is needed: a text's last one, all that an embedding pools, all
        behind which log-probabilities of the prompt are wanted."""
        if self.pooled_from is not None:
            return self.pooled_from
        return len(self.prompt_logprobs) if self.wants_prompt_logprobs else self.length - 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Log-probabilities of tokens of its prompt are still to come."""
        return self.params.prompt_logprobs is not None and (
            len(self.prompt_logprobs) < len(self.prompt) - 1
        )

    @property
    def max_tokens(self) -> int:
        """Most tokens of output."""
        return self.params.max_tokens if self.pooled_from is None else 0

    @property
    def device_tokens(self) -> Tokens:
        """Tokens as the device sees them. To the device a row is a prompt's chunk, which emits
        nothing, while more tokens follow; so a prompt that wants no output gets one more, which
        never runs."""
        return self.tokens if self.max_tokens else np.append(self.prompt, self.prompt[-1])

    @property
    def settled(self) -> int:
        """Characters of the text that no stop string can still cut off."""
        if self.finish_reason is not None or self.params.include_stop_str_in_output:
            return len(self.text)
        longest = 0
        for stop in self.params.stop:
            for n in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:n]):
                    longest = n
                    break
        return len(self.text) - longest

    @property
    def due(self) -> float | None:
        """When it ends with what it has, in seconds of perf_counter."""
        return None if self.lasts is None else self.submitted + self.lasts

    def forget(self) -> None:
        """It has no slot, and nothing of it has been computed."""
        prefill = self.prefill
        self.slot, self.line, self.restarts = -1, ledger.blank_line(), self.restarts + 1
        self.prefill = prefill

    def restore(
        self, tokenizer: Tokenizer | None, eos: Collection[int], max_length: int
    ) -> FinishReason | None:
        """After an exception in the middle of `append`: let text and end be what the output says;
        why it ends, if it does. May itself be interrupted."""
        fresh = replace(self, output=[], text="", stream=None)
        reason = fresh.append(self.output, tokenizer, eos, max_length)
        self.text, self.stream = fresh.text, fresh.stream
        return reason

    def note_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """Note log-probabilities of the tokens that are appended next. After an exception in
        between, nothing is lost: those tokens come again."""
        self.logprobs[len(self.output) :] = logprobs

    @property
    def all_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Log-probabilities of each token of the prompt, None for the first, fewer if it ended
        before they were known; None if not wanted."""
        return None if self.params.prompt_logprobs is None else [None, *self.prompt_logprobs]

    @property
    def output_logprobs(self) -> list[TokenLogprobs] | None:
        """Log-probabilities of each token of the output; None if not wanted."""
        return None if self.params.logprobs is None else self.logprobs[: len(self.output)]

    def append(
        self,
        tokens: list[int],
        tokenizer: Tokenizer | None,
        eos: Collection[int],
        max_length: int,
    ) -> FinishReason | None:
        """Add emitted tokens up to where the request ends; why it ends, if it does."""
        params, ends_at = self.params, list[int]()
        for token in tokens:
            ends = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
            if ends and not params.include_stop_str_in_output:
                return "stop"
            self.output.append(token)
            known = len(self.text)
            if tokenizer is not None:
                if self.stream is None:
                    ids = self.prompt[-4:].tolist()
                    self.stream = DecodeStream(ids, params.skip_special_tokens)
                self.text += self.stream.step(tokenizer, token) or ""
            ends_at.append(len(self.text))
            if ends:
                return "stop"
            if params.stop and len(self.output) > params.min_tokens and self._cut(known):
                cut = sum(end > len(self.text) for end in ends_at)
                self.cut = cut if cut < len(ends_at) else 0
                return "stop"
            if len(self.output) >= params.max_tokens or self.length >= max_length:
                return "length"
        return None

    def _cut(self, known: int) -> bool:
        """End the text at a stop string that ends behind its first `known` characters; whether
        there is one."""
        ends = []
        for stop in self.params.stop:
            at = self.text.find(stop, max(known + 1 - len(stop), 0))
            if at >= 0:
                ends.append(at + len(stop) * self.params.include_stop_str_in_output)
        if ends:
            self.text = self.text[: min(ends)]
        return bool(ends)


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt.

    text, tokens: the output.
    prompt_tokens: length of the prompt.
    finish_reason: "stop" (end of text, stop token or stop string), "length", "abort", "deadline" or
    "error"; `error` then says what went wrong, and other requests are not affected.
    time_to_first_token: seconds from `submit`.
    itl: seconds per token, one entry per token after the first step's; the tokens that a step
    emitted share its time equally. hit: what of the prompt was not computed, and why not more.
    logprobs: of each token, if asked for. prompt_logprobs: of each token of the prompt, None for
    the first, if asked for; fewer if the request ended while its prompt ran.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    time_to_first_token: float
    itl: list[float]
    error: Exception | None = None
    hit: Hit = Hit()
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None

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
            logprobs=request.output_logprobs,
            prompt_logprobs=request.all_prompt_logprobs,
        )


def raise_first(requests: Iterable[Request]) -> None:
    """Raise what the step of one of these requests has raised."""
    for request in requests:
        if request.error is not None:
            raise request.error
