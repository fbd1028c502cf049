"""Random models in 8 bits, and the tiny form of `benchmarks/kernels/fp8_experts.py`."""

import importlib
import sys

import pytest
import torch

from hybrid_runtime.kernels.linear.quantize import E4M3, quantize_lines_reference
from hybrid_runtime.models.linear import checkpoint_tensors

shapes = importlib.import_module("shapes")
fp8_experts = importlib.import_module("fp8_experts")


def test_a_model_in_8_bits_is_the_plain_one_rounded() -> None:
    config = shapes.config(shapes.SHAPES["tiny"])
    plain, rounded = (
        [checkpoint_tensors(part) for part in shapes.build(config, "cpu", torch.bfloat16, 3, way)]
        for way in (None, "fp8")
    )
    narrow = [name for name, tensor in rounded[0].items() if tensor.dtype == E4M3]
    assert sum(".experts." in name for name in narrow) == 2 * config.n_routed_experts
    for name in narrow:
        values, scale = quantize_lines_reference(plain[0].pop(name))
        assert torch.equal(rounded[0].pop(name).view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(rounded[0].pop(f"{name}_scale"), scale)
    for part, other in zip(plain, rounded, strict=True):
        assert part.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in part.items())


def test_experts_agree_in_every_format_and_are_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size, device = fp8_experts.size_of("super-120b", 16), torch.device("cpu")
    assert size == (16, 16, 16, 16, 40)
    given = fp8_experts.calls(size, 4, device)
    results = {
        name: fp8_experts.timed(experts, given)[0]().float()
        for name, experts in fp8_experts.made(size, device).items()
    }
    for y in results.values():
        assert (y - results["bf16"]).norm() < 0.1 * results["bf16"].norm()
    monkeypatch.setattr(sys, "argv", ["", "--trial", "--tokens", "1,4", "--shapes", "nano-30b"])
    fp8_experts.main()
    assert "Nemotron-3-Nano-30B-A3B, ms" in capsys.readouterr().out


@pytest.mark.parametrize("mean", [1, 9, 40, 300])
def test_a_sweep_tries_what_fits_the_tokens(mean: float) -> None:
    found = list(fp8_experts.tilings(mean))
    assert len({*found}) == len(found) > 20
    assert any(tiling.block_m >= min(mean, 128) for tiling in found)
