"""Root-mean-square norms."""

from typing import overload

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.layers.norm import add_rms_norm, gated_rms_norm, rms_norm
from hybrid_runtime.kernels.linear.quantize import Quantizer, Scaled


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32 (fp64 for fp64). centred:
    the weight is kept as what it differs from 1 by."""

    def __init__(
        self,
        size: int,
        eps: float,
        device: torch.device | str,
        dtype: torch.dtype,
        centred: bool = False,
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.eps, self.centred = eps, centred

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[..., size] to the same shape, in the weight's dtype; it goes to `out`, if given, as
        `rms_norm_reference` says."""
        return rms_norm(x, self.weight, self.eps, out=out, centred=self.centred)

    @overload
    def add(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]: ...
    @overload
    def add(
        self, x: Tensor, delta: Tensor | None, quantizer: Quantizer | None
    ) -> tuple[Tensor | Scaled, Tensor]: ...
    def add(
        self, x: Tensor, delta: Tensor | None, quantizer: Quantizer | None = None
    ) -> tuple[Tensor | Scaled, Tensor]:
        """The norm of ``x + delta`` (None: nothing to add), in 8 bits with a quantizer, and that
        sum in x's dtype or wider; delta may be parts `[parts, *x.shape]`."""
        if delta is None:
            return rms_norm(x, self.weight, self.eps, quantizer, centred=self.centred), x
        return add_rms_norm(delta, x, self.weight, self.eps, quantizer, self.centred)


class GatedRMSNorm(nn.Module):
    """RMS norm of x * silu(gate), each of `groups` slices of the last dimension by itself."""

    def __init__(
        self, size: int, groups: int, eps: float, device: torch.device | str, dtype: torch.dtype
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.groups = groups
        self.eps = eps

    def forward(
        self, x: Tensor, gate: Tensor, quantizer: Quantizer | None = None
    ) -> Tensor | Scaled:
        """[..., size] and a gate of that shape to the same shape, in the weight's dtype; in 8 bits
        with a quantizer."""
        return gated_rms_norm(x, gate, self.weight, self.groups, self.eps, quantizer)


class HeadNorm(nn.Module):
    """RMS norm of each head of x, times silu(gate); one weight `[head_dim]` for all heads."""

    def __init__(
        self, heads: int, head_dim: int, eps: float, device: torch.device | str, dtype: torch.dtype
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(head_dim, device=device, dtype=dtype))
        self.heads, self.eps = heads, eps

    def forward(
        self, x: Tensor, gate: Tensor, quantizer: Quantizer | None = None
    ) -> Tensor | Scaled:
        """[T, heads * head_dim] and a gate of that shape to the same shape, in the weight's dtype;
        in 8 bits with a quantizer."""
        return gated_rms_norm(
            x, gate, self.weight, self.heads, self.eps, quantizer, norm_first=True
        )
