"""What `swap.py` moves, and the ways to move it."""

from __future__ import annotations

import importlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from shapes import SHAPES, config
from torch import Tensor

from hybrid_runtime.engine.offload.memcpy import Copies, merged, paths
from hybrid_runtime.engine.offload.stream import Ticket
from hybrid_runtime.engine.offload.tier import HostTier
from hybrid_runtime.state import StateLayout

DRAFTS = 3
DENSE = {"80-layer": 16, "80-layer-64": 64}
"""Models with attention only, and the tokens of their blocks."""
TO_HOST, TO_DEVICE = DIRECTIONS = ("store", "load")


@dataclass(frozen=True)
class Kind:
    """A kind of blocks of a model: `make(blocks, device)` gives its tensors."""

    model: str
    group: str
    make: Callable[[int, torch.device], list[Tensor]]


def kinds(name: str) -> Iterator[Kind]:
    """What a model's blocks are."""
    if name in DENSE:
        yield Kind(name, "kv", keys_and_values(80, DENSE[name], 8, 128))
        return
    shape = SHAPES[name]
    model = config(shape, len(shape.pattern))
    layout = StateLayout.from_config(model, DRAFTS, torch.float16, conv_dtype=torch.bfloat16)
    attention = (shape.pattern + shape.mtp_pattern).count("*")
    heads, dim = model.num_key_value_heads, model.head_dim
    yield Kind(shape.name, "kv", keys_and_values(attention, layout.block_size, heads, dim))
    layers = range(shape.pattern.count("M"))
    yield Kind(shape.name, "state", lambda n, d: [t for _ in layers for t in layout.allocate(n, d)])


def keys_and_values(
    layers: int, tokens: int, heads: int, dim: int
) -> Callable[[int, torch.device], list[Tensor]]:
    shape = (tokens, heads, dim)
    return lambda n, d: [
        torch.zeros(n, *shape, dtype=torch.bfloat16, device=d) for _ in range(2 * layers)
    ]


