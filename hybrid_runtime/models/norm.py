"""Root-mean-square norms."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (fp64 for fp64)."""

    def __init__(self, size: int, eps: float, device: torch.device | str, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same shape, in the weight's dtype."""
        acc = torch.promote_types(x.dtype, torch.float32)
        y = x.to(acc)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.to(acc) * y).to(self.weight.dtype)


class GatedRMSNorm(nn.Module):
    """RMS norm of x * silu(gate), each of `groups` slices of the last dimension by itself."""

    def __init__(
        self, size: int, groups: int, eps: float, device: torch.device | str, dtype: torch.dtype
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.groups = groups
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[..., size] and a gate of that shape to the same shape, in the weight's dtype."""
        acc = torch.promote_types(x.dtype, torch.float32)
        y = (x.to(acc) * F.silu(gate.to(acc))).unflatten(-1, (self.groups, -1))
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight.to(acc) * y.flatten(-2)).to(self.weight.dtype)
