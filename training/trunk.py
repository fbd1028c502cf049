"""Trainable Nemotron-H, whole sequences at a time; parameters carry the checkpoint's names.

Written for training speed only: no cache, every expert computed for every token. The agreement
with ``transformers`` is checked by ``tests/models/test_shipped_checkpoint_format.py`` on the files.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)


class GatedNorm(nn.Module):
    """RMSNorm of ``x * silu(gate)`` within each of ``groups`` groups of channels."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.groups = groups
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = (x.float() * F.silu(gate.float())).unflatten(-1, (self.groups, -1))
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.flatten(-2) * self.weight


def linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    """A linear layer without bias, normal weights of deviation ``scale / sqrt(inputs)``."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=scale / math.sqrt(inputs))
    return layer


def chunk_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, size: int) -> Tensor:
    """Mamba-2 scan by chunks (Dao and Gu 2024, section 6), zero initial state, no skip term.

    ``x`` [batch, tokens, heads, dim], ``dt`` fp32 [batch, tokens, heads] after softplus, ``a``
    fp32 [heads] (negative), ``b`` and ``c`` [batch, tokens, groups, state]; ``tokens`` must be a
    multiple of ``size``. Returns [batch, tokens, heads, dim].
    """
    heads, groups = x.shape[2], b.shape[2]
    x, dt, b, c = (t.unflatten(1, (-1, size)) for t in (x * dt[..., None], dt, b, c))
    decay = (dt * a).cumsum(2).permute(0, 1, 3, 2)  # [batch, chunks, heads, size]
    x = x.permute(0, 1, 3, 2, 4)  # [batch, chunks, heads, size, dim]
    b, c = (t.permute(0, 1, 3, 2, 4) for t in (b, c))  # [batch, chunks, groups, size, state]
    mask = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    gap = decay[..., :, None] - decay[..., None, :]
    within = torch.exp(gap.masked_fill(~mask, float("-inf")))
    scores = (c @ b.transpose(-1, -2)).repeat_interleave(heads // groups, 2)
    y = (scores * within).to(x.dtype) @ x
    b, c = (t.repeat_interleave(heads // groups, 2) for t in (b, c))
    left = torch.exp(decay[..., -1:] - decay)[..., None]
    states = (b * left).to(x.dtype).transpose(-1, -2) @ x  # [batch, chunks, heads, state, dim]
    total = F.pad(decay[..., -1], (0, 0, 1, 0))[:, :-1].cumsum(1)  # decay before each chunk
    ends = total + decay[..., -1]
    gap = total[:, :, None, :] - ends[:, None, :, :]  # [batch, to chunk, from chunk, heads]
    chunks = x.shape[1]
    earlier = torch.ones(chunks, chunks, dtype=torch.bool, device=x.device).tril(-1)
    carry = torch.exp(gap.masked_fill(~earlier[:, :, None], float("-inf"))).permute(0, 3, 1, 2)
    flat = states.float().permute(0, 2, 1, 3, 4).flatten(-2)
    with torch.autocast(x.device.type, enabled=False):
        initial = (carry @ flat).unflatten(-1, (b.shape[-1], -1)).permute(0, 2, 1, 3, 4)
    y = y + (c * torch.exp(decay)[..., None]).to(x.dtype) @ initial.to(x.dtype)
    return y.permute(0, 1, 3, 2, 4).flatten(1, 2)


class Mamba(nn.Module):
    """Mamba-2 mixer."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.groups = cfg["mamba_num_heads"], cfg["n_groups"]
        self.state, self.chunk = cfg["ssm_state_size"], cfg["chunk_size"]
        self.width = cfg["conv_kernel"]
        self.inner = self.heads * cfg["mamba_head_dim"]
        self.channels = self.inner + 2 * self.groups * self.state
        hidden = cfg["hidden_size"]
        self.in_proj = linear(hidden, self.inner + self.channels + self.heads)
        self.conv1d = nn.Conv1d(self.channels, self.channels, self.width, groups=self.channels)
        self.A_log = nn.Parameter(torch.log(torch.linspace(1, 16, self.heads)))
        self.D = nn.Parameter(torch.ones(self.heads))
        step = torch.exp(torch.linspace(math.log(1e-3), math.log(0.1), self.heads))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.norm = GatedNorm(self.inner, self.groups, cfg["layer_norm_epsilon"])
        self.out_proj = linear(self.inner, hidden, len(cfg["hybrid_override_pattern"]) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        z, xbc, dt = self.in_proj(x).split([self.inner, self.channels, self.heads], -1)
        shifted = F.pad(xbc, (0, 0, self.width - 1, 0))
        taps = self.conv1d.weight[:, 0]
        conv = shifted[:, :tokens] * taps[:, 0]
        for i in range(1, self.width):
            conv = conv + shifted[:, i : i + tokens] * taps[:, i]
        xbc = F.silu(conv + self.conv1d.get_parameter("bias")).to(xbc.dtype)
        bc = self.groups * self.state
        inputs, b, c = xbc.split([self.inner, bc, bc], -1)
        step = F.softplus(dt.float() + self.dt_bias.float())
        inputs = inputs.unflatten(-1, (self.heads, -1))
        b, c = (t.unflatten(-1, (self.groups, -1)) for t in (b, c))
        pad = -tokens % self.chunk
        u, dt, b, c = (F.pad(t, (0, 0) * (t.ndim - 2) + (0, pad)) for t in (inputs, step, b, c))
        y = chunk_scan(u, dt, -self.A_log.float().exp(), b, c, self.chunk)
        y = y[:, :tokens] + inputs * self.D[:, None]
        return self.out_proj(self.norm(y.flatten(-2), z).to(z.dtype))


class Attention(nn.Module):
    """Grouped-query attention without positions."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv_heads = cfg["num_attention_heads"], cfg["num_key_value_heads"]
        self.dim = cfg["head_dim"]
        hidden = cfg["hidden_size"]
        self.q_proj = linear(hidden, self.heads * self.dim)
        self.k_proj = linear(hidden, self.kv_heads * self.dim)
        self.v_proj = linear(hidden, self.kv_heads * self.dim)
        self.o_proj = linear(self.heads * self.dim, hidden, 0.35)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values [batch, query heads, tokens, dim], KV heads repeated."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeat = self.heads // self.kv_heads
        return q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*self.project(x), is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Squared-ReLU perceptron, not gated."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden, 0.35)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())


class Router(nn.Module):
    """Router weights and the correction bias that balances the experts."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, hidden) / math.sqrt(hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Raise the bias of experts chosen too seldom since the last call, lower the others'."""
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class MoE(nn.Module):
    """Sigmoid-routed experts plus one shared expert."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        hidden, experts = cfg["hidden_size"], cfg["n_routed_experts"]
        self.top, self.scale = cfg["num_experts_per_tok"], cfg["routed_scaling_factor"]
        self.gate = Router(hidden, experts)
        inner = cfg["moe_intermediate_size"]
        self.experts = nn.ModuleList(MLP(hidden, inner) for _ in range(experts))
        self.shared_experts = MLP(hidden, cfg["moe_shared_expert_intermediate_size"])

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.gate.weight.float()))
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.top, -1).indices
        picked = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.gate.load.add_(picked.detach().flatten(0, -2).sum(0))
        weights = scores * picked
        weights = weights / weights.sum(-1, keepdim=True) * self.scale
        up = torch.cat([e.get_parameter("up_proj.weight") for e in self.experts])
        down = torch.cat([e.get_parameter("down_proj.weight") for e in self.experts], 1)
        h = F.relu(F.linear(x, up)).square().unflatten(-1, (len(self.experts), -1))
        h = (h * weights[..., None]).flatten(-2).to(h.dtype)
        return F.linear(h, down) + self.shared_experts(x)


class Layer(nn.Module):
    """Norm, one mixer, residual."""

    def __init__(self, kind: str, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.norm = RMSNorm(cfg["hidden_size"], cfg["layer_norm_epsilon"])
        self.mixer: nn.Module
        if kind == "M":
            self.mixer = Mamba(cfg)
        elif kind == "*":
            self.mixer = Attention(cfg)
        elif kind == "E":
            self.mixer = MoE(cfg)
        else:
            self.mixer = MLP(cfg["hidden_size"], cfg["intermediate_size"])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x))


class Backbone(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(cfg["vocab_size"], cfg["hidden_size"])
        nn.init.normal_(self.embeddings.weight, std=0.3)
        self.layers = nn.ModuleList(Layer(k, cfg) for k in cfg["hybrid_override_pattern"])
        self.norm_f = RMSNorm(cfg["hidden_size"], cfg["layer_norm_epsilon"])


class Trunk(nn.Module):
    """The target model."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        super().__init__()
        self.backbone = Backbone(cfg)
        self.lm_head = linear(cfg["hidden_size"], cfg["vocab_size"], 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states after ``norm_f`` [batch, tokens, hidden] of ``tokens`` [batch, tokens]."""
        x = self.backbone.embeddings(tokens)
        for layer in self.backbone.layers:
            x = layer(x)
        return self.backbone.norm_f(x)
