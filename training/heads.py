"""Trainable draft heads: MTP (``*E``) and EAGLE-1, unrolled over several passes.

At inference pass 1 runs over all tokens with the target's hidden states, and pass ``k > 1`` adds
one position fed with the head's own output. ``unroll`` does this for every start position at once:
the query of pass ``k`` that started at ``p`` sees the keys of pass 1 up to ``p`` and, of passes
2 to ``k``, only those of its own chain.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .trunk import Attention, Layer, MoE, RMSNorm, linear


class Chain:
    """Keys and values of the passes so far, and attention over them."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention [batch, heads, starts, dim] of one more pass."""
        self.keys.append(k)
        self.values.append(v)
        if len(self.keys) == 1:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        starts = q.shape[2]
        causal = torch.ones(starts, starts, dtype=torch.bool, device=q.device).tril()
        own = torch.eye(starts, dtype=torch.bool, device=q.device)
        mask = torch.cat([causal] + [own] * (len(self.keys) - 1), 1)
        return F.scaled_dot_product_attention(
            q, torch.cat(self.keys, 2), torch.cat(self.values, 2), attn_mask=mask
        )


class MTPFirst(nn.Module):
    """First layer of the MTP head: fuses token and hidden state, then attention."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = cfg["hidden_size"], cfg["layer_norm_epsilon"]
        self.enorm = RMSNorm(hidden, eps)
        self.hnorm = RMSNorm(hidden, eps)
        self.eh_proj = linear(2 * hidden, hidden)
        self.norm = RMSNorm(hidden, eps)
        self.mixer = Attention(cfg)

    def forward(self, embedded: Tensor, hidden: Tensor, chain: Chain) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))
        y = chain.attend(*self.mixer.project(self.norm(x)))
        return x + self.mixer.o_proj(y.transpose(1, 2).flatten(-2))


class MTPLast(Layer):
    """Last layer of the MTP head: experts, then the head's final norm."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__("E", cfg)
        self.final_layernorm = RMSNorm(cfg["hidden_size"], cfg["layer_norm_epsilon"])

    def forward(self, x: Tensor) -> Tensor:
        return self.final_layernorm(super().forward(x))


class MTP(nn.Module):
    """The MTP head of pattern ``*E``."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MTPFirst(cfg), MTPLast(cfg)])

    def forward(self, embedded: Tensor, hidden: Tensor, chain: Chain, offset: int) -> Tensor:
        """One pass; ``offset`` (passes before this one) has no meaning without positions."""
        return self.layers[1](self.layers[0](embedded, hidden, chain))


def rotate(x: Tensor, offset: int, theta: float) -> Tensor:
    """Rotary embedding (llama's half-split form) of [batch, heads, tokens, dim] from ``offset``."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    position = torch.arange(x.shape[2], device=x.device, dtype=torch.float32) + offset
    angle = position[:, None] * frequency
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    y = x.float()
    turned = torch.cat([-y[..., half:], y[..., :half]], -1)
    return (y * cos + turned * sin).to(x.dtype)


class EagleMLP(nn.Module):
    """Gated SiLU perceptron of a llama layer."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """Llama decoder layer without input norm."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.theta = cfg["rope_theta"]
        self.self_attn = Attention(cfg)
        self.mlp = EagleMLP(cfg["hidden_size"], cfg["intermediate_size"])
        self.post_attention_layernorm = RMSNorm(cfg["hidden_size"], cfg["rms_norm_eps"])

    def forward(self, x: Tensor, chain: Chain, offset: int) -> Tensor:
        q, k, v = self.self_attn.project(x)
        q, k = rotate(q, offset, self.theta), rotate(k, offset, self.theta)
        y = chain.attend(q, k, v)
        x = x + self.self_attn.o_proj(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle(nn.Module):
    """EAGLE-1 head (Li et al. 2024)."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.fc = linear(2 * cfg["hidden_size"], cfg["hidden_size"])
        self.layers = nn.ModuleList([EagleLayer(cfg)])

    def forward(self, embedded: Tensor, hidden: Tensor, chain: Chain, offset: int) -> Tensor:
        """One pass over all start positions, the first at position ``offset``."""
        x = self.fc(torch.cat([embedded.to(hidden.dtype), hidden], -1))
        return self.layers[0](x, chain, offset)


def unroll(
    head: nn.Module, embeddings: nn.Embedding, tokens: Tensor, hidden: Tensor, passes: int
) -> list[Tensor]:
    """Outputs of ``passes`` passes, each [batch, starts, hidden] with starts = tokens - passes.

    ``tokens`` int64 [batch, tokens]; ``hidden`` [batch, >= starts, hidden] are the target's states.
    Output ``k`` (from 0) of start ``p`` predicts token ``p + k + 2``.
    """
    starts = tokens.shape[1] - passes
    chain = Chain()
    outputs: list[Tensor] = []
    state = hidden[:, :starts]
    for k in range(passes):
        embedded = embeddings(tokens[:, k + 1 : k + 1 + starts])
        state = head(embedded, state, chain, k)
        outputs.append(state)
    return outputs


def routers(module: nn.Module) -> list[Any]:
    """The routers of all expert layers within ``module``."""
    return [m.gate for m in module.modules() if isinstance(m, MoE)]
