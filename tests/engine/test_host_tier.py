"""Blocks come back from the host byte for byte, and no host block is lost, whatever fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from helpers.host_blocks import (
    BROKEN,
    CPU,
    DEVICE_BLOCKS,
    HOST_BLOCKS,
    bytes_of,
    cache,
    check_failures,
    load,
    random_,
    store,
    tier_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hybrid_runtime.engine.offload.blocks import HostGroup, Usage
from hybrid_runtime.engine.offload.tier import HostTier

some_blocks = st.lists(
    st.integers(0, DEVICE_BLOCKS - 1), min_size=1, max_size=HOST_BLOCKS, unique=True
)


@settings(max_examples=40)
@given(
    st.sampled_from(["SD", "DS"]),
    st.sampled_from([10, 16]),
    st.sampled_from(["kv", "state"]),
    some_blocks,
    st.randoms(use_true_random=False),
)
def test_blocks_come_back_as_they_were(
    conv_layout: Literal["SD", "DS"], channels: int, group: str, blocks: list[int], random: Any
) -> None:
    groups = cache(conv_layout, channels=channels)
    tier = tier_of(groups)
    wanted = [bytes_of(groups[group], b) for b in blocks]
    ticket = tier.store(group, blocks)
    assert ticket is not None
    assert ticket.done()
    for tensors in groups.values():
        for tensor in tensors:
            random_(tensor)
    before = [bytes_of(groups[group], b) for b in range(DEVICE_BLOCKS)]
    targets = random.sample(range(DEVICE_BLOCKS), len(blocks))
    tier.load(group, ticket.blocks, targets)
    for b in range(DEVICE_BLOCKS):
        expected = wanted[targets.index(b)] if b in targets else before[b]
        assert bytes_of(groups[group], b) == expected
    moved = len(blocks) * sum(t[0].numel() * t.element_size() for t in groups[group])
    assert tier.stats.stored_bytes == tier.stats.loaded_bytes == moved


@pytest.mark.parametrize("conv_layout", ["SD", "DS"])
def test_the_gap_behind_a_component_is_not_moved(conv_layout: Literal["SD", "DS"]) -> None:
    groups = cache(conv_layout)
    windows = groups["state"][0]
    pages = torch.empty(0, dtype=torch.uint8).set_(windows.untyped_storage())
    pages = pages.view(DEVICE_BLOCKS, -1)
    used = windows[0].numel() * 2
    gap = slice(used, -(-used // 16) * 16)
    assert gap.start < gap.stop
    tier = tier_of(groups)
    pages[0, gap], pages[1, gap] = 1, 2
    ticket = tier.store("state", [0])
    assert ticket is not None
    tier.load("state", ticket.blocks, [1])
    assert bytes_of(groups["state"], 0) == bytes_of(groups["state"], 1)
    assert (pages[1, gap] == 2).all()


def test_neighbours_are_one_copy_per_run() -> None:
    tier = tier_of(cache(channels=16))  # window and state of a page are one run without a gap
    ticket = tier.store("kv", [5, 3, 4, 2])
    assert ticket is not None
    assert (tier.stats.asked, tier.stats.submitted) == (16, 4)
    tier.load("kv", ticket.blocks, [8, 6, 7, 5])
    assert (tier.stats.asked, tier.stats.submitted) == (32, 8)
    tier.load("kv", ticket.blocks, [0, 2, 4, 6])
    assert (tier.stats.asked, tier.stats.submitted) == (48, 24)
    tier.store("state", [0, 1])
    assert (tier.stats.asked, tier.stats.submitted) == (60, 27)


def test_tensors_that_are_neighbours_are_not_one_copy() -> None:
    # Neighbours in address space need not be one allocation, which one copy must not leave.
    both = torch.arange(8.0).view(2, 4, 1)
    tier = HostTier({"kv": [both[0], both[1]]}, {"kv": 4})
    ticket = tier.store("kv", [0, 1, 2, 3])
    assert ticket is not None
    assert tier.stats.submitted == 2


def test_tensors_of_other_storages_or_strides_are_not_one_run() -> None:
    memory = np.arange(8, dtype=np.float32)
    storages = [torch.from_numpy(memory[:4]).view(1, 4), torch.from_numpy(memory[4:]).view(1, 4)]
    flat = torch.arange(24.0)
    strides = [flat.as_strided((2, 4), (8, 1)), flat.as_strided((2, 4), (12, 1), 4)]
    for tensors in (storages, strides):
        tier = HostTier({"kv": tensors}, {"kv": 2})
        last = len(tensors[0]) - 1
        wanted = bytes_of(tensors, last)
        ticket = tier.store("kv", [last])
        assert ticket is not None
        assert tier.stats.submitted == 2
        for tensor in tensors:
            tensor.zero_()
        tier.load("kv", ticket.blocks, [last])
        assert bytes_of(tensors, last) == wanted


def test_blocks_may_have_holes() -> None:
    whole = random_(torch.empty(6, 5, 4, 6))
    part = whole[1:, ::2, :, 1:3].transpose(1, 3)
    tier = HostTier({"kv": [part]}, {"kv": 5})
    ticket = tier.store("kv", [4, 0])
    assert ticket is not None
    assert (tier.stats.asked, tier.stats.stored_bytes) == (2 * 12, 2 * part[0].numel() * 4)
    wanted = whole.clone()
    wanted[1:, ::2, :, 1:3][[1, 2]] = whole[1:, ::2, :, 1:3][[0, 4]]
    tier.load("kv", ticket.blocks, [2, 1])
    assert torch.equal(whole, wanted)


class History(RuleBasedStateMachine):
    """Random stores, loads and frees against a dictionary of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = cache("DS")
        self.tier = tier_of(self.groups)
        self.held: dict[str, dict[int, bytes]] = {"kv": {}, "state": {}}

    @rule(group=st.sampled_from(["kv", "state"]), blocks=some_blocks)
    def store(self, group: str, blocks: list[int]) -> None:
        wanted = [bytes_of(self.groups[group], b) for b in blocks]
        ticket = self.tier.store(group, blocks)
        if len(blocks) > HOST_BLOCKS - len(self.held[group]):
            assert ticket is None
            return
        assert ticket is not None
        assert not self.held[group].keys() & set(ticket.blocks.tolist())
        self.held[group].update(zip(ticket.blocks.tolist(), wanted, strict=True))

    @rule(group=st.sampled_from(["kv", "state"]), block=st.integers(0, DEVICE_BLOCKS - 1))
    def write(self, group: str, block: int) -> None:
        for tensor in self.groups[group]:
            random_(tensor[block])

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), blocks=some_blocks)
    def load(self, data: st.DataObject, blocks: list[int]) -> None:
        group = data.draw(st.sampled_from([g for g, held in self.held.items() if held]))
        one = st.sampled_from(sorted(self.held[group]))
        host = data.draw(st.lists(one, min_size=len(blocks), max_size=len(blocks)))
        self.tier.load(group, host, blocks)
        for h, b in zip(host, blocks, strict=True):
            assert bytes_of(self.groups[group], b) == self.held[group][h]

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from([g for g, held in self.held.items() if held]))
        one = st.sampled_from(sorted(self.held[group]))
        blocks = data.draw(st.lists(one, unique=True))
        self.tier.free(group, blocks)
        for block in blocks:
            del self.held[group][block]

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        for group, held in self.held.items():
            assert self.tier.usage(group) == Usage(HOST_BLOCKS - len(held), len(held), 0)


