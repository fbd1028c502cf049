"""How often each token is drawn, by chi-square: seeds and positions are as good as chance."""

from __future__ import annotations

import pytest
import torch
from helpers.sampling import excess, sampling_tensors

from hybrid_runtime.kernels.sampling import select
from hybrid_runtime.kernels.sampling.naive import probabilities_reference
from hybrid_runtime.specdecode.sampling import TARGET, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
V, DRAWS = 12, 99_999
TILING = select.SelectTiling(tile=16, piece=16, few=16, warps=1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.2),
        SamplingParams(temperature=0.8, top_k=7, top_p=0.9, min_p=0.02),
    ],
    ids=["all", "limited"],
)
def test_frequencies_are_the_probabilities(params: SamplingParams) -> None:
    logits = torch.randn(1, 1, V, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    seeds = list(range(DRAWS // 3))
    sampling = sampling_tensors([params] * len(seeds), seeds, DEVICE)
    position = torch.arange(len(seeds), device=DEVICE) % 50
    got = select.select_tokens(
        logits.expand(len(seeds), 3, V).contiguous(), sampling, position, TARGET, tiling=TILING
    )
    one = sampling_tensors([params], [0], DEVICE)
    expected = probabilities_reference(logits, one)[0, 0]
    assert excess(got.flatten().long(), expected) < 1
    flatter = (expected + 0.05) * (expected > 0)
    assert excess(got.flatten().long(), flatter / flatter.sum()) > 1
