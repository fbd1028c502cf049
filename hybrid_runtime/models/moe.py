"""The token-wise mixers: MLP and mixture of experts."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.layers.activation import relu2
from hybrid_runtime.kernels.linear.quantize import Quantizer, Scaled
from hybrid_runtime.kernels.moe.topk import topk
from hybrid_runtime.models.forward_batch import Pass
from hybrid_runtime.models.linear import Experts, Linear


class MLP(nn.Module):
    """down(relu2(up(x))), not gated. halves: the result may be left as a sum."""

    def __init__(
        self,
        size: int,
        inner: int,
        bias: bool,
        device: torch.device | str,
        dtype: torch.dtype,
        halves: bool = False,
    ):
        super().__init__()
        self.up_proj = Linear(size, inner, device, dtype, bias)
        self.down_proj = Linear(inner, size, device, dtype, bias, halves)

    @property
    def quantizer(self) -> Quantizer | None:
        """As of `Linear`."""
        return self.up_proj.quantizer

    def forward(self, x: Tensor | Scaled, step: Pass | None = None) -> Tensor:
        """`[T, size]` to `[T, size]`, with `halves` perhaps to `[parts, T, size]`, whose sum it is.
        step: what a layer gives any mixer; not used."""
        y: Tensor = self.down_proj(relu2(self.up_proj(x), self.down_proj.quantizer))
        return y


class Routing(NamedTuple):
    """How tokens choose their experts; see `hybrid_runtime.kernels.moe.topk.topk_reference`.

    experts: how many there are, in `num_expert_group` groups.
    top_k: experts of a token, from its `topk_group` best groups.
    renormalize: let a token's weights add up to `routed_scaling_factor`.
    """

    experts: int
    top_k: int
    num_expert_group: int
    topk_group: int
    renormalize: bool
    routed_scaling_factor: float


class Router(Linear):
    """Grouped sigmoid top-k routing in fp32 (fp64 in an fp64 model); padded tokens are routed like
    others."""

    def __init__(self, size: int, routing: Routing, device: torch.device | str, dtype: torch.dtype):
        fine = torch.promote_types(dtype, torch.float32)
        super().__init__(size, routing.experts, device, fine)
        self.routing = routing
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(routing.experts, device=device, dtype=fine)
        )

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, size] to weights [T, top_k] and experts int64 [T, top_k]."""
        bias, routing = self.e_score_correction_bias, self.routing
        return topk(
            logits=self(x.to(bias.dtype)),
            bias=bias,
            top_k=routing.top_k,
            num_expert_group=routing.num_expert_group,
            topk_group=routing.topk_group,
            renormalize=routing.renormalize,
            routed_scaling_factor=routing.routed_scaling_factor,
        )


class MoE(nn.Module):
    """Routed experts, between latent projections if there are any, plus a shared expert.

    Args:
        gate: chooses a token's experts.
        experts: the routed ones.
        shared_experts: the one that all tokens take.
        latent: to the size of the routed experts and back; None: they have the hidden size.
    """

    def __init__(
        self,
        gate: Router,
        experts: Experts,
        shared_experts: MLP,
        latent: tuple[Linear, Linear] | None = None,
    ):
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared_experts
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if latent is not None:
            self.fc1_latent_proj, self.fc2_latent_proj = latent

    @property
    def quantizer(self) -> None:
        """The router takes its input as it is."""

    def forward(self, x: Tensor, step: Pass | None = None) -> Tensor:
        """[T, hidden_size] to [T, hidden_size]. step: what a layer gives any mixer; not used."""
        weights, experts = self.gate.choose(x)
        routed = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        routed = self.experts(routed, weights, experts)
        if self.fc2_latent_proj is not None:
            routed = self.fc2_latent_proj(routed)
        return routed + self.shared_experts(x)
