"""Texts do not depend on how many drafts which step has, and a drafter that was left out for some
steps goes on as if it had not been."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small_engine import Make, drain, same_text
from transformers import NemotronHForCausalLM

from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.specdecode import shape
from hybrid_runtime.specdecode.draft_length import Drafts, StepCost

SIZES = range(1, 9)
PARAMS = {
    "greedy": [SamplingParams(max_tokens=24)],
    "drawn": [
        SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, seed=seed) for seed in range(8)
    ],
    "logprobs": [SamplingParams(max_tokens=24, logprobs=3)],
}


def prefer(runs: Engine, drafts: int | Drafts) -> None:
    """Have these drafts be by far the cheapest; any become the best ones."""
    known = runs.runner.drafts
    best = Drafts.alike(drafts) if isinstance(drafts, int) else drafts
    every = [*map(Drafts.alike, known.levels), *known.uneven()]
    slow = {(n, one): StepCost(1.0, 0.0) for n in SIZES for one in every}
    known.measured(slow | {(n, best): StepCost(1e-6, 0.0) for n in SIZES})


def texts(runs: Engine, prompts: Any, params: list[SamplingParams], numbers: Any = ()) -> Any:
    """What these prompts get, where step after step has the next of `numbers`."""
    luck = np.random.default_rng(0)
    requests = [runs.submit(p, q) for p, q in zip(prompts, itertools.cycle(params), strict=False)]
    chosen, seen = itertools.cycle(numbers) if numbers else None, set()
    while not runs.idle:
        if chosen is not None:
            prefer(runs, next(chosen))
            # Some rows are taken for better than others, in each step other ones.
            known = runs.runner.drafts.acceptance
            slots = np.arange(runs.config.max_requests)
            known.learn(slots, np.full(len(slots), 7), luck.integers(0, 8, len(slots)))
        for request in runs.step():
            assert request.error is None
        seen.add(runs.runner.drafts.chosen)
    assert {n if isinstance(n, Drafts) else Drafts.alike(n) for n in numbers} <= seen
    return requests


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "mtp", "steps_ahead": 1},
        {"drafter": "mtp", "graphs": True, "max_requests": 4},
        {"drafter": "mtp", "steps_ahead": 1, "sampled_drafts": True, "max_requests": 3},
        {"drafter": "ngram", "steps_ahead": 0},
        {"drafter": "ngram", "num_speculative_tokens": 5, "state_layout": "columns"},
    ],
    ids=["ahead", "graphs", "sampled drafts", "lookup", "columns"],
)
@pytest.mark.parametrize("differ", [False, True], ids=["alike", "uneven"])
@pytest.mark.parametrize("kind", PARAMS)
def test_the_same_text_whatever_steps_have(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    hf: NemotronHForCausalLM,
    prompts: Any,
    wanted: Any,
    options: dict[str, Any],
    kind: str,
    differ: bool,
) -> None:
    params = PARAMS[kind]
    if kind == "drawn" and options.get("sampled_drafts"):
        pytest.skip("the text of a seed depends on drafts that are drawn")
    plain = texts(make(), prompts, params)
    runs = make(**options)
    levels, uneven = runs.runner.drafts.levels, runs.runner.drafts.uneven()
    assert len(levels) > 3
    numbers: list[int | Drafts] = [*levels, levels[-1], levels[-1], *reversed(levels), 0, 0]
    if differ:  # rows of most steps have different numbers
        numbers = [0, *(one for one in uneven for _ in range(3)), *reversed(uneven)]
        monkeypatch.setattr(shape, "UNEVEN_ROWS", 2)  # so that graphs' steps are padded
    found = texts(runs, prompts, params, numbers)
    for prompt, one, other, text in zip(prompts, found, plain, wanted, strict=True):
        if kind == "greedy":
            same_text(hf, prompt, one.output, text)
        else:
            same_text(hf, prompt, one.output, other.output) if kind == "logprobs" else None
            assert kind != "drawn" or one.output == other.output
        if kind == "logprobs" and one.output == other.output:
            for a, b in zip(one.output_logprobs, other.output_logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def proposals(runs: Engine, prompt: Any, numbers: Any) -> dict[int, list[int]]:
    """By the text's length, the drafts that follow it."""
    request, found = runs.submit(prompt, SamplingParams(max_tokens=48)), {}
    for number in itertools.chain(numbers, itertools.repeat(3)):
        prefer(runs, number)
        runs.step()
        if request.finish_reason is not None:
            break
        if runs.runner.drafts._proposed == 3:
            found[len(request.prompt) + len(request.output)] = runs.sequences.drafts[
                request.slot, :3
            ].tolist()
    drain(runs)
    return found


@pytest.mark.parametrize("drafter", ["mtp", "eagle", "ngram"])
def test_a_drafter_that_was_left_out_goes_on_as_if_it_had_not_been(
    make: Make, prompts: Any, drafter: str
) -> None:
    """Its keys and values are those of every token, so that it proposes the same."""
    always = proposals(make(drafter=drafter, steps_ahead=0), prompts[5], [])
    for left_out in ([3, 3, 0, 0, 0, 0, 0], [0] * 12):
        found = proposals(make(drafter=drafter, steps_ahead=0), prompts[5], left_out)
        both = {*found} & {*always}
        assert len(both) > 5
        assert max(both) > min(found)
        assert {at: found[at] for at in both} == {at: always[at] for at in both}


def test_what_is_known_can_be_asked_for(make: Make, prompts: Any) -> None:
    runs = make(drafter="ngram")
    assert runs.config.num_draft == 7
    assert runs.stats().drafts.chosen == Drafts.alike(3)
    prefer(runs, 5)
    texts(runs, prompts, PARAMS["greedy"])
    stats = runs.stats().drafts
    assert stats.chosen == Drafts.alike(5)
    assert len(stats.survival) == 7
    assert 1 <= stats.expected <= 6
    assert {one.most for one in stats.tokens_per_second} == {0, 1, 3, 5, 7}
    assert make(drafter="ngram", adaptive=False).config.num_draft == 3
    assert make(drafter="ngram", state_layout="columns").config.num_draft == 3
    fixed = make(drafter="ngram", adaptive=False, num_speculative_tokens=5)
    prefer(fixed, 5)
    texts(fixed, prompts[:2], PARAMS["greedy"])
    assert fixed.stats().drafts.chosen == Drafts.alike(5)
    assert torch.tensor(fixed.stats().drafts.survival).le(1).all()
