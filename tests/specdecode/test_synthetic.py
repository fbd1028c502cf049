"""Synthetic acceptance, for measurements: as many drafts as the rates say, right or wrong."""

import math

import pytest
import torch
from helpers.sampling import assert_emits, rows_of

from hybrid_runtime.specdecode.acceptance import synthetic, synthetic_acceptance, synthetic_rates
from hybrid_runtime.specdecode.sampling import SamplingParams

V = 8


@pytest.mark.parametrize("one_request", [False, True], ids=["many requests", "one request"])
@pytest.mark.parametrize("mean_length", [1.0, 1.25, 2.0, 2.5, 3.3, 4.0])
def test_synthetic_mean_length(mean_length: float, one_request: bool) -> None:
    rows, most = 20_000, 3
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, most + 1, V, generator=generator)
    drafts = torch.randint(0, V, (rows, most), generator=generator).int()
    rates = synthetic_rates(mean_length, most)
    accept = synthetic_acceptance([rates], "cpu")
    full = torch.full((rows,), most, dtype=torch.int32)
    sampling, position = rows_of(SamplingParams(temperature=1.0), rows), torch.full((rows,), 9)
    if one_request:
        sampling, position = sampling._replace(seed=position), sampling.seed
    got = accept(logits, drafts, full, full, None, sampling, position)
    counts = got.num_accepted.long()
    spread = counts.double().std().item()
    assert abs(counts.double().mean().item() - mean_length) <= 4 * spread / math.sqrt(rows)
    for i, rate in enumerate(rates):
        assert abs((counts >= i + 2).double().mean().item() - rate) < 4 * 0.5 / math.sqrt(rows)
    index, last = torch.arange(most + 1), counts[:, None] - 1
    expected = torch.where(
        index == last, logits.argmax(-1), torch.nn.functional.pad(drafts, (0, 1))
    )
    assert torch.equal(got.tokens, torch.where(index <= last, expected, -1).int())


def test_synthetic_keeps_only_what_was_drafted() -> None:
    logits = torch.zeros(5, 4, V)
    logits[..., 6] = 1
    drafts = torch.tensor([[1, 2, 3], [1, 2, 3], [1, -1, 3], [1, 2, 3], [-1, -1, -1]]).int()
    num_draft = torch.tensor([3, 1, 3, 2, 0]).int()
    emits = torch.tensor([1, 1, 1, 0, 1])
    rates = torch.ones(5, 3)
    got = synthetic(logits, drafts, num_draft, emits, rates, torch.arange(5), torch.arange(5))
    expected = [[1, 2, 3, 6], [1, 6, -1, -1], [1, 6, -1, -1], [-1] * 4, [6, -1, -1, -1]]
    assert_emits(got, expected, [4, 2, 2, 0, 1])


def test_requests_have_rates_by_their_seeds() -> None:
    """Alone in a row, and as lines."""
    logits = torch.eye(V)[torch.tensor([6, 6, 6, 6, 5, 6, 6, 6])].view(2, 4, V)
    drafts, count = torch.ones(2, 3).int(), torch.full((2,), 3).int()
    accept = synthetic_acceptance([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]], "cpu")
    sampling = rows_of(SamplingParams(), 2)._replace(seed=torch.tensor([12, 7]))
    expected = [[1, 1, 1, 6], [5, -1, -1, -1]], [4, 1]
    position, verify = torch.zeros(2), torch.arange(8).view(2, 4)
    got = accept(logits, drafts, count, count, None, sampling, position)
    assert_emits(got, *expected)
    lines = logits.flatten(0, 1)
    assert_emits(accept(lines, drafts, count, count, None, sampling, position, verify), *expected)


def test_synthetic_rates() -> None:
    assert synthetic_rates(2.5, 3) == (1.0, 0.5, 0.0)
    assert synthetic_rates(4, 3) == (1.0, 1.0, 1.0)
    assert synthetic_rates(1.0, 0) == ()
    for wrong in (0.99, 4.01, math.nan):
        with pytest.raises(ValueError, match=r"mean_length is .*, must be in \[1, 4\]"):
            synthetic_rates(wrong, 3)
    with pytest.raises(ValueError, match="num_draft is -1, must be at least 0"):
        synthetic_rates(1.0, -1)
    with pytest.raises(ValueError, match=r"rates is \[0.5, 0.6\], must not increase"):
        synthetic_acceptance([[0.5, 0.6]], "cpu")
    for rates in ([1.2, 0.5], [0.5, -0.1], [math.nan]):
        with pytest.raises(ValueError, match="must be probabilities"):
            synthetic_acceptance([rates], "cpu")
