"""Random weights that behave like those of training, for our engine and for a peer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

LARGEST, SPREAD = 448.0, 5.0
"""Of e4m3; in deviations of weights."""
NORMAL, SQUARED = 6.0, 45.0
"""The largest inputs of products: what norms make, and squared ReLU."""


def randomize(module: nn.Module, depth: int, generator: torch.Generator) -> None:
    """Weights as training begins with them, so that activations keep a sensible size and a router
    spreads its tokens: normal with 0.02, divided by sqrt(2 depth) where a layer adds to the
    residual stream; time steps from 0.001 to 0.1, decay rates from 1 to 16. In 8 bits `SPREAD`
    deviations are the largest number, and scales give back the same weights. Names are those of
    checkpoints, and vLLM's where it has others (`A`, `w2_weight`)."""
    for name, parameter in module.named_parameters():
        fill(name, parameter.data, depth, generator)


def fill(name: str, value: Tensor, depth: int, generator: torch.Generator) -> None:
    """The parameter of that name; see `randomize`."""
    *_, owner, last = name.split(".")
    kind = {owner, last.removesuffix("_scale"), last.replace("_input_scale", "_weight")}
    adds = {"out_proj", "o_proj", "down_proj", "fc2_latent_proj", "w2_weight"} & kind
    deviation = 0.02 / math.sqrt(2 * depth) if adds else 0.02
    if last.endswith("input_scale"):
        value.fill_((SQUARED if {"down_proj", "w2_weight"} & kind else NORMAL) / LARGEST)
    elif last.endswith("weight_scale"):
        value.fill_(SPREAD * deviation / LARGEST)
    elif value.dtype == torch.float8_e4m3fn:
        drawn = torch.empty(value.shape, dtype=torch.bfloat16, device=value.device)
        drawn.normal_(0, LARGEST / SPREAD, generator=generator)
        value.copy_(drawn.clamp_(-LARGEST, LARGEST))
    elif last == "A_log":
        value.uniform_(1, 16, generator=generator).log_()
    elif last == "A":
        value.uniform_(-16, -1, generator=generator)
    elif last == "dt_bias":
        # In fp32: 1 - exp(-x) of a small x is nothing in bfloat16.
        step = torch.empty_like(value, dtype=torch.float32)
        step.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
        value.copy_(step.add_(torch.log(-torch.expm1(-step))))  # softplus of it is the time step
    elif last == "D" or "norm" in owner:
        value.fill_(1)
    elif owner == "conv1d" and last == "weight":
        value.uniform_(-0.5, 0.5, generator=generator)
    elif value.dim() == 1:
        value.zero_()
    else:
        value.normal_(0, deviation, generator=generator)