class Bench:
    """One kind of blocks on both sides: `most` host blocks, twice as many on the device."""

    def __init__(
        self, kind: Kind, most: int, device: torch.device, limit: dict[str, float]
    ) -> None:
        self.kind, self.device, self.limit = kind, device, limit
        self.tensors = kind.make(2 * most, device)
        for i, tensor in enumerate(self.tensors):
            mark = (torch.arange(2 * most, device=device) + i) % 101
            tensor.copy_(mark.view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor))
        self.tier = HostTier({"blocks": self.tensors}, {"blocks": most})
        self.group = self.tier.groups["blocks"]
        # What the loops copy to and from: per tensor host blocks of its own, in the tier's memory.
        self.twins, start = [], 0
        for tensor in self.tensors:
            one = tensor[0].numel() * tensor.element_size()
            part = self.group.slab[start : start + most * one].view(tensor.dtype)
            self.twins.append(part.view(most, *tensor.shape[1:]))
            start += -(-most * one // 16) * 16
        self.random = random.Random(0)
        self.held: Ticket | None = None

    def places(self, placement: str, count: int) -> list[int]:
        """Device blocks."""
        if placement == "row":
            return list(range(count))
        return [2 * i for i in self.random.sample(range(len(self.tensors[0]) // 2), count)]

    def batched(self, blocks: list[int], direction: str) -> Callable[[], Callable[[], object]]:
        """Prepares one move by the tier, and gives the call that is timed."""

        def store() -> None:
            self.held = self.tier.store("blocks", blocks)
            assert self.held is not None

        def prepare() -> Callable[[], object]:
            self.release()
            if direction == TO_HOST:
                return store
            store()
            held = self.held
            assert held is not None
            return lambda: self.tier.load("blocks", held.blocks, blocks)

        return prepare

    def release(self) -> None:
        """Give the host blocks of the last move back."""
        if self.held is not None:
            self.tier.free("blocks", self.held.blocks)
            self.held = None

    def copies(self, blocks: list[int], direction: str) -> Copies:
        """The batch as the tier builds it, host blocks in order."""
        device = np.sort(np.array(blocks))
        host = np.arange(len(blocks))
        return merged(self.group.copies(host, device, direction == TO_HOST))

    def loops(self, blocks: list[int], direction: str) -> dict[str, Callable[[], object]]:
        """The other ways, on the current stream."""
        pairs = list(zip(self.twins, self.tensors, strict=True))

        def copy_() -> None:
            for host, block in enumerate(blocks):
                for twin, tensor in pairs:
                    if direction == TO_HOST:
                        twin[host].copy_(tensor[block], non_blocking=True)
                    else:
                        tensor[block].copy_(twin[host], non_blocking=True)

        found: dict[str, Callable[[], object]] = {"loop of copy_": copy_}
        if self.device.type == "cuda":
            loop = paths(self.device)[-1]
            stream = torch.cuda.current_stream().cuda_stream
            # Neighbours are not joined here: each layer and block for itself.
            device, host = np.array(blocks), np.arange(len(blocks))
            to_host = direction == TO_HOST
            found[loop.name] = lambda: loop.submit(self.group.copies(host, device, to_host), stream)
            bindings = bound(stream)
            if bindings is not None:
                found["lists to cuda-bindings"] = lambda: bindings(self.copies(blocks, direction))
        return found

    def check(self, blocks: list[int]) -> None:
        """Blocks that go to the host and come back elsewhere are the same there."""
        ticket = self.tier.store("blocks", blocks)
        assert ticket is not None
        others = [b + 1 for b in blocks]
        kept = [tensor[others].clone() for tensor in self.tensors[:1]]
        self.tier.load("blocks", ticket.blocks, others)
        for tensor in self.tensors:
            assert torch.equal(tensor[blocks[0]], tensor[others[0]])
            assert torch.equal(tensor[blocks[-1]], tensor[others[-1]])
        assert not torch.equal(kept[0], self.tensors[0][others])
        self.tier.free("blocks", ticket.blocks)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time(
        self, prepare: Callable[[], Callable[[], object]], repeats: int, delay_us: float = 0.0
    ) -> tuple[list[float], list[float]]:
        """Per call: us on the host; ms from its start (or the end of `delay_us` of other work) to
        its last byte. The first call is not counted."""
        submit, moved = [], []
        for _ in range(repeats + 1):
            self.sync()
            call = prepare()
            self.sync()
            if self.device.type == "cuda":
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if delay_us:
                    torch.cuda._sleep(int(delay_us * 2000))  # cycles; 2 GHz at most
                start.record()
            begin = time.perf_counter()
            call()
            submit.append((time.perf_counter() - begin) * 1e6)
            if self.device.type == "cuda":
                torch.cuda.current_stream().wait_stream(self.tier.stream)
                stop.record()
                stop.synchronize()
                moved.append(start.elapsed_time(stop))
            else:
                moved.append(submit[-1] / 1e3)
        self.release()
        return submit[1:], moved[1:]


def bound(stream: int) -> Callable[[Copies], None] | None:
    """The batch through the function that cuda-bindings has, or None without it."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return None
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

    def submit(copies: Copies) -> None:
        dst, src = ([driver.CUdeviceptr(a) for a in part.tolist()] for part in copies[:2])
        sizes = copies.size.tolist()
        error, *_ = driver.cuMemcpyBatchAsync(
            dst, src, sizes, len(sizes), [attributes], [0], 1, driver.CUstream(stream)
        )
        if int(error):
            raise RuntimeError(f"cuda-bindings' cuMemcpyBatchAsync: {error}")

    return submit


def limits(device: torch.device) -> dict[str, float]:
    """Bytes per second of one large copy, by direction."""
    cuda = device.type == "cuda"
    size = 1 << (30 if cuda else 24)
    host = torch.ones(size, dtype=torch.uint8, pin_memory=cuda)
    there = torch.ones(size, dtype=torch.uint8, device=device)
    result = {}
    for direction, (dst, src) in zip(DIRECTIONS, ((host, there), (there, host)), strict=True):
        seconds = []
        for _ in range(6):
            begin = time.perf_counter()
            if cuda:
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                dst.copy_(src, non_blocking=True)
                stop.record()
                stop.synchronize()
                seconds.append(start.elapsed_time(stop) / 1e3)
            else:
                dst.copy_(src)
                seconds.append(time.perf_counter() - begin)
        result[direction] = size / statistics.median(seconds[1:])
    return result
