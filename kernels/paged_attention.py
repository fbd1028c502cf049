"""Causal attention over block tables for rows of any length (reference)."""

import torch
from torch import Tensor

from hybrid_runtime.kernels.rows import gather_rows, row_tokens, scatter_rows


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot: Tensor,
    row_start: Tensor,
    computed: Tensor,
    max_scheduled: int,
    max_context: int,
    scale: float,
) -> Tensor:
    """softmax(scale q k^T) v for token i of a row over positions 0 .. computed + i.

    The row's own keys and values must already be in the cache. Query head h uses key head
    ``h // (Hq // Hkv)``. Prefill and decode rows may be mixed. What lies in the cache beyond a
    row's context is never used, whatever it is (NaN included).

    Args:
        q: [tokens, Hq, D].
        k_cache: [blocks, block_size, Hkv, D].
        v_cache: [blocks, block_size, Hkv, D].
        block_table: int32 [slots, columns] of physical blocks.
        slot: int32 [rows]; -1 = padded row.
        row_start: int32 [rows + 1].
        computed: int32 [rows], position of the row's first token.
        max_scheduled: upper bound of tokens per row.
        max_context: upper bound of computed + scheduled.
        scale: factor of the scores, usually D ** -0.5.

    Returns:
        [tokens, Hq, D] in q's dtype, 0 for padded rows. Scores and sums in fp32 (fp64 for fp64).

    Raises:
        ValueError: query heads are no multiple of key heads.
    """
    heads, kv_heads = q.shape[1], k_cache.shape[2]
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, must be a multiple of k_cache's {kv_heads}")
    acc = torch.promote_types(q.dtype, torch.float32)
    block_size = k_cache.shape[1]
    active = slot >= 0
    index, valid = row_tokens(row_start, max_scheduled, q.shape[0], active)
    queries = gather_rows(q, index, valid).to(acc).unflatten(2, (kv_heads, heads // kv_heads))

    context = min(max_context, block_table.shape[1] * block_size)
    position = torch.arange(context, device=q.device)
    length = computed.long() + (row_start[1:] - row_start[:-1]).long()
    inside = active[:, None] & (position < length[:, None])
    table = block_table[torch.where(active, slot, 0).long()].long()
    block = torch.where(inside, table[:, position // block_size], 0)
    keys = k_cache[block, position % block_size].to(acc)
    values = v_cache[block, position % block_size].to(acc)
    values = torch.where(inside[:, :, None, None], values, values.new_zeros(()))

    scores = torch.einsum("rskgd,rckd->rkgsc", queries, keys) * scale
    step = torch.arange(max_scheduled, device=q.device)
    visible = position <= (computed.long()[:, None] + step)[..., None]
    visible = (visible & inside[:, None] & valid[..., None])[:, None, None]
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    # A row of nothing but -inf (padding) softmaxes to NaN.
    weights = torch.where(visible, weights, weights.new_zeros(()))
    y = torch.einsum("rkgsc,rckd->rskgd", weights, values).flatten(2, 3)
    return scatter_rows(y.to(q.dtype), index, valid, q.shape[0])
