"""Blocks with any number of owners, zero when they are handed out and NaN once nobody owns them."""

from hybrid_runtime.state.manager import HybridStateManager


class CountedBlocks:
    """All blocks of a manager's states.

    free: those without an owner.
    users: how many owners each block has.
    """

    def __init__(self, manager: HybridStateManager, count: int) -> None:
        assert manager._states is not None
        self._states = manager._states
        self.free = list(range(count - 1, -1, -1))
        self.users = [0] * count
        self.fill(slice(None), float("nan"))

    def new(self) -> int:
        """A block for its first owner."""
        block = self.free.pop()
        self.fill(block, 0.0)
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
            self.fill(block, float("nan"))

    def fill(self, blocks: int | slice, value: float) -> None:
        """Set whole blocks to one value, in all layers."""
        for part in (*self._states.conv_states, *self._states.matrices):
            part[blocks] = value
