"""The engine benchmark: its arithmetic, its files, and that it runs on a CPU. Nothing is timed."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import itl
import pytest
import torch
import weights
from torch import nn

from hybrid_runtime import demo
from hybrid_runtime.bench.drive import drive, summarize
from hybrid_runtime.bench.load import Load
from hybrid_runtime.cli import main
from hybrid_runtime.engine import Engine
from hybrid_runtime.models.norm import RMSNorm

TINY = ["--shape", "tiny", "--batches", "2", "--repeats", "1"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A result of the tiny shape, as written."""
    path = tmp_path_factory.mktemp("itl") / "a.json"
    kinds = ["--layouts", "columns", "--strategies", "blocking,auto", "--lengths", "all"]
    assert itl.main([*TINY, *kinds, "--acceptance", "3", "--out", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_staggered_prompts_spread_over_one_block() -> None:
    load = Load(batch=8, isl=100, lengths="staggered")
    assert sorted(load.prompt_lengths(64)) == list(range(68, 132, 8))
    assert sorted(load.prompt_lengths(1024)) == list(range(1, 1025, 128))
    assert Load(batch=8, isl=100).prompt_lengths(64) == [100] * 8


def test_stochastic_rounding_is_chosen_by_the_name_of_the_dtype() -> None:
    config = Load(ssm_dtype="float16-stochastic").config
    assert (config.ssm_dtype, config.stochastic_rounding) == (torch.float16, True)
    assert not Load(ssm_dtype="float16").config.stochastic_rounding


def test_steady_steps_are_those_of_the_whole_batch() -> None:
    model, head = itl.measured("tiny").build("cpu", torch.float32)
    load = Load(batch=3, isl=20, osl=13, block_size=16, acceptance=4.0, max_model_len=64)
    with Engine(model, load.config, head=head) as engine:
        run = drive(engine, load.prompts(16, 256, 0), 13)
    # First tokens with the prompt, then 4, 4, and the last 4, which end everybody.
    assert run.steady_tokens == [4] * 3 * 2
    assert len(run.steady) == 2
    figures = summarize(run)
    assert figures["output_tokens"] == 3 * 13
    assert figures["mean_acceptance_length"] == 4
    assert figures["itl_ms"] == pytest.approx(figures["step_ms_mean"] / 4)


def test_itl_writes_a_row_per_strategy_and_lengths(measured: dict[str, Any]) -> None:
    rows = measured["rows"]
    assert [(r["strategy"], r["lengths"]) for r in rows] == [
        ("blocking", "equal"), ("auto", "equal"), ("blocking", "staggered"), ("auto", "staggered"),
    ]  # fmt: skip
    for row in rows:
        assert len(row["repeats"]) == 1
        assert row["acceptance_length"] == pytest.approx(3, abs=0.01)
        assert row["state_layout"] == "columns"
    assert measured["layers"] == [6, 6]
    assert measured["runs"][0]["arguments"][:2] == ["--shape", "tiny"]


def test_a_shape_of_qwen_is_measured(tmp_path: Path) -> None:
    out, load = tmp_path / "a.json", ["--batches", "2", "--repeats", "1", "--acceptance", "3"]
    assert itl.main(["--shape", "qwen-tiny", "--layers", "2", *load, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["name"] == "Qwen-tiny"
    assert result["layers"] == [2, 4]
    assert result["config"]["pattern"] == "G-G-"
    assert result["rows"][0]["acceptance_length"] == pytest.approx(3, abs=0.01)


def test_weights_are_filled_alike_in_both_engines() -> None:
    """Qwen's by the package here, by `weights.py` in vLLM: the same numbers from the same seed, but
    for norms that scale by 1 + weight, which `nemotron.fill` sets to 0 by their class."""
    model, head = itl.measured("qwen-tiny").build("cpu", torch.bfloat16)
    assert isinstance(model, nn.Module)
    parts = nn.ModuleList([model, head])
    before = {name: value.clone() for name, value in parts.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for part in parts:
        weights.randomize(part, model.num_layers, generator)
    for module in parts.modules():
        if isinstance(module, RMSNorm) and module.centred:
            module.weight.data.zero_()
    for name, value in parts.named_parameters():
        assert torch.equal(value, before[name]), name


def test_a_quantization_that_a_family_does_not_have_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert itl.main(["--shape", "qwen-tiny", "--quantization", "modelopt"]) == 2
    assert "it must be of fp8" in capsys.readouterr().err


@pytest.mark.slow
def test_an_older_checkout_takes_turns(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    before = shlex.join([sys.executable, itl.__file__])
    load = [*TINY, "--drafts", "0", "--osl", "8"]
    assert itl.main([*load, "--before", before, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    (row,) = result["rows"]
    beside = row["peers"]["before"]
    assert (len(row["repeats"]), beside["repeats"]) == (2, 2)
    assert row["acceptance_length"] == 1
    assert row["peer_ratio"] == pytest.approx(row["step_ms"] / beside["step_ms"], rel=1e-4)


def test_plain_decoding_is_compared_whatever_its_states_are_called(
    measured: dict[str, Any],
) -> None:
    row = measured["rows"][0]
    older = {"rows": [row | {"state_layout": "replay"}]}
    plain = measured | {"rows": [row | {"drafts": 0}]}
    (found,) = itl.peer.attach(
        plain, itl.peer.entries({"rows": [older["rows"][0] | {"drafts": 0}]})
    )["rows"]
    assert found["peer_ratio"] == 1
    (found,) = itl.peer.attach(measured | {"rows": [row]}, itl.peer.entries(older))["rows"]
    assert "peer_ratio" not in found


def peer_line(step_ms: float, **changes: Any) -> str:
    line: dict[str, Any] = {
        "batch": 2, "isl": 24, "osl": 16, "rep": 0, "step_ms_mean": step_ms, "itl_ms": step_ms / 3,
    }  # fmt: skip
    options = {
        "runner": "v1", "num_spec": 3, "synthetic_len": 3.0, "ssm_dtype": "auto",
        "pattern": "M-M*ME", "hidden": 64, "vllm": "0.25.1",
    }  # fmt: skip
    return json.dumps(line | {"options": options | changes})


def test_merge_joins_repeats_and_sets_the_peer_beside(
    measured: dict[str, Any], tmp_path: Path
) -> None:
    a, b, lines, out = (tmp_path / name for name in ("a.json", "b.json", "peer.jsonl", "out.json"))
    a.write_text(json.dumps(measured))
    again = json.loads(a.read_text())
    for row in again["rows"]:
        for repeat in row["repeats"]:
            repeat["step_ms_mean"] += 1
    b.write_text(json.dumps(again))
    other, second = peer_line(1.0, num_spec=2), peer_line(6.0, runner="v2")
    lines.write_text("\n".join([peer_line(10.0), peer_line(14.0), second, other]))
    assert itl.main(["merge", str(a), str(b), "--peer", str(lines), "--out", str(out)]) == 0
    merged = json.loads(out.read_text())
    assert merged["environment"] == measured["environment"]
    assert len(merged["peer"]) == 3
    for row, before in zip(merged["rows"], measured["rows"], strict=True):
        assert len(row["repeats"]) == 2
        assert row["step_ms"] == pytest.approx(before["step_ms"] + 0.5, rel=1e-4)
        assert row["peers"]["v1"]["repeats"] == 2
        assert row["peers"]["v1"]["ratio"] == pytest.approx(row["step_ms"] / 12, rel=1e-4)
        assert row["peer_ratio"] == pytest.approx(row["step_ms"] / 6, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (peer_line(1.0, pattern="M-M-"), "the peer's pattern is 'M-M-'"),
        ('{"error": "out of memory"}', "the peer failed: out of memory"),
        ("{", "peer.jsonl:1 is not JSON"),
    ],
)
def test_a_peer_that_cannot_stand_beside_is_refused(
    measured: dict[str, Any],
    tmp_path: Path,
    text: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result, lines = tmp_path / "a.json", tmp_path / "peer.jsonl"
    result.write_text(json.dumps(measured))
    lines.write_text(text)
    out = tmp_path / "out.json"
    assert itl.main(["merge", str(result), "--peer", str(lines), "--out", str(out)]) == 2
    assert message in capsys.readouterr().err


def test_results_of_different_models_are_not_merged(measured: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of the same model"):
        itl.peer.merge([measured, measured | {"dtype": "bfloat16"}])


@pytest.mark.gpu
def test_every_strategy_runs_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    load = ["--batches", "4", "--isl", "40", "--osl", "96", "--block-size", "32", "--repeats", "2"]
    turns = ["--layouts", "columns", "--strategies", "all"]
    assert main(["bench", str(demo.SHIPPED), *load, *turns, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 4
    assert all(row["step_ms"] > 0 for row in rows)
