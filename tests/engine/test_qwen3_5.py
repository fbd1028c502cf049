"""Everything that the engine does with states holds for Gated DeltaNet too: texts of a tiny random
Qwen3.5 are those of transformers, whatever drafts, hits, turns, preemptions and tiers there are."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.qwen import small_checkpoint
from helpers.small_engine import Script, drain, hf_greedy, nothing_leaked, same_text
from transformers import PreTrainedModel

from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.models.qwen3_5 import Qwen35

Open = Callable[..., Engine]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen")


@pytest.fixture(scope="module")
def theirs(directory: Path) -> PreTrainedModel:
    return small_checkpoint(directory)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 4, 16, 17, 40, 61)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def texts(theirs: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [hf_greedy(theirs, prompt) for prompt in prompts]


@pytest.fixture
def opened(theirs: PreTrainedModel, directory: Path) -> Iterator[Open]:
    """Makes engines of these options; in the end nothing may be left in any of them."""
    made = []

    def one(**options: Any) -> Engine:
        sizes = {"device": "cpu", "block_size": 16, "max_model_len": 128}
        made.append(Engine.from_pretrained(directory, **sizes | options))
        return made[-1]

    yield one
    for runs in made:
        nothing_leaked(runs)
        runs.close()


OPTIONS: list[dict[str, Any]] = [
    {"drafter": None},
    {"drafter": None, "max_tokens_per_step": 9},
    {"drafter": "mtp", "num_speculative_tokens": 3, "steps_ahead": 1},
    {"drafter": "mtp", "num_speculative_tokens": 7, "graphs": True, "max_requests": 16},
    {"drafter": "mtp", "ring_tokens": 0},
    {"drafter": "mtp", "steps_ahead": 1, "num_blocks": (16, 9), "adaptive": True},
    {"drafter": "ngram", "num_speculative_tokens": 3, "conv_layout": "DS"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_texts_are_those_of_transformers(
    opened: Open,
    theirs: Any,
    prompts: list[list[int]],
    texts: list[list[int]],
    options: dict[str, Any],
) -> None:
    """Computed whole, again by prefix hits, and once more as the next turns of a chat."""
    runs = opened(**options)
    assert isinstance(runs.model, Qwen35)
    assert len(runs.runner.caches.kv) == 1 + (options["drafter"] == "mtp")
    first, again = (runs.generate(prompts, GREEDY) for _ in range(2))
    for prompt, one, other, want in zip(prompts, first, again, texts, strict=True):
        for answer in (one, other):
            assert answer.finish_reason == "length", answer.error
            same_text(theirs, prompt, answer.tokens, want)
    hits = [answer.hit.tokens for answer in again]
    assert max(hits) >= 48 or "num_blocks" in options
    assert (runs.stats().preemptions > 0) == ("num_blocks" in options)
    turn = runs.generate([[*prompts[3], *first[3].tokens, 7, 8]], GREEDY)[0]
    same_text(
        theirs, [*prompts[3], *first[3].tokens, 7, 8], turn.tokens,
        hf_greedy(theirs, [*prompts[3], *first[3].tokens, 7, 8]),
    )  # fmt: skip
    if "num_blocks" not in options:
        # Up to the last token, which no step has run.
        assert turn.hit.tokens >= len(prompts[3]) + len(first[3].tokens) - 1


@pytest.mark.parametrize(("k", "ring_tokens"), [(3, 4), (7, 15)])
def test_any_mix_of_acceptances_keeps_the_text(
    opened: Open, prompts: list[list[int]], texts: list[list[int]], k: int, ring_tokens: int
) -> None:
    runs = opened(drafter="ngram", num_speculative_tokens=k, ring_tokens=ring_tokens, steps_ahead=1)
    known = [p + w for p, w in zip(prompts, texts, strict=True)]
    runs.runner.drafter = Script(known, k, [k, 0, k + 1, 1, k, k - 1, 0, k + 1, k])
    for _ in range(2):
        assert [answer.tokens for answer in runs.generate(prompts, GREEDY)] == texts
    stats = runs.stats()
    assert 1 < stats.mean_acceptance_length < k + 1
    assert stats.prefix.hit_tokens > 0


def test_states_come_back_from_the_host(
    opened: Open, theirs: Any, prompts: list[list[int]], texts: list[list[int]]
) -> None:
    runs = opened(drafter="mtp", num_blocks=(12, 10), host_blocks=(60, 40), max_requests=2)
    for _ in range(3):
        answers = runs.generate(prompts, GREEDY)
        for prompt, answer, want in zip(prompts, answers, texts, strict=True):
            same_text(theirs, prompt, answer.tokens, want)
    drain(runs)
    assert runs.stats().prefix.host_blocks > 0


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_drafts_and_hits_do_not_change_what_is_drawn(
    opened: Open, prompts: list[list[int]], quantization: Any
) -> None:
    """Nor the texts of weights that are rounded as they are loaded."""
    params = [
        SamplingParams(max_tokens=16, temperature=0.9 * (seed % 2), seed=seed, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    alone = opened(drafter=None, quantization=quantization, max_requests=1, prefix_caching=False)
    want = [alone.generate([p], q)[0].tokens for p, q in zip(prompts, params, strict=True)]
    runs = opened(drafter="mtp", quantization=quantization)
    for _ in range(2):
        assert [answer.tokens for answer in runs.generate(prompts, params)] == want
    assert len({tuple(text) for text in want}) == len(want)


def test_the_columns_layout_is_refused(opened: Open) -> None:
    with pytest.raises(ValueError, match=r"state_layout is 'columns'; it must be 'replay' with"):
        opened(state_layout="columns")
