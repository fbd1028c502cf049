"""What one state block holds: the components of a Mamba layer, their bytes, and the block size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hybrid_runtime.kernels.mamba2.window_cache import WindowCache
from hybrid_runtime.kernels.replay.ring import (
    LONG_WINDOW,
    MAX_TOKENS,
    SHORT_WINDOW,
    default_window,
    ring_length,
)

ConvLayout = Literal["SD", "DS"]
LayoutKind = Literal["columns", "replay"]
KERNEL_GRANULARITY = 16
"""Attention kernels address KV in units of this many tokens, so block sizes are multiples of it."""
MAX_DRAFTS = MAX_TOKENS - 1
"""Most guesses of a step: its certain token is one of the `MAX_TOKENS`."""
ALIGNMENT = 16
"""Bytes: every component starts on this boundary, so that copies may use 16-byte accesses."""


class TableRow(NamedTuple):
    """A request's row of the block table of states.

    columns: width of the row.
    always: column that the request owns from its first step to its end; None: there is none.
    """

    columns: int
    always: int | None


class BlockBudget(NamedTuple):
    """State blocks that one request needs.

    admission: must be free to admit it.
    typical: owns while it decodes, a snapshot that is read and one that is written included.
    most: can own at once.
    """

    admission: int
    typical: int
    most: int


@dataclass(frozen=True, slots=True)
class Component:
    """One typed part of a layer's state.

    name: as error messages call it.
    shape: of one block, in elements.
    dtype: of its elements.
    rollback: the rule by which it rolls back to the state after j guesses: "window" (it starts j
        positions later in the same block), "column" (it lies j columns further) or "window_cache"
        (it follows from the inputs cached in `WindowCache`). A component without a known rule is
        refused.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rollback: Literal["window", "column", "window_cache"]

    def __post_init__(self) -> None:
        if self.rollback not in ("window", "column", "window_cache"):
            raise ValueError(
                f"component {self.name!r}: rollback is {self.rollback!r}; "
                "it must be 'window', 'column' or 'window_cache'"
            )
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"component {self.name!r}: shape is {self.shape}; all must be >= 1")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateLayout:
    """One Mamba-2 layer: a convolution window and an SSM state per block.

    conv_channels, conv_width: of the convolution. A window holds the inputs of
        `conv_width - 1 + num_speculative_tokens` positions.
    ssm_shape: (heads, head_dim, state_size).
    num_speculative_tokens: most guesses of a step (K), at most 15.
    block_size: tokens per block, more than K.
    conv_dtype, ssm_dtype: float32, bfloat16 or float16.
    conv_layout: windows are stored `[positions, channels]` ("SD") or `[channels, positions]`
        ("DS").
    kind: "columns" keeps a state for every guess that may be accepted, each in a column of its own.
        "replay" keeps one live state in the last column of the block table, and the inputs of the
        last tokens in a `WindowCache`; the columns below hold snapshots.
    window: replay layout: tokens whose inputs are kept before a state is written, K + 1 to 15, or
        31, which is better with more than 7 guesses (`from_config` knows, see `default_window`);
        0: every step writes. Without guesses every step does.
    """

    conv_channels: int
    conv_width: int
    ssm_shape: tuple[int, int, int]
    num_speculative_tokens: int
    block_size: int
    conv_dtype: torch.dtype = torch.float32
    ssm_dtype: torch.dtype = torch.float32
    conv_layout: ConvLayout = "SD"
    kind: LayoutKind = "columns"
    window: int = SHORT_WINDOW

    def __post_init__(self) -> None:
        if self.kind not in ("columns", "replay"):
            raise ValueError(f"kind is {self.kind!r}; it must be 'columns' or 'replay'")
        if self.conv_layout not in ("SD", "DS"):
            raise ValueError(f"conv_layout is {self.conv_layout!r}; it must be 'SD' or 'DS'")
        for name in ("conv_dtype", "ssm_dtype"):
            if getattr(self, name) not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be float32, bfloat16 or float16"
                )
        if self.conv_width < 2:
            raise ValueError(f"conv_width is {self.conv_width}; it must be at least 2")
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
        least = min(self.num_speculative_tokens + 1, SHORT_WINDOW)
        known = (0, *range(least, SHORT_WINDOW + 1), LONG_WINDOW)
        if self.replays and least > 1 and self.window not in known:
            raise ValueError(
                f"window is {self.window} with num_speculative_tokens="
                f"{self.num_speculative_tokens}; it must be 0, {least}..{SHORT_WINDOW} or "
                f"{LONG_WINDOW}"
            )

    @classmethod
    def from_config(
        cls,
        config: Any,
        num_speculative_tokens: int,
        ssm_dtype: torch.dtype = torch.float32,
        conv_layout: ConvLayout = "SD",
        conv_dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        block_size: int | None = None,
        kind: LayoutKind = "columns",
        window: int | None = None,
    ) -> StateLayout:
        """Layout for a model config with Hugging Face's Nemotron-H field names.

        Attention and state blocks share one page size, so unless `block_size` is given it is the
        bytes of one Mamba layer's block over the KV bytes per token of one attention layer
        (`kv_dtype`, default `conv_dtype`), rounded up to the attention kernel's 16 tokens. A window
        of None: `default_window`.
        """
        inner = config.mamba_num_heads * config.mamba_head_dim
        shape = (config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size)
        channels = inner + 2 * config.n_groups * config.ssm_state_size
        positions = config.conv_kernel - 1 + num_speculative_tokens
        if block_size is None:
            state = math.prod(shape) * ssm_dtype.itemsize + positions * channels * (
                conv_dtype.itemsize
            )
            per_token = (
                2 * config.num_key_value_heads * config.head_dim * (kv_dtype or conv_dtype).itemsize
            )
            block_size = -(-state // (per_token * KERNEL_GRANULARITY)) * KERNEL_GRANULARITY
        return cls(
            conv_channels=channels,
            conv_width=config.conv_kernel,
            ssm_shape=shape,
            num_speculative_tokens=num_speculative_tokens,
            block_size=block_size,
            conv_dtype=conv_dtype,
            ssm_dtype=ssm_dtype,
            conv_layout=conv_layout,
            kind=kind,
            window=default_window(num_speculative_tokens) if window is None else window,
        )

    @property
    def replays(self) -> bool:
        """For `state` alone: outside it nobody asks which layout it is."""
        return self.kind == "replay"

    @property
    def window_positions(self) -> int:
        return self.conv_width - 1 + self.num_speculative_tokens

    @property
    def components(self) -> tuple[Component, Component]:
        """The list that every mover walks: window first, then SSM matrix."""
        window = (self.window_positions, self.conv_channels)
        if self.conv_layout == "DS":
            window = window[::-1]
        return (
            Component("window", window, self.conv_dtype, "window"),
            Component(
                "ssm", self.ssm_shape, self.ssm_dtype, "window_cache" if self.replays else "column"
            ),
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer, components padded to `ALIGNMENT`."""
        return sum(-(-c.nbytes // ALIGNMENT) * ALIGNMENT for c in self.components)

    @property
    def ring(self) -> int:
        """Tokens of a slot's ring in the window cache. Without guesses nothing is ever kept."""
        k = self.num_speculative_tokens
        return ring_length(k, self.window if k else 0)

    @property
    def window_cache_bytes(self) -> int:
        """Bytes of one layer's `WindowCache` of one request; 0 in the columns layout.

        Of each token of the ring x and B in the window's dtype, and dt in fp32.
        """
        if not self.replays:
            return 0
        heads, dim, _ = self.ssm_shape
        inner = heads * dim
        # The convolution runs over x, B and C.
        inputs = inner + max(self.conv_channels - inner, 0) // 2
        each = inputs * self.conv_dtype.itemsize + heads * torch.float32.itemsize
        return self.ring * each

    def bytes_per_request(self, num_layers: int, snapshots: int = 0) -> int:
        """Device bytes that a running request holds: its running state, what its guesses need (a
        column each, or the window cache), and `snapshots` columns."""
        guesses = 0 if self.replays else self.num_speculative_tokens
        return num_layers * ((1 + guesses + snapshots) * self.page_bytes + self.window_cache_bytes)

    def steps_per_write(self, accepted: float) -> int:
        """Steps from one write of a state to the next in steady decode, a boundary aside.

        accepted: tokens that every step emits, 1 .. K + 1.
        """
        room = self.window - self.num_speculative_tokens - accepted
        if not self.replays or room < 0:
            return 1
        return int(room // accepted) + 2

    def states_per_step(self, accepted: float) -> float:
        """SSM states that a verify step reads and writes per row and layer, on average."""
        if self.replays:
            return 1 + 1 / self.steps_per_write(accepted)
        return 2 + self.num_speculative_tokens

    @property
    def rounds_stochastically(self) -> bool:
        """Whether verify passes can round states stochastically: the states are narrower than fp32,
        and the layout writes each of them once."""
        return self.replays and self.ssm_dtype != torch.float32

    def table_row(self, max_length: int) -> TableRow:
        """Row of the block table for requests of up to `max_length` tokens."""
        columns = -(-max_length // self.block_size)
        if self.replays:
            return TableRow(columns + 1, always=columns)  # the live state behind the snapshots
        return TableRow(columns + 1 + self.num_speculative_tokens, always=None)

    def block_budget(self, steps_ahead: int) -> BlockBudget:
        """Blocks per request with so many steps queued before the first one's results are read.

        The most, replay: the live state, a snapshot that is read or waits to be filed, with steps
        ahead a second one, and two that may be stored. Columns: the running column and the
        guesses', one below it for a snapshot, one that waits to be filed, one for the step in which
        the running column has moved on but the previous one is still read, and with steps ahead one
        more: guesses in flight leave open which column it is, and a prompt's last column is kept
        until the results are read.
        """
        k = self.num_speculative_tokens
        if self.replays:
            return BlockBudget(admission=2, typical=3, most=4 + (steps_ahead > 0))
        return BlockBudget(k + 2, k + 4, most=k + 4 + (steps_ahead > 0))

    def allocate_window_cache(
        self, num_layers: int, slots: int, groups: int, dtype: torch.dtype, device: torch.device
    ) -> WindowCache | None:
        """Inputs of the last tokens, all layers stacked; None in the columns layout.

        groups: of B. dtype: of the activations.
        """
        if not self.replays:
            return None
        k, shape = self.num_speculative_tokens, self.ssm_shape
        window = self.window if k else 0
        return WindowCache.allocate(num_layers, slots, k, window, shape, groups, dtype, device)

    def allocate(self, num_blocks: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Zeroed blocks of one layer: views (window `[blocks, *]`, ssm `[blocks, H, P, N]`)."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        pages = torch.zeros((num_blocks, self.page_bytes), dtype=torch.uint8, device=device)
        views, start = [], 0
        for c in self.components:
            view = pages[:, start : start + c.nbytes].view(c.dtype).unflatten(1, c.shape)
            views.append(view)
            start += -(-c.nbytes // ALIGNMENT) * ALIGNMENT
        return views[0], views[1]

    def positions_first(self, windows: Tensor) -> Tensor:
        """View of window blocks as `[blocks, positions, channels]`, whatever the stored layout."""
        return windows.transpose(1, 2) if self.conv_layout == "DS" else windows
