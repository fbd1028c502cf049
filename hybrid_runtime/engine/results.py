"""What a step has brought, read by the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import allowed
from hybrid_runtime.engine.ledger import Bools
from hybrid_runtime.engine.pooler import Pooler
from hybrid_runtime.engine.prompt_logprobs import PromptLogprobs
from hybrid_runtime.engine.scheduler import Schedule
from hybrid_runtime.specdecode.runner import SpecDecodeRunner
from hybrid_runtime.state.step import Step


class Results(NamedTuple):
    """What a step has brought.

    emitted: int32 `[rows, K + 2]`, tokens of each row (tail -1) and their count.
    held: bool `[rows]`, the device takes the text for ended and runs the row no more.
    embeddings: by row.
    logprobs: of the tokens, int32 `[rows, K + 1, words]`; None if no row wants them.
    prompt_logprobs: of prompts, int32 `[tokens, words]` by row.
    """

    emitted: NDArray[np.int32]
    held: Bools
    embeddings: dict[int, Tensor]
    logprobs: NDArray[np.int32] | None
    prompt_logprobs: dict[int, NDArray[np.int32]]

    @classmethod
    def read(
        cls,
        step: Step,
        schedule: Schedule,
        runner: SpecDecodeRunner,
        pooler: Pooler | None,
        prompts: PromptLogprobs | None,
        reason: str,
    ) -> Results:
        """A step's results; waits for the device, for that reason, until it has them."""
        with allowed(reason):
            emitted = runner.read(step, reason)
            embeddings = {} if pooler is None else pooler.read(schedule, step, reason)
            logprobs = runner.read_logprobs(step, reason) if schedule.has_logprobs else None
            scores = {} if prompts is None else prompts.read(schedule, step, reason)
        held = emitted[:, -1] < 0
        np.abs(emitted[:, -1], out=emitted[:, -1])
        return cls(emitted, held, embeddings, logprobs, scores)
