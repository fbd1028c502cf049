"""Blocks come back from the host byte for byte, and no host block is lost, whatever fails."""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from hybrid_runtime.engine.offload.blocks import HostGroup, Usage
from hybrid_runtime.engine.offload.memcpy import (
    Copies,
    CopyPath,
    _batch,
    driver_version,
    merged,
    paths,
)
from hybrid_runtime.engine.offload.tier import HostTier
from hybrid_runtime.state import StateLayout, sync_guard

CPU = torch.device("cpu")
DEVICE_BLOCKS, HOST_BLOCKS = 9, 6


def random_(tensor: Tensor) -> Tensor:
    return tensor.copy_(torch.randint(-99, 99, tensor.shape, device=tensor.device))


def cache(
    conv_layout: Literal["SD", "DS"] = "SD", device: str = "cpu", channels: int = 10
) -> dict[str, list[Tensor]]:
    """Keys and values of two layers, states of three as kernels see them, all random.

    10 channels leave a gap behind each window of 5 positions, 16 leave none.
    """
    layout = StateLayout(channels, 4, (2, 3, 4), 2, 16, torch.float16, conv_layout=conv_layout)
    kv = [torch.empty(DEVICE_BLOCKS, 16, 2, 4, device=device) for _ in range(4)]
    states = []
    for _ in range(3):
        windows, ssm = layout.allocate(DEVICE_BLOCKS, device)
        states += [layout.positions_first(windows), ssm]
    return {"kv": [random_(t) for t in kv], "state": [random_(t) for t in states]}


def tier_of(groups: dict[str, list[Tensor]], path: CopyPath | None = None) -> HostTier:
    return HostTier(groups, dict.fromkeys(groups, HOST_BLOCKS), path)


def bytes_of(tensors: list[Tensor], block: int) -> bytes:
    return b"".join(t[block].contiguous().cpu().numpy().tobytes() for t in tensors)


def run(copies: Copies) -> None:
    paths(CPU)[0].submit(copies, 0)


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


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=12))
def test_merged_copies_do_the_same(pairs: list[tuple[int, int]]) -> None:
    pairs = list({dst: (dst, src) for dst, src in pairs}.values())
    source = np.arange(60, dtype=np.uint8)
    results = []
    for change in (lambda c: c, merged):
        target = np.zeros(60, np.uint8)
        copies = change(
            Copies(
                np.array([target.ctypes.data + 3 * d for d, _ in pairs], np.int64),
                np.array([source.ctypes.data + 3 * s for _, s in pairs], np.int64),
                np.full(len(pairs), 3, np.int64),
            )
        )
        run(copies)
        results.append((target, len(copies.size)))
    (plain, _), (joined, count) = results
    assert (plain == joined).all()
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(pairs)]
    assert count == (1 + sum(step != (1, 1) for step in steps) if pairs else 0)


POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
FORM = [POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, SIZE]


@pytest.mark.parametrize("tells_index", [False, True])
def test_the_batch_call_has_the_arguments_of_its_form(tells_index: bool) -> None:
    """A C function with the signature that cuda.h gives, in the driver's place."""
    code = 0

    def cu_memcpy_batch_async(dst: int, src: int, size: int, count: int, *rest: int) -> int:
        attributes, applies_from, number, *index, stream = rest
        # In CUmemcpyAttributes: stream order, no hints of a location, no flags.
        assert list((ctypes.c_uint32 * 6).from_address(attributes)) == [1, 0, 0, 0, 0, 0]
        assert SIZE.from_address(applies_from).value == 0
        assert (number, stream, len(index)) == (1, 77, tells_index)
        lists = [list((ctypes.c_uint64 * count).from_address(a)) for a in (dst, src, size)]
        if code:
            for where in index:
                SIZE.from_address(where).value = 1
            return code
        for copy in zip(*lists, strict=True):
            ctypes.memmove(*copy)
        return 0

    form = ctypes.CFUNCTYPE(ctypes.c_int, *FORM, *[POINTER] * tells_index, POINTER)
    function = form(cu_memcpy_batch_async)
    submit = _batch(ctypes.cast(function, POINTER).value or 0, tells_index)
    source, target = np.arange(9, dtype=np.uint8), np.zeros(9, np.uint8)
    # Every other element: the driver reads consecutive ones.
    starts, sizes = np.array([0, -1, 4, -1])[::2], np.array([2, -1, 5, -1])[::2]
    copies = Copies(starts + target.ctypes.data, starts + source.ctypes.data, sizes)
    submit(copies, 77)
    assert target.tolist() == [0, 1, 0, 0, 4, 5, 6, 7, 8]
    submit(Copies(*(a[:0] for a in copies)), 0)  # nothing to do: no call
    code = 1
    message = "of 2 copies: CUresult 1" + (", copy 1" if tells_index else "") + "$"
    with pytest.raises(RuntimeError, match=message):
        submit(copies, 77)


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
    first = tier.store("kv", range(4))  # type: ignore[arg-type]
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
    blocks = group.take(HOST_BLOCKS)
    assert blocks is not None
    group.touch(blocks[:2], 1)
    group.touch(blocks[1:3], 2)
    group.put(blocks[1:4])
    group.put(blocks[:1])
    assert group.usage() == Usage(0, 2, 4)
    group.reclaim(1)
    assert group.usage() == Usage(1, 2, 3)
    assert group.take(2) is None
    assert group.take(1) == blocks[0]
    group.reclaim(2)
    assert group.usage() == Usage(3, 3, 0)


