"""Grouped-query attention over paged caches."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.attention.launch import AttentionRows, KVCache
from hybrid_runtime.kernels.attention.paged import paged_attention
from hybrid_runtime.kernels.attention.store_kv import store_kv
from hybrid_runtime.kernels.linear.quantize import E4M3, Quantizer, Scaled
from hybrid_runtime.models.forward_batch import Caches, Pass, RowBatch, WantedTokens
from hybrid_runtime.models.linear import Linear, MergedLinear

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


KV_SCALES = {"k_proj": "k_scale", "v_proj": "v_scale"}
"""Scales of keys and values in 8 bits, by the projection that has them in a checkpoint."""


class Attention(nn.Module):
    """q, k, v projections, KV write, causal attention, output projection; no bias anywhere.

    Args:
        layer: key of ``Caches.kv``.
        halves: the result may be left as a sum.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layer: int,
        device: torch.device | str,
        dtype: torch.dtype,
        halves: bool = False,
    ):
        super().__init__()
        self.head_dim, self.layer = head_dim, layer
        inner, kv_inner = num_heads * head_dim, num_kv_heads * head_dim
        outputs = {"q_proj": inner, "k_proj": kv_inner, "v_proj": kv_inner}
        self._qkv = MergedLinear(hidden_size, outputs, device, dtype)
        for name, part in self._qkv.parts.items():
            self.add_module(name, part)
        for name, scale in KV_SCALES.items():
            self.get_submodule(name).register_parameter(scale, None)
        self.o_proj = Linear(inner, hidden_size, device, dtype, halves=halves)

    @property
    def quantizer(self) -> Quantizer | None:
        """As of `Linear`."""
        return self._qkv.quantizer

    def add_kv_scales(self) -> None:
        """Have float32 [] scales of keys and values, without values."""
        for name, scale in KV_SCALES.items():
            part = self._qkv.parts[name]
            part.put(scale, part.weight.new_empty((), dtype=torch.float32))

    def forward(
        self,
        x: Tensor | Scaled,
        step: Pass,
        wanted: WantedTokens | None = None,
        rotate: Rotation | None = None,
    ) -> Tensor:
        """Attend from each token to its row's cached context and itself.

        Args:
            x: [T, hidden_size]; with `wanted` not quantised.
            step: with the rows, and the caches to which the tokens' keys and values are added.
            wanted: only these tokens attend, the others leave keys and values; None = all attend.
            rotate: position embedding; None = none.

        Returns:
            [T, hidden_size], with `halves` perhaps [parts, T, hidden_size] whose sum it is; with
            `wanted` as many tokens as those.
        """
        q, k, v = self._heads(x, rotate, wanted)
        batch, cache = step.batch, self._cache(step.caches)
        store_kv(k, v, cache, AttentionRows(batch.slot, batch.cu_seqlens, batch.computed))
        y = self._attend(q, cache, batch if wanted is None else wanted.batch).flatten(-2)
        out: Tensor = self.o_proj(y)
        return out

    def _cache(self, caches: Caches) -> KVCache:
        """The layer's; it has scales only in 8 bits."""
        cache = KVCache(*caches.kv[self.layer], caches.kv_block_table)
        if cache.k.dtype != E4M3:
            return cache
        k_scale, v_scale = (getattr(self._qkv.parts[name], s) for name, s in KV_SCALES.items())
        return cache._replace(k_scale=k_scale, v_scale=v_scale)

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
        self, x: Tensor | Scaled, rotate: Rotation | None, wanted: WantedTokens | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q of the wanted tokens, k and v of all, each [tokens, heads, head_dim]."""
        if wanted is None or isinstance(x, Scaled) or len(x) <= FEW_TOKENS:
            q, k, v = self._project(x, "q_proj", "k_proj", "v_proj")
            if rotate is not None:
                q, k = rotate.turn(q), rotate.turn(k)
            return q if wanted is None else wanted.of(q), k, v
        (q,) = self._project(wanted.of(x), "q_proj")
        k, v = self._project(x, "k_proj", "v_proj")
        if rotate is not None:
            q, k = rotate.of(wanted).turn(q), rotate.turn(k)
        return q, k, v

    def _project(self, x: Tensor | Scaled, *names: str) -> list[Tensor]:
        """Products with some projections, each [tokens, heads, head_dim]."""
        return [y.unflatten(-1, (-1, self.head_dim)) for y in self._qkv(x, *names)]
