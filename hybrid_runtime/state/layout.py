"""What one state block of a recurrence holds, how large it is, and what requests need of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hybrid_runtime.kernels.recurrence import CheckpointSpec, Recurrence
from hybrid_runtime.kernels.replay.ring import (
    LONG_RING_TOKENS,
    MAX_TOKENS,
    SHORT_RING_TOKENS,
    ring_length,
)
from hybrid_runtime.kernels.step.state_table import StateTable

LayoutKind = Literal["columns", "replay"]
MAX_DRAFTS = MAX_TOKENS - 1
"""Most drafts of a step: its certain token is one of the `MAX_TOKENS`."""
ALIGNMENT = 16
"""Bytes: every part of a block starts on this boundary, so that copies may use 16-byte accesses."""


class BlockBudget(NamedTuple):
    """State blocks that one request needs.

    admission: must be free to admit it.
    typical: owns while it decodes, a checkpoint that is read and one that is written included.
    most: can own at once.
    """

    admission: int
    typical: int
    most: int


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Blocks of states of one recurrence.

    recurrence: what a block holds.
    num_speculative_tokens: most drafts of a step (K), at most 15. A conv_state holds the inputs of
        so many positions more than the recurrence needs.
    block_size: tokens per block, more than K. Checkpoints of the columns layout lie at its
        multiples; the replay layout only checks it.
    kind: "columns" keeps a state for every draft that may be accepted, each in a column of its own.
        "replay" keeps one live state in the last column of the block table, and the records of the
        last tokens in a ring; the other columns hold checkpoints, which a step's rows ask for.
    ring_tokens: replay layout: tokens whose records are kept before a state is written, K + 1 to
        15, or 31, which is better with more than 7 drafts (`default_ring_tokens`); 0: every step
        writes.
    """

    recurrence: Recurrence
    num_speculative_tokens: int
    block_size: int
    kind: LayoutKind = "columns"
    ring_tokens: int = SHORT_RING_TOKENS

    def __post_init__(self) -> None:
        if self.kind not in ("columns", "replay"):
            raise ValueError(f"kind is {self.kind!r}; it must be 'columns' or 'replay'")
        if not 0 <= self.num_speculative_tokens <= MAX_DRAFTS:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must be in "
                f"0..{MAX_DRAFTS}, which is as many as the kernels take"
            )
        if self.block_size <= self.num_speculative_tokens:
            raise ValueError(
                f"block_size is {self.block_size}; it must be larger than num_speculative_tokens "
                f"({self.num_speculative_tokens}), or one step could cross two boundaries"
            )
        least = min(self.num_speculative_tokens + 1, SHORT_RING_TOKENS)
        known = (0, *range(least, SHORT_RING_TOKENS + 1), LONG_RING_TOKENS)
        if self.replays and self.ring_tokens not in known:
            raise ValueError(
                f"ring_tokens is {self.ring_tokens} with num_speculative_tokens="
                f"{self.num_speculative_tokens}; it must be 0, {least}..{SHORT_RING_TOKENS} or "
                f"{LONG_RING_TOKENS}"
            )

    @property
    def replays(self) -> bool:
        """Whether the layout is replay; only `state` asks, and who hands out its blocks."""
        return self.kind == "replay"

    @property
    def checkpoint(self) -> CheckpointSpec:
        """The parts of a block: the recurrence's, the conv_state with room for K drafts."""
        k = self.num_speculative_tokens
        return CheckpointSpec(*(part.longer(k) for part in self.recurrence.checkpoint))

    @property
    def matrix_dtype(self) -> torch.dtype:
        return self.recurrence.checkpoint.matrix.dtype

    @property
    def taps(self) -> int:
        """Inputs of a conv_state that the convolution needs."""
        conv_state = self.recurrence.checkpoint.conv_state
        assert conv_state.token_axis is not None
        return conv_state.shape[conv_state.token_axis]

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer, parts padded to `ALIGNMENT`."""
        return sum(_padded(part.nbytes) for part in self.checkpoint)

    @property
    def ring_length(self) -> int:
        """Tokens of a slot's ring."""
        return ring_length(self.num_speculative_tokens, self.ring_tokens)

    @property
    def record_bytes(self) -> int:
        """Bytes of one request's ring in one layer; 0 in the columns layout."""
        if not self.replays:
            return 0
        return sum(record.nbytes for record in self.recurrence.ring(self.ring_length))

    def bytes_per_request(self, num_layers: int, checkpoints: int = 0) -> int:
        """Device bytes that a running request holds: its running state, what its drafts need (a
        column each, or the ring), and `checkpoints` columns."""
        drafts = 0 if self.replays else self.num_speculative_tokens
        return num_layers * ((1 + drafts + checkpoints) * self.page_bytes + self.record_bytes)

    def steps_per_write(self, accepted: float) -> int:
        """Steps from one write of a state to the next in steady decode, a boundary aside.

        accepted: tokens that every step emits, 1 .. K + 1.
        """
        room = self.ring_tokens - self.num_speculative_tokens - accepted
        if not self.replays or room < 0:
            return 1
        return int(room // accepted) + 2

    def states_per_step(self, accepted: float) -> float:
        """Matrices that a verify step reads and writes per row and layer, on average."""
        if self.replays:
            return 1 + 1 / self.steps_per_write(accepted)
        return 2 + self.num_speculative_tokens

    @property
    def rounds_stochastically(self) -> bool:
        """Whether verify passes can round states stochastically: the states are narrower than fp32,
        and the layout writes each of them once."""
        return self.replays and self.matrix_dtype != torch.float32

    def table_columns(self, max_length: int) -> int:
        """Columns of a block table for requests of up to `max_length` tokens. Replay: one that is
        read, two that are stored, and the live one, whatever the length; a runner whose checkpoints
        stay in their columns needs more."""
        if self.replays:
            return 4
        return -(-max_length // self.block_size) + 1 + self.num_speculative_tokens

    def block_budget(self, steps_ahead: int) -> BlockBudget:
        """Blocks per request with so many steps queued before the first one's results are read.

        The most, replay: the live state, a checkpoint that is read or waits to be filed, with steps
        ahead a second one, and two that may be stored. Columns: the running column and the
        drafts', one below it for a checkpoint, one that waits to be filed, one for the step in
        which the running column has moved on but the previous one is still read, and with steps
        ahead one more: drafts in flight leave open which column it is, and a prompt's last column
        is kept until the results are read.
        """
        k = self.num_speculative_tokens
        if self.replays:
            return BlockBudget(admission=2, typical=3, most=4 + (steps_ahead > 0))
        return BlockBudget(k + 2, k + 4, most=k + 4 + (steps_ahead > 0))

    def allocate_records(
        self, num_layers: int, slots: int, device: torch.device | str
    ) -> tuple[Tensor, ...]:
        """The rings of all layers and slots, see `Recurrence.allocate_records`; none in the columns
        layout."""
        if not self.replays:
            return ()
        return self.recurrence.allocate_records(num_layers, slots, self.ring_length, device)

    def allocate(self, num_blocks: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Zeroed blocks of one layer: views (conv_states `[blocks, *]`, matrices `[blocks, *]`)."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        pages = torch.zeros((num_blocks, self.page_bytes), dtype=torch.uint8, device=device)
        views, start = [], 0
        for part in self.checkpoint:
            view = pages[:, start : start + part.nbytes].view(part.dtype)
            views.append(view.unflatten(1, part.shape))
            start += _padded(part.nbytes)
        return views[0], views[1]

    def positions_first(self, conv_states: Tensor) -> Tensor:
        """View of conv_states as `[blocks, positions, channels]`, however they are stored."""
        axis = self.recurrence.checkpoint.conv_state.token_axis
        assert axis is not None
        return conv_states.movedim(axis + 1, 1)

    def state_table(
        self, states: Iterable[tuple[Tensor, Tensor]], tables: Sequence[Tensor]
    ) -> StateTable:
        """Blocks of all layers, as `allocate` makes those of one, and each layer's block table."""
        conv_states, matrices = zip(*states, strict=True)
        views = [self.positions_first(part) for part in conv_states]
        return StateTable.build(views, matrices, tables, self.taps)


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
