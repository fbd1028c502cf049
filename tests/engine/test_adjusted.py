"""Penalties, biases and log-probabilities in the engine: the same with drafts as without."""

from typing import Any

import pytest
import torch
from helpers.small_engine import (
    DRAFTERS,
    NEW_TOKENS,
    VOCABULARY,
    Make,
    Script,
    engine,
    with_graphs_and_without,
)
from tokenizers import Tokenizer
from transformers import NemotronHForCausalLM

from hybrid_runtime.engine import Completion, SamplingParams

PENALISED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "counts": {"presence_penalty": 0.6, "frequency_penalty": 0.8},
    "bias": {"logit_bias": {3: 2.5, 17: -100, 40: 1.5}},
}


@pytest.mark.parametrize("kind", PENALISED)
def test_penalised_text_equals_that_of_transformers(
    make: Make, hf: NemotronHForCausalLM, prompts: Any, kind: str
) -> None:
    params = SamplingParams(max_tokens=NEW_TOKENS, **PENALISED[kind])
    runs = make()
    answers = runs.generate(prompts[2:5], params)
    for prompt, answer in zip(prompts[2:5], answers, strict=True):
        with torch.inference_mode():
            lines = hf(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
        known = list(prompt)
        for token, logits in zip(answer.tokens, lines.clone(), strict=True):
            output = torch.bincount(torch.tensor(known[len(prompt) :]).long(), minlength=VOCABULARY)
            seen = torch.bincount(torch.tensor(known), minlength=VOCABULARY) > 0
            r = params.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / r, logits * r), logits)
            logits -= params.frequency_penalty * output + params.presence_penalty * (output > 0)
            for biased, value in (params.logit_bias or {}).items():
                logits[biased] += value
            best = logits.topk(2)
            assert token == best.indices[0] or best.values[0] - best.values[1] < 1e-4
            known.append(token)
    assert any(
        answer.tokens != plain.tokens
        for answer, plain in zip(
            answers, runs.generate(prompts[2:5], SamplingParams(max_tokens=NEW_TOKENS)), strict=True
        )
    )


@pytest.mark.parametrize(
    "later", [{"logit_bias": {40: -100.0}}, {"presence_penalty": 0.5}], ids=str
)
def test_biases_end_with_their_request(make: Make, prompts: Any, later: dict[str, Any]) -> None:
    """Those that come after it share its slot, and the buffer by which biases reach the device."""
    runs = make(max_requests=1)
    params = SamplingParams(max_tokens=4, **later)
    want = runs.generate([prompts[2]], params)[0].tokens
    biased = SamplingParams(max_tokens=2, logit_bias={3: 100.0, 17: 100.0})
    for _ in range(2 * runs.runner.sequences._depth):  # through all buffers
        assert set(runs.generate([prompts[2]], biased)[0].tokens) <= {3, 17}
    assert runs.generate([prompts[2]], params)[0].tokens == want


@pytest.fixture(scope="module", params=[0.0, 0.9])
def alone(
    request: pytest.FixtureRequest, hf: NemotronHForCausalLM, tokenizer: Tokenizer, prompts: Any
) -> tuple[list[SamplingParams], list[Completion]]:
    """What four prompts ask for at this temperature, the first one nothing, and what each gets."""
    everything = {name: value for kind in PENALISED.values() for name, value in kind.items()}
    kinds: list[dict[str, Any]] = [{}, everything, PENALISED["counts"], {"logprobs": 3}]
    params = [
        SamplingParams(
            max_tokens=NEW_TOKENS, temperature=request.param, seed=i, **{"logprobs": i % 3} | kind
        )
        for i, kind in enumerate(kinds)
    ]
    params[0] = SamplingParams(max_tokens=NEW_TOKENS, temperature=request.param, seed=0)
    runs = engine(hf, tokenizer)
    return params, [runs.generate([p], s)[0] for p, s in zip(prompts[:4], params, strict=True)]


@DRAFTERS
def test_drafts_change_neither_text_nor_log_probabilities(
    make: Make, prompts: Any, options: Any, alone: tuple[list[SamplingParams], list[Completion]]
) -> None:
    """Beside requests without any of it, which keep theirs, too."""
    params, answers = alone
    runs = make(**options)
    if options["drafter"] == "ngram":  # half of all drafts are right, whatever the text
        texts = [p + a.tokens for p, a in zip(prompts, answers, strict=False)]
        runs.runner.drafter = Script(texts, 3, [3, 0, 2, 1, 3])
    runs.capture()
    together = runs.generate(prompts[:4], params)
    for got, wanted, one in zip(together, answers, params, strict=True):
        assert got.tokens == wanted.tokens
        if one.logprobs is None:
            assert got.logprobs is None
            continue
        assert got.logprobs is not None
        assert wanted.logprobs is not None
        assert len(got.logprobs) == len(got.tokens)
        for a, b in zip(got.logprobs, wanted.logprobs, strict=True):
            assert abs(a.logprob - b.logprob) < 1e-4
            assert len(a.top) == one.logprobs


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_log_probabilities_are_those_of_the_model(
    make: Make, hf: NemotronHForCausalLM, prompts: Any, steps_ahead: int
) -> None:
    """Whatever the penalties and limits; a stop string cuts the text, not what is told."""
    prompt = prompts[4]
    params = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=1.5, top_k=20, seed=2, logprobs=4, presence_penalty=1
    )
    runs = make(drafter="ngram", num_speculative_tokens=3, steps_ahead=steps_ahead)
    (answer,) = runs.generate([prompt], params)
    with torch.inference_mode():
        logits = hf(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
    wanted = logits.float().log_softmax(-1)
    assert answer.logprobs is not None
    for token, told, line in zip(answer.tokens, answer.logprobs, wanted, strict=True):
        assert abs(told.logprob - line[token]) < 1e-4
        best = line.topk(4)
        assert [t for t, _ in told.top] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([v for _, v in told.top]), best.values)
    # Preempted, it goes on where it was, and tells every token once.
    request = runs.submit(prompt, params)
    while len(request.output) < 5:
        runs.step()
    runs.scheduler.preempt(request)
    while request.finish_reason is None:
        runs.step()
    again = Completion.of(request)
    assert again.tokens == answer.tokens
    assert again.logprobs is not None
    assert len(again.logprobs) == len(again.tokens)
    for a, b in zip(again.logprobs, answer.logprobs, strict=True):
        assert abs(a.logprob - b.logprob) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_change_neither_text_nor_log_probabilities() -> None:
    kinds: list[dict[str, Any]] = [{}, *PENALISED.values(), {"logprobs": 2}, {"min_p": 0.1}]
    params = [
        SamplingParams(max_tokens=40, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, **kind)
        for i, kind in enumerate(kinds)
    ]
    for with_graphs, without in with_graphs_and_without(params):
        assert with_graphs.tokens == without.tokens
        for a, b in zip(with_graphs.logprobs or [], without.logprobs or [], strict=True):
            # Captured steps are padded, and products of other sizes add up in another order.
            assert abs(a.logprob - b.logprob) < 1e-4
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
