"""Write new keys and values into their cache blocks (reference)."""

import torch
from torch import Tensor


def kv_write_reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot: Tensor,
    row_start: Tensor,
    computed: Tensor,
) -> None:
    """Store token i of a row at position ``computed + i`` of the row's block table.

    Args:
        k: [tokens, Hkv, D], rows one after another.
        v: [tokens, Hkv, D].
        k_cache: [blocks, block_size, Hkv, D], changed in place, converted to its own dtype.
        v_cache: as k_cache.
        block_table: int32 [slots, columns] of physical blocks.
        slot: int32 [rows]; -1 = padded row, its tokens are dropped.
        row_start: int32 [rows + 1]; tokens outside [row_start[0], row_start[-1]) are dropped.
        computed: int32 [rows], position of the row's first token.

    Raises:
        ValueError: the caches do not have the shape of the keys and values.
    """
    for name, new, cache in (("k_cache", k, k_cache), ("v_cache", v, v_cache)):
        if cache.dim() != 4 or cache.shape[2:] != new.shape[1:]:
            raise ValueError(
                f"{name} is {tuple(cache.shape)}, must be [blocks, block_size, "
                f"{new.shape[1]}, {new.shape[2]}]"
            )
    block_size = k_cache.shape[1]
    token = torch.arange(k.shape[0], device=k.device)
    row = torch.searchsorted(row_start.long(), token, right=True) - 1
    inside = (row >= 0) & (row < slot.shape[0])
    token, row = token[inside], row[inside]
    used = slot[row] >= 0
    token, row = token[used], row[used]
    position = computed[row].long() + token - row_start[row].long()
    block = block_table[slot[row].long(), position // block_size].long()
    k_cache[block, position % block_size] = k[token].to(k_cache.dtype)
    v_cache[block, position % block_size] = v[token].to(v_cache.dtype)
