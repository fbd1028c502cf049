"""A conversation goes on where it stopped: the next turn finds the state and the keys and values
where the last one's text ended, at any position, and computes what is new.

Over the hash target, whose text shows any wrong byte; `World` checks after each step the texts, the
content of all blocks that can be found, their owners, and where each text that ended can be gone on
with.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from helpers.pool_world import World
from helpers.toy_recurrences import DELTA

from hybrid_runtime.engine.request import Request
from hybrid_runtime.engine.turn_ends import TurnEnds, tail_key

KINDS: tuple[str | None, ...] = (None, "token", "token", "string", "two tokens")
OPTIONS: list[dict[str, Any]] = [
    {"num_draft": 3},
    {"num_draft": 3, "text": True},
    {"num_draft": 3, "kv_block_size": 4, "graphs": True},
    {"num_draft": 3, "kv_block_size": 1, "strategy": "blocking"},
    {"num_draft": 3, "ring_tokens": 4, "strategy": "defer", "text": True},
    {"num_draft": 3, "ring_tokens": 0, "max_tokens_per_step": 9},
    {"num_draft": 1, "block_size": 12, "kv_block_size": 6},
    {"num_draft": 0, "text": True},
    {"num_draft": 7, "block_size": 8, "kv_block_size": 8},
    {"num_draft": 3, "rule": DELTA, "retention": "prompt", "conv_layout": "DS"},
]


def world(**options: Any) -> World:
    """Enough memory for all that is said."""
    each = {"kv_block_size": 2, "max_requests": 3, "num_blocks": (600, 90), "max_model_len": 150}
    return World(**each | options)


def say(
    here: World, prompt: list[int], draw: random.Random, most: int = 12, tenant: str = ""
) -> Request:
    """One turn, whose text ends by its length, a token or, where there is text, a string."""
    kind = draw.choice(KINDS if here.has_text else KINDS[:3])
    options: dict[str, Any] = {}
    if kind is not None:
        options = here.stop(prompt, kind, draw.randrange(1, most))
    return here.submit(prompt, tenant, max_tokens=draw.randint(1, most), **options)


def one_turn(here: World, prompt: list[int], **params: Any) -> Request:
    request = here.submit(prompt, **{"max_tokens": 5} | params)
    here.drain()
    return request


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_turns_compute_what_is_new_and_one_token_at_most(
    options: dict[str, Any], steps_ahead: int
) -> None:
    """Three conversations side by side, of turns that end in any way, at any offset to a block."""
    here, draw = world(**options, steps_ahead=steps_ahead), random.Random(steps_ahead)
    talks = [draw.choices(range(3), k=draw.randint(1, 9)) for _ in range(6)]
    last: dict[int, Request] = {}
    for _ in range(6):
        for who, tokens in enumerate(talks):
            last[who] = say(here, tokens, draw)
            for _ in range(draw.randint(0, 4)):
                here.step()
        here.drain()
        for who, request in last.items():
            talks[who] = [*request.tokens.tolist(), *draw.choices(range(3), k=draw.randint(1, 5))]
    for _ in range(2):  # alone, so that nothing else can be found
        for who, tokens in enumerate(talks):
            request, known = say(here, tokens, draw), last[who].turn_end
            here.drain()
            assert request.hit.tokens >= known
            if known % here.engine.scheduler.block_size and request.hit.tokens == known:
                assert request.hit.turn is not None
            talks[who], last[who] = [*request.tokens.tolist(), 1, 2], request
    assert here.events["turn ends"] > 30
    assert here.events["hits of turn ends"] > 20
    stats = here.engine.stats().prefix
    assert stats.turn_ends == here.events["turn ends"]
    assert stats.lost_turn_ends == here.events["lost turn ends"]
    assert stats.turn_hits == here.events["hits of turn ends"]
    here.finish()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_an_end_is_found_wherever_it_lies_among_the_last_drafts(steps_ahead: int) -> None:
    """By a token that is left out, one that is kept, and by the length, with a step queued."""
    here = world(num_draft=3, steps_ahead=steps_ahead, num_blocks=(90, 20))
    for length in range(1, 6):
        for at in range(1, 7):
            prompt = random.Random(length * 10 + at).choices(range(200), k=length)
            stops = here.stop(prompt, "token", at)
            for params in (
                stops,
                stops | {"include_stop_str_in_output": True},
                {"max_tokens": at + 1},
            ):
                first = one_turn(here, prompt, **{"max_tokens": 20} | params)
                known = first.length
                assert known - 1 <= first.turn_end <= known
                turn = one_turn(here, [*first.tokens.tolist(), 7, 8])
                assert turn.hit.tokens >= first.turn_end
    assert here.engine.stats().prefix.lost_turn_ends == 0
    here.finish()


@pytest.mark.parametrize("kind", ["string", "two tokens"])
def test_a_stop_string_loses_the_end_only_if_no_token_has_it_whole(kind: str) -> None:
    """And then only where the queued step went on behind the text, which ends in front of it."""
    lost = dict.fromkeys((0, 1), 0)
    for steps_ahead in lost:
        here = world(num_draft=3, steps_ahead=steps_ahead, text=True)
        for at in range(1, 20):
            prompt = random.Random(at).choices(range(200), k=5)
            options = here.stop(prompt, kind, at)
            options["include_stop_str_in_output"] = bool(at % 2)
            one_turn(here, prompt, max_tokens=40, **options)
        lost[steps_ahead] = here.engine.stats().prefix.lost_turn_ends
        assert here.engine.stats().prefix.turn_ends == 19 - lost[steps_ahead]
        here.finish()
    assert lost[0] == 0
    assert lost[1] == 0 if kind == "string" else 0 < lost[1] < 19


@pytest.mark.parametrize("options", OPTIONS[:8], ids=lambda o: "-".join(map(str, o.values())))
def test_a_text_that_was_held_back_for_nothing_goes_on(options: dict[str, Any]) -> None:
    """As if nothing had been, from where it was; in a pool without room to spare as well."""
    for steps_ahead, blocks in ((0, (600, 90)), (1, (600, 90)), (1, (90, 8))):
        here = world(**{"max_requests": 2, "num_blocks": blocks} | options, steps_ahead=steps_ahead)
        requests = [
            here.submit([number, 1, 2], max_tokens=25, held=tuple(range(number, 251, 3)))
            for number in range(5)
        ]
        here.drain()
        assert sum(request.restarts for request in requests) > 5
        if blocks[0] == 600:
            assert here.engine.stats().preemptions == 0
            assert all(r.hit.tokens > len(r.prompt) for r in requests if r.restarts)
        here.finish()


def test_other_tails_behind_the_same_blocks_are_not_found() -> None:
    here = world(num_draft=0, kv_block_size=4, steps_ahead=0)
    shared = [1, 2, 3, 4]
    first = one_turn(here, [*shared, 5, 6], max_tokens=1)
    assert first.turn_end == 6
    for tail in ([5], [5, 7], [6, 5], [6], [7, 8, 9]):
        assert one_turn(here, [*shared, *tail, 9], max_tokens=1).hit.turn is None
    assert one_turn(here, [*shared, 5, 6, 9], max_tokens=1).hit.tokens == 6
    assert one_turn(here, [*shared, 5, 6], max_tokens=1).hit.tokens == 4  # one has to run
    here.finish()


def test_tenants_do_not_find_each_others_turns() -> None:
    here = world(num_draft=3, kv_block_size=4)
    found = []
    for tenant in ("a", "b", "a", ""):
        request = here.submit([1, 2, 0], tenant, max_tokens=1)
        here.drain()
        again = here.submit([1, 2, 0, 5], tenant, max_tokens=1)
        here.drain()
        found.append((request.hit.tokens, again.hit.tokens))
    assert found == [(0, 3), (0, 3), (0, 4 - 1), (0, 3)]
    here.finish()


@pytest.mark.parametrize("kv_block", [4, 2])
def test_turns_that_branch_write_on_in_copies_of_their_own(kv_block: int) -> None:
    """At once, one after another, and again when others have written behind the same end."""
    here = world(num_draft=3, kv_block_size=kv_block, steps_ahead=1)
    first = one_turn(here, [1, 2, 0], max_tokens=6)
    known = first.tokens.tolist()
    for _ in range(2):
        turns = [here.submit([*known, token, 1], max_tokens=9) for token in (5, 6, 7, 8, 5)]
        here.drain()
        assert [turn.hit.tokens >= first.turn_end for turn in turns] == [True] * 5
    here.finish()


def test_a_copy_may_be_of_the_last_block_that_there_is() -> None:
    """The prompt needs all KV blocks, that of the turn's end among them."""
    here = world(num_draft=0, kv_block_size=4, num_blocks=(3, 20), steps_ahead=0, max_requests=1)
    first = one_turn(here, [1, 2, 0, 1, 2, 0], max_tokens=4)
    assert first.turn_end == 9
    turn = one_turn(here, [*first.tokens.tolist(), 1], max_tokens=1)
    assert turn.hit.tokens == 9
    here.finish()


