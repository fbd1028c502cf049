"""A request, from submission to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from tokenizers.decoders import DecodeStream

from hybrid_runtime.specdecode.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Request:
    """What the engine knows of a request.

    computed: tokens whose KV and state are final. drafts: guesses that wait for its next step.
    text: decoded output so far; `times`: seconds (perf_counter) at which `arrivals` tokens came.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    stream: DecodeStream
    slot: int = -1
    computed: int = 0
    drafts: int = 0
    output: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    submitted: float = 0.0
    times: list[tuple[float, int]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens that it may still emit."""
        return self.params.max_tokens - len(self.output)


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt.

    finish_reason: "stop" (end of text, stop token or stop string), "length", "abort", or "error"
    (then `error` says what went wrong; other requests are not affected). itl: seconds per token,
    one entry per token after the first step's; a step's time is shared by the tokens it emitted.
    """

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    time_to_first_token: float
    itl: list[float]
    error: Exception | None = None

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
        )
