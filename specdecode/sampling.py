"""Sampling parameters of a request, and the streams of its counter-based random numbers."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real

import torch
from torch import Tensor

from hybrid_runtime.kernels.sampling.uniform import uniform as keyed_uniform

# What a random number is used for. Numbers of different streams are independent, so a draft, the
# decision about it and the token that replaces it can all be keyed by the same absolute position.
DRAFT = 0
ACCEPT = 1
TARGET = 2
SYNTHETIC = 3

MAX_LOGIT_BIAS = 300
"""Tokens of one request that may have a bias."""

MAX_BAD_WORDS = 128
"""Texts of one request that may not be generated."""

MAX_BAD_WORD_LENGTH = 256
"""Characters of one of them."""

REPETITION_PENALTY = 1e-30, 1e30
"""Least and most: logits of up to 1e8 times either stay finite in float32."""

MAX_COMPLETIONS = 128
"""Of one prompt."""

MAX_LOGPROBS = 20
"""Most likely tokens whose log-probabilities come with those of an emitted one, at most."""


def _require(holds: bool, argument: str, value: object, must: str) -> None:
    if not holds:
        raise ValueError(f"{argument} is {value!r}, must be {must}")


def _is_int(value: object, low: int, high: float) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) < high


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What one request asks for.

    Attributes:
        temperature: logits are divided by it; 0 = greedy.
        top_k: sample among the k most likely tokens only; 0 = among all.
        top_p: sample among the fewest most likely tokens that together reach this probability.
        min_p: sample among tokens at least this many times as likely as the most likely one.
        repetition_penalty: logits of tokens in prompt or output are divided by it if positive,
            otherwise multiplied; 1 = off.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: the same, times how often the output has them.
        logit_bias: what is added to logits behind the penalties, by token; None = nothing.
        allowed_token_ids: no others are drawn; None = any.
        bad_words: texts that are not generated, with a space in front or without: where the output
            ends with all tokens of one but the last, that one is not drawn.
        min_tokens: before so many tokens of output none is drawn that would end it (end-of-text
            tokens unless `ignore_eos`, and `stop_token_ids`), and no stop string ends it.
        logprobs: give the log-probability of each token, and of so many most likely ones beside it;
            None = of none.
        prompt_logprobs: the same of each token of the prompt but the first.
        n: completions of the prompt.
        seed: key of the request's random numbers; None = the engine picks one.
        max_tokens: tokens to generate at most, of each completion; 0 = the prompt runs, no more.
        stop: generation ends when one of these texts appears.
        stop_token_ids: generation ends after one of these tokens.
        ignore_eos: go on after the model's end-of-text token.
        include_stop_str_in_output: keep the stop string in the text, or the token that ended it
            among the tokens.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError: a value out of range or of the wrong type.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _require(
            _is_real(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "a finite number >= 0",
        )
        _require(_is_int(self.top_k, 0, math.inf), "top_k", self.top_k, "an integer >= 0 (0 = off)")
        _require(
            _is_real(self.top_p) and 0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "a number > 0 and <= 1",
        )
        _require(
            _is_real(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]"
        )
        least, most = REPETITION_PENALTY
        _require(
            _is_real(self.repetition_penalty) and least <= self.repetition_penalty <= most,
            "repetition_penalty",
            self.repetition_penalty,
            f"a number in [{least}, {most}]",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_real(value) and -2 <= value <= 2, name, value, "a number in [-2, 2]")
        self._check_logit_bias()
        self._check_bans()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                value is None or _is_int(value, 0, MAX_LOGPROBS + 1),
                name,
                value,
                f"None or an integer in [0, {MAX_LOGPROBS}]",
            )
        _require(
            _is_int(self.n, 1, MAX_COMPLETIONS + 1),
            "n",
            self.n,
            f"an integer in [1, {MAX_COMPLETIONS}]",
        )
        _require(
            self.seed is None or _is_int(self.seed, 0, 2**63),
            "seed",
            self.seed,
            "None or an integer >= 0 and < 2**63",
        )
        _require(
            _is_int(self.max_tokens, 0, 2**31), "max_tokens", self.max_tokens, "an integer >= 0"
        )
        _require(
            _is_int(self.min_tokens, 0, self.max_tokens + 1),
            "min_tokens",
            self.min_tokens,
            f"an integer in [0, {self.max_tokens}], at most max_tokens",
        )
        # A lone string is itself a sequence of strings and would stop at each of its letters.
        _require(
            isinstance(self.stop, list | tuple)
            and all(isinstance(text, str) and text for text in self.stop),
            "stop",
            self.stop,
            "a tuple of non-empty strings",
        )
        _require(
            isinstance(self.stop_token_ids, list | tuple)
            and all(_is_int(token, 0, 2**31) for token in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "a tuple of integers >= 0",
        )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "True or False")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias or {}) or None)

    def check_vocabulary(self, size: int) -> None:
        """`ValueError` for a token outside a vocabulary of `size`."""
        for name in ("logit_bias", "allowed_token_ids"):
            tokens = getattr(self, name) or ()
            if any(token >= size for token in tokens):
                shown = reprlib.repr(tokens)  # they may be many
                raise ValueError(f"{name} is {shown}, must be of tokens in 0..{size - 1}")

    def each(self) -> "list[SamplingParams]":
        """Parameters of each of the `n` completions; the seeds follow on `seed`."""
        seeds = [None if self.seed is None else (self.seed + i) % 2**63 for i in range(self.n)]
        return [replace(self, n=1, seed=seed) for seed in seeds]

    @property
    def adjusts(self) -> bool:
        """Penalties, biases or a choice of tokens change the logits; bans do besides."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.logit_bias)
            or self.allowed_token_ids is not None
        )

    def _check_logit_bias(self) -> None:
        bias = self.logit_bias
        _require(
            bias is None
            or (
                isinstance(bias, Mapping)
                and len(bias) <= MAX_LOGIT_BIAS
                and all(_is_int(token, 0, 2**31) for token in bias)
                and all(_is_real(value) and -100 <= value <= 100 for value in bias.values())
            ),
            "logit_bias",
            bias,
            f"None or a mapping of at most {MAX_LOGIT_BIAS} tokens (integers >= 0) to numbers in "
            "[-100, 100]",
        )

    def _check_bans(self) -> None:
        _require(
            self.allowed_token_ids is None
            or (
                isinstance(self.allowed_token_ids, list | tuple)
                and len(self.allowed_token_ids) > 0
                and all(_is_int(token, 0, 2**31) for token in self.allowed_token_ids)
            ),
            "allowed_token_ids",
            self.allowed_token_ids,
            "None or a tuple of at least one integer >= 0",
        )
        _require(
            isinstance(self.bad_words, list | tuple)
            and len(self.bad_words) <= MAX_BAD_WORDS
            and all(
                isinstance(word, str) and 0 < len(word) <= MAX_BAD_WORD_LENGTH
                for word in self.bad_words
            ),
            "bad_words",
            self.bad_words,
            f"a tuple of at most {MAX_BAD_WORDS} non-empty strings of at most "
            f"{MAX_BAD_WORD_LENGTH} characters",
        )


def uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """Uniform random numbers that depend on nothing but their arguments, on every device.

    Args:
        seed: int64 [rows].
        position: int64 [rows, ...].
        stream: what the number is for (DRAFT, ACCEPT, ...).

    Returns:
        float32 like ``position``, multiples of 2**-24 in [0, 1).

    Raises:
        ValueError: wrong dtype or number of rows.
    """
    _require(seed.dtype == torch.int64 and seed.dim() == 1, "seed", _kind(seed), "int64 [rows]")
    _require(
        position.dtype == torch.int64 and position.shape[:1] == seed.shape,
        "position",
        _kind(position),
        f"int64 [{seed.shape[0]}, ...]",
    )
    return keyed_uniform(seed, position, stream)


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
