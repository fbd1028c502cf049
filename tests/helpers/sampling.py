"""Sampling parameters of a batch, as tensors, and what a step is to emit."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.specdecode.acceptance import Accepted
from hybrid_runtime.specdecode.sampling import SamplingParams


def sampling_tensors(
    params: Sequence[SamplingParams], seeds: Sequence[int], device: str = "cpu"
) -> SamplingTensors:
    """Row i samples as ``params[i]``, with ``seeds[i]``."""
    assert len(seeds) == len(params)
    return SamplingTensors(
        temperature=torch.tensor([float(p.temperature) for p in params], device=device),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
        top_p=torch.tensor([float(p.top_p) for p in params], device=device),
        min_p=torch.tensor([float(p.min_p) for p in params], device=device),
        seed=torch.tensor(seeds, dtype=torch.int64, device=device),
    )


def rows_of(params: SamplingParams, rows: int) -> SamplingTensors:
    """Rows that sample alike, each with a seed of its own."""
    one = sampling_tensors([params], [0]).select(torch.zeros(rows).int())
    return one._replace(seed=torch.arange(rows))


def assert_emits(got: Accepted, tokens: list[list[int]], counts: list[int]) -> None:
    assert got.tokens.dtype == got.num_accepted.dtype == torch.int32
    assert got.tokens.tolist() == tokens
    assert got.num_accepted.tolist() == counts


def misdrawn(token: Tensor, probs: Tensor, u: Tensor) -> Tensor:
    """bool [...]: where `token` is not what `u` draws from `probs` [..., V]. Its share of the
    cumulative distribution must hold `u`, but for what rounding moves."""
    cumulative = probs.double().cumsum(-1)
    at = token.long()[..., None]
    above = cumulative.gather(-1, at)[..., 0]
    below = above - probs.double().gather(-1, at)[..., 0]
    return (u < below - 1e-6) | (u > above + 1e-6) | (probs.gather(-1, at)[..., 0] == 0)


def excess(observed: Tensor, expected: Tensor) -> float:
    """Chi-square statistic over its limit at one in 10,000 (Wilson-Hilferty); > 1 is a misfit."""
    counts = torch.bincount(observed, minlength=len(expected)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a token of probability 0 was emitted"
    mean = expected[possible].double() * len(observed)
    statistic = ((counts[possible] - mean) ** 2 / mean).sum().item()
    freedom = int(possible.sum()) - 1
    spread = 2 / (9 * freedom)
    return statistic / (freedom * (1 - spread + 3.719 * math.sqrt(spread)) ** 3)
