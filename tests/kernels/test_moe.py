"""Routed experts and what lies between products: kernels against their references and formulas in
fp64."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.interpreter import kernels, plain
from helpers.marks import cases
from torch import Tensor

from hybrid_runtime.kernels.layers.activation import (
    relu2,
    relu2_reference,
    sigmoid_gate,
    sigmoid_gate_reference,
    swiglu,
    swiglu_reference,
)
from hybrid_runtime.kernels.moe import align_block_size as align
from hybrid_runtime.kernels.moe.align_block_size import (
    align_block_size,
    align_block_size_reference,
    max_blocks,
)
from hybrid_runtime.kernels.moe.fused_moe import (
    MoETiling,
    fused_moe,
    fused_moe_reference,
    moe_tiling,
)
from hybrid_runtime.kernels.moe.topk import topk, topk_reference
from hybrid_runtime.models.nemotron_h import moe
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
SMALL = MoETiling(16, 32, 32, 4, 2)
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Case:
    """One configuration; each below changes one thing of the base."""

    tokens: int = 7
    count: int = 8
    top_k: int = 2
    size: int = 48
    inner: int = 40
    dtype: torch.dtype = torch.float32
    chosen: str = "random"  # or "same": one choice for all tokens; "last": none of the first half
    strided: bool = False
    gated: bool = False
    tiling: MoETiling | None = SMALL


BASE = Case()
CASES = {
    "base": BASE,
    "bf16": replace(BASE, dtype=torch.bfloat16),
    "fp16": replace(BASE, dtype=torch.float16),
    "fp64": replace(BASE, dtype=torch.float64),
    **{f"{n} tokens": replace(BASE, tokens=n) for n in (0, 1, 3, 40)},
    "same expert": replace(BASE, tokens=40, top_k=1, chosen="same"),
    "same experts": replace(BASE, tokens=40, chosen="same"),
    "unused experts": replace(BASE, chosen="last"),
    "top 1": replace(BASE, top_k=1),
    "top 6": replace(BASE, top_k=6),
    "top 22": replace(BASE, tokens=3, count=30, top_k=22),
    "all experts": replace(BASE, count=3, top_k=3),
    "one expert": replace(BASE, count=1, top_k=1),
    "odd sizes": replace(BASE, size=37, inner=71),
    "whole tiles": replace(BASE, size=64, inner=32),
    "strided": replace(BASE, strided=True),
    "gated": replace(BASE, gated=True),
    "gated, few": replace(BASE, tokens=2, gated=True, inner=33, strided=True),
    "gated, bf16": replace(BASE, tokens=40, dtype=torch.bfloat16, gated=True, inner=64, size=64),
    "gated, default tiling": replace(BASE, gated=True, tiling=None),
    "tiles of 32": replace(BASE, tokens=40, tiling=MoETiling(32, 16, 64, 4, 2)),
    "default tiling": replace(BASE, tiling=None),
    "default tiling, many": replace(BASE, tokens=40, top_k=6, tiling=None),
}
LARGE = {
    f"{name} {dtype} {tokens}": Case(tokens, *shape, dtype, tiling=None)
    for name, shape in (("nano", (128, 6, 2688, 1856)), ("super", (512, 22, 1024, 2688)))
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for tokens in (1, 4, 33, 700)
    if dtype == torch.bfloat16 or name == "nano"
} | {
    f"35b {tokens}": Case(tokens, 256, 8, 2048, 512, torch.bfloat16, gated=True, tiling=None)
    for tokens in (1, 4, 33, 700)
}


def choices(case: Case, generator: torch.Generator) -> Tensor:
    """Distinct experts of each token."""
    first = case.count // 2 if case.chosen == "last" else 0
    scores = torch.rand(case.tokens, case.count - first, generator=generator)
    if case.chosen == "same" and case.tokens:
        scores = scores[:1].expand_as(scores)
    return scores.argsort(dim=-1)[:, : case.top_k].contiguous().to(DEVICE) + first


def inputs(case: Case) -> dict[str, Any]:
    """Arguments of `fused_moe`."""
    generator = torch.Generator().manual_seed(3)
    on_device = torch.Generator(DEVICE).manual_seed(3)

    def matrices(lines: int, size: int, pad: int) -> Tensor:
        shape = (case.count, lines, size + pad)
        dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
        values = torch.randn(shape, generator=on_device, device=DEVICE, dtype=dtype)
        return values.mul_(size**-0.5).to(case.dtype)[..., :size]

    pad = 8 if case.strided else 0
    x = torch.randn(case.tokens, case.size + pad, generator=generator, dtype=torch.float64)
    weights = torch.rand(case.top_k, case.tokens, generator=generator, dtype=torch.float64).T
    fine = torch.promote_types(case.dtype, torch.float32)
    return {
        "x": x.to(DEVICE, case.dtype)[:, : case.size],
        "topk_weights": (weights if case.strided else weights.contiguous()).to(DEVICE, fine),
        "topk_ids": choices(case, generator),
        "up": matrices((1 + case.gated) * case.inner, case.size, pad),
        "down": matrices(case.size, case.inner, pad),
        "gated": case.gated,
    }


def exact(given: dict[str, Any], fine: torch.dtype = torch.float64) -> Tensor:
    """The formula, expert by expert."""
    x = given["x"].to(fine)
    total = torch.zeros_like(x)
    for e in given["topk_ids"].unique().tolist():
        token, choice = (given["topk_ids"] == e).nonzero(as_tuple=True)
        inner = x[token] @ given["up"][e].to(fine).T
        if given["gated"]:
            gate, up = inner.chunk(2, -1)
            inner = gate * gate.sigmoid() * up
        else:
            inner = inner.clamp(min=0) ** 2
        outputs = inner @ given["down"][e].to(fine).T
        total.index_add_(0, token, outputs * given["topk_weights"][token, choice].to(fine)[:, None])
    return total


@plain
@pytest.mark.parametrize("case", cases(CASES, {}))
def test_fused_moe_reference(case: Case) -> None:
    given = inputs(case)
    y = fused_moe_reference(**given)
    assert y.dtype == case.dtype
    check(y, exact(given), case.dtype)


@kernels
@pytest.mark.parametrize("case", cases(CASES, LARGE))
def test_fused_moe(case: Case) -> None:
    given = inputs(case)
    y = fused_moe(**given, tiling=case.tiling)
    assert y.dtype == case.dtype
    check(y, exact(given), case.dtype)


def check(y: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert y.shape == want.shape
    if want.numel():
        error = (y.double() - want.double()).abs().max() / want.abs().max()
        assert error <= TOLERANCE[dtype]


@kernels
def test_a_token_is_independent_of_its_company() -> None:
    """Whatever the others are (NaN included) and however many, in whichever order."""
    given = inputs(replace(BASE, tokens=21, chosen="same"))
    y = fused_moe(**given, tiling=SMALL)
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    per_token = {name: given[name][order] for name in ("x", "topk_weights", "topk_ids")}
    per_token["x"][3:] = float("nan")
    other = fused_moe(**(given | per_token), tiling=SMALL)
    assert other[3:].isnan().all()
    torch.testing.assert_close(other[:3], y[order][:3], rtol=0 if GPU else 1e-6, atol=1e-6)


ALIGNMENTS = {
    "one token": (1, 1, 8),
    "decode": (4, 6, 128),
    "most blocks": (8, 1, 8),
    "many": (150, 3, 5),
    "few experts": (90, 1, 1),
    "experts beyond a power of two": (11, 9, 65),
}


@kernels
@pytest.mark.parametrize("ranked", [True, False])
@pytest.mark.parametrize("shape", cases(ALIGNMENTS, {"super": (256, 22, 512)}))
def test_align_block_size(
    shape: tuple[int, ...], ranked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not ranked:
        monkeypatch.setattr(align, "MAX_RANKED", 0)
    tokens, top_k, count = shape
    for chosen in ("random", "same", "last") if count > 2 * top_k else ("random", "same"):
        case = Case(tokens, count, top_k, chosen=chosen)
        topk_ids = choices(case, torch.Generator().manual_seed(tokens))
        for block_size in (16, 64):
            sorted_token_ids, blocks = align_block_size(topk_ids, count, block_size)
            want = align_block_size_reference(topk_ids, count, block_size)
            assert blocks.shape == (3, max_blocks(topk_ids.numel(), count, block_size))
            assert sorted_token_ids.dtype == blocks.dtype == torch.int32
            assert torch.equal(sorted_token_ids, want.sorted_token_ids)
            assert torch.equal(blocks[0], want.blocks[0])
            used = blocks[0] >= 0
            assert torch.equal(blocks[:, used], want.blocks[:, used])


@plain
def test_most_blocks_is_the_most() -> None:
    for ids, experts, block in ((1, 1, 16), (4, 5, 2), (9, 3, 4), (12, 3, 4), (7, 2, 3)):
        sizes = itertools.product(range(ids + 1), repeat=experts)
        needed = [sum(-(-n // block) for n in each) for each in sizes if sum(each) == ids]
        assert max_blocks(ids, experts, block) == max(needed)


@plain
def test_wrong_experts_are_refused() -> None:
    given = inputs(BASE)
    for change, message in (
        ({"x": given["x"][:, :8]}, "x is"),
        ({"down": given["up"]}, "down is"),
        ({"topk_weights": given["topk_weights"][:, :1]}, "topk_weights is"),
        ({"topk_ids": given["topk_ids"][:3]}, "topk_ids is"),
        ({"up": given["up"].half()}, "up is torch.float16"),
        ({"up": given["up"][:, 1:], "gated": True}, "up has 39 outputs, must be gate and up"),
    ):
        with pytest.raises(ValueError, match=message):
            fused_moe(**(given | change))


@kernels
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_relu2(dtype: torch.dtype) -> None:
    wide = 3 * torch.randn(5, 2100, device=DEVICE, dtype=torch.float64)
    wide = wide.to(dtype)
    wide[0, 0] = float("nan")
    for x in (wide, wide[:, :77], wide[:, ::2], wide[0], wide[:0], wide.view(5, 3, 700)[:, 1:]):
        y = relu2(x)
        assert y.dtype == dtype
        # The interpreter cuts fp32 off to bf16, where everybody else rounds.
        inexact = not GPU and dtype == torch.bfloat16
        torch.testing.assert_close(
            y, relu2_reference(x), rtol=1e-2 if inexact else 0, atol=0, equal_nan=True
        )


@kernels
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_swiglu(dtype: torch.dtype) -> None:
    wide = (3 * torch.randn(5, 4200, device=DEVICE, dtype=torch.float64)).to(dtype)
    wide[0, 0] = float("nan")
    for gate, up in (wide.chunk(2, 1), (wide[:, :77], wide[:, 80:157]), wide[:0].chunk(2, 1)):
        want = gate.double() * gate.double().sigmoid() * up.double()
        for y in (swiglu(gate, up), swiglu_reference(gate, up)):
            assert y.dtype == dtype
            bound = TOLERANCE[dtype]
            torch.testing.assert_close(y.double(), want, rtol=bound, atol=bound, equal_nan=True)
    for given in ((wide[:, ::2], wide[:, ::2]), (wide[0], wide[0]), (wide[:, :4], wide[:, :5])):
        with pytest.raises(ValueError, match="gate is"):
            swiglu(*given)


@kernels
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sigmoid_gate(dtype: torch.dtype) -> None:
    """Gates beside the heads that they belong to, as attention has them, and one for a token."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(DEVICE, dtype)

    beside = normal(3, 5, 2, 36)
    for gate, added in (
        (beside[:, :, 1], None), (normal(3, 1, 1), normal(3, 5, 36)), (beside[:0, :, 1], None),
    ):  # fmt: skip
        x = normal(len(gate), 5, 36)
        want = x.double() * gate.double().sigmoid()
        want = want if added is None else want + added.double()
        for y in (sigmoid_gate(x, gate, added), sigmoid_gate_reference(x, gate, added)):
            assert y.dtype == dtype
            bound = TOLERANCE[dtype]
            torch.testing.assert_close(y.double(), want, rtol=bound, atol=bound)


