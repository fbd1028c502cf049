"""Log-probabilities of a request's tokens, as the caller gets them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class TokenLogprobs(NamedTuple):
    """Of one token of the output, by the model's own distribution: before penalties, biases,
    temperature and what limits the choice.

    logprob: of the token.
    top: id and log-probability of the most likely tokens, as many as were asked for, the most
        likely first.
    """

    logprob: float
    top: list[tuple[int, float]]


def unpack(words: NDArray[np.int32], asked: int) -> list[TokenLogprobs]:
    """From the device's words for a row's tokens, int32 `[tokens, 1 + 2 * most]` (see
    `kernels.sampling.logprobs.token_logprobs`), with the `asked` most likely ones."""
    most = words.shape[1] // 2
    own = words[:, 0].copy().view(np.float32).tolist()
    ids = words[:, 1 : 1 + asked][:, :most].tolist()
    values = words[:, 1 + most : 1 + most + asked].copy().view(np.float32).tolist()
    return [
        TokenLogprobs(logprob, list(zip(*top, strict=True)))
        for logprob, *top in zip(own, ids, values, strict=True)
    ]
