"""Block boundaries: where the state at one belongs, and whether its checkpoint is kept.

Each rule once in plain torch and once for kernels; tests tie both to `state.boundaries`, which has
them for the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.step.entry import EVERY, FIRST, SECOND


def keeps_reference(boundary: Tensor, line: Tensor) -> Tensor:
    """Whether the checkpoint at each boundary is kept, bool `[rows]`.

    boundary: int `[rows]`, in tokens, at least 1.
    line: int `[rows, ENTRY_FIELDS]`, entries, whose EVERY, FIRST and SECOND are the rule.
    """
    every = line[:, EVERY]
    periodic = (every > 0) & (boundary % every.clamp(min=1) == 0)
    return periodic | (boundary == line[:, FIRST]) | (boundary == line[:, SECOND])


@triton.jit
def load_rule(p_entry, mask):
    """The retention rule of entries; one that keeps nothing where `mask` is false."""
    every = tl.load(p_entry + EVERY, mask=mask, other=0)
    first = tl.load(p_entry + FIRST, mask=mask, other=0)
    second = tl.load(p_entry + SECOND, mask=mask, other=0)
    return every, first, second


@triton.jit
def keeps(boundary, every, first, second):
    """`keeps_reference` of a rule from `load_rule`."""
    periodic = (every > 0) & (boundary % tl.maximum(every, 1) == 0)
    return periodic | (boundary == first) | (boundary == second)


def cut_reference(
    computed: Tensor, certain: Tensor, draft: Tensor, line: Tensor, block_size: int
) -> Tensor:
    """The boundary strictly inside a row without drafts at which it leaves a checkpoint, int
    `[rows]` in tokens, 0 = none: the last one there, if it is kept.

    computed, certain: int `[rows]`, tokens in the state before and after the row's certain ones.
    draft: int `[rows]`. line: as of `keeps_reference`.
    """
    inside = (certain - 1) // block_size * block_size
    cuts = (draft == 0) & (inside > computed) & keeps_reference(inside, line)
    return torch.where(cuts, inside, 0)


@triton.jit
def cut(computed, certain, draft, every, first, second, BLOCK_SIZE: tl.constexpr):
    """`cut_reference` with a rule from `load_rule`, where `computed` is not negative."""
    inside = (certain - 1) // BLOCK_SIZE * BLOCK_SIZE
    cuts = (draft == 0) & (inside > computed) & keeps(inside, every, first, second)
    return tl.where(cuts, inside, 0)


def last_boundary_reference(
    certain: Tensor, computed: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The last boundary that a row has reached, all int `[rows]`.

    certain: tokens R that were in the state whatever was accepted.
    computed: tokens n' that are.
    Returns the boundary in tokens; how many columns (or conv_state positions) above the running
    column its state lies, negative if the step began behind it; and the column in which a prefix
    hit will look for it.
    """
    boundary = computed // block_size * block_size
    return boundary, boundary - certain, boundary // block_size - 1


@triton.jit
def last_boundary(certain, computed, BLOCK_SIZE: tl.constexpr):
    """`last_boundary_reference`, for computed >= 0, where truncating division is the floor."""
    boundary = computed // BLOCK_SIZE * BLOCK_SIZE
    return boundary, boundary - certain, boundary // BLOCK_SIZE - 1


def running_column_reference(end: Tensor, block_size: int) -> Tensor:
    """Column that holds the state while tokens up to `end` = n + s (int, >= 1) run."""
    return torch.div(end - 1, block_size, rounding_mode="floor")


@triton.jit
def running_column(end, BLOCK_SIZE: tl.constexpr):
    """`running_column_reference`."""
    return (end + BLOCK_SIZE - 1) // BLOCK_SIZE - 1
