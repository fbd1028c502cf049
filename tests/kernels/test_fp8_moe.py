"""Routed experts in 8 bits: the reference against its formula in fp64, kernels against both."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hopper import compiled, spilled
from helpers.interpreter import INTERPRETED, kernels, plain
from helpers.interpreter_changes import round_to_nearest
from helpers.marks import cases
from torch import Tensor

from hybrid_runtime.kernels.linear.quantize import E4M3, LARGEST, quantize_lines_reference
from hybrid_runtime.kernels.moe import fused_moe as moe
from hybrid_runtime.kernels.moe.fused_moe import (
    MoETiling,
    fused_moe,
    fused_moe_reference,
    moe_tiling,
)
from hybrid_runtime.kernels.moe.scaled_experts import ScaledExperts

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SMALL = MoETiling(16, 64, 32, 4, 2)
if INTERPRETED:
    round_to_nearest()


@dataclass(frozen=True)
class Case:
    """One configuration; each below changes one thing of the base.

    each: a scale per output of a matrix, else per matrix. static: inputs' scales are known
    beforehand, else each line finds its own.
    """

    tokens: int = 7
    count: int = 8
    top_k: int = 2
    size: int = 48
    inner: int = 40
    each: bool = False
    static: bool = True
    dtype: torch.dtype = torch.float32
    chosen: str = "random"  # or "same": one choice for all tokens; "last": none of the first half
    gated: bool = False
    tiling: MoETiling | None = SMALL


BASE = Case()
SHAPES: dict[str, dict[str, Any]] = {
    "base": {},
    **{f"{n} tokens": {"tokens": n} for n in (0, 1, 3)},
    "40 tokens of one expert": {"tokens": 40, "top_k": 1, "chosen": "same"},
    "unused experts": {"chosen": "last"},
    "top 1": {"top_k": 1},
    "all experts": {"count": 3, "top_k": 3},
    "one expert": {"count": 1, "top_k": 1},
    "top 22": {"tokens": 2, "count": 30, "top_k": 22},
    "odd sizes": {"size": 37, "inner": 71},
    "whole tiles": {"size": 64, "inner": 64},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "wide tiles": {"tokens": 20, "tiling": MoETiling(32, 64, 64, 4, 2)},
    "default tiling": {"tiling": None},
}
FORMS: dict[str, dict[str, Any]] = {
    "tensor": {"each": False, "static": True},
    "lines": {"each": True, "static": False},
}
CASES = {
    **{
        f"{form}, {name}": replace(BASE, **given, **changes)
        for form, given in FORMS.items()
        for name, changes in SHAPES.items()
    },
    "matrix, token": replace(BASE, static=False),
    "output, static": replace(BASE, each=True),
    "gated": replace(BASE, each=True, static=False, gated=True),
    "gated, odd sizes": replace(BASE, each=True, gated=True, size=37, inner=35),
}
LARGE = {
    f"{form} {name} {tokens}": Case(
        tokens, *shape, **given, dtype=torch.bfloat16, tiling=None
    )
    for name, shape in (("nano", (128, 6, 2688, 1856)), ("super", (512, 22, 1024, 2688)))
    for form, given in FORMS.items()
    for tokens in (1, 4, 33, 300, 2000)
}  # fmt: skip


def choices(case: Case) -> Tensor:
    """Distinct experts of each token."""
    first = case.count // 2 if case.chosen == "last" else 0
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(case.tokens, case.count - first, generator=generator)
    if case.chosen == "same" and case.tokens:
        scores = scores[:1].expand_as(scores)
    return scores.argsort(dim=-1)[:, : case.top_k].contiguous().to(DEVICE) + first


def inputs(case: Case) -> dict[str, Any]:
    """Arguments of `fused_moe`: scales differ, and some inputs are cut off."""
    generator = torch.Generator(DEVICE).manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    def experts(outputs: int, size: int, input_scale: Tensor) -> ScaledExperts:
        found = ScaledExperts(
            torch.empty(case.count, outputs, size, dtype=E4M3, device=DEVICE),
            torch.empty((case.count, outputs) if case.each else case.count, device=DEVICE),
            input_scale if case.static else None,
        )
        for expert in range(case.count):
            weight = normal(outputs, size) * size**-0.5 * (1 + expert % 5)
            if case.each:
                values, scale = quantize_lines_reference(weight)
            else:
                scale = weight.abs().amax() / LARGEST
                values = (weight / scale).to(E4M3)
            found.values[expert], found.scale[expert] = values, scale
        return found

    x = normal(case.tokens, case.size)
    of_expert = torch.linspace(0.01, 0.09, case.count, device=DEVICE)
    return {
        "x": x.to(case.dtype),
        "topk_weights": torch.rand(case.tokens, case.top_k, generator=generator, device=DEVICE),
        "topk_ids": choices(case),
        "up": experts((1 + case.gated) * case.inner, case.size, torch.tensor(0.005, device=DEVICE)),
        "down": experts(case.size, case.inner, of_expert),
        "gated": case.gated,
    }


def meant(values: Tensor, scale: Tensor) -> Tensor:
    return values.double() * scale.double().reshape(-1, 1)


def rounded(x: Tensor, scale: Tensor | None) -> Tensor:
    """What is left of lines by 8 bits."""
    if scale is None:
        return meant(*quantize_lines_reference(x))
    return meant((x.float() * scale.reciprocal()).clamp(-LARGEST, LARGEST).to(E4M3), scale)


def formula(given: dict[str, Any]) -> Tensor:
    """Token by token, with matrices that are made of their scales first."""
    x, up, down = given["x"], given["up"], given["down"]
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, (weights, experts) in enumerate(
        zip(given["topk_weights"], given["topk_ids"].tolist(), strict=True)
    ):
        for weight, e in zip(weights.double(), experts, strict=True):
            line = rounded(x[token, None], up.input_scale)
            inner = line @ meant(up.values[e], up.scale[e]).T
            if given["gated"]:
                gate, inner = inner.chunk(2, -1)
                inner = gate * gate.sigmoid() * inner
            else:
                inner = inner.clamp(min=0).square()
            if down.input_scale is None:
                line = rounded(inner.to(x.dtype), None)
            else:
                line = rounded(inner, down.input_scale[e])
            total[token] += weight * (line @ meant(down.values[e], down.scale[e]).T)[0]
    return total


def close(found: Tensor, want: Tensor, case: Case) -> None:
    """fp32 sums in any order, which now and then round a number between the products to the other
    neighbour; on a GPU with the 14 bits that Hopper's units add numbers of 8 bits in."""
    assert found.shape == want.shape
    assert found.dtype == case.dtype
    bound = (8e-3 if found.is_cuda else 2e-4) + 2 * torch.finfo(case.dtype).eps
    assert (found.double() - want.double()).norm() <= bound * want.double().norm()