def store(tier: HostTier) -> None:
    tier.store("kv", [1, 2, 4])


def load(tier: HostTier) -> None:
    tier.load("kv", [0, 2], [6, 8])


BROKEN: dict[str, Callable[[Copies], int]] = {
    "before the first copy": lambda copies: 0,
    "half way": lambda copies: len(copies.size) // 2,
    "behind the last copy": lambda copies: len(copies.size),
}


def breaks(name: str, device: torch.device) -> tuple[CopyPath, list[int]]:
    """The device's best path, and a list: as long as it is not empty, the path fails."""
    armed: list[int] = []
    best = paths(device)[0]

    def submit(copies: Copies, stream: int) -> None:
        if not armed:
            return best.submit(copies, stream)
        best.submit(Copies(*(a[: BROKEN[name](copies)] for a in copies)), stream)
        raise RuntimeError("injected")

    return CopyPath(name, submit), armed


def check_failures(name: str, device: torch.device, move: Callable[[HostTier], None]) -> None:
    groups = cache(device=str(device))
    path, armed = breaks(name, device)
    tier = tier_of(groups, path)
    ticket = tier.store("kv", [0, 3, 5])
    assert ticket is not None
    wanted = [bytes_of(groups["kv"], b) for b in (0, 3, 5)]
    stats = str(tier.stats)
    armed.append(1)
    for _ in range(4):  # more often than there are blocks to lose
        with pytest.raises(RuntimeError, match="injected"):
            move(tier)
    armed.clear()
    if device.type == "cuda":
        tier.usage("kv")  # sets an event behind a batch that failed before its own
        torch.cuda.synchronize()
    assert tier.usage("kv") == Usage(3, 3, 0)
    assert str(tier.stats) == stats
    others = tier.store("kv", [1, 2, 4])
    assert others is not None
    assert sorted([*ticket.blocks, *others.blocks]) == list(range(HOST_BLOCKS))
    tier.load("kv", ticket.blocks, [6, 7, 8])
    assert [bytes_of(groups["kv"], b) for b in (6, 7, 8)] == wanted
    tier.free("kv", ticket.blocks)
    with pytest.raises(ValueError, match="is free"):
        tier.load("kv", ticket.blocks, [0, 1, 2])


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


@pytest.fixture(scope="module")
def swap() -> Any:
    """benchmarks/engine/swap.py, whose folder is no package."""
    folder = str(Path(__file__).parents[2] / "benchmarks" / "engine")
    sys.path.insert(0, folder)
    try:
        import swap

        yield swap
    finally:
        sys.path.remove(folder)


def test_the_benchmark_runs_on_a_cpu(swap: Any, tmp_path: Path) -> None:
    out = tmp_path / "swap.json"
    arguments = ["--device", "cpu", "--shapes", "tiny", "--blocks", "1,3", "--repeats", "2"]
    assert swap.main([*arguments, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["path"] == "memmove"
    # Two kinds of blocks, two counts, two directions, scattered and in a row.
    assert len(result["cases"]) == 2 * 2 * 2 * 2
    for case in result["cases"]:
        assert case["submitted"] <= case["asked"]
        both = {"batched", "loop of copy_"}
        assert case["submit_us"].keys() == (
            both if case["placement"] == "scattered" else {"batched"}
        )


GPU = torch.device("cuda")


def sleep() -> None:
    """Keep the current stream busy for some 50 ms."""
    torch.cuda._sleep(100_000_000)


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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
        tier.load("state", ticket.blocks, [5], order=False).order()
    assert bytes_of(read, 5) == before
    assert bytes_of(groups["state"], 5) == stored


@pytest.mark.gpu
def test_a_block_freed_under_its_copy_is_handed_out_only_behind_it() -> None:
    tier = tier_of(cache(device="cuda"))
    with sync_guard():
        sleep()
        ticket = tier.store("kv", range(HOST_BLOCKS))  # type: ignore[arg-type]
        assert ticket is not None
        tier.free("kv", ticket.blocks)
        assert tier.usage("kv") == Usage(0, 0, HOST_BLOCKS)
        assert tier.store("kv", [0]) is None
    torch.cuda.synchronize()
    assert tier.usage("kv") == Usage(HOST_BLOCKS, 0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("move", [store, load])
@pytest.mark.parametrize("name", BROKEN)
def test_a_failed_move_loses_no_block_on_a_gpu(name: str, move: Callable[[HostTier], None]) -> None:
    check_failures(name, GPU, move)


@pytest.mark.gpu
def test_memory_is_unpinned_when_the_tier_is_dropped() -> None:
    tier = tier_of(cache(device="cuda"))
    slab = tier.groups["kv"].slab
    with sync_guard():
        del tier
    assert not slab.is_pinned()


@pytest.mark.gpu
def test_what_the_driver_refuses_is_an_error() -> None:
    host = torch.zeros(16, pin_memory=True)
    copy = Copies(*(np.full(1, n) for n in (host.data_ptr(), host[8:].data_ptr(), 32)))
    for path in paths(GPU)[:-1]:
        with pytest.raises(RuntimeError, match="of 1 copies: CUresult"):
            path.submit(copy, 0)  # the legacy default stream
