"""Blocks with any number of owners, zero when they are handed out and NaN once nobody owns them."""

from __future__ import annotations

import torch

from hybrid_runtime.state.manager import HybridStateManager


class CountedBlocks:
    """All blocks of a manager's states.

    free: those without an owner.
    users: how many owners each block has.
    """

    def __init__(self, manager: HybridStateManager, count: int) -> None:
        self._manager = manager
        self.free = list(range(count - 1, -1, -1))
        self.users = [0] * count
        self._ids = torch.arange(count, device=manager.device)
        manager.fill(self._ids, float("nan"))

    def new(self) -> int:
        """A block for its first owner."""
        block = self.free.pop()
        self._manager.fill(self._ids[block : block + 1], 0.0)
        self.users[block] = 1
        return block

    def share(self, block: int) -> None:
        """One owner more."""
        self.users[block] += 1

    def put(self, block: int) -> None:
        """One owner less."""
        self.users[block] -= 1
        if not self.users[block]:
            self.free.append(block)
            self._manager.fill(self._ids[block : block + 1], float("nan"))
