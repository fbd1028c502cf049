"""Drafts of a head, whose first pass computes no more than is wanted of it."""

from __future__ import annotations

import pytest
from torch import Tensor

from hybrid_runtime.demo import PROMPTS, SHIPPED
from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.models.attention import FEW_TOKENS
from hybrid_runtime.models.forward_batch import Caches, RowBatch, WantedTokens
from hybrid_runtime.specdecode.drafter import DrafterName, DraftHead, HeadDrafter


class WholePass:
    """A head that computes all tokens, whatever is wanted. `most` tokens in a pass, so far."""

    def __init__(self, head: DraftHead) -> None:
        self.head, self.most = head, 0
        self.logits = head.logits

    def __call__(
        self,
        tokens: Tensor,
        hidden: Tensor,
        batch: RowBatch,
        caches: Caches,
        wanted: WantedTokens | None = None,
    ) -> Tensor:
        self.most = max(self.most, len(tokens))
        out = self.head(tokens, hidden, batch, caches)
        return out if wanted is None else wanted.of(out)


@pytest.mark.parametrize(("max_prompt_tokens", "block_size"), [(16, 32), (2 * FEW_TOKENS, 256)])
@pytest.mark.parametrize("drafter", ["mtp", "eagle"])
def test_as_many_drafts_are_accepted_as_of_whole_passes(
    drafter: DrafterName, max_prompt_tokens: int, block_size: int
) -> None:
    """Prompts in chunks beside rows that decode, and long ones in one step."""
    accepted, heads = [], []
    for whole in (False, True):
        engine = Engine.from_pretrained(
            SHIPPED, device="cpu", dtype="float32", drafter=drafter, max_requests=3,
            max_prompt_tokens=max_prompt_tokens, block_size=block_size,
        )  # fmt: skip
        made = engine.runner._phases.drafter
        assert isinstance(made, HeadDrafter)
        if whole:
            made.head = WholePass(made.head)
            heads.append(made.head)
        params = SamplingParams(max_tokens=48, ignore_eos=True)
        answers = engine.generate([2 * prompt for prompt in PROMPTS], params)
        accepted.append((engine.stats().mean_acceptance_length, [a.tokens for a in answers]))
    assert accepted[0] == accepted[1]
    assert accepted[0][0] > 2
    assert (heads[0].most > FEW_TOKENS) == (max_prompt_tokens > FEW_TOKENS)
