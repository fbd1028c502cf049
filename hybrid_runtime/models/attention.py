"""Grouped-query attention over paged caches."""

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.attention.launch import AttentionRows, KVCache
from hybrid_runtime.kernels.attention.paged import paged_attention
from hybrid_runtime.kernels.attention.rotary import HeadNorm, Rotary, rotate_heads
from hybrid_runtime.kernels.attention.store_kv import store_kv
from hybrid_runtime.kernels.layers.activation import sigmoid_gate
from hybrid_runtime.kernels.linear.quantize import E4M3, Quantizer, Scaled
from hybrid_runtime.models.forward_batch import Caches, Pass, RowBatch, WantedTokens
from hybrid_runtime.models.linear import Linear, MergedLinear
from hybrid_runtime.models.norm import RMSNorm

FEW_TOKENS = 256
"""Up to so many, a product takes about as long as its matrix takes to come from memory. Then one
product for q, k and v of all tokens is quicker than one for q of the wanted ones and another."""


KV_SCALES = {"k_proj": "k_scale", "v_proj": "v_scale"}
"""Scales of keys and values in 8 bits, by the projection that has them in a checkpoint."""


class Attention(nn.Module):
    """q, k, v projections, KV write, causal attention, output projection; no bias anywhere.

    Args:
        layer: key of ``Caches.kv``.
        halves: the result may be left as a sum.
        rotary: position embedding of queries and keys; None = none.
        norm_eps: queries and keys have a norm by heads, before `rotary`; None = none.
        gated: what is attended to is multiplied by the sigmoid of a gate; ``q_proj`` gives each
            head's queries, and then its gate.

    Raises:
        ValueError: norms without a position embedding.
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
        rotary: Rotary | None = None,
        norm_eps: float | None = None,
        gated: bool = False,
    ):
        super().__init__()
        self.head_dim, self.layer = head_dim, layer
        self.rotary, self.gated = rotary, gated
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if norm_eps is not None:
            if rotary is None:
                raise ValueError("rotary is None, must be given where queries and keys have a norm")
            self.q_norm = RMSNorm(head_dim, norm_eps, device, dtype, centred=True)
            self.k_norm = RMSNorm(head_dim, norm_eps, device, dtype, centred=True)
        inner, kv_inner = num_heads * head_dim, num_kv_heads * head_dim
        outputs = {"q_proj": (1 + gated) * inner, "k_proj": kv_inner, "v_proj": kv_inner}
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
    ) -> Tensor:
        """Attend from each token to its row's cached context and itself.

        Args:
            x: [T, hidden_size]; with `wanted` not quantised.
            step: with the rows, and the caches to which the tokens' keys and values are added.
            wanted: only these tokens attend, the others leave keys and values; None = all attend.

        Returns:
            [T, hidden_size], with `halves` perhaps [parts, T, hidden_size] whose sum it is; with
            `wanted` as many tokens as those.
        """
        batch, cache = step.batch, self._cache(step.caches)
        q, k, v, gate = self._heads(x, batch, wanted)
        store_kv(k, v, cache, _attention_rows(batch))
        y = self._attend(q, cache, batch if wanted is None else wanted.batch)
        if gate is not None:
            y = sigmoid_gate(y, gate)
        out: Tensor = self.o_proj(y.flatten(-2))
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
        self, x: Tensor | Scaled, batch: RowBatch, wanted: WantedTokens | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q of the wanted tokens, k and v of all, each [tokens, heads, head_dim], and the gate, of
        q's shape."""
        if wanted is None or isinstance(x, Scaled) or len(x) <= FEW_TOKENS:
            q, k, v = self._project(x, "q_proj", "k_proj", "v_proj")
            q, gate = self._split(q)
            q, k = self._rotate(q, k, batch)
            if wanted is not None:
                q, gate = wanted.of(q), None if gate is None else wanted.of(gate)
            return q, k, v, gate
        (q,) = self._project(wanted.of(x), "q_proj")
        q, gate = self._split(q)
        k, v = self._project(x, "k_proj", "v_proj")
        q, _ = self._rotate(q, q[:, :0], wanted.batch)
        _, k = self._rotate(k[:, :0], k, batch)
        return q, k, v, gate

    def _split(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """What `q_proj` gives, as queries and gate."""
        if not self.gated:
            return q, None
        q, gate = q.unflatten(1, (-1, 2)).unbind(2)
        return q, gate

    def _rotate(self, q: Tensor, k: Tensor, batch: RowBatch) -> tuple[Tensor, Tensor]:
        """Norm and position embedding, if there are any, at the tokens of a batch."""
        if self.rotary is None:
            return q, k
        norm = None
        if self.q_norm is not None and self.k_norm is not None:
            norm = HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return rotate_heads(q, k, self.rotary, _attention_rows(batch), norm)

    def _project(self, x: Tensor | Scaled, *names: str) -> list[Tensor]:
        """Products with some projections, each [tokens, heads, head_dim]."""
        return [y.unflatten(-1, (-1, self.head_dim)) for y in self._qkv(x, *names)]


def _attention_rows(batch: RowBatch) -> AttentionRows:
    return AttentionRows(batch.slot, batch.cu_seqlens, batch.computed)
