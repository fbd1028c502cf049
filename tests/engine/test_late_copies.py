"""Copies to the host run beside the steps: what they still read is not overwritten before."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.late_copies import late
from helpers.pool_world import BLOCK, World

from hybrid_runtime.engine.offload.cache import HostCache
from hybrid_runtime.engine.offload.tier import HostTier

ROOM = (300, 300)
"""Host blocks of which none has to make room."""


def test_a_block_is_overwritten_behind_its_copy() -> None:
    blocks = torch.arange(12.0).view(12, 1)
    cache = HostCache(HostTier({"kv": [blocks]}, {"kv": 8}))
    copies = late(cache.tier)
    for block in (3, 7, 5):
        cache.store("kv", [bytes([block])], [block])
    assert copies.passed() == 0
    cache.order_reuse("kv", [2, 7])
    assert copies.passed() == 2  # and not the one behind it
    cache.order_reuse("state", [5])
    assert copies.passed() == 2
    blocks[7] = -1
    assert cache.load("kv", [bytes([7])], [0])
    assert blocks[0] == 7


def test_a_host_block_is_free_once_its_copy_has_run() -> None:
    tier = HostTier({"kv": [torch.arange(12.0).view(12, 1)]}, {"kv": 1})
    copies = late(tier)
    ticket = tier.store("kv", [3])
    assert ticket is not None
    tier.free("kv", ticket.blocks)
    assert tier.usage("kv").in_flight == 1
    assert tier.store("kv", [5]) is None
    copies.run_until(1)
    assert tier.store("kv", [5]) is not None


def test_a_block_is_loaded_into_behind_its_copy() -> None:
    """One stream for both directions: nothing needs to be ordered."""
    blocks = torch.arange(12.0).view(12, 1)
    cache = HostCache(HostTier({"kv": [blocks]}, {"kv": 8}))
    late(cache.tier)
    for block in (3, 7):
        cache.store("kv", [bytes([block])], [block])
    assert cache.load("kv", [bytes([3])], [7])
    assert cache.load("kv", [bytes([7])], [3])
    assert blocks[[3, 7], 0].tolist() == [7, 3]


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("state_layout", ["replay", "columns"])
def test_what_the_host_keeps_is_right_however_late_it_is_copied(
    state_layout: str, steps_ahead: int
) -> None:
    """Requests that push each other's blocks out, and come back for them from the host."""
    rng = random.Random(steps_ahead)
    prompts = [rng.choices(range(100), k=5 * BLOCK + n) for n in range(5)]
    world = World(
        3, num_blocks=(18, 12), max_requests=2, host_blocks=ROOM, state_layout=state_layout,
        steps_ahead=steps_ahead,
    )  # fmt: skip
    assert world.host is not None
    copies = late(world.host.tier)
    latest = 0
    for prompt in [*prompts, *prompts[::-1], *prompts]:
        world.submit(prompt, max_tokens=6)
        if rng.random() < 0.5:
            world.drain()
        latest = max(latest, copies.issued - copies.passed())
    world.drain()
    assert latest > 5
    assert world.engine.prefix_cache.stats().host_blocks == world.host.tier.stats.loaded_blocks > 20
    world.finish()  # loads all that the host has, and checks it
