"""The engine against transformers' own greedy text: any drafter, batch, block or strategy."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.marks import slow
from helpers.small_engine import (
    NEW_TOKENS,
    Script,
    engine,
    hf,
    prompts,
    same_text,
    tokenizer,
    wanted,
)
from tokenizers import Tokenizer
from transformers import NemotronHForCausalLM

from hybrid_runtime.engine import SamplingParams

__all__ = ["hf", "prompts", "tokenizer", "wanted"]  # fixtures

ROWS = [
    {"drafter": None, "num_speculative_tokens": 0},
    *({"drafter": d, "num_speculative_tokens": 3} for d in ("mtp", "eagle", "ngram")),
    {"drafter": "mtp", "num_speculative_tokens": 3, "block_size": 8, "kv_block_size": 4},
    *({"drafter": d, "num_speculative_tokens": k} for d in ("mtp", "ngram") for k in (1, 2, 4, 5)),
    {"drafter": "eagle", "num_speculative_tokens": 5},
    *({"drafter": "ngram", "num_speculative_tokens": 3, "block_size": b} for b in (8, 11, 64)),
    *({"drafter": "mtp", "num_speculative_tokens": 3, "max_requests": n} for n in (1, 2, 5)),
    *(
        {"drafter": "ngram", "num_speculative_tokens": 3, "strategy": s, "block_size": 8}
        for s in ("blocking", "defer", "always")
    ),
    {"drafter": "ngram", "num_speculative_tokens": 3, "conv_layout": "DS"},
    {"drafter": "ngram", "num_speculative_tokens": 3, "max_tokens_per_step": 9},
    {"drafter": "mtp", "num_speculative_tokens": 3, "num_blocks": (12, 14)},
    *(
        {"drafter": None, "num_speculative_tokens": 0, "steps_ahead": 1} | more
        for more in ({}, {"state_layout": "columns"}, {"ring_tokens": 4, "block_size": 8})
    ),
    *(
        {"drafter": "mtp", "num_speculative_tokens": 3, "block_size": 8, "steps_ahead": 1} | more
        for more in (
            {},
            {"max_requests": 2},
            {"strategy": "blocking"},
            {"strategy": "defer"},
            {"strategy": "always"},
            {"max_tokens_per_step": 9},
            {"num_blocks": (20, 14)},
        )
    ),
    *(
        {"drafter": "mtp", "num_speculative_tokens": 3, "block_size": 8, "state_layout": "replay"}
        | more
        for more in (
            {},
            {"steps_ahead": 1},
            {"strategy": "blocking"},
            {"max_requests": 2, "steps_ahead": 1},
            {"max_tokens_per_step": 9},
            {"num_speculative_tokens": 5, "steps_ahead": 1},
            {"num_speculative_tokens": 1},
            {"num_speculative_tokens": 15, "block_size": 16, "steps_ahead": 1},
            {"ring_tokens": 0},
            {"ring_tokens": 4, "steps_ahead": 1},
            {"num_blocks": (30, 12)},
        )
    ),
]


@pytest.mark.parametrize(
    "options", [*ROWS[:5], *slow(*ROWS[5:])], ids=lambda o: "-".join(str(v) for v in o.values())
)
def test_greedy_text_is_that_of_transformers(
    hf: NemotronHForCausalLM,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    wanted: list[list[int]],
    options: dict[str, Any],
) -> None:
    runs = engine(hf, tokenizer, **options)
    answers = runs.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
    for prompt, answer, want in zip(prompts, answers, wanted, strict=True):
        assert answer.finish_reason == "length", answer.error
        same_text(hf, prompt, answer.tokens, want)
    pools = (runs.scheduler.kv.pool, runs.scheduler.state.pool)
    assert [p.free for p in pools] == [p.size for p in pools]


# Drafts, block size, steps ahead and tokens of the ring; the other strategies with some of them.
SIZES = [
    (1, 8, 0, 15), (3, 8, 0, 15), (3, 8, 1, 0), (3, 8, 1, 4), (3, 16, 0, 15), (5, 8, 1, 15),
    (15, 16, 1, 15),
]  # fmt: skip
MIXES = [("auto", *sizes) for sizes in SIZES] + [
    pytest.param(strategy, *sizes, marks=pytest.mark.slow)
    for strategy in ("blocking", "defer", "always")
    for sizes in (SIZES[1], SIZES[3], SIZES[6])
]


@pytest.mark.parametrize(("strategy", "k", "block_size", "steps_ahead", "ring_tokens"), MIXES)
@pytest.mark.parametrize("state_layout", ["columns", "replay"])
def test_any_mix_of_acceptances_keeps_the_text(
    hf: NemotronHForCausalLM,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    wanted: list[list[int]],
    strategy: str,
    k: int,
    block_size: int,
    steps_ahead: int,
    ring_tokens: int,
    state_layout: str,
) -> None:
    runs = engine(
        hf, tokenizer, drafter="ngram", num_speculative_tokens=k, block_size=block_size,
        strategy=strategy, steps_ahead=steps_ahead, state_layout=state_layout,
        ring_tokens=ring_tokens,
    )  # fmt: skip
    texts = [p + w for p, w in zip(prompts, wanted, strict=True)]
    runs.runner.drafter = Script(texts, k, [k, 0, k + 1, 1, k, k - 1, 0, k + 1, k])
    answers = runs.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
    assert [a.tokens for a in answers] == wanted
    stats = runs.stats()
    assert 1 < stats.mean_acceptance_length < k + 1
    assert stats.state.rows_copied > 0
    assert 0 < stats.state.skipped < stats.state.steps


def test_seeded_sampling_does_not_depend_on_batch_or_drafts(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, prompts: list[list[int]]
) -> None:
    params = [
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=i, max_tokens=12)
        for i in range(len(prompts))
    ]
    alone = engine(hf, tokenizer, max_requests=1)
    want = [alone.generate([p], s)[0].tokens for p, s in zip(prompts, params, strict=True)]
    for options in ({}, {"drafter": "ngram", "num_speculative_tokens": 3}):
        got = engine(hf, tokenizer, **options).generate(prompts, params)
        assert [g.tokens for g in got] == want
    assert len({tuple(w) for w in want}) > 1


def test_sampled_drafts_run_and_use_their_distributions(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, prompts: list[list[int]]
) -> None:
    runs = engine(hf, tokenizer, drafter="mtp", num_speculative_tokens=3, sampled_drafts=True)
    answers = runs.generate(prompts, SamplingParams(temperature=1.0, seed=7, max_tokens=16))
    assert all(a.finish_reason == "length" for a in answers)
    assert runs.sequences.draft_probs is not None
    assert runs.stats().mean_acceptance_length > 1


@pytest.mark.parametrize("drafter", ["mtp", "eagle"])
def test_a_drafter_writes_no_block_that_nobody_owns(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, prompts: Any, drafter: str
) -> None:
    """Its own passes reach beyond the step's tokens, and a column without a block names the last
    one of memory. Prompts end around a block's end, and all drafts are accepted."""
    runs = engine(
        hf, tokenizer, drafter=drafter, num_speculative_tokens=3, synthetic_acceptance=4.0,
        block_size=8, num_blocks=(80, 40),
    )  # fmt: skip
    nobodys = [part[-1] for pair in runs.runner.caches.kv.values() for part in pair]
    for block in nobodys:
        block.fill_(7.0)
    runs.generate([prompts[-1][:n] for n in range(6, 10)], SamplingParams(max_tokens=24))
    assert all((block == 7.0).all() for block in nobodys)


def test_records_of_another_ring_are_refused(hf: NemotronHForCausalLM) -> None:
    """The manager places rows by its layout's ring; with another the outputs would be wrong."""
    runs = engine(hf, None, drafter="ngram", state_layout="replay")
    caches: Any = runs.runner.caches.records
    for layer, records in caches.items():
        caches[layer] = tuple(part[:, :, 1:].contiguous() for part in records)
    with pytest.raises(ValueError, match=r"records has rings of .* must be rows\.ring_length"):
        runs.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
