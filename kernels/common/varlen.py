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
        draft: [rows], how many of the row's last tokens are drafts.
        read_column: [rows], column of the state before the row's tokens; -1 = start from zeros.
        read_offset: [rows], accepted drafts behind that column's state: counted in columns by the
            matrix, in positions of the block by the conv_state.
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


class Cuts(NamedTuple):
    """Checkpoints that rows without drafts leave on the way, at most one each; int32 `[rows]`.

    Outputs and states of a row with a cut are those of two calls, one up to the cut and one from
    there on.

    Attributes:
        after: tokens of the row that are in the checkpoint, less than it has; 0 = it leaves none.
            0 in padded rows too, because kernels share tokens out by it.
        column: column that gets the checkpoint, another one than `write_column`; not read
            where `after` is 0.
    """

    after: Tensor
    column: Tensor


def split_rows(rows: StateRows, cuts: Cuts) -> tuple[StateRows, StateRows]:
    """The same tokens as two calls, twice as many rows each: the parts before the cuts, which write
    the checkpoints, and those from there on, which read them."""
    starts = torch.stack([rows.cu_seqlens[:-1], rows.cu_seqlens[:-1] + cuts.after], 1).flatten()
    starts = torch.cat([starts, rows.cu_seqlens[-1:]])
    is_cut, none = cuts.after > 0, torch.full_like(rows.slot, -1)

    def part(second: bool, **changed: Tensor) -> StateRows:
        fields = rows._asdict() | changed
        for name in ("slot", "draft", "read_column", "read_offset", "write_column"):
            pair = (none, fields[name]) if second else (fields[name], none)
            fields[name] = torch.stack(pair, 1).flatten()
        return StateRows(**(fields | {"cu_seqlens": starts}))

    first = part(False, slot=torch.where(is_cut, rows.slot, -1), write_column=cuts.column)
    second = part(
        True,
        read_column=torch.where(is_cut, cuts.column, rows.read_column),
        read_offset=torch.where(is_cut, 0, rows.read_offset),
    )
    return first, second


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
