"""Products in halves: their sum is the product, and they are left whole where halves are no use."""

import pytest
import torch
from torch import nn

from hybrid_runtime.models.products import MAX_TOKENS, in_halves


def operands(tokens: int, device: str, bias: bool = False) -> tuple[nn.Linear, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(2)
    linear = nn.Linear(512, 96, bias=bias, device=device, dtype=torch.bfloat16)
    for part in linear.parameters():
        part.data.normal_(std=0.05, generator=generator)
    return linear, torch.randn(tokens, 512, generator=generator, device=device).bfloat16()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, MAX_TOKENS, MAX_TOKENS + 1])
def test_halves_add_up(tokens: int) -> None:
    linear, x = operands(tokens, "cuda")
    y = in_halves(linear, x)
    assert y.shape == ((2, tokens, 96) if tokens <= MAX_TOKENS else (tokens, 96))
    total = y.double().sum(0) if y.dim() == 3 else y.double()
    torch.testing.assert_close(total, x.double() @ linear.weight.double().T, rtol=0, atol=1e-2)


@pytest.mark.gpu
def test_a_bias_or_a_narrow_input_leaves_the_product_whole() -> None:
    linear, x = operands(7, "cuda", bias=True)
    torch.testing.assert_close(in_halves(linear, x), linear(x), rtol=0, atol=0)
    narrow = nn.Linear(40, 96, bias=False, device="cuda", dtype=torch.bfloat16)
    assert in_halves(narrow, x[:, :40]).shape == (7, 96)


def test_a_cpu_takes_one_product() -> None:
    linear, x = operands(7, "cpu")
    torch.testing.assert_close(in_halves(linear, x), linear(x), rtol=0, atol=0)
