"""Prefix hits and preemption in the whole engine: the text is as if nothing had been shared, taken
away or given back, and whatever was not hit has a reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers.marks import slow
from helpers.pool_world import owned_blocks
from helpers.small_engine import (
    NEW_TOKENS,
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

from hybrid_runtime.engine import Engine, QueueFull, SamplingParams
from hybrid_runtime.engine.block_pool import BlockPool
from hybrid_runtime.engine.offload.memcpy import CopyPath

__all__ = ["hf", "tokenizer"]  # fixtures

BLOCK = 8
GREEDY = SamplingParams(max_tokens=NEW_TOKENS)
SHORT = SamplingParams(max_tokens=12)
"""Past the end of a block, wherever it begins."""
LAYOUTS = ("columns", "replay")
DRAFTERS: list[dict[str, Any]] = [
    {"drafter": None},
    {"drafter": "ngram", "num_speculative_tokens": 3},
    {"drafter": "mtp", "num_speculative_tokens": 3, "state_layout": "columns"},
    {"drafter": "mtp", "num_speculative_tokens": 3, "state_layout": "replay", "steps_ahead": 1},
    {"drafter": "eagle", "num_speculative_tokens": 5, "state_layout": "replay"},
]


def small(hf: NemotronHForCausalLM, tokenizer: Tokenizer, **options: Any) -> Engine:
    return engine(hf, tokenizer, **{"block_size": BLOCK} | options)


@pytest.mark.parametrize("options", DRAFTERS, ids=lambda o: "-".join(str(v) for v in o.values()))
@pytest.mark.parametrize("length", [1, 8, 9, 17, *slow(7, 15, 16, 40, 41)])
def test_an_identical_prompt_hits_all_but_its_last_token(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, length: int, options: dict[str, Any]
) -> None:
    """Rows 35, 37, 38, 41: with drafts on, at every length around a block's end, and counted."""
    runs = small(hf, tokenizer, **options)
    prompt, want = text(length, 1), hf_greedy(hf, text(length, 1))[: SHORT.max_tokens]
    for turn in range(3):
        answer = runs.generate([prompt], SHORT)[0]
        same_text(hf, prompt, answer.tokens, want)
        hit = (length - 1) // BLOCK * BLOCK if turn else 0
        assert answer.hit.tokens == hit
        assert runs.stats().prefix.hit_tokens == turn * ((length - 1) // BLOCK * BLOCK)
        # Row 40: what is too short to hit says so.
        assert (answer.hit.short == "short_prompt") == (length < BLOCK + 1)
    assert runs.prefix_cache.min_cacheable_tokens == BLOCK + 1
    assert runs.stats().prefix.hit_rate == 2 * hit / (3 * length)
    while not runs.idle:  # a step that was queued ahead
        runs.step()
    nothing_leaked(runs)


@pytest.mark.slow
@pytest.mark.parametrize("state_layout", LAYOUTS)
def test_a_hit_does_not_depend_on_what_follows_the_shared_prefix(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, state_layout: str
) -> None:
    """Rows 24, 36: a longer unique end never lowers the hit, nor does a longer shared prefix."""
    runs = small(
        hf, tokenizer, drafter="mtp", num_speculative_tokens=3, state_layout=state_layout,
        num_blocks=(200, 200),
    )  # fmt: skip
    shared = text(40, 2)
    runs.generate([shared + text(9, 3)], GREEDY)
    for number, unique in enumerate((1, 2, 7, 8, 9, 30)):
        prompt = shared + text(unique, 10 + number)
        answer = runs.generate([prompt], GREEDY)[0]
        assert answer.hit.tokens == 40
        same_text(hf, prompt, answer.tokens, hf_greedy(hf, prompt))
    hits = [
        runs.generate([shared[:n] + text(9, 50 + n)], GREEDY)[0].hit.tokens for n in range(0, 41, 4)
    ]
    assert hits == [n // BLOCK * BLOCK for n in range(0, 41, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("state_layout", LAYOUTS)
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_the_second_turn_of_a_chat_starts_near_the_end_of_the_first(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, state_layout: str, steps_ahead: int
) -> None:
    """Row 42: new tokens and one block are computed again at most."""
    runs = small(
        hf, tokenizer, drafter="mtp", num_speculative_tokens=3, state_layout=state_layout,
        steps_ahead=steps_ahead,
    )  # fmt: skip
    prompt, known = text(21, 4), 0
    for turn in range(3):
        answer = runs.generate([prompt], GREEDY)[0]
        same_text(hf, prompt, answer.tokens, hf_greedy(hf, prompt))
        assert answer.hit.tokens >= known - BLOCK
        known = len(prompt) + len(answer.tokens)
        prompt = prompt + answer.tokens + text(5, 60 + turn)


def test_tenants_do_not_find_each_others_prompts(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer
) -> None:
    runs = small(hf, tokenizer)
    prompt = text(33, 5)
    found = []
    for tenant in ("a", "b", "a", "b", ""):
        request = runs.submit(prompt, GREEDY, tenant=tenant)
        while request.finish_reason is None:
            runs.step()
        found.append(request.hit.tokens)
    assert found == [0, 0, 32, 32, 0]


@pytest.mark.parametrize("retention", ["prompt", 16])
def test_sparse_retention_keeps_what_can_be_asked_for(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, retention: Any
) -> None:
    """Row 37: an identical resend and a sibling that shares a prefix both hit, the sibling from the
    second time on, because the first one leaves a checkpoint where the prefix was found to end."""
    runs = small(hf, tokenizer, drafter="ngram", num_speculative_tokens=3, retention=retention)
    shared = text(24, 6)
    prompt = shared + text(20, 7)
    runs.generate([prompt], GREEDY)
    assert runs.generate([prompt], GREEDY)[0].hit.tokens == 40
    first = runs.generate([shared + text(20, 8)], GREEDY)[0]
    assert (first.hit.tokens, first.hit.short) == (
        (0 if retention == "prompt" else 16),
        "no_checkpoint",
    )
    sibling = shared + text(20, 9)
    second = runs.generate([sibling], GREEDY)[0]
    assert (second.hit.tokens, second.hit.short) == (24, None)
    same_text(hf, sibling, second.tokens, hf_greedy(hf, sibling))
    assert runs.stats().prefix.short["no_checkpoint"] == 1


def test_a_hit_below_a_checkpoint_that_was_evicted_says_so(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer
) -> None:
    runs = small(hf, tokenizer)
    request = runs.submit(text(41, 11), GREEDY)
    while not runs.idle:
        runs.step()
    pool, (*lower, longest) = runs.prefix_cache.state.pool, request.hashes[:5]
    for key in lower:  # the longest one was used the longest time ago
        block = pool.find(key)
        assert block is not None
        pool.share([block])
        pool.put([block])
    taken = []
    while pool.find(longest) is not None:
        taken += pool.take(1)
    pool.put(taken)
    hit = runs.generate([text(41, 11)], GREEDY)[0].hit
    assert (hit.tokens, hit.short) == (32, "evicted_checkpoint")


def test_what_was_evicted_says_so(hf: NemotronHForCausalLM, tokenizer: Tokenizer) -> None:
    runs = small(hf, tokenizer, max_requests=1, num_blocks=(60, 6))
    prompt = text(41, 11)
    runs.generate([prompt], GREEDY)
    for seed in range(20, 23):
        runs.generate([text(41, seed)], GREEDY)
    answer = runs.generate([prompt], GREEDY)[0]
    assert answer.hit.short in ("evicted_checkpoint", "evicted_keys")
    assert runs.stats().prefix.evictions > 0
    nothing_leaked(runs)


OPTIONS = [
    {"drafter": None},
    *(
        {"drafter": "mtp", "num_speculative_tokens": 3, "state_layout": layout, "steps_ahead": n}
        for layout, n in itertools.product(LAYOUTS, (0, 1))
    ),
    {"drafter": "ngram", "num_speculative_tokens": 3, "prefix_caching": False},
    {"drafter": "ngram", "num_speculative_tokens": 3, "retention": "prompt"},
    {"drafter": "mtp", "num_speculative_tokens": 3, "host_blocks": (40, 30), "steps_ahead": 1},
    {"drafter": "mtp", "num_speculative_tokens": 3, "host_blocks": (9, 3)},
]


PREEMPTED = [text(20 + n, 70 + n) for n in range(9)]


def params_of(sampled: bool) -> list[SamplingParams]:
    temperature = 0.9 if sampled else 0.0
    return [SamplingParams(max_tokens=30, temperature=temperature, seed=n) for n in range(9)]


@pytest.fixture(scope="module")
def alone(hf: NemotronHForCausalLM, tokenizer: Tokenizer) -> dict[bool, list[list[int]]]:
    """Greedy and sampled tokens of each prompt when nobody else is there."""
    runs = small(hf, tokenizer, max_requests=1)
    return {
        sampled: [
            runs.generate([prompt], params)[0].tokens
            for prompt, params in zip(PREEMPTED, params_of(sampled), strict=True)
        ]
        for sampled in (False, True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_preempted_requests_go_on_as_if_nothing_had_happened(
    hf: NemotronHForCausalLM,
    tokenizer: Tokenizer,
    alone: dict[bool, list[list[int]]],
    options: dict[str, Any],
    sampled: bool,
) -> None:
    """Row 66: at every offset to a block's end, greedy and sampled."""
    runs = small(hf, tokenizer, max_requests=6, num_blocks=(22, 24), **options)
    most = runs.scheduler.footprint(1, 1)[1]
    requests = [runs.submit(p, s) for p, s in zip(PREEMPTED, params_of(sampled), strict=True)]
    while not runs.idle:
        runs.step()
        owned = [len(owned_blocks(runs.scheduler.state, slot)) for slot in range(6)]
        assert max(owned) <= most  # P12: the bound by which requests are refused
    assert runs.stats().preemptions > 0
    for request, tokens in zip(requests, alone[sampled], strict=True):
        if sampled:
            assert request.output == tokens
        else:
            same_text(hf, request.prompt.tolist(), request.output, tokens)
    nothing_leaked(runs)


@pytest.mark.parametrize(
    ("state_layout", "conv_layout", "kv_block", "length"),
    [
        ("columns", "SD", 8, 41),
        ("replay", "SD", 2, 41),
        ("replay", "SD", 8, 40),
        pytest.param("replay", "DS", 8, 41, marks=pytest.mark.slow),
    ],
)
def test_what_the_device_had_no_room_for_comes_back_from_the_host(
    hf: NemotronHForCausalLM,
    tokenizer: Tokenizer,
    state_layout: str,
    conv_layout: str,
    kv_block: int,
    length: int,
) -> None:
    """Up to the last block's end that leaves a token to run, also where the host has later ones."""
    runs = small(
        hf, tokenizer, drafter="mtp", num_speculative_tokens=3, state_layout=state_layout,
        conv_layout=conv_layout, max_requests=1, kv_block_size=kv_block,
        num_blocks=(112 // kv_block, 9), host_blocks=(480 // kv_block, 60),
    )  # fmt: skip
    prompt = text(length, 11)
    want = hf_greedy(hf, prompt)
    runs.generate([prompt], GREEDY)
    for seed in range(20, 24):
        runs.generate([text(41, seed)], GREEDY)
    assert runs.stats().prefix.evictions > 0
    answer = runs.generate([prompt], GREEDY)[0]
    same_text(hf, prompt, answer.tokens, want)
    assert answer.hit.tokens == (length - 1) // BLOCK * BLOCK
    assert runs.stats().prefix.host_blocks > 0
    nothing_leaked(runs)


@pytest.mark.parametrize("at", ["store", "load"])
def test_a_failing_copy_makes_the_cache_smaller_and_nothing_wrong(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, at: str
) -> None:
    """Row 63: nobody finds what was not copied, no block is lost, and the text is right."""
    runs = small(hf, tokenizer, max_requests=1, num_blocks=(14, 9), host_blocks=(60, 60))
    host = runs.prefix_cache.host
    assert host is not None
    working = host.tier._copies.path
    broken = CopyPath("broken", lambda *_: (_ for _ in ()).throw(RuntimeError("no copies today")))
    prompt = text(41, 11)
    want = hf_greedy(hf, prompt)
    for number, seed in enumerate((11, 20, 21, 22, 23, 11)):
        fails = number == 0 if at == "store" else number == 5
        host.tier._copies.path = broken if fails else working
        answer = runs.generate([text(41, seed)], GREEDY)[0]
    same_text(hf, prompt, answer.tokens, want)
    assert host.failed > 0
    assert answer.hit.tokens < 40
    nothing_leaked(runs)
    runs.reset_prefix_cache()
    for group, size in (("kv", 60), ("state", 60)):
        assert host.tier.usage(group).free == size


@pytest.mark.parametrize("host_blocks", [None, (40, 40)])
def test_after_a_reset_nothing_is_found_and_running_requests_go_on(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, host_blocks: tuple[int, int] | None
) -> None:
    runs = small(hf, tokenizer, host_blocks=host_blocks)
    prompt = text(41, 12)
    want = hf_greedy(hf, prompt)
    assert [runs.generate([prompt], GREEDY)[0].hit.tokens for _ in range(2)] == [0, 40]
    request = runs.submit(prompt, GREEDY)
    runs.step()
    runs.reset_prefix_cache()
    while not runs.idle:
        runs.step()
    same_text(hf, prompt, request.output, want)
    runs.reset_prefix_cache()
    answer = runs.generate([prompt], GREEDY)[0]
    same_text(hf, prompt, answer.tokens, want)
    assert (answer.hit.tokens, answer.hit.short) == (0, None)
    nothing_leaked(runs)


def test_the_queue_has_a_bound_and_requests_a_deadline(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer
) -> None:
    runs = small(hf, tokenizer, max_requests=1, max_waiting=2)
    kept = [runs.submit(text(9, 1), GREEDY)]
    runs.step()
    kept += [runs.submit(text(9, 2), GREEDY), runs.submit(text(9, 3), GREEDY, deadline=0.0)]
    with pytest.raises(QueueFull, match="2 requests wait; max_waiting is 2"):
        runs.submit(text(9, 4), GREEDY)
    assert kept[2] in runs.step()
    runs.submit(text(9, 4), GREEDY)
    running = runs.submit(text(9, 5), GREEDY, deadline=0.0) if not runs.scheduler.waiting else None
    while not runs.idle:
        runs.step()
    assert [r.finish_reason for r in kept] == ["length", "length", "deadline"]
    assert running is None or running.finish_reason == "deadline"
    nothing_leaked(runs)


@pytest.mark.parametrize("retention", ["some", 0, 12, -8])
def test_bad_retention_is_refused(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, retention: Any
) -> None:
    with pytest.raises(ValueError, match=f"retention is {retention!r}"):
        small(hf, tokenizer, retention=retention)


def test_owned_blocks_are_never_evicted_and_the_longest_unused_goes_first() -> None:
    pool = BlockPool(3)
    first, second, third = pool.take(3)
    for key, block in ((b"1", first), (b"2", second)):
        assert pool.file(key, block)
    assert not pool.file(b"1", third)
    pool.put([second, first, third])
    assert (pool.free, pool.cached) == (3, 2)
    found = pool.find(b"2")
    assert found == second
    pool.share([second])
    assert pool.take(2) == [third, first]
    assert (pool.find(b"1"), pool.evicted(b"1"), pool.evicted(b"2")) == (None, True, False)
    assert (pool.free, pool.evictions) == (0, 1)
    pool.put([second])
    assert pool.take(1) == [second]
    assert pool.find(b"2") is None