def evict(here: World, group: str, blocks: int) -> None:
    """Let so many blocks make room."""
    pool = here.pools[group]
    pool.put(pool.take(pool.free - pool.cached + blocks))


@pytest.mark.parametrize(("blocks", "hit"), [(9, 0), (10, 9)])
def test_who_goes_on_leaves_room_for_the_copy(blocks: int, hit: int) -> None:
    """Beside the block that it is made of, which makes no room while it is copied."""
    here = world(num_draft=0, kv_block_size=4, num_blocks=(blocks, 30), steps_ahead=0)
    first = one_turn(here, [1, 2, 0, 1, 1, 2], max_tokens=4)
    assert first.turn_end == 9
    here.submit([7] * 15, max_tokens=16)
    here.step()
    turn = here.submit([*first.tokens.tolist(), 1, 2], max_tokens=1)
    here.step()
    assert turn.hit.tokens == hit
    here.finish()


@pytest.mark.parametrize("group", ["kv", "state"])
def test_an_end_whose_blocks_made_room_says_so(group: str) -> None:
    here = world(num_draft=0, kv_block_size=4, steps_ahead=0)
    first = one_turn(here, [1, 2, 0], max_tokens=1)
    evict(here, group, 1)
    hit = one_turn(here, [*first.tokens.tolist(), 1], max_tokens=1).hit
    gone = {"kv": "evicted_keys", "state": "evicted_checkpoint"}[group]
    assert (hit.tokens, hit.short) == (0, gone)
    here.finish()


