"""The checkpoint in the package: real drafts, real acceptance, the text of transformers."""

import pytest
import torch
from transformers import NemotronHForCausalLM

from hybrid_runtime.demo import PROMPTS, SHIPPED
from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.specdecode.drafter import DrafterName
from hybrid_runtime.state.checks import Strategy
from hybrid_runtime.state.layout import LayoutKind

TOKENS = 64


@pytest.fixture(scope="module")
def hf() -> NemotronHForCausalLM:
    return NemotronHForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def wanted(hf: NemotronHForCausalLM) -> list[list[int]]:
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([list(prompt.encode())])
        with torch.inference_mode():
            out = hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
                eos_token_id=None, pad_token_id=257,
            )  # fmt: skip
        texts.append(out[0, ids.shape[1] :].tolist())
    return texts


@pytest.mark.parametrize(
    ("drafter", "drafts", "strategy", "least"),
    [
        (None, 0, "auto", None),
        ("mtp", 3, "auto", 2.0),
        ("mtp", 3, "blocking", 2.0),
        ("mtp", 5, "defer", 2.0),
        ("mtp", 1, "always", 1.5),
        ("eagle", 3, "auto", 1.8),
        ("ngram", 3, "auto", 1.2),
    ],
)
@pytest.mark.parametrize("state_layout", ["columns", "replay"])
def test_greedy_text_is_that_of_transformers(
    hf: NemotronHForCausalLM,
    wanted: list[list[int]],
    drafter: DrafterName | None,
    drafts: int,
    strategy: Strategy,
    least: float | None,
    state_layout: LayoutKind,
) -> None:
    engine = Engine.from_pretrained(
        SHIPPED,
        dtype="float32",
        drafter=drafter,
        num_speculative_tokens=drafts,
        strategy=strategy,
        block_size=32,
        state_layout=state_layout,
    )
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    for prompt, answer, want in zip(PROMPTS, answers, wanted, strict=True):
        for i, (a, b) in enumerate(zip(answer.tokens, want, strict=True)):
            if a != b:
                ids = torch.tensor([[*prompt.encode(), *want[:i]]])
                with torch.inference_mode():
                    best = hf(ids).logits[0, -1].topk(2).values
                assert best[0] - best[1] < 1e-3, f"token {i} is {a} instead of {b}"
                break
    stats = engine.stats()
    if least is not None:
        assert stats.mean_acceptance_length > least
        assert stats.state.rows_copied > 0


def test_text_is_the_bytes_emitted() -> None:
    engine = Engine.from_pretrained(SHIPPED)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    answer = engine.generate(["# naïve café ☕\n"], params)[0]
    text = bytes(t for t in answer.tokens if t < 256).decode("utf-8", "ignore")
    assert answer.prompt_tokens == len("# naïve café ☕\n".encode())
    assert answer.text.startswith(text[:10])
    assert "".join(engine.stream("# naïve café ☕\n", params)) == answer.text
