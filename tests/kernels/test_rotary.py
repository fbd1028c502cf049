"""Norm and rotation of queries and keys: the reference against transformers' functions, the kernel
against the reference."""

from dataclasses import dataclass, replace

import pytest
import torch
from helpers.interpreter import kernels, plain
from helpers.marks import cases
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    apply_rotary_pos_emb,
)

from hybrid_runtime.kernels.attention.launch import AttentionRows
from hybrid_runtime.kernels.attention.rotary import (
    HeadNorm,
    Rotary,
    rotate_heads,
    rotate_heads_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """lengths, computed: of rows; the last tokens belong to none. gated: queries lie between
    gates."""

    heads: int = 3
    kv_heads: int = 2
    dim: int = 16
    size: int = 4
    dtype: torch.dtype = torch.float32
    normed: bool = True
    gated: bool = True
    lengths: tuple[int, ...] = (1, 0, 4)
    computed: tuple[int, ...] = (7, 3, 300)


BASE = Case()
SMALL = {
    "base": BASE,
    "whole heads": replace(BASE, size=16, normed=False, gated=False),
    "whole heads, normed": replace(BASE, size=16),
    "not normed": replace(BASE, normed=False),
    "odd sizes": replace(BASE, dim=20, size=6),
    "bf16": replace(BASE, dtype=torch.bfloat16),
    "fp16": replace(BASE, dtype=torch.float16),
    "fp64": replace(BASE, dtype=torch.float64),
    "no keys": replace(BASE, kv_heads=0),
    "no queries": replace(BASE, heads=0),
    "no tokens": replace(BASE, lengths=(), computed=()),
}
LARGE = {
    f"{dtype} {computed}": Case(
        16, 4, 256, 64, dtype, lengths=(4, 700), computed=(computed, 0)
    )
    for dtype in (torch.bfloat16, torch.float32)
    for computed in (100, 262144)
}  # fmt: skip


def inputs(case: Case) -> tuple[Tensor, Tensor, Rotary, AttentionRows, HeadNorm | None]:
    """Arguments of `rotate_heads`."""
    generator = torch.Generator().manual_seed(6)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(DEVICE, case.dtype)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    tokens = sum(case.lengths) + 2 * bool(case.lengths)
    q = normal(tokens, case.heads, 1 + case.gated, case.dim)[:, :, 0]
    k = normal(tokens, case.kv_heads + 1, case.dim)[:, 1:]
    starts = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
    rows = AttentionRows(ints(*range(len(case.lengths))), ints(*starts), ints(*case.computed))
    norm = HeadNorm(normal(case.dim), normal(case.dim), 1e-6) if case.normed else None
    return q, k, Rotary(case.size, 10000.0), rows, norm


@plain
@pytest.mark.parametrize("case", cases({n: c for n, c in SMALL.items() if c.lengths}, {}))
def test_the_reference_is_transformers_own(case: Case) -> None:
    q, k, rotary, rows, norm = inputs(replace(case, dtype=torch.float32))
    found = rotate_heads_reference(q, k, rotary, rows, norm)
    position = torch.cat(
        [torch.arange(n) + c for n, c in zip(case.lengths, case.computed, strict=True)]
    )
    frequencies = 1.0 / rotary.theta ** (torch.arange(0, case.size, 2).float() / case.size)
    angle = torch.cat([position[:, None].float() * frequencies] * 2, -1)[None].to(q.device)
    normed = [q, k]
    for i, weight in enumerate(() if norm is None else (norm.q, norm.k)):
        theirs = Qwen3NextRMSNorm(case.dim)
        theirs.weight.data = weight
        normed[i] = theirs(normed[i])
    owned = len(position)
    want = apply_rotary_pos_emb(
        *(x[None, :owned].transpose(1, 2) for x in normed), angle.cos(), angle.sin()
    )
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours[:owned], theirs[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.parametrize("case", cases(SMALL, LARGE))
def test_kernel(case: Case) -> None:
    given = inputs(case)
    owned = sum(case.lengths)
    for x, got, want in zip(
        given[:2], rotate_heads(*given), rotate_heads_reference(*given), strict=True
    ):
        assert got.shape == x.shape
        assert got.dtype == case.dtype
        bound = TOLERANCE[case.dtype]
        torch.testing.assert_close(got[:owned], want[:owned], rtol=bound, atol=bound)
