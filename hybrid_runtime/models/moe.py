"""The token-wise mixers: MLP and mixture of experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_runtime.kernels.layers.activation import relu2
from hybrid_runtime.kernels.moe.fused_moe import fused_moe
from hybrid_runtime.kernels.moe.topk import topk
from hybrid_runtime.models.config import NemotronHConfig
from hybrid_runtime.models.products import in_halves


class MLP(nn.Module):
    """down(relu2(up(x))), not gated."""

    def __init__(
        self, size: int, inner: int, bias: bool, device: torch.device | str, dtype: torch.dtype
    ):
        super().__init__()
        self.up_proj = nn.Linear(size, inner, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(inner, size, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, halves: bool = False) -> Tensor:
        """[T, size] to [T, size], with `halves` perhaps [2, T, size] whose sum it is."""
        inner = relu2(self.up_proj(x))
        return in_halves(self.down_proj, inner) if halves else self.down_proj(inner)


class Router(nn.Module):
    """Grouped sigmoid top-k routing in fp32 (fp64 in an fp64 model).

    See `hybrid_runtime.kernels.moe.topk.topk_reference`; padded tokens are routed like others.
    """

    def __init__(self, config: NemotronHConfig, device: torch.device | str, dtype: torch.dtype):
        super().__init__()
        self.config = config
        fine = torch.promote_types(dtype, torch.float32)
        experts = config.n_routed_experts
        self.weight = nn.Parameter(
            torch.empty(experts, config.hidden_size, device=device, dtype=fine)
        )
        self.e_score_correction_bias = nn.Parameter(torch.empty(experts, device=device, dtype=fine))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden_size] to weights [T, top_k] and experts int64 [T, top_k]."""
        config = self.config
        return topk(
            logits=F.linear(x.to(self.weight.dtype), self.weight),
            bias=self.e_score_correction_bias,
            top_k=config.num_experts_per_tok,
            num_expert_group=config.n_group,
            topk_group=config.topk_group,
            renormalize=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
        )


class Experts(nn.Module):
    """The weights of all routed experts; checkpoints name each expert's matrices by themselves."""

    def __init__(
        self, count: int, size: int, inner: int, device: torch.device | str, dtype: torch.dtype
    ):
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(count, inner, size, device=device, dtype=dtype))
        self.down_proj = nn.Parameter(torch.empty(count, size, inner, device=device, dtype=dtype))

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Weighted sum of each token's experts.

        Args:
            x: [T, size].
            weights: [T, top_k].
            experts: int64 [T, top_k].

        Returns:
            [T, size] in x's dtype.

        Raises:
            ValueError: shapes or dtypes that do not go together.
        """
        return fused_moe(x, weights, experts, self.up_proj, self.down_proj)


class MoE(nn.Module):
    """Routed experts, between latent projections if the config has them, plus a shared expert."""

    def __init__(self, config: NemotronHConfig, device: torch.device | str, dtype: torch.dtype):
        super().__init__()
        hidden, latent = config.hidden_size, config.moe_latent_size
        self.gate = Router(config, device, dtype)
        self.experts = Experts(
            config.n_routed_experts,
            hidden if latent is None else latent,
            config.moe_intermediate_size,
            device,
            dtype,
        )
        self.shared_experts = MLP(
            hidden, config.moe_shared_expert_intermediate_size, config.mlp_bias, device, dtype
        )
        self.fc1_latent_proj: nn.Linear | None = None
        self.fc2_latent_proj: nn.Linear | None = None
        if latent is not None:
            self.fc1_latent_proj = nn.Linear(
                hidden, latent, bias=config.mlp_bias, device=device, dtype=dtype
            )
            self.fc2_latent_proj = nn.Linear(
                latent, hidden, bias=config.mlp_bias, device=device, dtype=dtype
            )

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden_size] to [T, hidden_size]."""
        weights, experts = self.gate(x)
        routed = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        routed = self.experts(routed, weights, experts)
        if self.fc2_latent_proj is not None:
            routed = self.fc2_latent_proj(routed)
        return routed + self.shared_experts(x)