@plain
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference_is_the_formula(case: Case) -> None:
    given = inputs(case)
    close(fused_moe_reference(**given), formula(given), case)


@kernels
@pytest.mark.parametrize("case", cases(CASES, LARGE))
def test_fused_moe_in_8_bits(case: Case) -> None:
    given = inputs(case)
    found = fused_moe(**given, tiling=case.tiling)
    close(found, fused_moe_reference(**given), case)
    if case.tokens:
        assert found.double().norm() > 0


@kernels
@pytest.mark.parametrize("tokens", [5, 20])
def test_of_whole_numbers_nothing_is_lost(tokens: int) -> None:
    """Sums that fp32 holds are the formula's own; a GPU's have 14 bits."""
    case = Case(tokens, size=40, inner=33)
    given, generator = inputs(case), torch.Generator().manual_seed(1)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float().to(DEVICE)

    powers = torch.tensor([0.5, 1, 2, 4] * 2, device=DEVICE)
    given["x"] = whole(tokens, 40) * 0.25
    given["topk_weights"] = whole(tokens, 2)
    given["up"] = ScaledExperts(whole(8, 33, 40).to(E4M3), powers, powers[0] / 2)
    given["down"] = ScaledExperts(whole(8, 40, 33).to(E4M3), powers.flip(0), 4 * powers)
    want = formula(given)
    assert torch.equal(fused_moe_reference(**given).double(), want)
    found = fused_moe(**given, tiling=SMALL).double()
    assert (found - want).abs().max() <= (want.abs().max() * 2**-9 if GPU else 0)


@kernels
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_token_is_independent_of_its_company(form: dict[str, Any]) -> None:
    """Whatever the others are and however many; NaN stays NaN."""
    given = inputs(Case(tokens=21, chosen="same", **form))
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    per_token = {name: given[name][order] for name in ("x", "topk_weights", "topk_ids")}
    per_token["x"][3:, 5] = float("nan")
    for function in (fused_moe_reference, lambda **more: fused_moe(**more, tiling=SMALL)):
        y, other = function(**given), function(**(given | per_token))
        assert other[3:].isnan().all()
        torch.testing.assert_close(other[:3], y[order][:3], rtol=1e-5, atol=1e-5)


