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


def largest_error(linear: nn.Linear, x: torch.Tensor, parts: int) -> torch.Tensor:
    """Bound of |sum of the parts - exact product|, `[T, out]`; parts are equal shares of the depth.

    Products of two bf16 numbers are exact in fp32. Each of the `depth` fp32 additions of a part
    errs by at most eps(fp32) times the largest partial sum (tensor cores cut off, so eps and not
    eps / 2), and no partial sum exceeds sum |x w|. The part is then rounded to bf16 once, by at
    most eps(bf16) / 2 of its value. The parts themselves are added up exactly here.
    """
    depth = x.shape[1] // parts
    lines = x.double().unflatten(1, (parts, depth)).transpose(0, 1)
    weight = linear.weight.double().unflatten(1, (parts, depth)).permute(1, 2, 0)
    added = depth * torch.finfo(torch.float32).eps * (lines.abs() @ weight.abs())
    rounded = torch.finfo(x.dtype).eps / 2 * ((lines @ weight).abs() + added)
    return (added + rounded).sum(0)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, MAX_TOKENS, MAX_TOKENS + 1])
def test_halves_add_up(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # cuBLAS may divide the depth further, and would round each of its shares to bf16.
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(matmul, "allow_bf16_reduced_precision_reduction", False)
    linear, x = operands(tokens, "cuda")
    y = in_halves(linear, x)
    parts = 2 if tokens <= MAX_TOKENS else 1
    assert y.shape == ((2, tokens, 96) if parts == 2 else (tokens, 96))
    total = y.double().sum(0) if y.dim() == 3 else y.double()
    error = (total - x.double() @ linear.weight.double().T).abs()
    assert bool((error <= largest_error(linear, x, parts)).all())


def test_the_bound_of_the_error_is_tight() -> None:
    """Rounded halves computed in fp32 keep it; a hundredth of the weight's last half missing, or
    values rounded twice as coarsely, do not."""
    linear, x = operands(MAX_TOKENS, "cpu")
    lines, weight = x.float().unflatten(1, (2, -1)), linear.weight.float().unflatten(1, (2, -1))
    want = x.double() @ linear.weight.double().T
    bound = largest_error(linear, x, 2)

    def within(halves: torch.Tensor) -> bool:
        return bool(((halves.double().sum(0) - want).abs() <= bound).all())

    halves = torch.einsum("tpk,npk->ptn", lines, weight)
    assert within(halves.bfloat16())
    coarse = (halves.view(torch.int32) + (1 << 16)) & ~((1 << 17) - 1)  # 6 bits instead of 7
    assert not within(coarse.view(torch.float32))
    halves[1] *= 0.99
    assert not within(halves.bfloat16())


@pytest.mark.gpu
def test_a_bias_or_a_narrow_input_leaves_the_product_whole() -> None:
    linear, x = operands(7, "cuda", bias=True)
    torch.testing.assert_close(in_halves(linear, x), linear(x), rtol=0, atol=0)
    narrow = nn.Linear(40, 96, bias=False, device="cuda", dtype=torch.bfloat16)
    assert in_halves(narrow, x[:, :40]).shape == (7, 96)


def test_a_cpu_takes_one_product() -> None:
    linear, x = operands(7, "cpu")
    torch.testing.assert_close(in_halves(linear, x), linear(x), rtol=0, atol=0)
