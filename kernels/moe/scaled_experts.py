"""Routed experts in 8 bits (e4m3), and what their products are."""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from hybrid_runtime.kernels.layers.activation import relu2_reference, swiglu_reference
from hybrid_runtime.kernels.linear.fp8_product import fp8_product_reference
from hybrid_runtime.kernels.linear.quantize import Quantizer, Scaled, quantize_reference


class ScaledExperts(NamedTuple):
    """The same matrix of all experts in 8 bits.

    values: e4m3 `[num_experts, outputs, size]`.
    scale: float32 `[num_experts]` or `[num_experts, outputs]`; weights are the values times this.
    input_scale: of inputs, float32, if known beforehand: of the first product `[]`, because a token
        is quantised once for all of its experts; of the second `[num_experts]`, because a line is
        one expert's. None: each line has its own, found when it is there.
    """

    values: Tensor
    scale: Tensor
    input_scale: Tensor | None = None

    def check(self, name: str, input_scales: tuple[int, ...]) -> None:
        """Refuse scales of other shapes. input_scales: what that of inputs must be."""
        shape, given = self.values.shape, self.input_scale
        if self.scale.shape not in (shape[:1], shape[:2]):
            raise ValueError(
                f"{name}'s scale is {tuple(self.scale.shape)}, must be {tuple(shape[:1])} or "
                f"{tuple(shape[:2])}"
            )
        if given is not None and given.shape != input_scales:
            raise ValueError(
                f"{name}'s input_scale is {tuple(given.shape)}, must be {input_scales} or None"
            )

    def of(self, expert: int) -> Scaled:
        """The matrix of one."""
        return Scaled(self.values[expert], self.scale[expert])


def between(y: Tensor, gated: bool, dim: int = -1) -> Tensor:
    """What an expert's second product takes of its first: relu2 of it, or SwiGLU of its halves
    along `dim`, gate first."""
    return swiglu_reference(*y.chunk(2, dim)) if gated else relu2_reference(y)


def scaled_moe_reference(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    up: ScaledExperts,
    down: ScaledExperts,
    gated: bool = False,
) -> Tensor:
    """`fused_moe_reference` in 8 bits. All products, and what lies between them, are fp32; lines
    between the two that find their own scales are rounded to x's dtype first."""
    top_k, flat = topk_ids.shape[1], topk_ids.flatten()
    given = quantize_reference(x, Quantizer(up.input_scale))
    outputs = x.new_zeros((len(flat), x.shape[1]), dtype=torch.float32)
    for expert in flat.unique().tolist():
        ids = (flat == expert).nonzero().squeeze(-1)
        scale = given.scale[ids // top_k] if given.scale.dim() else given.scale
        lines = Scaled(given.values[ids // top_k], scale)
        inner = between(fp8_product_reference(lines, up.of(expert), torch.float32), gated)
        if down.input_scale is None:
            lines = quantize_reference(inner.to(x.dtype), Quantizer())
        else:
            lines = quantize_reference(inner, Quantizer(down.input_scale[expert]))
        outputs[ids] = fp8_product_reference(lines, down.of(expert), torch.float32)
    outputs = rearrange(outputs, "(token top_k) size -> token top_k size", top_k=top_k)
    return (outputs * topk_weights[..., None]).sum(1).to(x.dtype)