@plain
def test_wrong_scales_are_refused() -> None:
    given = inputs(BASE)
    up, down = given["up"], given["down"]
    for change, message in (
        ({"up": up._replace(scale=up.scale[:3])}, r"up's scale is \(3,\), must be \(8,\) or"),
        ({"down": down._replace(scale=torch.ones(()))}, r"down's scale is \(\), must be \(8,\)"),
        ({"up": up._replace(input_scale=torch.ones(8))}, r"up's input_scale is \(8,\), must"),
        ({"down": down._replace(input_scale=torch.ones(()))}, r"down's input_scale is \(\), must"),
        ({"up": up._replace(values=up.values.float())}, "up is torch.float32 and down"),
        ({"up": up.values}, "up is torch.float8_e4m3fn and down torch.float8_e4m3fn, must be x's"),
        ({"down": down.values.float()}, "up is torch.float8_e4m3fn and down torch.float32, must"),
    ):  # fmt: skip
        for function in (fused_moe_reference, fused_moe):
            with pytest.raises(ValueError, match=message):
                function(**(given | change))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 2000])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@torch.inference_mode()
def test_nobody_waits_and_a_graph_replays(tokens: int, form: dict[str, Any]) -> None:
    given = inputs(Case(tokens, 64, 6, 256, 192, dtype=torch.bfloat16, tiling=None, **form))
    fused_moe(**given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused_moe(**given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fused_moe(**given)
    for _ in range(3):
        given["x"].copy_(torch.randn_like(given["x"]))
        graph.replay()
        assert torch.equal(y, fused_moe(**given))


SIZES: dict[str, dict[str, Any]] = {
    "nano up": {"N": 1856, "K": 2688, "TOP_K": 6, "RELU2": True, "GATED": False},
    "nano down": {"N": 2688, "K": 1856, "TOP_K": 1, "RELU2": False, "GATED": False},
    "super up": {"N": 2688, "K": 1024, "TOP_K": 22, "RELU2": True, "GATED": False},
    "super down": {"N": 1024, "K": 2688, "TOP_K": 1, "RELU2": False, "GATED": False},
}


@plain
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("mean", [1, 16, 64, 200])
@pytest.mark.parametrize("static", [True, False], ids=["static", "lines"])
def test_expert_products_stream_8_bits(
    static: bool, mean: int, sizes: dict[str, Any], tmp_path: Path
) -> None:
    kernel, shape = moe._fused_moe_kernel, moe_tiling(mean * 128, 128, E4M3)
    constants = sizes | {
        "dot_type": None, "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n,
        "BLOCK_K": shape.block_k,
    }  # fmt: skip
    scales, quantised = ("x_scale", "weight_scale"), static and sizes["RELU2"]
    if not quantised:
        constants["out_scale"] = None
    out = "*bf16" if sizes["RELU2"] else "*fp32"
    types: dict[str, Any] = dict.fromkeys((*scales, "out_scale"), "*fp32") | {
        "x": "*fp8e4nv", "weight": "*fp8e4nv", "out": "*fp8e4nv" if quantised else out,
        "sorted_token_ids": "*i32", "blocks": "*i32", "x_stride": moe.LineStrides("i32", 1),
        "weight_stride": moe.WeightStrides("i32", "i32", 1),
        "x_scale_stride": moe.ScaleStrides("i32", "i32" if static else 1),
        "weight_scale_stride": moe.ScaleStrides("i32", "i32" if static else 1),
    }  # fmt: skip
    multiples = ("x", "weight", "out", "x_stride", "weight_stride", *scales)
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    code = compiled(kernel, constants, multiples, options, **types)
    text = code.asm["ptx"]
    assert spilled(code, tmp_path) == 0
    assert "wgmma.mma_async.sync.aligned.m64" in text
    assert "f32.e4m3.e4m3" in text
    assert "cp.async.cg.shared.global" in text
    assert "cp.async.ca" not in text
    assert code.metadata.shared <= 113 * 1024  # two programs on a multiprocessor
    if quantised:
        assert "cvt.rn.satfinite.e4m3x2.f32" in text
