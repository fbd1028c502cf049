"""Random weights of a model, for measurements that need no text of sense."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.linear.quantize import E4M3, quantize_lines_reference
from hybrid_runtime.models.formats import SCALE
from hybrid_runtime.models.norm import RMSNorm


def draw(module: nn.Module, depth: int, generator: torch.Generator) -> None:
    """Weights as training begins with them, so that activations keep a sensible size and a router
    spreads its tokens: normal with 0.02, divided by sqrt(2 depth) where a layer of so many adds to
    the residual stream; steps from 0.001 to 0.1, rates of decay from 1 to 16. Those in 8 bits are
    rounded as a loader does it, one parameter after another."""
    for name, parameter in module.named_parameters():
        path, _, last = name.rpartition(".")
        owner: Any = module.get_submodule(path)
        if parameter.dtype == E4M3:
            plain = torch.empty_like(parameter, dtype=owner.dtype)
            _fill(name, plain, depth, generator)
            values, scale = quantize_lines_reference(plain.flatten(0, -2))
            parameter.data.copy_(values.view(parameter.shape))
            owner.weight_scale.data.copy_(scale.view(owner.weight_scale.shape))
        elif isinstance(owner, RMSNorm):
            parameter.data.fill_(0 if owner.centred else 1)
        elif not last.endswith(SCALE):
            _fill(name, parameter.data, depth, generator)


def _fill(name: str, value: Tensor, depth: int, generator: torch.Generator) -> None:
    last = name.rpartition(".")[-1]
    if last == "A_log":
        value.uniform_(1, 16, generator=generator).log_()
    elif last == "dt_bias":
        value.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
        value.add_(torch.log(-torch.expm1(-value)))  # softplus of it is the step
    elif value.dim() == 1:
        value.fill_(1 if "norm" in name else 0)
    elif "conv1d" in name:
        value.uniform_(-0.5, 0.5, generator=generator)
    else:
        adds = any(part in name for part in ("out_proj", "o_proj", "down_proj"))
        deviation = 0.02 / math.sqrt(2 * depth) if adds else 0.02
        value.normal_(0, deviation, generator=generator)
