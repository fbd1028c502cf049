"""Prompts say behind which of their tokens others will go on: the state is kept there, at any
position, goes last when room is needed, and gives way to the next one of its conversation.

Over the hash target, as in `test_turn_ends`.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers.pool_world import BLOCK, World
from helpers.toy_recurrences import DELTA

from hybrid_runtime.engine.arguments import check_positions, each_positions
from hybrid_runtime.engine.block_pool import BlockPool
from hybrid_runtime.engine.eviction import WORTHLESS, IdleBlocks
from hybrid_runtime.engine.request import Request
from hybrid_runtime.engine.wanted import Wanted, spread
from hybrid_runtime.state.boundaries import NEVER

OPTIONS: list[dict[str, Any]] = [
    {"num_draft": 3},
    {"num_draft": 3, "kv_block_size": 4, "graphs": True, "text": True},
    {"num_draft": 3, "kv_block_size": 1, "strategy": "blocking"},
    {"num_draft": 3, "ring_tokens": 4, "retention": "prompt", "max_tokens_per_step": 9},
    {"num_draft": 3, "retention": 2 * BLOCK, "max_prompt_tokens": 3},
    {"num_draft": 1, "block_size": 12, "kv_block_size": 6},
    {"num_draft": 0, "rule": DELTA, "conv_layout": "DS"},
    {"num_draft": 7, "block_size": 8, "kv_block_size": 8},
]


def world(**options: Any) -> World:
    """Enough memory for all that is said."""
    each = {"kv_block_size": 4, "max_requests": 3, "num_blocks": (600, 90), "max_model_len": 150}
    return World(**each | options)


def serve(here: World, prompt: list[int], *ends: int, tenant: str = "", most: int = 1) -> Request:
    request = here.submit(prompt, tenant, None, ends, max_tokens=most)
    here.drain()
    return request


def evict(here: World, group: str, blocks: int) -> None:
    """Let so many blocks make room."""
    pool = here.pools[group]
    pool.put(pool.take(pool.free - pool.cached + blocks))


def test_a_superseded_pin_takes_no_block_with_it_that_the_newer_one_stands_on() -> None:
    """A position at the end of a full KV block has no block of its own."""
    here = world(num_draft=0, kv_block_size=2, steps_ahead=0)
    serve(here, [5, 6, 0], 3)
    first, newer = [1, 2, 0, 4, 5, 6], [1, 2, 0, 4, 5, 6, 7, 8, 9, 3]
    serve(here, [*first, 9], len(first))
    assert len(first) % here.engine.scheduler.block_size
    assert serve(here, [*newer, 7], len(newer)).hit.tokens == len(first)
    evict(here, "kv", 1)
    assert serve(here, [*newer, 2]).hit.tokens == len(newer)
    here.finish()


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_a_prompt_that_goes_on_behind_a_named_position_hits_it(
    options: dict[str, Any], steps_ahead: int
) -> None:
    """Any positions, several at once, whatever is answered; nothing but what is new runs."""
    here = world(**options, steps_ahead=steps_ahead, num_blocks=(1500, 300))
    draw = random.Random(steps_ahead)
    k = here.engine.scheduler.num_draft
    for _ in range(12):
        prompt = draw.choices(range(200), k=draw.randint(2, 45))
        ends = draw.choices(range(1, len(prompt) + 1), k=3)
        for _ in range(draw.randint(0, 2)):  # others run beside it
            here.submit(draw.choices(range(3), k=9), max_tokens=9)
            here.step()
        serve(here, prompt, *ends, most=draw.randint(1, 9))
        for end in spread(ends, k):
            assert serve(here, [*prompt[:end], 201, 202]).hit.tokens == end
    assert here.events["hits of messages"] > 9
    stats = here.engine.stats().prefix
    assert stats.message_hits >= here.events["hits of messages"]
    assert stats.message_ends >= 12
    here.finish()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_who_computed_a_partial_block_writes_on_in_it_and_others_in_copies(
    steps_ahead: int,
) -> None:
    """The block has a key for each end in it, and one of its own when it is full."""
    here = world(num_draft=0, block_size=8, kv_block_size=8, steps_ahead=steps_ahead)
    first = here.submit([1, 2, 0, 1, 1], "", None, (2, 4), max_tokens=6)
    while not first.output:
        here.step()
    others = [here.submit([*first.prompt[:4].tolist(), 7, token], max_tokens=9) for token in (5, 6)]
    here.drain()
    assert [other.hit.tokens for other in others] == [4, 4]
    assert serve(here, [1, 2, 9]).hit.tokens == 2
    assert serve(here, [*first.tokens.tolist(), 9]).hit.tokens == first.turn_end
    here.finish()


def test_other_tokens_and_other_tenants_hit_nothing() -> None:
    here = world(num_draft=3)
    serve(here, [1, 2, 3, 4, 5, 6, 7], 6, tenant="a")
    assert serve(here, [1, 2, 3, 4, 5, 6, 9], tenant="b").hit.tokens == 0
    assert serve(here, [1, 2, 3, 4, 6, 6, 9], tenant="a").hit.turn is None
    assert serve(here, [1, 2, 3, 4, 5, 6, 9], tenant="a").hit.tokens == 6
    here.finish()


def in_order(here: World, group: str) -> list[bytes]:
    """Keys of the blocks that nobody owns, those that go first in front."""
    pool = here.pools[group]
    return [pool._keys[block][0] for block in pool._idle]


def test_a_pin_that_texts_go_on_from_outlives_what_is_used_once() -> None:
    """As long as they do; when they have stopped, it goes as all else does."""
    here = world(num_draft=0, steps_ahead=0, num_blocks=(600, 12))
    head, cache = [1, 2, 3, 4, 5], here.engine.prefix_cache
    key = cache._key(serve(here, [*head, 6], 5), 5)
    for token in range(20, 90):
        serve(here, [token] * 9)
        if not token % 4:
            assert serve(here, [*head, 9, token]).hit.tokens == 5
    pool, others = here.pools["state"], 0
    while pool.find(key) is not None:
        serve(here, [others, 91, 92, 93, 94, 95, others, 96])
        others += 1
    assert 3 < others < 200
    here.finish()


@pytest.mark.parametrize("answer_stays", [True, False])
def test_a_conversation_keeps_the_pin_of_its_last_message(answer_stays: bool) -> None:
    """Whether the next turn goes on behind the answer or behind the message itself."""
    here = world(num_draft=0, steps_ahead=0)
    cache, pool = here.engine.prefix_cache, here.pools["state"]
    first = serve(here, [1, 2, 3, 4, 5, 6], 5, most=4)
    known = first.tokens if answer_stays else first.prompt[:5]
    second = here.submit([*known.tolist(), 7, 8, 9], "", None, (len(known) + 2,), max_tokens=4)
    older, newer = cache._key(first, 5), cache._key(second, len(known) + 2)
    while pool.find(newer) is None:
        assert older in cache._pins
        here.step()
    assert older in cache._pins
    here.drain()
    assert [key in cache._pins for key in (older, newer)] == [False, True]
    assert older in in_order(here, "state")[:2]
    assert in_order(here, "state")[-1] == newer
    here.finish()


def test_what_is_named_again_stays() -> None:
    here = world(num_draft=0, steps_ahead=0)
    cache = here.engine.prefix_cache
    first = serve(here, [1, 2, 3, 4, 5, 6], 3, 6, most=2)
    second = serve(here, [*first.tokens.tolist(), 7, 8], 3, 9, most=2)
    pinned = [cache._key(second, at) in cache._pins for at in (3, 6, 9)]
    assert pinned == [True, False, True]
    here.finish()


def test_a_beginning_that_several_share_is_not_superseded() -> None:
    here = world(num_draft=0, steps_ahead=0)
    cache = here.engine.prefix_cache
    head = [1, 2, 3, 4, 5]
    serve(here, [*head, 6], 5)
    one = serve(here, [*head, 7, 7], 7, most=2)
    key = cache._key(one, 5)
    assert one.hit.tokens == 5
    assert key not in cache._pins  # for all that is known, it is one conversation
    serve(here, [*head, 6], 5)
    other = here.submit([*head, 8, 8], max_tokens=1)
    here.drain()
    assert other.hit.tokens == 5
    serve(here, [*head, 9, 9], 7)
    assert key in cache._pins
    here.finish()


@pytest.mark.parametrize("how", ["owned", "not published"])
def test_a_pin_is_not_superseded_while(how: str) -> None:
    """Somebody owns it, or the newer one cannot be found."""
    here = world(num_draft=0, steps_ahead=0, max_requests=2, max_prompt_tokens=3)
    cache = here.engine.prefix_cache
    first = serve(here, [1, 2, 3, 4, 5, 6], 5, most=2)
    key = cache._key(first, 5)
    prompt = [*first.tokens.tolist(), 7, 8, 9]
    if how == "owned":
        owner = here.submit([*prompt[:5], 9, *[2] * 30], max_tokens=1)
        here.step()
        assert owner.hit.tokens == 5
        cache._pins._hits[key] = 0  # or it would be a beginning that several share
        text = [(cache._parent(first, 1), first.span(4, 6))]
        cache._pins.supersede(text, (), None)
        assert key in cache._pins
        here.drain()
        cache._pins.supersede(text, (), None)
        assert key not in cache._pins
    else:
        going = here.submit([*prompt, *[3] * 30], "", None, (len(prompt) + 30,), max_tokens=1)
        here.step()
        here.engine.abort(going)
        here._close()
        assert key in cache._pins
    here.finish()


@pytest.mark.parametrize("missing", [None, "kv", "state"])
def test_a_message_end_comes_back_from_the_host_with_both_or_not_at_all(
    missing: str | None,
) -> None:
    here = world(
        num_draft=0, num_blocks=(12, 8), host_blocks=(60, 60), steps_ahead=0, max_requests=1
    )
    first = serve(here, [1, 2, 0, 1, 1, 2, 3], 6)
    for token in range(20, 28):
        serve(here, [token] * 7)
    for group in ("state", "kv"):
        evict(here, group, here.pools[group].cached)
    host, key = here.host, here.engine.prefix_cache._key(first, 6)
    assert host is not None
    if missing is not None:
        host.tier.free(missing, [host._blocks[missing].pop(key)])
    again = serve(here, [*first.prompt[:6].tolist(), 9, 9])
    assert again.hit.tokens == (6 if missing is None else 0)
    assert here.engine.prefix_cache._pins._hits[key] == (missing is None)
    here.finish()


def test_after_a_reset_there_are_no_pins_and_a_broken_request_takes_its_own_with_it() -> None:
    here = world(num_draft=3, host_blocks=(60, 60))
    cache = here.engine.prefix_cache
    for forget in (lambda _: here.engine.reset_prefix_cache(), cache.forget):
        first = serve(here, [1, 2, 3, 4, 5, 6], 5)
        assert len(cache._pins) == 1
        forget(first)
        here.forget()
        assert len(cache._pins) == 0
        assert serve(here, [*first.prompt[:5].tolist(), 9]).hit.tokens == 0
        cache.clear()
        here.forget()
    here.finish()


def test_in_the_columns_layout_nothing_is_kept_beside_boundaries() -> None:
    here = world(num_draft=3, state_layout="columns")
    serve(here, [1, 2, 3, 4, 5, 6, 7], 6)
    assert serve(here, [1, 2, 3, 4, 5, 6, 9]).hit.tokens == 4
    assert here.engine.stats().prefix.message_ends == 0
    here.finish()


@pytest.mark.parametrize("apart", [0, 1, 3])
@pytest.mark.parametrize("every", [0, 4, 8])
def test_wanted_positions_are_all_but_those_of_the_grid_that_a_named_one_stands_for(
    every: int, apart: int
) -> None:
    draw = random.Random(every + apart)
    for _ in range(40):
        named = spread(draw.choices(range(1, 40), k=draw.randint(0, 3)), apart)
        places = spread(draw.choices(range(1, 40), k=draw.randint(0, 2)), apart, named)
        wanted, found, at = Wanted(every, places, named, apart), [], 0
        while (at := wanted.next(at)) <= 60:
            found.append(at)
        grid = range(every, 61, every) if every else range(0)
        kept = {
            g for g in grid
            if all(abs(p - g) > apart for p in (*named, *places))
            and not any(g < p < g + every for p in named)
        }  # fmt: skip
        assert found == sorted({*named, *places} | kept)
        assert all(b - a > apart for a, b in pairwise(found))
    assert Wanted(0).next(5) == NEVER


def test_of_neighbours_the_last_is_kept() -> None:
    assert spread([5, 9, 12, 12, 30], 3) == (5, 12, 30)
    assert spread([5, 9, 12, 30], 3, [8]) == (12, 30)


@pytest.mark.parametrize("wrong", [0, -1, 4, True, 2.0, "2", None])
def test_positions_that_a_prompt_cannot_have_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"checkpoints_at has .* 1\.\.3"):
        check_positions([1, wrong], 3)
    assert check_positions(np.array([3, 1, 3]), 3) == (1, 3)


@pytest.mark.parametrize("wrong", ["12", 3, {1: 2}])
def test_what_is_no_list_of_positions_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="checkpoints_at is"):
        check_positions(wrong, 3)
    with pytest.raises(ValueError, match="checkpoints_at is"):
        each_positions(wrong, 2)  # type: ignore[arg-type]
    assert each_positions(None, 2) == [(), ()]


def test_idle_blocks_go_in_the_order_of_worth_and_use() -> None:
    """Against a plain list, as long as it takes to make the heap anew."""
    draw, idle = random.Random(1), IdleBlocks(6)
    order: list[tuple[float, int, int]] = []
    for time in range(2000):
        block, act = draw.randrange(6), draw.choice(["add", "add", "demote", "drop", "pop"])
        if act == "pop":
            if order:
                assert idle.pop() == min(order)[2]
                order.remove(min(order))
            continue
        order = [one for one in order if one[2] != block]
        if act == "add":
            worth = draw.choice([-1.5, 0.0, 2.0])
            idle.add(block, worth)
            order.append((worth, time, block))
        elif act == "demote":
            idle.demote(block)
            order.append((WORTHLESS, -time, block))
        else:
            idle.discard(block)
        assert [one[2] for one in sorted(order)] == list(idle)
        assert len(idle) == len(order)


def test_a_block_that_another_key_finds_does_not_go_first() -> None:
    """The partial block of a superseded end is a full one of the text that went on in it."""
    pool = BlockPool(2)
    older, newer = pool.take(2)
    for key, block in ((b"old", older), (b"end", newer), (b"full", newer)):
        assert pool.file(key, block)
        pool.value(block, 1.0)
    pool.put([older, newer])
    pool.demote(b"end")
    assert list(pool._idle) == [older, newer]
    assert pool.take(2) == [older, newer]
    assert [pool.evicted(key) for key in (b"old", b"end", b"full")] == [True] * 3
