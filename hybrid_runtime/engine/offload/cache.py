"""The prefix cache's second level: copies of its blocks in host memory, found by the same keys.

Blocks are copied when they are filed, not when they are evicted, so an evicted block can be reused
at once. Preempted requests come back from here too, up to the last boundary whose state was kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from hybrid_runtime.engine.offload.stream import Ticket
from hybrid_runtime.engine.offload.tier import HostTier


class HostCache:
    """Blocks in a host tier, found by group and key; the least recently used ones make room.

    A block is found only after its copy was submitted, and is read behind it on the same stream. A
    copy that fails is counted in `failed` and leaves nothing behind: the cache only gets smaller.
    """

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        self.failed = 0
        self._blocks: dict[str, OrderedDict[bytes, int]] = {g: OrderedDict() for g in tier.groups}
        self._reading: dict[tuple[str, int], Ticket] = {}

    def has(self, group: str, key: bytes) -> bool:
        return key in self._blocks[group]

    def store(self, group: str, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Copy filed device blocks to the host, except those that are there already; the least
        recently used ones make room. More blocks than the host has are not stored at all."""
        found = self._blocks[group]
        new = [(key, block) for key, block in zip(keys, blocks, strict=True) if key not in found]
        room = self.tier.groups[group]
        if not new or len(new) > room.size:
            return
        device = [block for _, block in new]
        try:
            ticket = self.tier.store(group, device)
            if ticket is None:
                missing = min(len(device) - room.usage().free, len(found))
                oldest = [found.popitem(last=False)[1] for _ in range(missing)]
                self.tier.free(group, oldest)
                ticket = self.tier.store(group, device)
        except Exception:
            self.failed += 1
            return
        if ticket is None:
            return  # copies of the blocks that made room are still under way
        for (key, block), host in zip(new, ticket.blocks.tolist(), strict=True):
            found[key] = host
            self._reading[group, block] = ticket

    def load(self, group: str, keys: Sequence[bytes], blocks: Sequence[int]) -> bool:
        """Copy the blocks with these keys into device blocks, before anything launched from now on.
        False if that failed; the device blocks then hold anything."""
        found = self._blocks[group]
        try:
            self.tier.load(group, [found[key] for key in keys], blocks)
        except Exception:
            self.failed += 1
            return False
        for key in keys:
            found.move_to_end(key)
        return True

    def order_reuse(self, group: str, blocks: Iterable[int]) -> None:
        """These device blocks will be overwritten: let what is launched from now on run behind the
        copies that still read them."""
        if not self._reading:
            return
        for block in blocks:
            ticket = self._reading.pop((group, block), None)
            if ticket is not None and not ticket.done():
                ticket.order()

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let the content of these keys not be found any more."""
        for group, found in self._blocks.items():
            self.tier.free(group, [found.pop(key) for key in keys if key in found])

    def clear(self) -> None:
        """Forget all content; copies under way come to their end."""
        for group, found in self._blocks.items():
            if found:
                self.tier.free(group, list(found.values()))
                found.clear()

    def reset(self) -> None:
        """The same after an exception anywhere; the device must have run all copies."""
        self._reading.clear()
        for found in self._blocks.values():
            found.clear()
        self.tier.reset()