@kernels
@pytest.mark.parametrize(
    "changes", [{}, {"moe_latent_size": 24}, {"n_group": 4, "topk_group": 2}], ids=str
)
@torch.inference_mode()
def test_layer(changes: dict[str, Any]) -> None:
    config = NemotronHConfig(
        vocab_size=8, hidden_size=40, pattern="E", n_routed_experts=12, num_experts_per_tok=3,
        moe_intermediate_size=24, moe_shared_expert_intermediate_size=56,
        routed_scaling_factor=2.5, **changes,
    )  # fmt: skip
    layer = moe(config, 0, DEVICE, torch.float32)
    generator = torch.Generator(DEVICE).manual_seed(2)
    for parameter in layer.parameters():
        parameter.normal_(std=0.2, generator=generator)
    x = torch.randn(9, 40, device=DEVICE, generator=generator)
    logits = F.linear(x, layer.gate.weight)
    bias = layer.gate.e_score_correction_bias
    topk_weights, topk_ids = topk_reference(
        logits, bias, 3, config.n_group, config.topk_group, True, 2.5
    )
    routed = x if layer.fc1_latent_proj is None else layer.fc1_latent_proj(x)
    up, down = layer.experts.up_proj.weight, layer.experts.down_proj.weight
    routed = fused_moe_reference(routed, topk_weights, topk_ids, up, down)
    if layer.fc2_latent_proj is not None:
        routed = layer.fc2_latent_proj(routed)
    shared = layer.shared_experts
    want = routed + shared.down_proj(F.relu(shared.up_proj(x)).square())
    torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 2000])
@torch.inference_mode()
def test_nobody_waits_and_a_graph_replays(tokens: int) -> None:
    case = Case(tokens, 64, 6, 256, 192, torch.bfloat16, tiling=None)
    given = inputs(case)
    logits = torch.randn(tokens, 64, device=DEVICE)
    bias = torch.zeros(64, device=DEVICE)

    def run() -> Tensor:
        topk_weights, topk_ids = topk(logits, bias, 6, 1, 1, True, 2.5)
        return relu2(fused_moe(given["x"], topk_weights, topk_ids, given["up"], given["down"]))

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(3):
        logits.copy_(torch.randn(tokens, 64, device=DEVICE))
        graph.replay()
        assert torch.equal(y, run())


@plain
def test_blocks_grow_with_the_tokens_of_an_expert() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        sizes = [moe_tiling(tokens * 6, 128, dtype).block_m for tokens in (1, 64, 512, 8192)]
        assert sizes == sorted(sizes)
        assert sizes[0] == 16
