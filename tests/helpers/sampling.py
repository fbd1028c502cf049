"""Sampling parameters of a batch, as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybrid_runtime.specdecode.sampling import SamplingParams, SamplingTensors


def sampling_tensors(
    params: Sequence[SamplingParams], seeds: Sequence[int], device: str = "cpu"
) -> SamplingTensors:
    """Row i samples as ``params[i]``, with ``seeds[i]``."""
    assert len(seeds) == len(params)
    return SamplingTensors(
        temperature=torch.tensor([float(p.temperature) for p in params], device=device),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
        top_p=torch.tensor([float(p.top_p) for p in params], device=device),
        seed=torch.tensor(seeds, dtype=torch.int64, device=device),
    )
