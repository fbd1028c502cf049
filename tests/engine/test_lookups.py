"""Which prompts hit what: every length, retention and layout, over the hash target."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from helpers.pool_world import BLOCK, World

from hybrid_runtime.state import Checkpoint

TEXT = random.Random(5).choices(range(100), k=6 * BLOCK)
LAYOUTS = ("replay", "columns")
RETENTIONS = ("all", "prompt", 2 * BLOCK)


def world_of(**options: Any) -> World:
    roomy: dict[str, Any] = {"num_draft": 3, "max_requests": 3, "num_blocks": (90, 60)}
    return World(**roomy | options)


def hit_of(world: World, prompt: list[int], max_tokens: int = 1) -> int:
    request = world.submit(prompt, max_tokens=max_tokens)
    world.drain()
    return request.hit.tokens


def below(length: int) -> int:
    """The last boundary that leaves a prompt one token to run."""
    return (length - 1) // BLOCK * BLOCK


@pytest.mark.slow
@pytest.mark.parametrize("state_layout", LAYOUTS)
@pytest.mark.parametrize("retention", RETENTIONS)
def test_whatever_is_kept_can_be_found_and_whatever_is_asked_for_is_kept(
    state_layout: str, retention: Any
) -> None:
    """P7, rows 37, 38: both directions, at every prompt length."""
    for length in range(1, 4 * BLOCK + 2):
        world = world_of(state_layout=state_layout, retention=retention, steps_ahead=length % 2)
        prompt = TEXT[:length]
        hit_of(world, prompt, max_tokens=10)
        kept = [world.text_of[key][1] for key in world.pools["state"]._block]
        for text in sorted(kept, key=len):
            assert hit_of(world, [*text, 200]) == len(text)
        assert hit_of(world, prompt) == below(length)
        shared = prompt[: length // 2]
        hit_of(world, [*shared, *range(201, 206)])
        assert hit_of(world, [*shared, *range(211, 216)]) == len(shared) // BLOCK * BLOCK
        world.finish()


@pytest.mark.parametrize("retention", RETENTIONS)
def test_hits_lie_at_the_same_positions_with_smaller_kv_blocks(retention: Any) -> None:
    """Alone and side by side, of prompts and of whole texts."""
    found = []
    for kv_block in (BLOCK, 2, 1):
        draw, hits = random.Random(3), []
        world = world_of(
            retention=retention, steps_ahead=1, kv_block_size=kv_block,
            num_blocks=(900 // kv_block, 200),
        )  # fmt: skip
        for turn in range(12):
            for _ in range(draw.randint(1, 3)):
                world.submit([*TEXT[: draw.randint(1, 24)], 200 + turn], max_tokens=9)
            for _ in range(draw.randint(0, 9)):
                world.step()
            if turn % 3:
                world.drain()
                world.submit([*world.requests[-1].tokens.tolist(), 1], max_tokens=2)
        world.drain()
        hits = [(r.hit.tokens, r.hit.known, r.hit.short) for r in world.requests]
        first = world.requests[0]
        assert len(first.hashes) == first.length // kv_block
        found.append(hits)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) > 8


@pytest.mark.parametrize("state_layout", LAYOUTS)
def test_hits_grow_with_what_is_shared_and_with_nothing_else(state_layout: str) -> None:
    """P8, rows 24, 36: the length of the rest of the prompt does not matter."""
    world = world_of(state_layout=state_layout, num_blocks=(900, 400))
    hit_of(world, TEXT, max_tokens=5)
    rests = (1, 2, BLOCK, 2 * BLOCK + 1)
    for number, (shared, rest) in enumerate(itertools.product(range(len(TEXT) + 1), rests)):
        prompt = TEXT[:shared] + [100 + number] * rest
        assert hit_of(world, prompt) == shared // BLOCK * BLOCK
    world.finish()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state_layout", "num_draft", "steps_ahead"),
    [("replay", 3, 1), ("replay", 1, 0), ("replay", 0, 1), ("columns", 3, 1), ("columns", 0, 0)],
)
def test_any_tail_joins_a_batch_that_speculates(
    state_layout: str, num_draft: int, steps_ahead: int
) -> None:
    """P14, rows 53, 54, 55: one token, K + 1 tokens, a block more or less, with and without a hit,
    single and twice, beside a request in the middle of its decoding."""
    for length in range(1, 2 * BLOCK + 2):
        world = world_of(
            state_layout=state_layout, num_draft=num_draft, steps_ahead=steps_ahead, max_requests=4
        )
        for turn in range(2):
            world.submit([100 + turn, length], max_tokens=20)
            for _ in range(3):
                world.step()
            twins = [world.submit(TEXT[:length], max_tokens=6) for _ in range(2)]
            world.drain()
            hits = [request.hit.tokens for request in twins]
            assert hits == [below(length) if turn else 0] * 2
        world.finish()


@pytest.mark.parametrize("state_layout", LAYOUTS)
def test_what_was_evicted_and_computed_again_is_found_again(state_layout: str) -> None:
    """Rows 33, 61: a preempted request loses states that it had filed, and files them once more."""
    # As few blocks as preempt, and as many as keep what is asked for to the end.
    blocks = {"replay": (13, 10), "columns": (14, 13)}[state_layout]
    world = world_of(state_layout=state_layout, max_requests=2, num_blocks=blocks)
    world.submit(TEXT[:14], max_tokens=28)
    second = world.submit([200, *TEXT[:13]], max_tokens=28)
    world.drain()
    assert world.events["preemptions"] > 0
    assert world.events["resumes"] > world.events["resumes from a checkpoint"]
    assert hit_of(world, second.tokens[:30]) == below(30)
    world.finish()


@pytest.mark.parametrize("state_layout", LAYOUTS)
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_who_continues_a_text_starts_from_its_last_full_block(
    state_layout: str, steps_ahead: int
) -> None:
    """Wherever it ended, and also if drafts of its last step have filled that block."""
    for prompt, output in itertools.product(range(5, 9), range(1, 9)):
        world = world_of(state_layout=state_layout, steps_ahead=steps_ahead)
        first = world.submit(TEXT[:prompt], max_tokens=output)
        world.drain()
        assert hit_of(world, [*first.tokens.tolist(), 1]) >= below(first.length)


def test_a_checkpoint_whose_block_was_given_back_is_not_filed_again() -> None:
    world = world_of(max_tokens_per_step=BLOCK)
    request, cache = world.submit(TEXT[: 3 * BLOCK], max_tokens=9), world.engine.prefix_cache
    for _ in range(4):
        world.step()
    cache.clear()
    first, last = (Checkpoint(request.slot, 0, n * BLOCK, 0) for n in (1, 3))
    assert [cache.is_unfiled(request, one) for one in (first, last)] == [False, True]
