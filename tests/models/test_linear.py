"""Weight matrices: products in halves add up, and are left whole where halves are no use; merged
projections are the projections, and what is loaded into one of them is in the matrix."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid_runtime.models.formats import MAX_TOKENS
from hybrid_runtime.models.linear import (
    Embedding,
    Experts,
    Linear,
    MergedLinear,
    checkpoint_tensors,
)


def operands(tokens: int, device: str, bias: bool = False) -> tuple[Linear, Tensor]:
    generator = torch.Generator(device).manual_seed(2)
    linear = Linear(512, 96, device, torch.bfloat16, bias, halves=True)
    for part in linear.parameters():
        part.data.normal_(std=0.05, generator=generator)
    return linear, torch.randn(tokens, 512, generator=generator, device=device).bfloat16()


def largest_error(linear: Linear, x: Tensor, parts: int) -> Tensor:
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
    y = linear(x)
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

    def within(halves: Tensor) -> bool:
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
    torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias), rtol=0, atol=0)
    narrow = Linear(40, 96, "cuda", torch.bfloat16, halves=True)
    assert narrow(x[:, :40]).shape == (7, 96)


def test_a_cpu_takes_one_product() -> None:
    linear, x = operands(7, "cpu")
    torch.testing.assert_close(linear(x), F.linear(x, linear.weight), rtol=0, atol=0)


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.merged = MergedLinear(8, {"q": 6, "k": 4, "v": 2}, "cpu", torch.float64)
        self.q, self.k, self.v = self.merged.parts.values()


@pytest.mark.parametrize("names", [(), ("q", "k", "v"), ("k", "v"), ("q", "k"), ("v",)])
def test_merged_projections_are_the_projections(names: tuple[str, ...]) -> None:
    module, x = Projections(), torch.randn(5, 8, dtype=torch.float64)
    for seed, tensor in enumerate(checkpoint_tensors(module).values()):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    found = module.merged(x, *names)
    for name, y in zip(names or ("q", "k", "v"), found, strict=True):
        torch.testing.assert_close(y, x @ getattr(module, name).weight.T)


def test_merged_projections_have_names_of_their_own() -> None:
    shapes = {"q.weight": (6, 8), "k.weight": (4, 8), "v.weight": (2, 8)}
    assert {n: tuple(t.shape) for n, t in Projections().state_dict().items()} == shapes
    parts = Projections().merged.parts.values()
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1


@pytest.mark.parametrize("names", [("q", "v"), ("v", "k"), ("k", "v", "q")])
def test_only_neighbours_share_a_product(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be side by side in \['q', 'k', 'v'\]"):
        Projections().merged(torch.zeros(1, 8, dtype=torch.float64), *names)


def test_an_embedding_looks_up_and_gives_logits() -> None:
    table = Embedding(3, 5, "cpu", torch.float32)
    table.weight.data.copy_(torch.arange(15.0).view(5, 3))
    assert table.lookup(torch.tensor([4, 0])).tolist() == [[12, 13, 14], [0, 1, 2]]
    assert table(torch.tensor([[0.0, 1.0, 0.0]])).tolist() == [[1, 4, 7, 10, 13]]


def test_each_expert_has_its_tensors_in_a_checkpoint() -> None:
    module = nn.Module()
    module.experts = experts = Experts(2, 3, 4, "cpu", torch.float32)
    tensors = checkpoint_tensors(module)
    assert tensors.keys() == {
        f"experts.{i}.{name}_proj.weight" for i in range(2) for name in ("up", "down")
    }
    tensors["experts.1.up_proj.weight"].fill_(7)
    assert bool((experts.up_proj.weight[1] == 7).all())
