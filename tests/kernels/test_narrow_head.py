"""Tokens found by an output head in 8 bits, against the reference and the full product."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hopper import compiled, spilled
from helpers.interpreter import INTERPRETED, kernels, plain
from helpers.interpreter_changes import round_to_nearest
from torch import Tensor

from hybrid_runtime.kernels.sampling import narrow_head
from hybrid_runtime.kernels.sampling.narrow_head import (
    CANDIDATES,
    PART,
    head_tiling,
    narrow,
    narrow_argmax,
    narrow_argmax_reference,
    narrow_bytes,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if INTERPRETED:
    round_to_nearest()


def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).to(DEVICE, dtype)


def by_kernel(hidden: Tensor, weight: Tensor) -> Tensor:
    out = torch.full((len(hidden), 2), -1, dtype=torch.int32, device=DEVICE)
    assert narrow_argmax(hidden, narrow(weight), out[:, 1]) is not None
    assert (out[:, 0] == -1).all()
    return out[:, 1]


def by_reference(hidden: Tensor, weight: Tensor) -> Tensor:
    out = torch.full((len(hidden),), -1, dtype=torch.int32, device=hidden.device)
    return narrow_argmax_reference(hidden, narrow(weight), out)


def either(hidden: Tensor, weight: Tensor) -> list[int]:
    """What kernel and reference both find."""
    found = by_kernel(hidden, weight)
    assert torch.equal(found, by_reference(hidden, weight))
    return [int(token) for token in found]


def full_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden.float() @ weight.float().T).to(weight.dtype).float()


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lines", "vocabulary", "size"),
    [(1, 256, 128), (3, 37, 64), (5, 1000, 100), (17, 300, 272), (33, 640, 64), (130, 259, 64)],
)
def test_finds_the_best_token(lines: int, vocabulary: int, size: int, dtype: torch.dtype) -> None:
    hidden = normal(lines, size + 8, dtype=dtype)[:, :size]
    hidden[:, 3] *= 10
    hidden *= torch.logspace(-3, 1, lines, device=DEVICE)[:, None]
    weight = normal(vocabulary + PART, size, dtype=dtype, seed=1)
    weight[vocabulary:] = 20 * hidden[-1] / hidden[-1].norm()  # which is no part of it
    weight = weight[:vocabulary]
    logits = full_logits(hidden, weight)
    best = logits.amax(-1)
    rounding = best.abs() * 2**-7  # sums in another order may round to another neighbour
    for found in (by_kernel(hidden, weight), by_reference(hidden, weight)):
        assert (logits.gather(1, found.long()[:, None])[:, 0] >= best - rounding).all()


def misleading(winner: int, decoys: list[int], vocabulary: int) -> tuple[Tensor, Tensor]:
    """Hidden states and a weight whose token `winner` has the largest logit, but the decoys have
    larger ones in 8 bits."""
    weight = torch.zeros(vocabulary, 64)
    weight[:, 0] = narrow_head.LARGEST  # a scale of 1
    # In 8 bits 1, 1 and 1.125; what is lost is more than what the last channel gains.
    weight[winner, 1:] = 1 + 7 / 128
    for decoy in decoys:
        weight[decoy, 1:-1], weight[decoy, -1] = 1.0, 1.125
    hidden = torch.ones(1, 64)
    hidden[:, 0] = 0
    return hidden.to(DEVICE, torch.bfloat16), weight.to(DEVICE, torch.bfloat16)


@kernels
@pytest.mark.parametrize(
    ("winner", "decoys"),
    [
        (7, [3]),
        (3, [7]),
        (200, [3]),
        (255, [250]),
        (300, [299]),
        (299, [300]),
        (5, [PART * i for i in range(1, CANDIDATES)]),
    ],
)
def test_what_8_bits_mistake_is_scored_in_full(winner: int, decoys: list[int]) -> None:
    hidden, weight = misleading(winner, decoys, 301 if len(decoys) == 1 else PART * CANDIDATES)
    _, values, scale = narrow(weight)
    in_8_bits = values.float() @ hidden[0].float() * scale
    assert in_8_bits[winner] < in_8_bits[decoys].min()
    assert either(hidden, weight) == [winner]


@kernels
@pytest.mark.parametrize("equals", [[4, 9, 11], [40, 200], [128, 130, 299]])
def test_the_lowest_of_equals(equals: list[int]) -> None:
    weight = normal(300, 64)
    weight[equals] = weight[equals[0]].clone()
    hidden = weight[equals[:1]]
    assert either(hidden, weight) == equals[:1]


@kernels
def test_equal_once_rounded() -> None:
    hidden = torch.ones(1, 64, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.ones(300, 64, device=DEVICE, dtype=torch.bfloat16)
    weight[200:, 0] = 1 + 1 / 128  # 64.0078 and 64 are the same in bfloat16
    assert either(hidden, weight)[0] < 200


@kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0, 3e38])
def test_any_hidden_state_gives_a_token(value: float) -> None:
    hidden, weight = normal(4, 64), normal(300, 64, seed=1)
    plain = by_kernel(hidden, weight)
    hidden[1], hidden[2, 7] = value, value
    found = by_kernel(hidden, weight)
    assert ((found >= 0) & (found < 300)).all()
    other = by_reference(hidden, weight)
    assert ((other >= 0) & (other < 300)).all()
    assert torch.equal(found[[0, 3]], plain[[0, 3]])  # other lines do not see it
    broken = weight.clone()
    broken[299] = value
    found = by_kernel(hidden, broken)
    assert ((found >= 0) & (found < 300)).all()


@kernels
@pytest.mark.parametrize("tiny", [0.0, 1e-39, 1e-33])
def test_tokens_that_training_never_met(tiny: float) -> None:
    weight = normal(PART * (CANDIDATES + 1), 64)
    weight[: PART * CANDIDATES] *= tiny
    hidden = normal(4, 64, seed=1)
    best = full_logits(hidden, weight).argmax(-1).tolist()
    assert min(best) >= PART * CANDIDATES
    assert either(hidden, weight) == best
    assert narrow(weight).values.float().isfinite().all()  # a GPU takes NaN for the largest


@kernels
def test_no_lines() -> None:
    assert by_kernel(normal(0, 64), normal(300, 64)).tolist() == []


@plain
def test_a_weight_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(300, 64) * torch.logspace(-6, 3, 300, device=DEVICE)[:, None]
    weight[7] = 0
    _, values, scale = narrow(weight)
    assert narrow_bytes(weight) == values.nbytes + scale.nbytes
    near = values.float() * scale[:, None]
    largest = weight.abs().amax(-1, keepdim=True).float()
    # Half a step of 3 bits; of the smallest numbers half of theirs.
    allowed = torch.maximum(weight.float().abs() / 16, largest / narrow_head.LARGEST * 2**-10)
    assert ((near - weight.float()).abs() <= allowed * 1.001).all()
    assert not near[7].any()
    monkeypatch.setattr(narrow_head, "_AT_ONCE", 128)
    for whole, in_pieces in zip((values, scale), narrow(weight)[1:], strict=True):
        assert torch.equal(whole.float(), in_pieces.float())


PRODUCT: dict[str, Any] = {"V": 131072, "PARTS": 1024}
TYPES = {
    "hidden": "*fp8e4nv", "values": "*fp8e4nv", "scale": "*fp32", "keys": "*i32", "lines": "i32",
}  # fmt: skip


@plain
@pytest.mark.parametrize("lines", [1, 32, 64, 80])
@pytest.mark.parametrize("size", [2688, 4096, 4480])
def test_the_product_streams_8_bits(lines: int, size: int, tmp_path: Path) -> None:
    kernel = narrow_head._propose_kernel
    shape = head_tiling(lines)
    constants = PRODUCT | {"H": size, "BLOCK_M": shape.block_m, "BLOCK_K": shape.block_k}
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    aligned = ("hidden", "values", "scale", "keys")
    code = compiled(kernel, constants, aligned, options, **TYPES)
    text = code.asm["ptx"]
    assert spilled(code, tmp_path) == 0
    assert "wgmma.mma_async.sync.aligned.m64" in text
    assert "f32.e4m3.e4m3" in text
    assert "cp.async.cg.shared.global" in text
    assert "cp.async.ca" not in text
    assert code.metadata.shared <= 99 * 1024  # Ada has less than Hopper


@plain
@pytest.mark.parametrize("size", [2688, 4096, 4480])
def test_what_surrounds_the_product(size: int, tmp_path: Path) -> None:
    kernel = narrow_head._best_kernel
    best = PRODUCT | {"H": size, "WIDTH": 2048, "CANDIDATES": CANDIDATES, "BLOCK_K": 1024}
    types = {"hidden": "*bf16", "weight": "*bf16", "keys": "*i32", "out": "*i32"}
    aligned = ("hidden", "weight", "keys", "stride")
    code = compiled(kernel, best, aligned, {"num_warps": 8}, **types)
    assert spilled(code, tmp_path) == 0
    assert "ld.global.v4" in code.asm["ptx"]
    kernel, types = narrow_head._round_kernel, {"hidden": "*bf16", "values": "*fp8e4nv"}
    rounding = {"H": size, "BLOCK": 4096 if size <= 4096 else 8192}
    code = compiled(kernel, rounding, ("hidden", "values", "stride"), {"num_warps": 8}, **types)
    assert spilled(code, tmp_path) == 0
    assert "cvt.rn.satfinite.e4m3x2.f32" in code.asm["ptx"]