def test_a_newer_end_supersedes_the_one_that_it_went_on_from() -> None:
    """It makes room first, before what nobody has used for longer."""
    here = world(num_draft=0, steps_ahead=0)
    other = one_turn(here, [5, 6, 0])
    first = one_turn(here, [1, 2, 0])
    second = one_turn(here, [*first.tokens.tolist(), 1])
    evict(here, "state", 1)
    evict(here, "kv", 1)
    for request, there in ((first, False), (other, True), (second, True)):
        turn = one_turn(here, [*request.tokens.tolist(), 2])
        assert (turn.hit.turn is not None) == there
    here.finish()


def test_what_is_superseded_is_no_block_that_the_newer_end_stands_on() -> None:
    """An end at the end of a full KV block has no block of its own."""
    here = world(num_draft=0, kv_block_size=2, steps_ahead=0)
    one_turn(here, [5, 6, 0])  # used longest ago
    first = one_turn(here, [1, 2, 0], max_tokens=4)
    assert first.turn_end == 6
    assert first.turn_end % here.engine.scheduler.block_size
    second = one_turn(here, [*first.tokens.tolist(), 1])
    assert second.hit.turn is not None
    evict(here, "kv", 1)
    third = one_turn(here, [*second.tokens.tolist(), 2])
    assert third.hit.tokens == second.turn_end
    here.finish()


@pytest.mark.parametrize("how", ["abort", "deadline", "error"])
def test_a_turn_without_an_end_supersedes_nothing(how: str) -> None:
    here = world(num_draft=0, steps_ahead=0)
    first = one_turn(here, [1, 2, 0])
    one_turn(here, [5, 6, 0])
    going = here.submit([*first.tokens.tolist(), 1], "", 2.5 if how == "deadline" else None,
                        max_tokens=30)  # fmt: skip
    here.step()
    assert going.hit.turn is not None
    if how == "abort":
        here.abort(0)
    elif how == "error":
        here.fail_next_step()
    here.drain()
    assert (going.finish_reason, going.turn_end) == (how, 0)
    pool = here.pools["state"]
    oldest = next(iter(pool._idle))
    assert pool._keys[oldest] != (going.hit.turn,)
    here.finish()


def test_an_end_that_others_go_on_from_is_not_superseded() -> None:
    here = world(num_draft=0, steps_ahead=0, max_requests=2, max_prompt_tokens=3)
    first = one_turn(here, [1, 2, 0])
    going = here.submit([*first.tokens.tolist(), 1], max_tokens=1)
    other = here.submit([*first.tokens.tolist(), *[2] * 20], max_tokens=3)
    while going.finish_reason is None:
        here.step()
    pool = here.pools["state"]
    block = pool.find(going.hit.turn or b"")
    assert block is not None
    assert other.hit.turn == going.hit.turn
    assert pool._owners[block] == 1
    here.drain()
    assert pool.find(going.hit.turn or b"") == block
    here.finish()


def test_a_preempted_turn_finds_the_end_again() -> None:
    here = world(num_draft=3, steps_ahead=1, max_requests=1)
    first = one_turn(here, [1, 2, 0, 1, 1])
    turn = here.submit([*first.tokens.tolist(), 1, 2], max_tokens=9)
    for _ in range(2):
        here.step()
    here.engine.scheduler.preempt(turn)
    here.drain()
    assert turn.restarts == 1
    assert turn.hit.tokens >= first.turn_end
    here.finish()


