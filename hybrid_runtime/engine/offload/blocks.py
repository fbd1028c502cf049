"""Host blocks that mirror one kind of device blocks: where the bytes lie, and who owns which."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import allowed
from hybrid_runtime.engine.offload.memcpy import Copies, Int64s
from hybrid_runtime.state.layout import ALIGNMENT


class Runs(NamedTuple):
    """Where the bytes of blocks lie: run r of block b is the `size[r]` bytes from address
    `base[r] + b * stride[r]`. int64 `[runs]` each."""

    base: Int64s
    stride: Int64s
    size: Int64s

    def addresses(self, blocks: Int64s) -> Int64s:
        """int64 `[runs, blocks]`."""
        found = np.multiply.outer(self.stride, blocks)
        found += self.base[:, None]
        return found


class Usage(NamedTuple):
    """Host blocks of a group, by what they are doing; their sum is its size.

    free: can be allocated.
    used: owned.
    in_flight: freed, but a copy still reads or writes them.
    """

    free: int
    used: int
    in_flight: int


class HostGroup:
    """`size` host blocks for the blocks of `tensors`, each `[blocks, ...]` with any strides.

    A host block holds exactly the bytes of a device block. In `slab` (uint8, pinned where the
    tensors lie on a GPU) the blocks of one run lie one after another, so that neighbouring blocks
    are one copy per run, and the runs a gap apart.
    """

    def __init__(
        self, name: str, tensors: Sequence[Tensor], size: int, stream: torch.cuda.Stream | None
    ) -> None:
        if not tensors:
            raise ValueError(f"groups[{name!r}] has no tensors; it must have at least 1")
        if size < 1:
            raise ValueError(f"num_blocks[{name!r}] is {size}; it must be at least 1")
        self.name, self.size = name, size
        self.device_size = len(tensors[0])
        for tensor in tensors:
            _check(name, tensor, tensors[0])
        every = [_runs(tensor) for tensor in tensors]
        self.runs_per_block = sum(len(r.size) for r in every)
        self.device = _joined(every, [t.untyped_storage().data_ptr() for t in tensors])
        self.bytes_per_block = int(self.device.size.sum())
        # Nothing joins copies across the gap: neighbours on the device may be two allocations.
        room = (self.device.size * size // ALIGNMENT + 2) * ALIGNMENT
        self.slab = torch.empty(int(room.sum()), dtype=torch.uint8)
        if stream is not None:
            _pin(self, stream)
        base = self.slab.data_ptr() + np.cumsum(room) - room
        self.host = Runs(base, self.device.size, self.device.size)
        self._tensors = list(tensors)  # keeps the addresses valid
        self._owned = np.zeros(size, bool)
        self._last = np.zeros(size, np.int64)
        self.reset()

    def reset(self) -> None:
        """No block has an owner, whatever was before, and no copy is under way."""
        self._free = list(range(self.size - 1, -1, -1))
        self._owned[:] = False
        self._quarantine: list[tuple[int, Int64s]] = []

    def copies(self, host: Int64s, device: Int64s, to_host: bool) -> Copies:
        """A copy per run and block, neighbours in the lists next to each other."""
        pair = self.host.addresses(host).ravel(), self.device.addresses(device).ravel()
        dst, src = pair if to_host else pair[::-1]
        return Copies(dst, src, np.repeat(self.device.size, len(host)))

    def allocate(self, count: int) -> Int64s | None:
        """The ids of `count` free blocks, ascending; None when there are fewer."""
        if count > len(self._free):
            return None
        start = len(self._free) - count
        blocks = np.sort(np.array(self._free[start:], np.int64))
        del self._free[start:]
        self._owned[blocks] = True
        return blocks

    def touch(self, blocks: Int64s, number: int) -> None:
        """Batch `number` reads or writes these blocks."""
        self._last[blocks] = number

    def free(self, blocks: Int64s) -> None:
        """Give blocks back; they can be allocated again when the last batch that touched them has
        run."""
        self._owned[blocks] = False
        if len(blocks):
            self._quarantine.append((int(self._last[blocks].max()), np.sort(blocks)[::-1]))

    def reclaim(self, passed: int) -> None:
        """Let freed blocks be allocated again, if the last batch that touched them is number
        `passed` or an earlier one."""
        waiting = []
        for number, blocks in self._quarantine:
            if number <= passed:
                self._free += blocks.tolist()
            else:
                waiting.append((number, blocks))
        self._quarantine = waiting

    def usage(self) -> Usage:
        used = int(self._owned.sum())
        return Usage(len(self._free), used, self.size - used - len(self._free))

    def host_ids(self, blocks: Sequence[int] | NDArray[np.integer], distinct: bool) -> Int64s:
        """`blocks` as int64, each owned by the caller."""
        ids = _ids("host_blocks", blocks, self.size, distinct)
        if not self._owned[ids].all():
            stray = ids[~self._owned[ids]][0]
            raise ValueError(
                f"host_blocks has {stray}, which is free; all must come from a store and not have "
                f"been freed since (group {self.name!r})"
            )
        return ids

    def device_ids(self, blocks: Sequence[int] | NDArray[np.integer]) -> Int64s:
        """`blocks` as int64, each in the device's tensors and named once."""
        return _ids("device_blocks", blocks, self.device_size, distinct=True)


