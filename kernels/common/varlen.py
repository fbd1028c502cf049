"""Rows of different lengths in one flat token dimension: what describes them, and padded tensors
of them for the references."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StateRows(NamedTuple):
    """The rows of a launch: which tokens each has, and where its state is read and written.

    All tensors are int32. A row is padded when its slot or its write column is -1; its outputs are
    zero, and nothing of it is read or written.

    Attributes:
        block_table: [slots, columns], the physical block of each column.
        slot: [rows], line of the block table; -1 = padded row.
        cu_seqlens: [rows + 1]; row i owns the tokens cu_seqlens[i] up to cu_seqlens[i + 1].
        draft: [rows], how many of the row's last tokens are guesses.
        read_column: [rows], column of the state before the row's tokens; -1 = start from zeros.
        read_offset: [rows], accepted guesses behind that column's state: counted in columns by the
            SSM state, in positions of the block by the convolution window.
        write_column: [rows], column of the state after the row's certain tokens; -1 = padded row.
    """

    block_table: Tensor
    slot: Tensor
    cu_seqlens: Tensor
    draft: Tensor
    read_column: Tensor
    read_offset: Tensor
    write_column: Tensor

    @property
    def active(self) -> Tensor:
        """bool [rows], False for padded rows."""
        return (self.slot >= 0) & (self.write_column >= 0)


def row_tokens(
    cu_seqlens: Tensor, max_scheduled: int, tokens: int, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Token index of every (row, step) pair.

    Args:
        cu_seqlens: int32 [rows + 1].
        max_scheduled: upper bound of tokens per row.
        tokens: size of the flat token dimension.
        active: bool [rows]; the tokens of other rows are not valid.

    Returns:
        index int64 [rows, max_scheduled] (clamped into range) and valid bool of the same shape.
    """
    start = cu_seqlens.long()
    step = torch.arange(max_scheduled, device=cu_seqlens.device)
    index = start[:-1, None] + step
    valid = (index < start[1:, None]) & active[:, None]
    return index.clamp(min=0, max=max(tokens - 1, 0)), valid


def gather_rows(x: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    """[tokens, ...] to [rows, steps, ...], 0 where not valid."""
    if x.shape[0] == 0:
        return x.new_zeros(*index.shape, *x.shape[1:])
    mask = valid.reshape(*valid.shape, *([1] * (x.dim() - 1)))
    return torch.where(mask, x[index], x.new_zeros(()))


def scatter_rows(y: Tensor, index: Tensor, valid: Tensor, tokens: int) -> Tensor:
    """[rows, steps, ...] back to [tokens, ...], 0 where no valid pair points."""
    out = y.new_zeros(tokens, *y.shape[2:])
    out[index[valid]] = y[valid]
    return out


def physical_blocks(block_table: Tensor, slot: Tensor, column: Tensor, used: Tensor) -> Tensor:
    """int64 [rows] of physical blocks at (slot, column), 0 in rows that are not used."""
    zero = torch.zeros((), dtype=torch.int64, device=block_table.device)
    row = torch.where(used, slot.long(), zero)
    col = torch.where(used, column.long(), zero)
    return torch.where(used, block_table[row, col].long(), zero)