@pytest.mark.parametrize("missing", [None, "kv", "state"])
def test_an_end_comes_back_from_the_host_with_both_or_not_at_all(missing: str | None) -> None:
    here = world(
        num_draft=0, kv_block_size=4, num_blocks=(12, 8), host_blocks=(60, 60), steps_ahead=0,
        max_requests=1,
    )  # fmt: skip
    first = one_turn(here, [1, 2, 0, 1, 1, 2])
    for token in range(20, 28):
        one_turn(here, [token] * 7)
    for group in ("state", "kv"):
        evict(here, group, here.pools[group].cached)
    host, cache = here.host, here.engine.prefix_cache
    assert host is not None
    key = cache._key(first, first.turn_end)
    assert [pool.find(key) for pool in here.pools.values()] == [None, None]
    if missing is not None:
        host.tier.free(missing, [host._blocks[missing].pop(key)])
    turn = one_turn(here, [*first.tokens.tolist(), 1])
    assert turn.hit.tokens == (first.turn_end if missing is None else first.turn_end // 4 * 4)
    assert (turn.hit.turn is None) == (missing is not None)
    here.finish()


def test_after_a_reset_no_end_is_found() -> None:
    here = world(num_draft=3, steps_ahead=1, host_blocks=(60, 60))
    first = one_turn(here, [1, 2, 0], max_tokens=3)
    assert len(here.engine.prefix_cache._ends) == 1
    here.engine.reset_prefix_cache()
    here.forget()
    assert len(here.engine.prefix_cache._ends) == 0
    assert one_turn(here, [*first.tokens.tolist(), 1]).hit.tokens == 0
    here.finish()


def test_a_broken_turn_takes_the_end_that_it_went_on_from_with_it() -> None:
    here = world(num_draft=0, steps_ahead=0)
    first = one_turn(here, [1, 2, 0])
    turn = one_turn(here, [*first.tokens.tolist(), 1])
    here.engine.prefix_cache.forget(turn)
    here.forget()
    assert one_turn(here, [*first.tokens.tolist(), 2]).hit.tokens == 0
    here.finish()


def test_nothing_is_kept_where_nothing_could_be_found() -> None:
    for options in ({"prefix_caching": False}, {"state_layout": "columns"}):
        here = world(num_draft=3, **options)
        first = here.submit([1, 2, 0], max_tokens=5)
        while not here.engine.idle:
            here.engine.step()
        assert (first.finish_reason, first.turn_end) == ("length", 0)
        stats = here.engine.stats().prefix
        assert (stats.turn_ends, stats.lost_turn_ends) == (0, 0)


def test_more_stop_tokens_than_the_device_looks_for() -> None:
    """The end is then known to the host alone."""
    here = world(num_draft=3, steps_ahead=1)
    for at in range(1, 9):
        prompt = random.Random(at).choices(range(200), k=5)
        stops = here.stop(prompt, "token", at)["stop_token_ids"]
        request = here.submit(prompt, max_tokens=20, stop_token_ids=(*stops, *range(240, 250)))
        while request.finish_reason is None:
            here.engine.step()
        assert request.output == here.wanted_text(request)[0]
    stats = here.engine.stats().prefix
    assert stats.turn_ends + stats.lost_turn_ends == 8
    assert stats.lost_turn_ends > 0


def test_the_ends_that_are_remembered_are_the_last_used() -> None:
    ends, tokens = TurnEnds(2), np.arange(6, dtype=np.int32)
    keys = [tail_key(b"chain", tokens[:n]) for n in range(4)]
    assert keys[0] == b"chain"
    for n in (1, 2):
        ends.add(b"chain", keys[n], n)
    ends.add(b"chain", keys[1], 1)
    ends.add(b"chain", keys[3], 3)
    assert list(ends.matching(b"chain", tokens)) == [(keys[3], 3), (keys[1], 1)]
    assert list(ends.matching(b"chain", tokens[:2])) == [(keys[1], 1)]
    assert list(ends.matching(b"chain", tokens[1:])) == []
    assert list(ends.matching(b"other", tokens)) == []
    ends.forget(keys[3])
    ends.forget(keys[1])
    ends.add(b"chain", keys[0], 0)
    ends.add(b"chain", keys[2], 2)
    assert list(ends.matching(b"chain", tokens)) == [(keys[2], 2), (b"chain", 0)]
    ends.forget(keys[0])
    ends.forget(keys[2])
    assert not ends.any_behind(b"chain")
    assert len(ends) == 0
