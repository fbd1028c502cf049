"""Grouped-query attention over paged caches."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_runtime.kernels.attention.launch import AttentionRows, KVCache
from hybrid_runtime.kernels.attention.paged import paged_attention
from hybrid_runtime.kernels.attention.store_kv import store_kv
from hybrid_runtime.models.forward_batch import Caches, RowBatch
from hybrid_runtime.models.products import in_halves

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
        self._joined: Tensor | None = None

    def join(self) -> None:
        """Let q, k and v be parts of one matrix, so that one product computes all three. Their
        names stay; to be called once they have storage, before it is filled."""
        parts = (self.q_proj, self.k_proj, self.v_proj)
        self._joined = torch.cat([part.weight.data for part in parts])
        sizes = [part.weight.shape[0] for part in parts]
        for part, weight in zip(parts, self._joined.split(sizes), strict=True):
            part.weight.data = weight

    def forward(
        self,
        x: Tensor,
        batch: RowBatch,
        caches: Caches,
        layer: int,
        rotate: Rotation | None = None,
        halves: bool = False,
    ) -> Tensor:
        """Attend from each token to its row's cached context and itself.

        Args:
            x: [T, hidden_size].
            batch: the rows.
            caches: holds the layer's keys and values; this step's are added.
            layer: key of caches.kv.
            rotate: position embedding of [T, heads, head_dim]; None = none.
            halves: the result may be left as a sum.

        Returns:
            [T, hidden_size], with `halves` perhaps [2, T, hidden_size] whose sum it is.
        """
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self._project(x))
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        cache = KVCache(*caches.kv[layer], caches.kv_block_table)
        store_kv(k, v, cache, AttentionRows(batch.slot, batch.cu_seqlens, batch.computed))
        parts = batch.parts(x.shape[0])
        if not parts:
            return torch.zeros_like(x)
        y = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in parts:
            paged_attention(
                q=part.tokens(q),
                cache=cache,
                rows=AttentionRows(
                    part.rows(batch.slot), part.cu_seqlens, part.rows(batch.computed)
                ),
                max_scheduled=part.max_scheduled,
                max_context=batch.max_context,
                scale=self.head_dim**-0.5,
                out=part.tokens(y),
            )
        y = y.flatten(-2)
        return in_halves(self.o_proj, y) if halves else self.o_proj(y)

    def _project(self, x: Tensor) -> Sequence[Tensor]:
        parts = (self.q_proj, self.k_proj, self.v_proj)
        if self._joined is None:
            return [part(x) for part in parts]
        return F.linear(x, self._joined).split([part.weight.shape[0] for part in parts], -1)


def join_projections(module: nn.Module) -> None:
    """`Attention.join` of every attention in `module`."""
    for part in module.modules():
        if isinstance(part, Attention):
            part.join()