def _ids(
    name: str, blocks: Sequence[int] | NDArray[np.integer], size: int, distinct: bool
) -> Int64s:
    given = np.asarray(blocks)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} is {given.dtype} of shape {given.shape}; it must be integers [blocks]"
        )
    ids = given.astype(np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < size:
        stray = ids[(ids < 0) | (ids >= size)][0]
        raise ValueError(f"{name} has {stray}; all must be in 0..{size - 1}")
    if distinct and len(np.unique(ids)) != len(ids):
        raise ValueError(f"{name} is {ids.tolist()}; each block must be named once")
    return ids


def _check(name: str, tensor: Tensor, first: Tensor) -> None:
    """Refuse what cannot be copied block by block."""
    if tensor.dim() < 1 or not tensor.numel():
        raise ValueError(f"groups[{name!r}] has shape {tuple(tensor.shape)}; it must hold blocks")
    if len(tensor) != len(first) or tensor.device != first.device:
        raise ValueError(
            f"groups[{name!r}] has {len(tensor)} blocks on {tensor.device} beside {len(first)} on "
            f"{first.device}; all tensors must have the same blocks on the same device"
        )
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < span:
            raise ValueError(
                f"groups[{name!r}] has strides {tensor.stride()} with shape {tuple(tensor.shape)}; "
                "no element may share its memory with another one"
            )
        span += stride * (size - 1)


def _runs(tensor: Tensor) -> Runs:
    """The contiguous runs of a block, whatever the order of its dimensions in memory."""
    item = tensor.element_size()
    inner = zip(tensor.stride()[1:], tensor.shape[1:], strict=True)
    dims = sorted((stride * item, size) for stride, size in inner if size > 1)
    run = item
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    base = np.full(1, tensor.data_ptr(), np.int64)
    for stride, size in reversed(dims):
        base = (base[:, None] + stride * np.arange(size)).ravel()
    return Runs(base, np.full_like(base, tensor.stride(0) * item), np.full_like(base, run))


def _joined(every: list[Runs], storages: list[int]) -> Runs:
    """The runs of all tensors, those joined that continue each other in every block."""
    storage = np.repeat(np.array(storages), [len(r.size) for r in every])
    base, stride, size = (np.concatenate(parts) for parts in zip(*every, strict=True))
    first = np.ones(len(size), bool)
    first[1:] = (base[1:] - base[:-1] != size[:-1]) | (stride[1:] != stride[:-1])
    first[1:] |= storage[1:] != storage[:-1]
    starts = np.flatnonzero(first)
    return Runs(base[starts], stride[starts], np.add.reduceat(size, starts))


def _pin(group: HostGroup, stream: torch.cuda.Stream) -> None:
    # Torch's own pinned allocator rounds up to a power of two and never gives memory back.
    slab, runtime = group.slab, torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(slab.data_ptr(), slab.numel(), 1))  # portable
    if code:
        raise RuntimeError(
            f"cudaHostRegister of {slab.numel()} bytes for group {group.name!r}: error {code}; "
            "num_blocks must fit the memory that can be pinned"
        )

    def unpin() -> None:
        with allowed("host blocks are given up"):
            stream.synchronize()
        runtime.cudaHostUnregister(slab.data_ptr())

    # At exit the process takes its memory with it.
    weakref.finalize(group, unpin).atexit = False