TestHistory = History.TestCase


TestHistory.settings = settings(max_examples=25, stateful_step_count=20)


def test_a_full_tier_says_so_and_changes_nothing() -> None:
    groups = cache()
    tier = tier_of(groups)
    first = tier.store("kv", range(4))
    assert first is not None
    stats = str(tier.stats)
    slab = tier.groups["kv"].slab.clone()
    assert tier.store("kv", [4, 5, 6]) is None
    assert tier.usage("kv") == Usage(2, 4, 0)
    assert str(tier.stats) == stats
    assert torch.equal(tier.groups["kv"].slab, slab)
    tier.free("kv", first.blocks[:1])
    assert tier.store("kv", [4, 5, 6]) is not None
    assert tier.usage("kv") == Usage(0, 6, 0)


def test_a_freed_block_waits_for_the_copies_that_touch_it() -> None:
    group = HostGroup("kv", cache()["kv"], HOST_BLOCKS, None)
    blocks = group.allocate(HOST_BLOCKS)
    assert blocks is not None
    group.touch(blocks[:2], 1)
    group.touch(blocks[1:3], 2)
    group.free(blocks[1:4])
    group.free(blocks[:1])
    assert group.usage() == Usage(0, 2, 4)
    group.reclaim(1)
    assert group.usage() == Usage(1, 2, 3)
    assert group.allocate(2) is None
    assert group.allocate(1) == blocks[0]
    group.reclaim(2)
    assert group.usage() == Usage(3, 3, 0)


