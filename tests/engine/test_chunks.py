"""Chunks of prompts: how many steps a prompt takes, and that its text does not depend on them."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.pool_world import BLOCK as SMALL
from helpers.pool_world import World
from helpers.small_engine import (
    drain,
    engine,
    hf,
    hf_greedy,
    nothing_leaked,
    same_text,
    text,
    tokenizer,
)
from tokenizers import Tokenizer
from transformers import NemotronHForCausalLM

from hybrid_runtime.engine import SamplingParams

__all__ = ["hf", "tokenizer"]  # fixtures

BLOCK = 16
PARAMS = SamplingParams(max_tokens=6)
OPTIONS: list[dict[str, Any]] = [
    {"drafter": None},
    {"drafter": "mtp", "num_speculative_tokens": 3, "state_layout": "columns", "steps_ahead": 1},
    {"drafter": "mtp", "num_speculative_tokens": 3, "state_layout": "replay", "steps_ahead": 1},
    {"drafter": "mtp", "num_speculative_tokens": 3, "graphs": True, "strategy": "blocking"},
]
layouts = pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: "-".join(str(v) for v in o.values())
)


@layouts
@pytest.mark.parametrize(
    ("length", "chunks"),
    [
        (BLOCK - 1, [BLOCK - 1]),
        (BLOCK, [BLOCK]),
        (BLOCK + 1, [BLOCK + 1]),
        (2 * BLOCK, [2 * BLOCK]),
        (2 * BLOCK + 1, [2 * BLOCK, 1]),
        (4 * BLOCK + 5, [2 * BLOCK, 2 * BLOCK, 5]),
    ],
)
def test_a_chunk_passes_one_boundary_and_leaves_every_checkpoint(
    hf: NemotronHForCausalLM,
    tokenizer: Tokenizer,
    length: int,
    chunks: list[int],
    options: dict[str, Any],
) -> None:
    runs = engine(hf, tokenizer, block_size=BLOCK, **options)
    prompt = text(length, 7)
    request = runs.submit(prompt, PARAMS)
    ran: list[int] = []
    while sum(ran) < length:
        left = length if request.slot < 0 else request.prompt_left
        runs.step()
        ran.append(left - request.prompt_left)
    assert ran == chunks
    drain(runs)
    want = hf_greedy(hf, prompt)[: PARAMS.max_tokens]
    same_text(hf, prompt, request.output, want)
    assert runs.manager.stats().lost_checkpoints == 0
    # Each boundary can be hit, and leads to the same text.
    for boundary in range(BLOCK, length, BLOCK):
        other = prompt[: boundary + 1] + text(3, boundary)
        answer = runs.generate([other], PARAMS)[0]
        assert answer.hit.tokens == boundary
        same_text(hf, other, answer.tokens, hf_greedy(hf, other)[: PARAMS.max_tokens])
    drain(runs)
    nothing_leaked(runs)


@layouts
def test_the_text_does_not_depend_on_the_chunks(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    """With and without a prefix cache, few tokens at a time or all at once, several at once."""
    prompts = [text(length, length) for length in (1, 15, 17, 31, 33, 50)]
    wanted = [hf_greedy(hf, prompt)[: PARAMS.max_tokens] for prompt in prompts]
    for changed in (
        {"prefix_caching": False},
        {"max_tokens_per_step": 4},
        {"max_prompt_tokens": 21, "max_tokens_per_step": 43},
        {"retention": "prompt"},
        {"retention": 2 * BLOCK, "max_prompt_tokens": 40},
    ):
        runs = engine(hf, tokenizer, block_size=BLOCK, max_requests=6, **options | changed)
        answers = runs.generate(prompts, PARAMS)
        for prompt, answer, want in zip(prompts, answers, wanted, strict=True):
            same_text(hf, prompt, answer.tokens, want)
        assert runs.manager.stats().lost_checkpoints == 0


def test_without_a_cache_a_prompt_takes_one_step(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer
) -> None:
    runs = engine(hf, tokenizer, block_size=BLOCK, drafter=None, prefix_caching=False)
    request = runs.submit(text(5 * BLOCK + 3, 1), PARAMS)
    runs.step()
    assert request.prompt_left == 0


def test_prompts_of_a_step_share_its_prompt_tokens() -> None:
    world = World(0, num_blocks=(40, 40), max_requests=3, max_prompt_tokens=3, steps_ahead=0)
    requests = [world.submit([token] * 2, max_tokens=1) for token in range(3)]
    world.step()
    assert [request.computed for request in requests] == [2, 1, 0]
    world.finish()


def test_a_chunk_in_the_middle_of_a_prompt_brings_nothing() -> None:
    world = World(0, num_blocks=(40, 40), max_requests=1, max_prompt_tokens=3, steps_ahead=0)
    request, scheduler = world.submit([1] * 6, max_tokens=2, logprobs=0), world.engine.scheduler
    assert scheduler.admit() == [request]
    scheduler.ledger.expect(request, (), False)
    schedule = scheduler.schedule()
    assert schedule is not None
    assert (schedule.samples, schedule.has_logprobs) == (False, False)
    assert (schedule.pooled, schedule.prompt_logprobs) == ([], [])


def test_a_chunk_that_begins_where_a_checkpoint_was_wanted_goes_on_to_the_next() -> None:
    """The prefix that another prompt left without a checkpoint ends where the first chunk does."""
    size = 2 * SMALL
    world = World(
        0, num_blocks=(40, 40), max_requests=1, max_tokens_per_step=size, steps_ahead=0,
        retention="prompt",
    )  # fmt: skip
    shared = [1] * size
    world.submit([*shared, *[2] * size], max_tokens=1)
    world.drain()
    request, ends = world.submit([*shared, *[3] * (2 * size)], max_tokens=2), []
    while not request.output:
        world.step()
        ends.append(request.computed)
    assert request.hit.known == size
    assert ends == [size, 2 * size, 3 * size]
    world.finish()
