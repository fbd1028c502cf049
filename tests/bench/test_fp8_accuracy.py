"""The benchmark of what FP8 costs in accuracy: its arithmetic, and that it runs on a CPU."""

import json
import re
from pathlib import Path
from typing import Any

import fp8_accuracy
import fp8_tables
import pytest
import torch
from fp8_accuracy import differ, logits_of, per_tensor, watched
from shapes import SHAPES, build, config

from hybrid_runtime.kernels.linear.quantize import E4M3
from hybrid_runtime.models.linear import checkpoint_tensors
from hybrid_runtime.models.nemotron_h import NemotronH

SIZES = config(SHAPES["tiny"])


def tokens(length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, SIZES.vocab_size, (2, length), generator=generator)


@pytest.fixture(scope="module")
def model() -> NemotronH:
    return build(SIZES, "cpu", torch.float32)[0]


def test_decode_goes_on_from_the_prompt(model: NemotronH) -> None:
    """Both ways to compute the same tokens."""
    given = tokens(84)
    early, late = logits_of(model, given, 64), logits_of(model, given, 80)
    vocabulary = SIZES.vocab_size
    wanted = late.prompt.view(2, 80, vocabulary)
    assert torch.equal(early.prompt.view(2, 64, vocabulary), wanted[:, :64])
    got = early.decode.view(2, 20, vocabulary)
    torch.testing.assert_close(got[:, :16], wanted[:, 64:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        got[:, 16:], late.decode.view(2, 4, vocabulary), rtol=1e-4, atol=1e-5
    )


def test_differences_of_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    wanted = torch.randn(300, 20, generator=generator)
    same = differ(wanted, wanted)
    assert (same["rms"], same["largest"], same["same_best"], same["kl"]) == (0, 0, 1, 0)
    # 1 % larger logits have the same best token.
    larger = differ(wanted, 1.01 * wanted)
    assert larger["rms"] == pytest.approx(0.01, rel=1e-4)
    assert larger["largest"] == pytest.approx(0.01 * wanted.abs().amax().item(), rel=1e-4)
    assert larger["same_best"] == 1
    other = torch.randn(300, 20, generator=generator)
    found = differ(wanted, other)
    logs = [one.double().log_softmax(-1) for one in (other, wanted)]
    kl = torch.nn.functional.kl_div(*logs, reduction="batchmean", log_target=True)
    assert found["kl"] == pytest.approx(kl.item())
    best = (wanted.argmax(-1) == other.argmax(-1)).double().mean().item()
    assert found["same_best"] == pytest.approx(best)
    assert found["tokens"] == 300


def test_inputs_are_watched(model: NemotronH) -> None:
    outputs = []
    mlp = "backbone.layers.1.mixer"
    hook = model.get_submodule(f"{mlp}.up_proj").register_forward_hook(
        lambda *given: outputs.append(given[-1].relu().square().amax().item())
    )
    with watched(model) as largest:
        logits_of(model, tokens(40), 32)
    hook.remove()
    assert largest[f"{mlp}.down_proj"] == max(outputs)
    attention, mixture = (
        f"backbone.layers.{SIZES.pattern.index(kind)}.mixer" for kind in ("*", "E")
    )
    assert len({largest[f"{attention}.{one}_proj"] for one in "qkv"}) == 1
    experts = [
        largest.get(f"{mixture}.experts.{i}.up_proj", 0.0) for i in range(SIZES.n_routed_experts)
    ]
    # Every token has experts, and all tokens the shared one.
    assert max(experts) == largest[f"{mixture}.shared_experts.up_proj"]
    matrices = {n.removesuffix(".weight") for n in checkpoint_tensors(model) if "proj.w" in n}
    assert largest.keys() - matrices == set()
    before = dict(largest)
    logits_of(model, 0 * tokens(40), 32)
    assert largest == before


def test_inputs_of_each_expert_are_watched(model: NemotronH) -> None:
    experts = f"backbone.layers.{SIZES.pattern.index('E')}.mixer.experts"
    found: dict[str, float] = {}
    tensors = checkpoint_tensors(model)

    def see(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        for x, chosen in zip(given[0], given[2].tolist(), strict=True):
            for i in chosen:
                inner = (tensors[f"{experts}.{i}.up_proj.weight"] @ x).clamp(min=0) ** 2
                for name, value in {"up": x, "down": inner}.items():
                    name = f"{experts}.{i}.{name}_proj"
                    found[name] = max(found.get(name, 0.0), value.abs().amax().item())

    hook = model.get_submodule(experts).register_forward_pre_hook(see)
    with watched(model) as largest:
        logits_of(model, tokens(40), 32)
    hook.remove()
    assert {n: v for n, v in largest.items() if ".experts." in n} == pytest.approx(found)
    assert len(set(found.values())) > 4


def test_static_scales_are_those_of_what_was_seen(model: NemotronH) -> None:
    given = tokens(40)
    with watched(model) as largest:
        wanted = logits_of(model, given, 32)
    weights = dict(checkpoint_tensors(model))
    rounded = per_tensor(SIZES, torch.float32, model.device, weights, largest)
    found = checkpoint_tensors(rounded)
    matrices = [n.removesuffix(".weight") for n, t in found.items() if t.dtype == E4M3]
    assert len(matrices) > 8
    for name in matrices:
        scale = found[f"{name}.weight_scale"]
        plain, got = weights[f"{name}.weight"], found[f"{name}.weight"].float() * scale
        assert found[f"{name}.weight"].float().abs().amax() == 448
        # Three bits behind the point, below which numbers are a multiple of the smallest one.
        assert bool(((got - plain).abs() <= plain.abs() / 16 + scale * 2**-10).all())
        # A token is quantised once for all experts; other inputs are one matrix's.
        sharing = re.sub(r"experts\.\d+\.up", r"experts\.\\d+\.up", name)
        seen = [value for one, value in largest.items() if re.fullmatch(sharing, one)]
        if seen:
            assert found[f"{name}.input_scale"].item() == pytest.approx(max(seen) / 448)
    for name, tensor in found.items():
        if tensor.dtype != E4M3 and not name.endswith("_scale"):
            assert torch.equal(tensor, weights[name])
    difference = differ(wanted.prompt, logits_of(rounded, given, 32).prompt)
    assert 0 < difference["rms"] < 0.2


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a tiny run."""
    folder = tmp_path_factory.mktemp("results")
    few = "--texts 2 --windows 1 --sequences 1 --lengths 16,8 --dtypes float32 --shapes tiny"
    fp8_accuracy.main([*few.split(), "--out", str(folder / "cpu" / "fp8-accuracy.json")])
    return folder


def test_the_script_runs(measured: Path) -> None:
    result: dict[str, Any] = json.loads((measured / "cpu" / "fp8-accuracy.json").read_text())
    ways = {(row["model"], row["of"], row["against"]) for row in result["logits"]}
    rounded = {"FP8 per channel", "FP8 per tensor"}
    assert ways == {
        *(("python-small", way, "float32") for way in rounded),
        *(("tiny", way, "bfloat16") for way in rounded),
        ("tiny", "bfloat16", "float32"),
    }
    assert {row["tokens"] for row in result["logits"] if row["phase"] == "prompt"} == {16}
    assert {row["tokens"] for row in result["logits"] if row["phase"] == "decode"} == {8}
    assert [row["drafter"] for row in result["texts"]] == ["none", "mtp", "eagle"]
    for row in result["texts"]:
        assert row["same"] + len(row["first_different"]) == row["texts"] == 2
    plain, fp8 = (row["perplexity"] for row in result["perplexity"])
    assert plain != fp8


def test_its_tables_need_results_of_one_device_only(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("fp8_tables", "source"):
        monkeypatch.setattr(f"{module}.RESULTS", measured)
    assert "| CPU | tiny | FP8 per tensor | bfloat16 |" in fp8_tables.accuracy()
    assert "| CPU | float32 |" in fp8_tables.texts()
