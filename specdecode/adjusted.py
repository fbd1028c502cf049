"""An acceptance for steps in which somebody wants other logits or log-probabilities."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hybrid_runtime.kernels.sampling.logprobs import token_logprobs
from hybrid_runtime.kernels.sampling.penalties import penalise
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.specdecode.acceptance import Acceptance, Accepted
from hybrid_runtime.specdecode.sampling import MAX_LOGPROBS
from hybrid_runtime.specdecode.sequences import Sequences


class Adjusted:
    """An acceptance with more before and behind it; an ``Acceptance`` itself.

    Attributes:
        accept: judges the drafts.
        sequences: whose tokens are penalised, by slot.
        penalises: on logits after penalties, biases and bans.
        allows: some rows can draw a few tokens only (with `penalises`).
        tells: log-probabilities of what is emitted, by the logits as the model gives them.
    """

    def __init__(
        self,
        accept: Acceptance,
        sequences: Sequences,
        penalises: bool,
        allows: bool,
        tells: bool,
    ) -> None:
        self.accept, self.sequences = accept, sequences
        self.penalises, self.allows, self.tells = penalises, allows, tells

    def __call__(
        self,
        logits: Tensor,
        drafts: Tensor,
        num_draft: Tensor,
        emits: Tensor,
        draft_probs: Tensor | None,
        sampling: SamplingTensors,
        position: Tensor,
    ) -> Accepted:
        adjusted = logits
        if self.penalises:
            assert sampling.slot is not None
            penalties = self.sequences.penalties
            if self.allows:
                penalties = penalties._replace(allowed=self.sequences.allowed)
            adjusted = penalise(logits, penalties, sampling.slot, position, drafts)
        accepted = self.accept(adjusted, drafts, num_draft, emits, draft_probs, sampling, position)
        if not self.tells:
            return accepted
        most = min(MAX_LOGPROBS, logits.shape[-1])
        return replace(accepted, logprobs=token_logprobs(logits, accepted.tokens, most))
