"""What a body asks for, in the engine's words."""

from __future__ import annotations

from dataclasses import replace

from hybrid_runtime.engine import SamplingParams
from hybrid_runtime.models.json_fields import shown
from hybrid_runtime.server.errors import ApiError, refused
from hybrid_runtime.server.schemas import Sampled

_OFTEN_LEFT_OUT = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_params(
    body: Sampled,
    default: SamplingParams,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> list[SamplingParams]:
    """Parameters of each choice of a prompt; `ApiError` for values that the engine refuses.

    default: the checkpoint's own, for what the body does not say; where that would be greedy,
    OpenAI's, which samples. logprobs, prompt_logprobs: how many likely tokens to tell beside each
    of the output's and the prompt's, None = none.
    A negative seed, which OpenAI allows, is one of the upper half of ours; a negative `top_k`,
    which vLLM allows, is none.
    """
    if default.temperature == 0:
        default = SamplingParams(temperature=1.0)
    given = {name: getattr(body, name) for name in _OFTEN_LEFT_OUT}
    given = {name: value for name, value in given.items() if value is not None}
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)
    try:
        return replace(
            default,
            **given,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=_logit_bias(body),
            allowed_token_ids=_tuple(body.allowed_token_ids),
            bad_words=tuple(body.bad_words or ()),
            min_tokens=body.min_tokens or 0,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=body.n or 1,
            seed=None if body.seed is None else body.seed % 2**63,
            max_tokens=max_tokens,
            stop=tuple(body.stop or ()),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
        ).each()
    except ValueError as error:
        raise refused(error) from error


def _tuple(tokens: list[int] | None) -> tuple[int, ...] | None:
    return None if tokens is None else tuple(tokens)


def _logit_bias(body: Sampled) -> dict[int, float] | None:
    """By token: JSON has only text for keys."""
    if body.logit_bias is None:
        return None
    try:
        return {int(token): value for token, value in body.logit_bias.items()}
    except ValueError as error:
        raise ApiError(
            400,
            f"logit_bias has keys {shown(list(body.logit_bias))}; they must be token ids",
            param="logit_bias",
        ) from error
