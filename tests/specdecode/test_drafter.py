"""Drafts of a head: its first pass computes no more than is wanted of it, and 8 bits of the output
weight find the same ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_runtime.demo import PROMPTS, SHIPPED
from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.kernels.sampling.narrow_head import narrow
from hybrid_runtime.models.attention import FEW_TOKENS
from hybrid_runtime.models.forward_batch import Caches, RowBatch, WantedTokens
from hybrid_runtime.models.nemotron_h import MTPHead, NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig
from hybrid_runtime.specdecode.drafter import (
    DrafterName,
    DraftHead,
    HeadDrafter,
    narrowed_weight,
)


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


@pytest.mark.parametrize("drafter", ["mtp", "eagle"])
def test_drafts_by_an_output_weight_in_8_bits_are_the_same(
    drafter: DrafterName, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for narrows in (False, True):
        engine = Engine.from_pretrained(
            SHIPPED, device="cpu", dtype="float32", drafter=drafter, max_requests=3
        )
        made = engine.runner._phases.drafter
        assert isinstance(made, HeadDrafter)
        assert made.narrow_head is None  # nothing is gained on a CPU
        if narrows:
            made.narrow_head = narrow(engine.model.output_weight)
            monkeypatch.setattr(made.head, "logits", None)  # nobody may call them
        requests = [
            engine.submit(prompt, SamplingParams(max_tokens=48, ignore_eos=True))
            for prompt in PROMPTS
        ]
        drafts = []
        while not engine.idle:
            engine.step()
            drafts.append(engine.sequences.drafts.clone())
        found.append((torch.stack(drafts), [r.output for r in requests], engine.stats()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[0][2].mean_acceptance_length == found[1][2].mean_acceptance_length > 2


def shapes(dtype: torch.dtype, vocabulary: int = 131072, hidden_size: int = 4096) -> MTPHead:
    config = NemotronHConfig(
        vocab_size=vocabulary, hidden_size=hidden_size, pattern="M*", mtp_pattern="*",
        num_nextn_predict_layers=1,
    )  # fmt: skip
    return MTPHead(NemotronH(config, "meta", dtype))


def test_which_output_weights_are_copied_in_8_bits() -> None:
    head, cuda, cpu = shapes(torch.bfloat16), torch.device("cuda"), torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit products")
    weight = narrowed_weight(head, False, cuda)
    assert weight is head.output_weight
    others: list[tuple[Any, bool, torch.device]] = [
        (None, False, cuda),
        (head, True, cuda),  # drawn from whole distributions
        (head, False, cpu),
        (WholePass(head), False, cuda),  # which names no weight
        (shapes(torch.float32), False, cuda),
        (shapes(torch.bfloat16, 512), False, cuda),  # too few to propose from
        (shapes(torch.bfloat16, hidden_size=4104), False, cuda),  # lines of 8 bits are not aligned
    ]
    for other in others:
        assert narrowed_weight(*other) is None
