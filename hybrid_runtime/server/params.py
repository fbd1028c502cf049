"""What a body asks for, in the engine's words."""

from __future__ import annotations

from hybrid_runtime.engine import SamplingParams
from hybrid_runtime.server.errors import ApiError
from hybrid_runtime.server.schemas import Sampled


def sampling_params(body: Sampled, max_tokens: int, logprobs: int | None) -> list[SamplingParams]:
    """Parameters of each choice of a prompt; `ApiError` for values that the engine refuses.

    logprobs: how many likely tokens to tell beside each, None = none. A negative seed, which OpenAI
    allows, is one of the upper half of ours.
    """
    try:
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(body.top_k or 0, 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=_logit_bias(body),
            logprobs=logprobs,
            n=body.n or 1,
            seed=None if body.seed is None else body.seed % 2**63,
            max_tokens=max_tokens,
            stop=tuple(body.stop or ()),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
        ).each()
    except ValueError as error:
        raise ApiError(400, str(error), param=str(error).split(" ", 1)[0]) from error


def _logit_bias(body: Sampled) -> dict[int, float] | None:
    """By token: JSON has only text for keys."""
    if body.logit_bias is None:
        return None
    try:
        return {int(token): value for token, value in body.logit_bias.items()}
    except ValueError as error:
        raise ApiError(
            400, "logit_bias has a key that is no token id", param="logit_bias"
        ) from error
