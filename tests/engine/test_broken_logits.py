"""NaN and infinity in weights end the requests that meet them, as errors, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.small_engine import (
    NEW_TOKENS,
    VOCABULARY,
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

from hybrid_runtime.engine import BrokenLogits, Engine, SamplingParams

__all__ = ["hf", "prompts", "tokenizer", "wanted"]  # fixtures

ODD = 77
LONG = SamplingParams(max_tokens=NEW_TOKENS)
DRAFTERS: list[dict[str, Any]] = [
    {"drafter": None},
    {"drafter": "ngram", "num_speculative_tokens": 3, "steps_ahead": 1},
    {"drafter": "mtp", "num_speculative_tokens": 3, "steps_ahead": 1},
    {"drafter": "mtp", "num_speculative_tokens": 3, "sampled_drafts": True},
]


@contextmanager
def broken_token(runs: Engine, value: float) -> Iterator[None]:
    """Whoever has token `ODD` in its text gets broken numbers from there on."""
    weight = runs.model.backbone.embeddings.weight
    with torch.no_grad():
        before = weight[ODD].clone()
        weight[ODD] = value
        yield
        weight[ODD] = before


PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_k": 20},
    {"presence_penalty": 0.5, "logprobs": 2},
]


@pytest.mark.parametrize("asked", PARAMS, ids=str)
@pytest.mark.parametrize("options", DRAFTERS, ids=str)
def test_broken_logits_end_a_request_and_no_other(
    hf: NemotronHForCausalLM,
    tokenizer: Tokenizer,
    options: dict[str, Any],
    asked: dict[str, Any],
) -> None:
    runs = engine(hf, tokenizer, block_size=8, max_tokens_per_step=24, **options)
    params = SamplingParams(max_tokens=8, seed=3, **asked)
    good = [[t for t in text(n, n) if t != ODD] for n in (5, 30, 45)]
    bad = [[ODD], [*good[2], ODD, 4], [*good[1][:20], ODD, *good[1][20:]]]
    with broken_token(runs, float("nan")):
        # A sampled draft may be the odd token, too.
        alone = [runs.generate([prompt], params, raise_errors=False)[0] for prompt in good]
        assert [a.finish_reason for a in alone].count("length") >= 2
        runs.reset_prefix_cache()
        answers = runs.generate([*bad, *good], params, raise_errors=False)
        assert [a.tokens for a in answers[3:]] == [a.tokens for a in alone]
        for answer in answers[:3]:
            assert answer.finish_reason == "error"
            assert answer.tokens == []
            assert f"{VOCABULARY} logits of output token 0 are NaN or infinite" in str(answer.error)
        with pytest.raises(BrokenLogits):
            runs.generate([bad[0]], params)
    while not runs.idle:
        runs.step()  # what was queued before the error was known
    nothing_leaked(runs)


@pytest.mark.parametrize("host", [None, (40, 40)])
def test_nobody_finds_what_broken_numbers_have_left(
    hf: NemotronHForCausalLM,
    tokenizer: Tokenizer,
    prompts: Any,
    wanted: Any,
    host: tuple[int, int] | None,
) -> None:
    runs = engine(
        hf, tokenizer, drafter="ngram", num_speculative_tokens=3, block_size=8,
        max_tokens_per_step=24, host_blocks=host,
    )  # fmt: skip
    runs.generate([prompts[7][:40]], LONG)  # others may go on finding what they had before
    broken = prompts[7][50]
    with torch.no_grad():
        weight = runs.model.backbone.embeddings.weight
        before = weight[broken].clone()
        weight[broken] = float("nan")
        with pytest.raises(BrokenLogits):
            runs.generate([prompts[7]], LONG)
        weight[broken] = before
    answer = runs.generate([prompts[7]], LONG)[0]
    assert (answer.tokens, answer.hit.tokens) == (wanted[7], 0)
    nothing_leaked(runs)


def test_an_embedding_of_broken_numbers_is_an_error(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, prompts: Any
) -> None:
    runs = engine(hf, tokenizer)
    good = [t for t in prompts[6] if t != ODD]
    with broken_token(runs, float("inf")):
        with pytest.raises(BrokenLogits, match="numbers of its embedding are NaN or infinite"):
            runs.embed([good, [1, ODD]])
        assert runs.embed([good]).isfinite().all()
    nothing_leaked(runs)