@pytest.mark.parametrize("move", [store, load])
@pytest.mark.parametrize("name", BROKEN)
def test_a_failed_move_loses_no_block(name: str, move: Callable[[HostTier], None]) -> None:
    check_failures(name, CPU, move)


KV = torch.zeros(3, 2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.store("keys", [0]), "group is 'keys'; it must be one of"),
        (lambda t: t.store("kv", [0, 9]), r"device_blocks has 9; all must be in 0\.\.8"),
        (lambda t: t.store("kv", [-1]), "device_blocks has -1"),
        (lambda t: t.store("kv", [1, 1]), "device_blocks is .*; each block must be named once"),
        (lambda t: t.store("kv", [0.5]), "device_blocks is float64 of shape"),
        (lambda t: t.store("kv", [[1]]), "device_blocks is int64 of shape"),
        (lambda t: t.load("kv", [1], [0]), "host_blocks has 1, which is free"),
        (lambda t: t.load("kv", [6], [0]), r"host_blocks has 6; all must be in 0\.\.5"),
        (lambda t: t.load("kv", [0], [0, 1]), "device_blocks has 2 blocks; .* 1"),
        (lambda t: t.load("state", [0], [0]), "which is free"),
        (lambda t: t.free("kv", [0, 0]), "host_blocks is .*; each block must be named once"),
        (lambda t: t.free("kv", [5]), "host_blocks has 5, which is free"),
        (lambda t: HostTier({}, {}), "at least 1"),
        (lambda t: HostTier({"kv": [KV]}, {"state": 1}), "num_blocks is for"),
        (lambda t: HostTier({"kv": []}, {"kv": 1}), "groups lie on"),
        (lambda t: HostTier({"kv": [KV], "state": []}, {"kv": 1, "state": 1}), "has no tensors"),
        (lambda t: HostTier({"kv": [KV]}, {"kv": 0}), r"num_blocks\['kv'\] is 0"),
        (lambda t: HostTier({"kv": [KV, KV[:2]]}, {"kv": 1}), "has 2 blocks"),
        (lambda t: HostTier({"kv": [KV[:, :0]]}, {"kv": 1}), "it must hold blocks"),
        (lambda t: HostTier({"kv": [KV[:1].expand(3, 2, 2)]}, {"kv": 1}), "share its memory"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[HostTier], object], message: str) -> None:
    tier = tier_of(cache())
    ticket = tier.store("kv", [0])
    assert ticket is not None
    assert ticket.blocks.tolist() == [0]
    with pytest.raises(ValueError, match=message):
        call(tier)
    assert tier.usage("kv") == Usage(5, 1, 0)
