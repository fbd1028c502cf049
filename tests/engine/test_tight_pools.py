"""Pools with no block to spare, over the hash target."""

from __future__ import annotations

import pytest
from helpers.pool_world import BLOCK, World, owned_blocks


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("state_layout", ["replay", "columns"])
@pytest.mark.parametrize(("num_draft", "state_blocks"), [(0, 5), (1, 6), (3, 8)])
def test_a_sole_request_needs_no_more_than_its_bound(
    num_draft: int, state_blocks: int, state_layout: str, steps_ahead: int
) -> None:
    world = World(
        num_draft, num_blocks=(14, state_blocks), max_requests=1, max_tokens_per_step=64,
        retention=2 * BLOCK, state_layout=state_layout, steps_ahead=steps_ahead,
    )  # fmt: skip
    world.submit([1, 2] * 15, max_tokens=9)
    world.finish()
    # Four chunks, and no step behind the one that is certain to be the last.
    assert world.engine.stats().steps == {0: 12, 1: 11, 3: 8}[num_draft]


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("state_layout", ["replay", "columns"])
@pytest.mark.parametrize("num_draft", [0, 1, 3])
@pytest.mark.parametrize(("chunk", "retention"), [(64, "all"), (11, "prompt"), (9, 2 * BLOCK)])
def test_chunks_that_pass_boundaries_need_no_more_than_the_budget(
    chunk: int, retention: str | int, num_draft: int, state_layout: str, steps_ahead: int
) -> None:
    """One request at a time, of every length, from nothing and from each hit, and every checkpoint
    is filed: the scheduler raises if there are too few blocks."""
    layout = World(num_draft, state_layout=state_layout).engine.manager.layout
    most = layout.block_budget(steps_ahead).most
    for length in range(5, 10 * BLOCK, 6):
        world = World(
            num_draft, num_blocks=(14, most), max_requests=1, max_tokens_per_step=chunk,
            state_layout=state_layout, steps_ahead=steps_ahead, retention=retention,
        )  # fmt: skip
        for tokens in (length // 2, length):
            world.submit(([1, 2, 2, 0, 1] * 10)[:tokens], max_tokens=5)
            world.drain()
        world.finish()
        assert world.engine.stats().preemptions == 0


def test_a_chunk_passes_no_boundary_where_that_takes_another_requests_blocks() -> None:
    """Two prompts of two blocks and more need three state blocks each if they pass a boundary."""
    for blocks, chunks in ((6, [2 * BLOCK] * 2), (5, [BLOCK] * 2)):
        world = World(3, num_blocks=(14, blocks), max_requests=2, steps_ahead=0)
        prompts = [[token] * (2 * BLOCK + 2) for token in (1, 2)]
        requests = [world.submit(prompt, max_tokens=1) for prompt in prompts]
        world.step()
        assert [r.computed for r in requests] == chunks
        assert world.engine.stats().preemptions == 0
        world.finish()


def test_blocks_that_a_hit_takes_are_missing_to_the_others() -> None:
    """They are free as long as nobody owns them, but not once they are shared."""
    world = World(0, num_blocks=(6, 20), max_requests=2, max_tokens_per_step=64, steps_ahead=0)
    prompt = [1] * 3 * BLOCK
    world.submit(prompt, max_tokens=1)
    world.drain()
    world.submit([2] * 2 * BLOCK, max_tokens=4)
    world.step()
    again = world.submit(prompt, max_tokens=8)
    world.drain()
    assert again.hit.tokens == 2 * BLOCK
    assert world.engine.stats().preemptions == 0
    world.finish()


def test_who_comes_leaves_room_for_one_block_more_of_those_who_run() -> None:
    world = World(0, num_blocks=(4, 20), max_requests=2, max_tokens_per_step=64, steps_ahead=0)
    world.submit([1] * (2 * BLOCK - 1), max_tokens=BLOCK)
    world.step()
    world.submit([2] * (2 * BLOCK - 1), max_tokens=BLOCK)
    world.drain()
    assert world.engine.stats().preemptions == 0
    world.finish()


@pytest.mark.parametrize(("blocks", "running"), [(6, 1), (7, 2)])
@pytest.mark.parametrize(("num_draft", "max_tokens"), [(0, 3 * BLOCK), (3, 1)])
def test_who_comes_leaves_room_for_the_token_behind_a_prompt_and_for_drafts(
    num_draft: int, max_tokens: int, blocks: int, running: int
) -> None:
    """Two prompts of two blocks: the first may need four, the second three to begin with."""
    world = World(num_draft, num_blocks=(blocks, 40), max_requests=2, steps_ahead=0)
    for token in (1, 2):
        world.submit([token] * 2 * BLOCK, max_tokens=max_tokens)
    world.step()
    assert len([r for r in world.requests if r.computed]) == running
    world.finish()


def test_who_comes_finds_the_blocks_free_that_a_queued_step_has_not_taken() -> None:
    world = World(0, num_blocks=(40, 5), max_requests=2, steps_ahead=1)
    for number in range(2):
        world.submit([number] * 6, max_tokens=2)
        world.step()  # which leaves the first one's results on their way
        assert len(world.engine.scheduler.running) == number + 1
    world.finish()


def test_a_prompt_gives_its_columns_back_as_their_checkpoints_are_filed() -> None:
    world = World(
        3, num_blocks=(40, 40), max_requests=1, max_tokens_per_step=5, state_layout="columns",
        steps_ahead=0,
    )  # fmt: skip
    request, scheduler = world.submit(list(range(22)), max_tokens=1), world.engine.scheduler
    while not request.output:
        world.step()
        assert len(owned_blocks(scheduler.state, 0)) <= 2
    world.finish()


def test_drafts_of_no_more_rows_run_than_a_step_has_tokens_for() -> None:
    world = World(3, num_blocks=(40, 40), max_requests=3, max_tokens_per_step=8, steps_ahead=0)
    requests = [world.submit([token], max_tokens=9) for token in range(3)]
    for _ in range(2):
        world.step()
    assert [len(request.output) > 1 for request in requests] == [True, True, False]
    world.finish()


def test_a_state_that_a_hit_takes_is_missing_to_the_others() -> None:
    world = World(0, num_blocks=(40, 20), max_requests=2, max_tokens_per_step=64, steps_ahead=0)
    prompt = [1] * 3 * BLOCK
    world.submit(prompt, max_tokens=1)
    world.drain()
    world.submit([2], max_tokens=20)
    world.step()
    scheduler, pool = world.engine.scheduler, world.pools["state"]
    again = world.submit(prompt, max_tokens=1)
    hit = world.engine.prefix_cache.find(again)
    assert hit.state is not None
    pool.share([hit.state])
    pool.put([hit.state])  # the last one that makes room
    pool.take(pool.free - scheduler.manager.layout.block_budget(0).admission)
    assert scheduler.admit() == []
    world.engine.abort(world.requests[1])
    assert scheduler.admit() == [again]


@pytest.mark.parametrize("steps", range(1, 7))
def test_results_on_their_way_are_nobodys_after_a_preemption(steps: int) -> None:
    """The request is back in its slot before they are read, and computes those tokens again."""
    world = World(0, num_blocks=(40, 40), max_requests=1, max_tokens_per_step=64, steps_ahead=1)
    request = world.submit([1, 2] * 5, max_tokens=12)
    for _ in range(steps):
        world.step()
    known = min(request.computed_min, request.length - 1)  # what queued steps run is filed, too
    world.engine.scheduler.preempt(request)
    world.step()
    assert request.restarts == 1
    assert request.computed == request.hit.tokens == known // BLOCK * BLOCK
    world.finish()


def test_embeddings_that_fit_run_side_by_side() -> None:
    world = World(0, num_blocks=(4, 20), max_requests=4, max_tokens_per_step=4, steps_ahead=0)
    for token in range(2):
        world.engine.submit_embedding([token] * 2 * BLOCK)
    world.engine.step()
    assert len(world.engine.scheduler.running) == 2


def test_a_copy_that_fails_costs_no_hit() -> None:
    world = World(0, num_blocks=(20, 6), max_requests=1, host_blocks=(20, 20), steps_ahead=0)
    prompt = [1, 2] * 5
    world.submit(prompt, max_tokens=1)
    world.drain()
    cache, pool = world.engine.prefix_cache, world.pools["state"]
    again = world.submit(prompt, max_tokens=1)
    assert cache.find(again).tokens == 2 * BLOCK
    early = pool.find(again.hashes[0])
    assert early is not None
    pool.value(early, 1e9)  # the last one that makes room
    pool.take(pool.free - 1)
    hit = cache.find(again)
    assert hit.tokens == BLOCK
    world.break_copies(True)
    assert cache.promote(again, hit).tokens == BLOCK


@pytest.mark.parametrize("kv_block", [BLOCK, 1])
def test_only_blocks_that_were_gone_come_from_the_host(kv_block: int) -> None:
    """One of four where KV blocks are smaller than a state's."""
    world = World(
        0, num_blocks=(32 // kv_block, 20), max_requests=1, host_blocks=(80 // kv_block, 20),
        steps_ahead=0, kv_block_size=kv_block,
    )  # fmt: skip
    prompt = [1, 2] * 5
    world.submit(prompt, max_tokens=1)
    world.drain()
    cache, pool = world.engine.prefix_cache, world.pools["kv"]
    again = world.submit(prompt, max_tokens=1)
    while cache.find(again).tokens == 2 * BLOCK:
        taken = pool.take(1)
    pool.put(taken)
    hit = cache.find(again)
    assert (hit.tokens, hit.known, hit.short) == (BLOCK, BLOCK, "evicted_keys")
    assert cache.promote(again, hit).tokens == 2 * BLOCK
    assert cache.stats().host_blocks == 1
