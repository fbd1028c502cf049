"""The host tier on a GPU: ordered by streams alone, and without a wait of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from helpers.host_blocks import (
    BROKEN,
    HOST_BLOCKS,
    bytes_of,
    cache,
    check_failures,
    load,
    store,
    tier_of,
)

from hybrid_runtime.engine.offload.blocks import Usage
from hybrid_runtime.engine.offload.memcpy import driver_version, paths
from hybrid_runtime.engine.offload.tier import HostTier
from hybrid_runtime.state import sync_guard

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def sleep() -> None:
    """Keep the current stream busy for some 50 ms."""
    torch.cuda._sleep(100_000_000)


@pytest.mark.parametrize("conv_layout", ["SD", "DS"])
@pytest.mark.parametrize("group", ["kv", "state"])
def test_every_path_moves_the_same_bytes(conv_layout: Literal["SD", "DS"], group: str) -> None:
    version = driver_version()
    assert version is not None
    found = paths(GPU)
    assert len(found) == 1 + (version >= 12080) + (version >= 13000)
    blocks = [7, 2, 3, 4, 0]
    for path in found:
        groups = cache(conv_layout, "cuda")
        wanted = [bytes_of(groups[group], b) for b in blocks]
        tier = tier_of(groups, path)
        with sync_guard():
            ticket = tier.store(group, blocks)
            assert ticket is not None
            ticket.order()
            for tensor in groups[group]:
                tensor.zero_()
            tier.load(group, ticket.blocks, [1, 8, 7, 6, 5])
        assert [bytes_of(groups[group], b) for b in (1, 8, 7, 6, 5)] == wanted, path.name
        assert tier.groups[group].slab.is_pinned()


def test_a_store_sees_what_was_launched_before_it_and_nothing_after() -> None:
    groups = cache(device="cuda")
    tier = tier_of(groups)
    for tensor in groups["kv"]:
        tensor.fill_(4)  # a kernel's first launch may wait for the device
    torch.cuda.synchronize()
    with sync_guard() as waits:
        sleep()
        for tensor in groups["kv"]:
            tensor.fill_(5)
        ticket = tier.store("kv", [3, 4])
        assert ticket is not None
        assert not ticket.done()
        ticket.order()
        for tensor in groups["kv"]:
            tensor.fill_(6)
        tier.load("kv", ticket.blocks, [0, 1])
        after = [tensor.clone() for tensor in groups["kv"]]
    assert waits.count == 0
    torch.cuda.synchronize()
    assert ticket.done()
    for tensor in after:
        assert (tensor[:2] == 5).all()
        assert (tensor[2:] == 6).all()


def test_a_load_waits_for_those_who_still_read_the_block() -> None:
    groups = cache(device="cuda")
    tier = tier_of(groups)
    ticket = tier.store("state", [2])
    assert ticket is not None
    ticket.order()
    before = bytes_of(groups["state"], 5)
    stored = bytes_of(groups["state"], 2)
    with sync_guard():
        sleep()
        read = [tensor.clone() for tensor in groups["state"]]
        tier.load("state", ticket.blocks, [5])
    assert bytes_of(read, 5) == before
    assert bytes_of(groups["state"], 5) == stored


def test_a_block_freed_under_its_copy_is_handed_out_only_behind_it() -> None:
    tier = tier_of(cache(device="cuda"))
    with sync_guard():
        sleep()
        ticket = tier.store("kv", range(HOST_BLOCKS))
        assert ticket is not None
        tier.free("kv", ticket.blocks)
        assert tier.usage("kv") == Usage(0, 0, HOST_BLOCKS)
        assert tier.store("kv", [0]) is None
    torch.cuda.synchronize()
    assert tier.usage("kv") == Usage(HOST_BLOCKS, 0, 0)


@pytest.mark.parametrize("move", [store, load])
@pytest.mark.parametrize("name", BROKEN)
def test_a_failed_move_loses_no_block_on_a_gpu(name: str, move: Callable[[HostTier], None]) -> None:
    check_failures(name, GPU, move)


def test_memory_is_unpinned_when_the_tier_is_dropped() -> None:
    tier = tier_of(cache(device="cuda"))
    slab = tier.groups["kv"].slab
    with sync_guard():
        del tier
    assert not slab.is_pinned()
