"""The engine against transformers' own greedy text: any drafter, batch, block or strategy."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.oracle import hf_model, our_model, random_config, randomise
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import NemotronHForCausalLM

from hybrid_runtime.engine import Engine, EngineConfig, SamplingParams
from hybrid_runtime.models.eagle import EagleConfig, EagleHead
from hybrid_runtime.models.mtp import MTPHead
from hybrid_runtime.specdecode.drafter import Verified

NEW_TOKENS = 24
VOCABULARY = 96
CONFIG = random_config(
    "M*M-E",
    vocab_size=VOCABULARY,
    num_nextn_predict_layers=1,
    mtp_layers_block_type=["attention", "moe"],
)
EAGLE = EagleConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
NOISE = 1e-4
"""Logits closer than this are a tie in fp32: several times the largest difference measured between
this engine and transformers (1e-5 of the largest logit, which is about 3 here)."""


@pytest.fixture(scope="module")
def hf() -> NemotronHForCausalLM:
    return hf_model(CONFIG, seed=3)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 4, 7, 16, 17, 33, 40, 61)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def wanted(hf: NemotronHForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    return [hf_greedy(hf, prompt) for prompt in prompts]


def hf_greedy(hf: NemotronHForCausalLM, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        out = hf.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def engine(hf: NemotronHForCausalLM, tokenizer: Tokenizer, **options: Any) -> Engine:
    model = our_model(CONFIG, hf)
    head: Any = None
    drafter = options.get("drafter")
    if drafter == "mtp":
        head = MTPHead(model)
    elif drafter == "eagle":
        head = EagleHead(EAGLE, model)
    if head is not None:
        randomise(head, seed=5)
    sizes = {"drafter": None, "max_model_len": 128, "block_size": 16}
    config = EngineConfig(**sizes | options)
    return Engine(model, config, tokenizer=tokenizer, eos_token_ids=(), head=head)


def same_text(hf: NemotronHForCausalLM, prompt: list[int], got: list[int], want: list[int]) -> None:
    """Equal, or different from a token on whose two best logits are closer than `NOISE`."""
    if got == want:
        return
    first = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
    with torch.inference_mode():
        logits = hf(torch.tensor([prompt + want[:first]])).logits[0, -1]
    best = logits.topk(2).values
    assert best[0] - best[1] < NOISE, f"token {first}: {got[first]} instead of {want[first]}"


ROWS = [
    {"drafter": None, "num_speculative_tokens": 0},
    *({"drafter": d, "num_speculative_tokens": 3} for d in ("mtp", "eagle", "ngram")),
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
    {"drafter": None, "num_speculative_tokens": 0, "steps_ahead": 1},
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
            {"num_blocks": (30, 12)},
        )
    ),
]


@pytest.mark.parametrize("options", ROWS, ids=lambda o: "-".join(str(v) for v in o.values()))
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


class Script:
    """A drafter that knows the right text and errs where it is told to: any acceptances."""

    def __init__(self, texts: list[list[int]], k: int, pattern: list[int]) -> None:
        self.texts, self.k = texts, k
        self.errors = itertools.cycle(pattern)

    def propose(self, verified: Verified) -> tuple[Tensor, Tensor | None]:
        sequences, drafts = verified.sequences, []
        for slot, emits in zip(
            verified.rows.slot.tolist(), verified.rows.emits.tolist(), strict=True
        ):
            known = sequences.history[slot, : int(sequences.length[slot])].tolist()
            guess = [-1] * self.k
            if emits:
                right = next(self.errors) % (self.k + 2)
                # The last step may emit more than was asked for.
                text = next(t for t in self.texts if t[: len(known)] == known[: len(t)])
                guess = [*text[len(known) :], *[0] * self.k][: self.k]
                if right <= self.k:  # k + 1: offer no draft at all
                    guess = [t if i < right else (t + 1) % VOCABULARY for i, t in enumerate(guess)]
                else:
                    guess = [-1] * self.k
            drafts.append(guess)
        return torch.tensor(drafts, dtype=torch.int32), None


@pytest.mark.parametrize("strategy", ["blocking", "defer", "always", "auto"])
@pytest.mark.parametrize(
    ("k", "block_size", "steps_ahead"), [(1, 8, 0), (3, 8, 0), (3, 8, 1), (3, 16, 0), (5, 8, 1)]
)
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
    state_layout: str,
) -> None:
    runs = engine(
        hf, tokenizer, drafter="ngram", num_speculative_tokens=k, block_size=block_size,
        strategy=strategy, steps_ahead=steps_ahead, state_layout=state_layout,
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
