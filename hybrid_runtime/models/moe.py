"""The token-wise mixers: MLP and mixture of experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_runtime.models.config import NemotronHConfig


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU."""
    return F.relu(x).square()


class MLP(nn.Module):
    """down(relu2(up(x))), not gated."""

    def __init__(
        self, size: int, inner: int, bias: bool, device: torch.device | str, dtype: torch.dtype
    ):
        super().__init__()
        self.up_proj = nn.Linear(size, inner, bias=bias, device=device, dtype=dtype)
        self.down_proj = nn.Linear(inner, size, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] to [T, size]."""
        return self.down_proj(relu2(self.up_proj(x)))


class Router(nn.Module):
    """Grouped sigmoid top-k routing in fp32 (fp64 in an fp64 model).

    Experts are chosen by sigmoid score plus correction bias: first the ``topk_group`` groups whose
    two best experts sum highest, then the best ``num_experts_per_tok`` experts in them. Weights
    are the uncorrected scores, normalised if ``norm_topk_prob``, times the scaling factor
    (DeepSeek-V3 report, section 2.1.2).
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
        scores = F.linear(x.to(self.weight.dtype), self.weight).sigmoid()
        corrected = scores + self.e_score_correction_bias
        if config.topk_group < config.n_group:
            grouped = corrected.unflatten(-1, (config.n_group, -1))
            best = grouped.topk(2, dim=-1)[0].sum(-1).topk(config.topk_group, dim=-1)[1]
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
            corrected = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        experts = corrected.topk(config.num_experts_per_tok, dim=-1)[1]
        weights = scores.gather(-1, experts)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.routed_scaling_factor, experts


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
        """
        count, top_k = self.up_proj.shape[0], experts.shape[1]
        pairs = experts.numel()
        if pairs <= count:
            # So few pairs that gathering their matrices is cheaper than visiting every expert.
            chosen = experts.flatten()
            inner = relu2(self.up_proj[chosen] @ x.repeat_interleave(top_k, 0)[..., None])
            outputs = (self.down_proj[chosen] @ inner)[..., 0].unflatten(0, (-1, top_k))
            return (outputs * weights[..., None]).sum(1).to(x.dtype)
        order = experts.flatten().argsort(stable=True)
        token = order // top_k
        sizes = experts.flatten().bincount(minlength=count).tolist()
        sorted_x = x[token]
        outputs = torch.cat(
            [
                F.linear(relu2(F.linear(rows, self.up_proj[i])), self.down_proj[i])
                for i, rows in enumerate(sorted_x.split(sizes))
                if rows.shape[0]
            ]
        )
        outputs = outputs * weights.flatten()[order][:, None]
        total = torch.zeros(x.shape, dtype=outputs.dtype, device=x.device)
        return total.index_add_(0, token, outputs).to(x.dtype)


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
