"""Log-probabilities of prompts: the model's logits over them, piece by piece, while they run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Readback, Staging
from hybrid_runtime.engine.scheduler import Schedule
from hybrid_runtime.kernels.sampling.logprobs import token_logprobs
from hybrid_runtime.specdecode.sampling import MAX_LOGPROBS
from hybrid_runtime.state.step import Step

PIECE = 2**23
"""Logits that exist at once; those of a whole long prompt would be gigabytes."""


class PromptLogprobs:
    """How likely each token of a prompt was, from the hidden state before it.

    logits: from hidden states after the final norm, `[n, hidden]`, to `[n, vocabulary]`.
    vocabulary: tokens. max_tokens: most prompt tokens of a step.
    """

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor],
        vocabulary: int,
        max_tokens: int,
        steps_ahead: int,
        device: torch.device,
        waits: Waits,
    ) -> None:
        self._logits = logits
        self._piece, self._most = max(PIECE // vocabulary, 1), min(MAX_LOGPROBS, vocabulary)
        words = max_tokens * (1 + 2 * self._most)
        # Row, position in it and the token that follows.
        self._staging = Staging(max_tokens, 3, steps_ahead + 2, device, waits)
        self._results = Readback(words, steps_ahead + 1, device, waits)

    def start(self, schedule: Schedule, step: int, hidden: Tensor, cu_seqlens: Tensor) -> None:
        """Queue the log-probabilities of a step, before its tokens are counted in its requests.

        step: its number. hidden: `[tokens, size]`, after the final norm. cu_seqlens: int32, first
        token of each row that runs a prompt, by row.
        """
        if not schedule.prompt_logprobs:
            return
        index, packed = self._staging.take()
        count = 0
        for row, first, last in schedule.prompt_logprobs:
            request, n = schedule.requests[row], last - first
            lines = packed[count : count + n]
            lines[:, 0] = row
            lines[:, 1] = np.arange(first, last) - request.computed_min
            lines[:, 2] = request.prompt[first + 1 : last + 1]
            count += n
        uploaded = self._staging.upload(index, count)[:count]
        at = cu_seqlens.index_select(0, uploaded[:, 0]) + uploaded[:, 1]
        most = self._asked(schedule)
        logprobs = [
            token_logprobs(self._logits(hidden.index_select(0, some))[:, None], follows, most)
            for some, follows in zip(
                at.split(self._piece), uploaded[:, 2:].split(self._piece), strict=True
            )
        ]
        self._results.start(step, torch.cat(logprobs).flatten())

    def read(self, schedule: Schedule, step: Step, reason: str) -> dict[int, NDArray[np.int32]]:
        """Those of a step, int32 `[tokens, 1 + 2 * most]` by row, see `token_logprobs`."""
        if not schedule.prompt_logprobs:
            return {}
        words = self._results.read(step.number, reason).reshape(-1, 1 + 2 * self._asked(schedule))
        ends = np.cumsum([last - first for _, first, last in schedule.prompt_logprobs])
        rows = [row for row, _, _ in schedule.prompt_logprobs]
        return dict(zip(rows, np.split(words, ends[:-1]), strict=True))

    def _asked(self, schedule: Schedule) -> int:
        asked = [
            schedule.requests[row].params.prompt_logprobs or 0
            for row, _, _ in schedule.prompt_logprobs
        ]
        return min(max(asked), self._most)
