"""What the prefix cache's second level keeps, and what has to make room."""

from __future__ import annotations

import torch

from hybrid_runtime.engine.offload.cache import HostCache
from hybrid_runtime.engine.offload.tier import HostTier


def cache_of(room: int) -> tuple[HostCache, torch.Tensor]:
    blocks = torch.arange(12.0).view(12, 1)
    return HostCache(HostTier({"kv": [blocks]}, {"kv": room})), blocks


def keep(cache: HostCache, *blocks: int) -> None:
    cache.store("kv", [bytes([block]) for block in blocks], blocks)


def kept(cache: HostCache) -> list[int]:
    return [block for block in range(12) if cache.has("kv", bytes([block]))]


def test_only_so_many_make_room_as_it_takes() -> None:
    cache, _ = cache_of(4)
    keep(cache, 0, 1, 2)
    keep(cache, 3, 4)
    assert kept(cache) == [1, 2, 3, 4]
    keep(cache, 1, 5)  # of these one is there already
    assert kept(cache) == [2, 3, 4, 5]


def test_more_than_there_is_room_for_pushes_nothing_out() -> None:
    cache, _ = cache_of(4)
    keep(cache, 0, 1)
    keep(cache, 2, 3, 4, 5, 6)
    assert kept(cache) == [0, 1]


def test_what_was_fetched_stays_longer() -> None:
    cache, blocks = cache_of(2)
    keep(cache, 7)
    keep(cache, 8)
    blocks.fill_(-1)
    assert cache.load("kv", [bytes([7])], [3])
    assert blocks[3] == 7
    keep(cache, 9)
    assert kept(cache) == [7, 9]
