"""The host tier: host memory for cache blocks that the device has no room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.engine.offload.blocks import HostGroup, Usage
from hybrid_runtime.engine.offload.memcpy import CopyPath, Int64s, merged
from hybrid_runtime.engine.offload.stream import CopyStream, Ticket

Blocks = Sequence[int] | NDArray[np.integer]


@dataclass(slots=True)
class HostTierStats:
    """What was moved since construction.

    asked: copies, one for each run of bytes of each block.
    submitted: copies that the driver was given, after neighbours were joined.
    """

    stored_blocks: int = 0
    stored_bytes: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    asked: int = 0
    submitted: int = 0


class HostTier:
    """Host blocks beside device blocks, moved by copies that the host never waits for.

    groups: per kind of block ("kv", "state"), the device tensors `[blocks, ...]`, with any strides,
        in which a block of that kind has its bytes.
    num_blocks: host blocks per kind.
    path: how copies are submitted; None = the best that the driver has.

    Copies run on a stream of their own (see `CopyStream`), each batch behind what the current
    stream was given before it; `Ticket` orders what comes after. A device block that is stored may
    be used again for what is launched after `ticket.order()`, or once `ticket.done()`.

    Raises `ValueError` for groups that cannot be mirrored, `RuntimeError` when memory cannot be
    pinned. A move that raises leaves all accounts as they were before.
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[Tensor]],
        num_blocks: Mapping[str, int],
        path: CopyPath | None = None,
    ) -> None:
        if not groups or groups.keys() != num_blocks.keys():
            raise ValueError(
                f"num_blocks is for {sorted(num_blocks)}, groups has {sorted(groups)}; both must "
                "name the same groups, at least 1"
            )
        devices = {tensor.device for tensors in groups.values() for tensor in tensors}
        if len(devices) != 1:
            raise ValueError(f"groups lie on {sorted(map(str, devices))}; it must be one device")
        self._copies = CopyStream(devices.pop(), path)
        self.groups = {
            name: HostGroup(name, tensors, num_blocks[name], self._copies.stream)
            for name, tensors in groups.items()
        }
        self.stats = HostTierStats()

    @property
    def path(self) -> str:
        """How copies are submitted."""
        return self._copies.path.name

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """What copies run on; None on the CPU."""
        return self._copies.stream

    def usage(self, group: str) -> Usage:
        """Free and used host blocks, and those of which a copy must end first."""
        found = self._group(group)
        found.reclaim(self._copies.passed())
        return found.usage()

    def store(self, group: str, device_blocks: Blocks) -> Ticket | None:
        """Copy blocks to the host, as they are when the current stream gets here.

        `ticket.blocks` are then the caller's until `free`. None, and nothing has changed, when so
        many host blocks are not free.
        """
        found = self._group(group)
        device = found.device_ids(device_blocks)
        found.reclaim(self._copies.passed())
        taken = found.allocate(len(device))
        if taken is None:
            return None
        # Neighbours on the device become neighbours on the host.
        order = np.argsort(device)
        host = np.empty_like(taken)
        host[order] = taken
        try:
            ticket = self._move(found, host, device, order, to_host=True)
        except BaseException:
            found.free(taken)
            raise
        self.stats.stored_blocks += len(host)
        self.stats.stored_bytes += len(host) * found.bytes_per_block
        return ticket

    def load(self, group: str, host_blocks: Blocks, device_blocks: Blocks) -> Ticket:
        """Copy host blocks into device blocks, behind what the current stream still does with them
        and before what is launched on it from now on.

        The host blocks stay the caller's. After an error the device blocks hold anything, and may
        be used again.
        """
        found = self._group(group)
        host = found.host_ids(host_blocks, distinct=False)
        device = found.device_ids(device_blocks)
        if len(host) != len(device):
            raise ValueError(
                f"device_blocks has {len(device)} blocks; it must have as many as host_blocks, "
                f"{len(host)}"
            )
        ticket = self._move(found, host, device, np.argsort(device), to_host=False)
        self.stats.loaded_blocks += len(host)
        self.stats.loaded_bytes += len(host) * found.bytes_per_block
        ticket.order()
        return ticket

    def free(self, group: str, host_blocks: Blocks) -> None:
        """Give host blocks back, also while copies of them are under way."""
        found = self._group(group)
        found.free(found.host_ids(host_blocks, distinct=True))

    def reset(self) -> None:
        """Take all host blocks back, whatever was being done when an exception came. The device
        must have run all copies."""
        for group in self.groups.values():
            group.reset()

    def _move(
        self, group: HostGroup, host: Int64s, device: Int64s, order: Int64s, to_host: bool
    ) -> Ticket:
        copies = merged(group.copies(host[order], device[order], to_host))
        # Before the attempt: of a batch that fails, a part may run.
        group.touch(host, self._copies.issued + 1)
        event = self._copies.run(copies)
        self.stats.asked += group.runs_per_block * len(host)
        self.stats.submitted += len(copies.size)
        return Ticket(host, event)

    def _group(self, name: str) -> HostGroup:
        if name not in self.groups:
            raise ValueError(f"group is {name!r}; it must be one of {sorted(self.groups)}")
        return self.groups[name]
