"""Norm and embedding kernels against their references, and norms against formulas written out in
fp64."""

from dataclasses import dataclass, replace

import pytest
import torch
from helpers.interpreter import kernels
from helpers.marks import cases
from torch import Tensor

from hybrid_runtime.kernels.layers.embedding import embedding, embedding_reference
from hybrid_runtime.kernels.layers.norm import (
    add_rms_norm,
    add_rms_norm_reference,
    gated_rms_norm,
    gated_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from hybrid_runtime.models.norm import GatedRMSNorm, RMSNorm

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...] = (5, 96)
    groups: int = 4
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    strided: bool = False


BASE = Case()
SMALL = {
    "base": BASE,
    "bf16": replace(BASE, dtype=torch.bfloat16),
    "fp16": replace(BASE, dtype=torch.float16),
    "fp64": replace(BASE, dtype=torch.float64),
    "bf16 weight": replace(BASE, weight_dtype=torch.bfloat16),
    "fp32 weight": replace(BASE, dtype=torch.bfloat16, weight_dtype=torch.float32),
    "1 group": replace(BASE, groups=1),
    "power of two": replace(BASE, shape=(3, 128), groups=8),
    "no tokens": replace(BASE, shape=(0, 96)),
    "3 dimensions": replace(BASE, shape=(2, 3, 96)),
    "1 dimension": replace(BASE, shape=(96,)),
    "strided": replace(BASE, strided=True),
}
LARGE = {
    f"{shape} {dtype}": Case(shape, 8, dtype, strided=True)
    for shape in ((256, 2688), (256, 4480), (64, 10240), (1, 8192))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """x, another of its shape, a weight."""
    generator = torch.Generator().manual_seed(3)
    size = case.shape[-1]

    def values() -> Tensor:
        shape = (*case.shape[:-1], size + (64 if case.strided else 0))
        x = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(case.dtype).to(DEVICE)[..., :size]

    weight = torch.randn(size, generator=generator, dtype=torch.float64)
    return values(), values(), weight.to(case.weight_dtype or case.dtype).to(DEVICE)


def check(y: Tensor, reference: Tensor, want: Tensor, case: Case) -> None:
    assert y.dtype == reference.dtype == (case.weight_dtype or case.dtype)
    assert y.shape == reference.shape == case.shape
    tolerance = max(TOLERANCE[case.dtype], TOLERANCE[y.dtype])
    torch.testing.assert_close(reference.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance)


def norm(x: Tensor, weight: Tensor, groups: int) -> Tensor:
    parts = [
        part / (part.square().mean(-1, keepdim=True) + EPS).sqrt() for part in x.chunk(groups, -1)
    ]
    return torch.cat(parts, -1) * weight.double()


@kernels
@pytest.mark.parametrize("case", cases(SMALL, LARGE))
def test_norms(case: Case) -> None:
    x, other, weight = inputs(case)
    y = rms_norm(x, weight, EPS)
    check(y, rms_norm_reference(x, weight, EPS), norm(x.double(), weight, 1), case)

    y, total = add_rms_norm(x, other, weight, EPS)
    reference, total_reference = add_rms_norm_reference(x, other, weight, EPS)
    # The interpreter cuts fp32 off to bf16, where everybody else rounds.
    inexact = not GPU and case.dtype == torch.bfloat16
    torch.testing.assert_close(total, total_reference, rtol=8e-3 if inexact else 0, atol=0)
    assert total.dtype == case.dtype
    check(y, reference, norm(total.double(), weight, 1), case)

    parts = torch.stack([x, other, x])  # and dense, which x need not be
    y, total = add_rms_norm(parts, other, weight, EPS)
    reference, total_reference = add_rms_norm_reference(parts, other, weight, EPS)
    torch.testing.assert_close(total, total_reference, rtol=8e-3 if inexact else 0, atol=0)
    want = (2 * x.double() + 2 * other.double()).to(case.dtype)
    rounding = TOLERANCE[case.dtype]
    torch.testing.assert_close(total_reference, want, rtol=rounding, atol=rounding)
    assert total.dtype == case.dtype
    assert total.shape == case.shape
    check(y, reference, norm(total.double(), weight, 1), case)

    around_1 = (1 + weight.double()).to(torch.float64)
    y, _ = add_rms_norm(x, other, weight, EPS, centred=True)
    reference, total = add_rms_norm_reference(x, other, weight, EPS, centred=True)
    check(y, reference, norm(total.double(), around_1, 1), case)
    y, reference = (f(x, weight, EPS, centred=True) for f in (rms_norm, rms_norm_reference))
    check(y, reference, norm(x.double(), around_1, 1), case)

    factor = other.double() * other.double().sigmoid()
    one = weight[: weight.shape[0] // case.groups]
    want = norm(x.double(), one.repeat(case.groups), case.groups) * factor
    y = gated_rms_norm(x, other, one, case.groups, EPS, norm_first=True)
    reference = gated_rms_norm_reference(x, other, one, case.groups, EPS, norm_first=True)
    check(y, reference, want, case)

    gated = x.double() * factor
    want = norm(gated, weight, case.groups)
    y = gated_rms_norm(x, other, weight, case.groups, EPS)
    check(y, gated_rms_norm_reference(x, other, weight, case.groups, EPS), want, case)


@kernels
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_side_by_side(dtype: torch.dtype) -> None:
    x, other, weight = inputs(replace(BASE, dtype=dtype, strided=True))
    both = torch.full((5, 2 * 96), -7.0, dtype=dtype, device=DEVICE)
    left, right = both.chunk(2, -1)
    assert rms_norm(x, weight, EPS, out=left) is left
    assert (right == -7).all()
    rms_norm(other, weight, EPS, out=right)
    assert torch.equal(both, torch.cat([rms_norm(y, weight, EPS) for y in (x, other)], -1))
    rms_norm_reference(x, weight, EPS, out=right)
    assert torch.equal(right, rms_norm_reference(x, weight, EPS))
    for wrong in (both, left[:4], left.to(torch.float16), both.T.contiguous().T[:, :96]):
        with pytest.raises(ValueError, match="out is"):
            rms_norm(x, weight, EPS, out=wrong)


@kernels
def test_extreme_gates_and_zeros() -> None:
    gate = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 3e4, -3e4, 1.0, 0.0]], device=DEVICE)
    weight = torch.ones(8, device=DEVICE)
    for x in (torch.ones_like(gate), torch.zeros_like(gate)):
        y = gated_rms_norm(x, gate, weight, 2, EPS)
        torch.testing.assert_close(y, gated_rms_norm_reference(x, gate, weight, 2, EPS))


