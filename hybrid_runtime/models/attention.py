"""Grouped-query attention over paged caches."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.kv_write import kv_write
from hybrid_runtime.kernels.paged_attention import paged_attention
from hybrid_runtime.specdecode.batch import Caches, RowBatch

Rotation = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """q, k, v projections, KV write, causal attention, output projection; no bias anywhere."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.head_dim = head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        self.q_proj = linear(hidden_size, num_heads * head_dim)
        self.k_proj = linear(hidden_size, num_kv_heads * head_dim)
        self.v_proj = linear(hidden_size, num_kv_heads * head_dim)
        self.o_proj = linear(num_heads * head_dim, hidden_size)

    def forward(
        self,
        x: Tensor,
        batch: RowBatch,
        caches: Caches,
        layer: int,
        rotate: Rotation | None = None,
    ) -> Tensor:
        """Attend from each token to its row's cached context and itself.

        Args:
            x: [T, hidden_size].
            batch: the rows.
            caches: holds the layer's keys and values; this step's are added.
            layer: key of caches.kv.
            rotate: position embedding of [T, heads, head_dim]; None = none.

        Returns:
            [T, hidden_size].
        """
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        k_cache, v_cache = caches.kv[layer]
        table = caches.kv_block_table
        kv_write(k, v, k_cache, v_cache, table, batch.slot, batch.row_start, batch.computed)
        outputs = [
            paged_attention(
                part.tokens(q),
                k_cache,
                v_cache,
                table,
                part.rows(batch.slot),
                part.row_start,
                part.rows(batch.computed),
                part.max_scheduled,
                batch.max_context,
                self.head_dim**-0.5,
            )
            for part in batch.parts(x.shape[0])
        ]
        if not outputs:
            return torch.zeros_like(x)
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.o_proj(y.flatten(-2))
