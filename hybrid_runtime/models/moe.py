"""The token-wise mixers: MLP and mixture of experts."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.layers.activation import relu2, sigmoid_gate, swiglu
from hybrid_runtime.kernels.linear.quantize import Quantizer, Scaled
from hybrid_runtime.kernels.moe.topk import softmax_topk, topk
from hybrid_runtime.models.forward_batch import Pass
from hybrid_runtime.models.linear import Experts, Linear, MergedLinear


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


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), without bias. halves: the result may be left as a sum."""

    def __init__(
        self,
        size: int,
        inner: int,
        device: torch.device | str,
        dtype: torch.dtype,
        halves: bool = False,
    ):
        super().__init__()
        self._up = MergedLinear(size, {"gate_proj": inner, "up_proj": inner}, device, dtype)
        for name, part in self._up.parts.items():
            self.add_module(name, part)
        self.down_proj = Linear(inner, size, device, dtype, halves=halves)

    @property
    def quantizer(self) -> Quantizer | None:
        """As of `Linear`."""
        return self._up.quantizer

    def forward(self, x: Tensor | Scaled) -> Tensor:
        """`[T, size]` to `[T, size]`, with `halves` perhaps to `[parts, T, size]`, whose sum it
        is."""
        gate, up = self._up(x)
        y: Tensor = self.down_proj(swiglu(gate, up, self.down_proj.quantizer))
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


class SoftmaxRouter(Linear):
    """Softmax top-k routing, and the gate of a shared expert as one more output behind the experts:
    in fp32 (fp64 in an fp64 model). renormalize: let a token's weights add up to 1."""

    def __init__(
        self,
        size: int,
        experts: int,
        top_k: int,
        renormalize: bool,
        device: torch.device | str,
        dtype: torch.dtype,
    ):
        fine = torch.promote_types(dtype, torch.float32)
        super().__init__(size, experts + 1, device, fine)
        self.experts, self.top_k, self.renormalize = experts, top_k, renormalize

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, size] to weights [T, top_k], experts int64 [T, top_k], and the gate [T, 1]."""
        logits, gate = self(x.to(self.dtype)).split([self.experts, 1], -1)
        return *softmax_topk(logits, self.top_k, self.renormalize), gate


class GatedMoE(nn.Module):
    """Routed experts plus a shared one times the sigmoid of its gate, SwiGLU all.

    Args:
        gate: chooses a token's experts, and weighs the shared one.
        experts: the routed ones.
        shared_expert: the one that all tokens take.
    """

    def __init__(self, gate: SoftmaxRouter, experts: Experts, shared_expert: GatedMLP):
        super().__init__()
        self.gate, self.experts, self.shared_expert = gate, experts, shared_expert

    @property
    def quantizer(self) -> None:
        """The router takes its input as it is."""

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        weights, experts, gate = self.gate.choose(x)
        routed, shared = self.experts(x, weights, experts), self.shared_expert(x)
        return sigmoid_gate(shared[:, None], gate[:, None], routed[:, None]).squeeze(1)
