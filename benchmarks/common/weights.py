"""Random weights that behave like those of training, for our engine and for a peer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def randomize(module: nn.Module, depth: int, generator: torch.Generator) -> None:
    """Weights as training begins with them, so that activations keep a sensible size and a router
    spreads its tokens: normal with 0.02, divided by sqrt(2 depth) where a layer adds to the
    residual stream; time steps from 0.001 to 0.1, decay rates from 1 to 16. Names are those of
    checkpoints, and vLLM's where it has others (`A`, `w2_weight`)."""
    for name, parameter in module.named_parameters():
        fill(name, parameter.data, depth, generator)


def fill(name: str, value: Tensor, depth: int, generator: torch.Generator) -> None:
    """The parameter of that name; see `randomize`."""
    *_, owner, last = name.split(".")
    if last == "A_log":
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
        adds = {"out_proj", "o_proj", "down_proj", "fc2_latent_proj", "w2_weight"} & {last, owner}
        value.normal_(0, 0.02 / math.sqrt(2 * depth) if adds else 0.02, generator=generator)
