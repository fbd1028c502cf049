"""Products in 8 bits and what quantises their operands, against their specifications."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hopper import compiled, spilled
from helpers.interpreter import INTERPRETED, kernels, plain
from helpers.interpreter_changes import round_to_nearest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_runtime.kernels.layers.activation import relu2, relu2_reference, swiglu
from hybrid_runtime.kernels.layers.norm import add_rms_norm, gated_rms_norm, rms_norm
from hybrid_runtime.kernels.linear import fp8_product as product
from hybrid_runtime.kernels.linear import quantize
from hybrid_runtime.kernels.linear.fp8_product import (
    FEW_TOKENS,
    FEW_TOKENS_OF_LINES,
    FEW_TOKENS_OF_PARTS,
    ProductTiling,
    fp8_product,
    fp8_product_reference,
    product_tiling,
    scaled_mm,
    stream_product,
)
from hybrid_runtime.kernels.linear.quantize import (
    E4M3,
    LARGEST,
    Quantizer,
    Scaled,
    quantize_lines_reference,
    quantize_reference,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN, INF = float("nan"), float("inf")
if INTERPRETED:
    round_to_nearest()


def normal(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).to(DEVICE, dtype)


def bits(values: Tensor) -> Tensor:
    """Of e4m3 numbers, with one NaN and one zero."""
    return torch.where(values.float() == 0, 0, values.view(torch.uint8)).int() & torch.where(
        values.float().isnan(), 0x7F, 0xFF
    )


QUANTIZERS = (Quantizer(), Quantizer(torch.tensor(0.003, device=DEVICE)))
"""The second one cuts numbers above 1.3 off."""


def same(found: Tensor | Scaled, want: Scaled) -> None:
    assert isinstance(found, Scaled)
    assert torch.equal(bits(found.values), bits(want.values))
    assert torch.equal(found.scale, want.scale)


def scaled(lines: int, size: int, each: bool, seed: int) -> Scaled:
    x = normal(lines, size, seed=seed) * torch.logspace(-2, 1, lines, device=DEVICE)[:, None]
    if each:
        return Scaled(*quantize_lines_reference(x))
    scale = x.abs().sum() / max(x.numel(), 1) / 50  # some of them are cut off
    return quantize_reference(x, Quantizer(scale))


def close(found: Tensor, x: Scaled, weight: Scaled, bias: Tensor | None = None) -> None:
    """To the exact product: fp32 sums in any order, on a GPU with the 14 bits that Hopper's tensor
    cores add numbers of 8 bits in, and one rounding of each part to its dtype."""
    a, b = x.values.double(), weight.values.double()
    scale = x.scale.double().reshape(-1, 1) * weight.scale.double()
    want, size = a @ b.T * scale, a.shape[1]
    if bias is not None:
        want = want + bias.double()
    sums = a.abs() @ b.abs().T * scale + (0 if bias is None else bias.double().abs())
    parts = found.double() if found.dim() == 3 else found.double()[None]
    bound = (size + 4) * torch.finfo(torch.float32).eps * sums
    if found.is_cuda:
        bound += 2.0**-12 * sums
    info = torch.finfo(found.dtype)
    bound += info.eps / 2 * parts.abs().clamp(min=info.smallest_normal).sum(0) * 1.01
    assert ((parts.sum(0) - want).abs() <= bound).all()


@kernels
@settings(max_examples=30)
@given(
    tokens=st.integers(1, 70),
    outputs=st.integers(1, 150),
    size=st.integers(1, 300),
    each=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    biased=st.booleans(),
    parts=st.integers(1, 3),
)
def test_a_streamed_product_is_the_product(
    tokens: int, outputs: int, size: int, each: Any, dtype: torch.dtype, biased: bool, parts: int
) -> None:
    x, weight = scaled(tokens, size, each[0], 1), scaled(outputs, size, each[1], 2)
    bias = normal(outputs, dtype=dtype) if biased and parts == 1 else None
    tiling = ProductTiling(16, block_n=64, block_k=64, parts=parts)
    found = stream_product(x, weight, dtype, bias, tiling)
    assert found.dtype == dtype
    assert found.shape == ((parts, tokens, outputs) if parts > 1 else (tokens, outputs))
    close(found, x, weight, bias)
    close(fp8_product_reference(x, weight, dtype, bias), x, weight, bias)


@kernels
@pytest.mark.parametrize(
    ("tokens", "each", "parts"),
    [
        (0, True, 4), (1, False, 4), (1, True, 4), (32, True, 4), (33, True, 2),
        (FEW_TOKENS, False, 4), (FEW_TOKENS + 1, False, 0),
        (FEW_TOKENS_OF_LINES, True, 2), (FEW_TOKENS_OF_LINES + 1, True, 2),
        (FEW_TOKENS_OF_PARTS, True, 2), (FEW_TOKENS_OF_PARTS + 1, True, 0), (200, False, 0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("outputs", [48, 100])
def test_any_number_of_tokens(tokens: int, each: bool, parts: int, outputs: int) -> None:
    x, weight = scaled(tokens, 512, each, 1), scaled(outputs, 512, each, 2)
    found = fp8_product(x, weight, torch.bfloat16, may_part=True)
    assert found.shape == ((parts, tokens, outputs) if parts else (tokens, outputs))
    # cuBLASLt's own sums have 14 bits.
    exact = fp8_product_reference(x, weight, torch.float32)
    total = found.float().sum(0) if found.dim() == 3 else found.float()
    if tokens:
        assert (total - exact).norm() <= 5e-3 * exact.norm()
    whole = fp8_product(x, weight, torch.bfloat16, normal(outputs).bfloat16(), may_part=True)
    assert whole.shape == (tokens, outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [17, 65, 512])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("each", [False, True], ids=["tensor", "lines"])
def test_the_library_s_product(tokens: int, biased: bool, each: bool) -> None:
    x, weight = scaled(tokens, 4096, each, 1), scaled(6144, 4096, each, 2)
    bias = normal(6144).bfloat16() if biased else None
    found = scaled_mm(x, weight, torch.bfloat16, bias)
    assert found is not None
    want = fp8_product_reference(x, weight, torch.float32, bias)
    assert (found.float() - want).norm() <= 5e-3 * want.norm()


@plain
def test_what_the_library_does_not_take() -> None:
    def taken(outputs: int, size: int, dtype: torch.dtype, *each: bool) -> bool:
        x, weight = scaled(16, size, each[0], 1), scaled(outputs, size, each[1], 2)
        return scaled_mm(x, weight, dtype) is not None

    half = torch.bfloat16
    assert not taken(100, 32, half, False, False)
    assert not taken(96, 40, half, False, False)
    assert not taken(96, 32, half, True, False)
    assert not taken(96, 32, half, False, True)
    assert not taken(96, 32, torch.float32, False, False)
    assert not taken(96, 32, torch.float16, True, True)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("lines", "size"), [(1, 32), (5, 100), (3, 5000), (0, 16)])
def test_quantised_as_specified(lines: int, size: int, dtype: torch.dtype) -> None:
    wide = normal(lines, size + 3, dtype=dtype)
    for x in (wide[:, :size], wide.T.contiguous().T[:, :size]):
        for quantizer in QUANTIZERS:
            same(quantize.quantize(x, quantizer), quantize_reference(x, quantizer))
            same(relu2(x, quantizer), quantize_reference(relu2_reference(x), quantizer))
    gate, up = wide[:, :size], wide[:, 3:]
    for quantizer in QUANTIZERS:
        same(swiglu(gate, up, quantizer), quantize_reference(swiglu(gate, up), quantizer))


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("groups", "size"), [(1, 96), (8, 128), (3, 96), (5, 60)])
def test_norms_quantise_what_they_would_give(groups: int, size: int, dtype: torch.dtype) -> None:
    """Byte for byte, but for sums in another order: of several groups in one program on a GPU."""
    x, other = normal(7, size, dtype=dtype), normal(7, size, dtype=dtype, seed=1)
    weight = normal(size, dtype=dtype, seed=2)
    parts = torch.stack([x, other])
    for quantizer in QUANTIZERS:
        want = quantize_reference(rms_norm(x, weight, 1e-5), quantizer)
        same(rms_norm(x, weight, 1e-5, quantizer), want)
        for delta in (x, parts):
            y, total = add_rms_norm(delta, other, weight, 1e-5)
            found, again = add_rms_norm(delta, other, weight, 1e-5, quantizer)
            same(found, quantize_reference(y, quantizer))
            assert torch.equal(total, again)
        for first in (False, True):
            own = weight[: size // groups] if first else weight
            y = gated_rms_norm(x, other, own, groups, 1e-5, norm_first=first)
            found = gated_rms_norm(x, other, own, groups, 1e-5, quantizer, norm_first=first)
            want = quantize_reference(y, quantizer)
            if not (x.is_cuda and groups > 1 and quantizer.scale is None):
                same(found, want)
                continue
            assert isinstance(found, Scaled)
            torch.testing.assert_close(found.scale, want.scale, rtol=1e-2, atol=0)
            step = (found.values.view(torch.int8).int() - want.values.view(torch.int8).int()).abs()
            assert step.max() <= 1
            assert (step > 0).float().mean() < 0.05


@kernels
def test_numbers_that_are_none_and_lines_of_nothing() -> None:
    x = normal(5, 64)
    x[0] = 0
    x[1, 3], x[2, 3] = NAN, INF
    x[3], x[4] = 1e-38, 1e38
    one = Quantizer(torch.ones((), device=DEVICE))
    for values, _ in (quantize.quantize(x, one), quantize_reference(x, one)):
        values = values.float()
        assert values.isnan().nonzero().tolist() == [[1, 3]]
        assert values[2, 3] == values[4].amax() == LARGEST
    for values, scale in (quantize.quantize(x, Quantizer()), quantize_reference(x, Quantizer())):
        assert not values[0].float().any()
        assert scale[0] > 0
        assert [bool((values[i].float() * scale[i]).isnan().any()) for i in (1, 2)] == [True, True]
        assert values[3:].float().abs().amax() <= LARGEST
        torch.testing.assert_close(values[4].float() * scale[4], x[4])


@plain
def test_lines_are_quantised_to_half_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(300, 64) * torch.logspace(-6, 3, 300, device=DEVICE)[:, None]
    values, scale = quantize_lines_reference(x)
    assert values.dtype == E4M3
    assert (values.float().abs().amax(-1) == LARGEST).all()
    error = (values.float() * scale[:, None] - x).abs()
    allowed = torch.maximum(x.abs() / 16, x.abs().amax(-1, keepdim=True) / LARGEST * 2**-10)
    assert (error <= allowed * 1.001).all()
    monkeypatch.setattr(quantize, "_AT_ONCE", 128)
    pieces = quantize_lines_reference(x)
    assert torch.equal(bits(pieces[0]), bits(values))
    assert torch.equal(pieces[1], scale)


@plain
@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        ((2, 16, 2), (8, 32, 0), r"x is \[2, 16\]; it must be \[T, 32\]"),
        ((2, 32, 3), (8, 32, 0), r"x's values are \[2, 32\] and its scale is \[3\]"),
        ((2, 32, 0), (8, 32, 32), r"weight's values are \[8, 32\] and its scale is \[32\]"),
    ],
)
def test_operands_that_do_not_go_together(x: Any, weight: Any, message: str) -> None:
    def of(lines: int, size: int, scales: int) -> Scaled:
        return Scaled(torch.zeros(lines, size).to(E4M3), torch.ones([scales] if scales else []))

    for function in (fp8_product_reference, stream_product):
        with pytest.raises(ValueError, match=message):
            function(of(*x), of(*weight), torch.float32)


TYPES = {
    "x": "*fp8e4nv", "weight": "*fp8e4nv", "x_scale": "*fp32", "weight_scale": "*fp32",
    "scale": "*fp32", "values": "*fp8e4nv", "out": "*bf16", "tokens": "i32", "tiles": "i32",
}  # fmt: skip


@plain
@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 128])
@pytest.mark.parametrize(
    ("outputs", "size", "may_part"),
    [(18560, 4096, False), (6144, 4096, False), (4096, 8192, True), (4096, 21504, True)],
)
def test_the_product_streams_8_bits(
    tokens: int, outputs: int, size: int, may_part: bool, tmp_path: Path
) -> None:
    shape = product_tiling(tokens, outputs, may_part)
    constants = {
        "N": outputs, "K": size, "PARTS": shape.parts, "X_LINES": True, "W_LINES": True,
        "BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "BLOCK_K": shape.block_k, "bias": None,
    }  # fmt: skip
    options = {"num_warps": shape.warps, "num_stages": shape.stages}
    aligned = ("x", "weight", "x_scale", "weight_scale", "out")
    code = compiled(product._product_kernel, constants, aligned, options, **TYPES)
    text = code.asm["ptx"]
    assert spilled(code, tmp_path) == 0
    assert "wgmma.mma_async.sync.aligned.m64" in text
    assert "f32.e4m3.e4m3" in text
    assert "cp.async.cg.shared.global" in text
    assert "cp.async.ca" not in text
    # Two programs on a multiprocessor, unless each of an H200 has hardly more than one to run.
    programs = -(-outputs // shape.block_n) * shape.parts
    assert code.metadata.shared <= (113 if programs > 132 else 227) * 1024


@plain
@pytest.mark.parametrize("gated", [False, True], ids=["one", "gated"])
@pytest.mark.parametrize("size", [4096, 21504])
def test_what_quantises_moves_16_bytes_at_once(size: int, gated: bool, tmp_path: Path) -> None:
    types = TYPES | {"x": "*bf16", "gate": "*bf16"}
    for lines, block in ((False, 4096), (True, 4096 if size == 4096 else 32768)):
        constants = {"BLOCK": block, "LINES": lines, "RELU2": size > 4096}
        gate: dict[str, Any] = {"gate": None, "gate_line": 0}
        if gated:
            constants, gate = constants | {"RELU2": False}, {}
        constants |= gate
        options = {"num_warps": min(block // 512, 16)}
        multiples = ("x", "values", "size", "x_line", "gate", "gate_line")
        code = compiled(quantize._quantize_kernel, constants, multiples, options, **types)
        assert spilled(code, tmp_path) == 0
        assert "ld.global.v4" in code.asm["ptx"]
        assert "cvt.rn.satfinite.e4m3x2.f32" in code.asm["ptx"]
