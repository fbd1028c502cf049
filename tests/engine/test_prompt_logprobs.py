"""Log-probabilities of prompts, and prompts without output."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from helpers.small_engine import (
    NEW_TOKENS,
    drain,
    engine,
    hf,
    nothing_leaked,
    prompts,
    text,
    tokenizer,
    wanted,
)
from tokenizers import Tokenizer
from transformers import NemotronHForCausalLM

from hybrid_runtime.engine import AsyncEngine, BrokenLogits, Completion, Delta, SamplingParams
from hybrid_runtime.engine import prompt_logprobs as module
from hybrid_runtime.state import sync_guard

__all__ = ["hf", "prompts", "tokenizer", "wanted"]  # fixtures

SCORED = SamplingParams(max_tokens=0, prompt_logprobs=3)
ENGINES: list[dict[str, Any]] = [
    {},
    {"max_tokens_per_step": 5, "steps_ahead": 1},
    {"drafter": "ngram", "num_speculative_tokens": 3, "max_prompt_tokens": 21, "steps_ahead": 1},
    {"drafter": "mtp", "graphs": True, "max_requests": 4, "max_tokens_per_step": 32},
    {"drafter": "mtp", "state_layout": "columns", "prefix_caching": False},
]


def check(hf: NemotronHForCausalLM, prompt: list[int], answer: Completion, asked: int = 3) -> None:
    """One entry per token of the prompt, as a whole pass of transformers has them."""
    told = answer.prompt_logprobs
    assert told is not None
    assert len(told) == len(prompt)
    assert told[0] is None
    with torch.inference_mode():
        lines = hf(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    for one, token, line in zip(told[1:], prompt[1:], lines, strict=False):
        assert one is not None
        assert abs(one.logprob - line[token]) < 1e-4
        best = line.topk(asked)
        assert [t for t, _ in one.top] == best.indices.tolist()
        torch.testing.assert_close(
            torch.tensor([v for _, v in one.top]).double(), best.values, rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("options", ENGINES, ids=["plain", "chunks", "ngram", "graphs", "columns"])
def test_log_probabilities_of_prompts_are_those_of_one_pass(
    hf: NemotronHForCausalLM,
    tokenizer: Tokenizer,
    prompts: Any,
    wanted: Any,
    options: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside requests without, in pieces, and again when the cache has the whole prompt."""
    monkeypatch.setattr(module, "PIECE", 7 * 96 + 5)
    runs = engine(hf, tokenizer, **options)
    runs.capture()
    plain, both = SamplingParams(max_tokens=6), SamplingParams(max_tokens=6, prompt_logprobs=0)
    chosen = 0, 1, 4, 7
    for _ in range(2):
        each = [(prompts[i], one) for i in chosen for one in (SCORED, plain, both)]
        with sync_guard() as waits:
            answers = runs.generate([p for p, _ in each], [one for _, one in each])
        assert not waits.undeclared, waits.reasons
        for number, ((prompt, params), answer) in enumerate(zip(each, answers, strict=True)):
            assert answer.finish_reason == "length"
            assert answer.tokens == wanted[chosen[number // 3]][: params.max_tokens]
            if params is plain:
                assert answer.prompt_logprobs is None
            else:
                check(hf, prompt, answer, params.prompt_logprobs or 0)
                assert answer.hit.tokens == 0
    if options.get("prefix_caching", True):
        assert answers[-1].hit.short == "prompt_logprobs"
        assert answers[-2].hit.known > 0
    nothing_leaked(runs)


@pytest.mark.parametrize(("chunk", "after"), [(17, 1), (17, 2), (17, 5), (17, 9), (5, 4), (5, 8)])
def test_a_preempted_prompt_is_told_once(
    hf: NemotronHForCausalLM,
    tokenizer: Tokenizer,
    wanted: Any,
    prompts: Any,
    chunk: int,
    after: int,
) -> None:
    """In the middle of it from where it was told, which need not be where a block ends; after it
    as any other: by a hit."""
    prompt = prompts[7]
    runs = engine(hf, tokenizer, max_tokens_per_step=chunk, block_size=8, steps_ahead=1)
    request = runs.submit(prompt, SamplingParams(max_tokens=NEW_TOKENS, prompt_logprobs=3))
    for _ in range(after):
        runs.step()
    told = len(request.prompt_logprobs)
    runs.scheduler.preempt(request)
    while request.finish_reason is None:
        runs.step()
    answer = Completion.of(request)
    assert answer.tokens == wanted[7]
    check(hf, prompt, answer)
    assert request.hit.tokens <= told or told == len(prompt) - 1
    if after > 1:
        assert request.hit.tokens > 0
    drain(runs)
    nothing_leaked(runs)


def test_prompts_without_output_leave_their_blocks_to_others(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, prompts: Any
) -> None:
    """A prompt may be as long as a request can be, then; one with output needs room for it."""
    runs = engine(hf, tokenizer, max_model_len=61, block_size=8)
    longest = prompts[7]
    nothing = SamplingParams(max_tokens=0)
    (answer,) = runs.generate([longest], nothing)
    assert (answer.text, answer.tokens, answer.finish_reason) == ("", [], "length")
    assert answer.prompt_logprobs is None
    (again,) = runs.generate([longest], nothing)
    assert again.hit.tokens == 56
    assert "".join(runs.stream(longest, nothing)) == ""
    with pytest.raises(ValueError, match="with at least one of output"):
        runs.submit(longest, SamplingParams(max_tokens=1))
    nothing_leaked(runs)


def test_log_probabilities_of_prompts_come_with_the_first_delta(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, prompts: Any
) -> None:
    async def serve() -> tuple[list[Delta], Completion]:
        async with AsyncEngine(engine(hf, tokenizer, steps_ahead=1)) as serving:
            params = SamplingParams(max_tokens=4, prompt_logprobs=3)
            deltas = [delta async for delta in serving.stream(prompts[5], params)]
            return deltas, await serving.generate(prompts[5], SCORED)

    deltas, scored = asyncio.run(serve())
    last = deltas[-1].completion
    assert last is not None
    check(hf, prompts[5], last)
    check(hf, prompts[5], scored)
    assert deltas[0].prompt_logprobs == last.prompt_logprobs
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])


def test_broken_log_probabilities_end_a_prompt_by_an_error(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer
) -> None:
    runs = engine(hf, tokenizer)
    runs.model.output_weight.data.fill_(torch.nan)
    (answer,) = runs.generate([text(9, 1)], SCORED, raise_errors=False)
    assert answer.finish_reason == "error"
    assert isinstance(answer.error, BrokenLogits)
    assert "8 log-probabilities of its prompt are NaN" in str(answer.error)
    nothing_leaked(runs)