@kernels
def test_modules_and_wrong_shapes() -> None:
    x, gate, weight = inputs(BASE)
    plain = RMSNorm(96, EPS, DEVICE, torch.float32)
    gated = GatedRMSNorm(96, 4, EPS, DEVICE, torch.float32)
    with torch.inference_mode():
        plain.weight.copy_(weight)
        gated.weight.copy_(weight)
        assert torch.equal(plain(x), rms_norm(x, weight, EPS))
        assert torch.equal(gated(x, gate), gated_rms_norm(x, gate, weight, 4, EPS))
    with pytest.raises(ValueError, match="gate is"):
        gated_rms_norm(x, gate[:, :8], weight, 4, EPS)
    with pytest.raises(ValueError, match="residual is"):
        add_rms_norm(x, gate[:4], weight, EPS)
    with pytest.raises(ValueError, match="multiple of 5 groups"):
        gated_rms_norm(x, gate, weight, 5, EPS)
    with pytest.raises(ValueError, match="weight is"):
        rms_norm(x, weight[:8], EPS)
    with pytest.raises(ValueError, match=r"weight is \(96,\) for lines of 96, must be \[24\]"):
        gated_rms_norm(x, gate, weight, 4, EPS, norm_first=True)


@kernels
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (0,)])
def test_embedding(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(5)
    wide = torch.randn(11, 1300, generator=generator).to(torch.bfloat16).to(DEVICE)
    tokens = torch.randint(0, 11, shape, generator=generator).to(DEVICE, dtype)
    for weight in (wide, wide[:, :1100], wide[:, :96].float(), wide[:, ::2]):
        y = embedding(tokens, weight)
        torch.testing.assert_close(y, embedding_reference(tokens, weight), rtol=0, atol=0)
        assert y.is_contiguous()


@kernels
def test_embedding_of_a_token_outside_the_table() -> None:
    weight = torch.ones(4, 8, device=DEVICE)
    y = embedding(torch.tensor([4, -1, 2], device=DEVICE), weight)
    assert y.sum(1).tolist() == [0, 0, 8]
