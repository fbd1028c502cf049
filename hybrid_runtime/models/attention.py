"""Grouped-query attention over paged caches."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_runtime.kernels.attention.launch import AttentionRows, KVCache
from hybrid_runtime.kernels.attention.paged import paged_attention
from hybrid_runtime.kernels.attention.store_kv import store_kv
from hybrid_runtime.models.forward_batch import Caches, RowBatch, WantedTokens
from hybrid_runtime.models.products import in_halves

FEW_TOKENS = 256
"""Up to so many, a product takes about as long as its matrix takes to come from memory. Then one
product for q, k and v of all tokens is quicker than one for q of the wanted ones and another."""


class Rotation(NamedTuple):
    """Rotary position embedding, by Llama's halves: cos and sin `[T, 1, head_dim / 2]`."""

    cos: Tensor
    sin: Tensor

    def of(self, wanted: WantedTokens) -> "Rotation":
        """That of some tokens."""
        return Rotation(wanted.of(self.cos), wanted.of(self.sin))

    def turn(self, heads: Tensor) -> Tensor:
        """`[T, heads, head_dim]`, rotated by each token's position."""
        low, high = heads.chunk(2, dim=-1)
        cos, sin = self
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


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
        wanted: WantedTokens | None = None,
    ) -> Tensor:
        """Attend from each token to its row's cached context and itself.

        Args:
            x: [T, hidden_size].
            batch: the rows.
            caches: holds the layer's keys and values; this step's are added.
            layer: key of caches.kv.
            rotate: position embedding; None = none.
            halves: the result may be left as a sum.
            wanted: only these tokens attend, the others leave keys and values; None = all attend.

        Returns:
            [T, hidden_size], with `halves` perhaps [2, T, hidden_size] whose sum it is; with
            `wanted` as many tokens as those.
        """
        q, k, v = self._heads(x, rotate, wanted)
        cache = KVCache(*caches.kv[layer], caches.kv_block_table)
        store_kv(k, v, cache, AttentionRows(batch.slot, batch.cu_seqlens, batch.computed))
        y = self._attend(q, cache, batch if wanted is None else wanted.batch).flatten(-2)
        return in_halves(self.o_proj, y) if halves else self.o_proj(y)

    def _attend(self, q: Tensor, cache: KVCache, batch: RowBatch) -> Tensor:
        parts = batch.parts(q.shape[0])
        y = torch.empty_like(q, memory_format=torch.contiguous_format)
        if not parts:
            y.zero_()
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
        return y

    def _heads(
        self, x: Tensor, rotate: Rotation | None, wanted: WantedTokens | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q of the wanted tokens, k and v of all, each [tokens, heads, head_dim]."""
        if wanted is None or len(x) <= FEW_TOKENS:
            q, k, v = self._project(x, self.q_proj, self.k_proj, self.v_proj)
            if rotate is not None:
                q, k = rotate.turn(q), rotate.turn(k)
            return q if wanted is None else wanted.of(q), k, v
        (q,) = self._project(wanted.of(x), self.q_proj)
        k, v = self._project(x, self.k_proj, self.v_proj)
        if rotate is not None:
            q, k = rotate.of(wanted).turn(q), rotate.turn(k)
        return q, k, v

    def _project(self, x: Tensor, *parts: nn.Linear) -> list[Tensor]:
        """Products with `parts`, each [tokens, heads, head_dim]; parts that lie at the end of the
        joined matrix take one product."""
        if self._joined is None or len(parts) == 1:
            products = [part(x) for part in parts]
        else:
            sizes = [part.weight.shape[0] for part in parts]
            products = F.linear(x, self._joined[-sum(sizes) :]).split(sizes, -1)
        return [product.unflatten(-1, (-1, self.head_dim)) for product in products]


def join_projections(module: nn.Module) -> None:
    """`Attention.join` of every attention in `module`."""
    for part in module.modules():
        if isinstance(part, Attention):
            part.join()
