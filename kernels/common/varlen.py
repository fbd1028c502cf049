"""Variable-length rows of a flat token dimension as padded tensors, for the references."""

import torch
from torch import Tensor


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
