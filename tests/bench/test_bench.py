"""The engine benchmark: its arithmetic, its files, and that it runs on a CPU. Nothing is timed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hybrid_runtime import demo
from hybrid_runtime.bench import floor
from hybrid_runtime.bench.drive import drive, summarize
from hybrid_runtime.bench.floor import step_bytes
from hybrid_runtime.bench.load import Load
from hybrid_runtime.bench.measure import Engines, aggregate, measure
from hybrid_runtime.bench.trace import Operation, analyse
from hybrid_runtime.cli import main
from hybrid_runtime.models.nemotron_h import MTPHead, NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig
from hybrid_runtime.state import StateLayout

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def itl() -> Any:
    """benchmarks/engine/itl.py, whose folder is no package."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "engine"))
    try:
        import itl

        yield itl
    finally:
        sys.path.remove(str(ROOT / "benchmarks" / "engine"))


@pytest.fixture(scope="module")
def tiny(itl: ModuleType) -> tuple[NemotronH, MTPHead]:
    return itl.build(itl.config(itl.SHAPES["tiny"]), "cpu", torch.float32)


@pytest.fixture(scope="module")
def measured(itl: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A result of the tiny shape, as written."""
    path = tmp_path_factory.mktemp("itl") / "a.json"
    arguments = ["--shape", "tiny", "--batches", "2", "--strategies", "blocking,auto"]
    arguments += ["--lengths", "all", "--acceptance", "3", "--layouts", "columns"]
    assert itl.main([*arguments, "--out", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_floor_counts_what_must_move(monkeypatch: pytest.MonkeyPatch) -> None:
    config = NemotronHConfig(
        vocab_size=50, hidden_size=8, pattern="M*-E", mtp_pattern="*", num_nextn_predict_layers=1,
        intermediate_size=12, num_attention_heads=2, num_key_value_heads=1, head_dim=4,
        mamba_num_heads=2, mamba_head_dim=4, n_groups=1, ssm_state_size=4,
        n_routed_experts=4, num_experts_per_tok=1, moe_intermediate_size=6,
        moe_shared_expert_intermediate_size=10,
    )  # fmt: skip
    model = NemotronH(config, "cpu", torch.bfloat16)
    layout = StateLayout.from_config(
        config, 2, torch.float32, conv_dtype=torch.bfloat16, block_size=16
    )
    moved = step_bytes(model, MTPHead(model), layout, rows=3, context=100, accepted=2)

    mamba = 2 * (8 * (8 + 16 + 2) + 16 * 4 + 16 + 8 + 8 * 8) + 4 * 3 * 2
    attention = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8)
    mlp = 2 * 2 * 8 * 12
    touched = 1 - (3 / 4) ** 9
    experts = 4 * (4 * 8 + 4) + 2 * 2 * 8 * 10 + touched * 4 * 2 * 2 * 8 * 6
    norms, output_head = 2 * 8 * 5, 2 * 50 * 8
    assert moved.weights == pytest.approx(mamba + attention + mlp + experts + norms + output_head)
    head = attention + 2 * (2 * 8 * 8) + 2 * 8 * 4
    assert moved.draft == 2 * (head + output_head)
    assert moved.state == 3 * 1 * 4 * (2 * 4 * 4) * 4
    assert moved.window == 3 * (3 + 3 + 2) * 16 * 2
    assert moved.kv == 2 * 4 * 2 * ((300 + 9) + (300 + 9) + (300 + 3))
    assert moved.total == pytest.approx(
        moved.weights + moved.draft + moved.state + moved.window + moved.kv
    )

    drafter = MTPHead(NemotronH(replace(config, mtp_pattern="*E"), "cpu", torch.bfloat16))
    moved = step_bytes(model, drafter, layout, rows=3, context=100, accepted=2)
    touched = 1 - (3 / 4) ** 3
    expert_layer = 4 * (4 * 8 + 4) + 2 * 2 * 8 * 10 + touched * 4 * 2 * 2 * 8 * 6 + 2 * 8
    assert moved.draft == pytest.approx(2 * (head + expert_layer + output_head))

    plain = StateLayout.from_config(config, 0, torch.float32, block_size=16)
    assert step_bytes(model, None, plain, rows=1, context=1, accepted=1).draft == 0

    # As on a GPU that copies the output weight in 8 bits, with a scale for each token.
    monkeypatch.setattr(floor, "narrowed_weight", lambda head, sampled, device: head.output_weight)
    moved = step_bytes(model, drafter, layout, rows=3, context=100, accepted=2)
    assert moved.draft == pytest.approx(2 * (head + expert_layer + 50 * (8 + 4)))


def test_floor_of_the_replay_layout_counts_a_write_now_and_then() -> None:
    """Four of five steps read the state only, and what it lacks: 2, 5, 8, 11 and 14 tokens."""
    config = NemotronHConfig(
        vocab_size=50, hidden_size=8, pattern="M", num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, mamba_num_heads=2, mamba_head_dim=4, n_groups=1, ssm_state_size=4,
    )  # fmt: skip
    model = NemotronH(config, "cpu", torch.bfloat16)
    state, token = 4 * (2 * 4 * 4), 2 * (2 * 4 + 4) + 4 * 2
    for window, writes, lacks in ((15, 1 / 5, 8), (4, 1, 2), (0, 1, 2)):
        layout = StateLayout.from_config(
            config, 3, torch.float32, conv_dtype=torch.bfloat16, block_size=16, kind="replay",
            window=window,
        )  # fmt: skip
        moved = step_bytes(model, None, layout, rows=3, context=100, accepted=3)
        assert moved.state == pytest.approx(3 * ((1 + writes) * state + (lacks + 4) * token))


def test_staggered_prompts_spread_over_one_block() -> None:
    load = Load(batch=8, isl=100, lengths=("staggered",))
    assert sorted(load.prompt_lengths("staggered", 64)) == list(range(68, 132, 8))
    assert sorted(load.prompt_lengths("staggered", 1024)) == list(range(1, 1025, 128))
    assert load.prompt_lengths("equal", 64) == [100] * 8


def test_strategies_take_turns_forwards_and_backwards() -> None:
    load = Load(strategies=("blocking", "auto"), repeats=3)
    order = [strategy for strategy, _ in load.turns()]
    assert order == ["blocking", "auto", "auto", "blocking", "blocking", "auto"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"osl": 1}, "osl is 1"),
        ({"ssm_dtype": "int8"}, "ssm_dtype is 'int8'"),
        ({"strategies": ("hope",)}, "strategies is"),
        ({"lengths": ()}, "lengths is"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Load(**wrong)


def test_engines_that_do_not_fit_together_are_made_again_in_turn(
    tiny: tuple[NemotronH, MTPHead], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(
        batch=1, isl=8, osl=4, warmup_osl=2, block_size=16, profile_steps=0, max_model_len=32,
        strategies=("blocking", "always", "auto"),
    )  # fmt: skip
    order = [strategy for strategy, _ in load.turns()]
    engines = Engines(*tiny, load, list(order))
    monkeypatch.setattr(engines, "_fits", lambda: len(engines._kept) < 2)
    seen = []
    for strategy in order:
        assert engines.next().manager.strategy == strategy
        assert len(engines._kept) <= 2
        seen.append(set(engines._kept))
    # Of blocking and always, the second is needed sooner once auto has had its two turns.
    assert seen[2] == {"always", "auto"}
    monkeypatch.setattr(engines, "_fits", lambda: False)
    engines.close()
    engines._order.append("defer")
    with pytest.raises(ValueError, match="batch is 1; its caches take"):
        engines.next()


def test_steady_steps_are_those_of_the_whole_batch(tiny: tuple[NemotronH, MTPHead]) -> None:
    load = Load(
        batch=3, isl=20, osl=13, block_size=16, acceptance=4.0, profile_steps=0, max_model_len=64
    )
    engine = Engines(*tiny, load, ["auto"]).next()
    prompts = load.prompts("equal", 16, 256, 0)
    run = drive(engine, prompts, 13)
    # First tokens with the prompt, then 4, 4, and the last 4, which end everybody.
    assert run.steady_tokens == [4] * 3 * 2
    assert len(run.steady) == 2
    figures = summarize(run)
    assert figures["output_tokens"] == 3 * 13
    assert figures["mean_acceptance_length"] == 4
    assert figures["itl_ms"] == pytest.approx(figures["step_ms_mean"] / 4)
    assert figures["tokens_per_step_hist"] == {"4": 6}
    # On a CPU every result is waited for with nothing queued behind; `starved` must know the words.
    assert run.waits.count == run.waits.starved == 2
    assert run.waits.undeclared == 0


def test_plain_decoding_is_measured_too(tiny: tuple[NemotronH, MTPHead]) -> None:
    load = Load(
        batch=2, drafts=0, isl=20, osl=8, warmup_osl=2, block_size=16, repeats=2, max_model_len=64
    )
    (row,) = measure(*tiny, load, bandwidth=1e9)
    assert row["acceptance_length"] == 1
    assert row["bytes"]["draft"] == 0
    assert row["floor_ratio"] == pytest.approx(row["step_ms"] / (row["bytes"]["total"] / 1e6))
    assert row["profile"] is None


def test_itl_writes_a_row_per_strategy_and_lengths(measured: dict[str, Any]) -> None:
    rows = measured["rows"]
    assert [(r["strategy"], r["lengths"]) for r in rows] == [
        ("blocking", "equal"), ("blocking", "staggered"), ("auto", "equal"), ("auto", "staggered"),
    ]  # fmt: skip
    for row in rows:
        assert len(row["repeats"]) == 2
        assert row["acceptance_length"] == pytest.approx(3, abs=0.01)
        assert row["crossings_per_row"] >= 1
        assert 0 <= row["skip_rate"] <= 1
        assert row["undeclared_waits"] == (row["strategy"] == "blocking")
    assert measured["layers"] == [6, 6]
    assert measured["runs"][0]["arguments"][:2] == ["--shape", "tiny"]


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
    itl: ModuleType, measured: dict[str, Any], tmp_path: Path
) -> None:
    a, b, lines, out = (tmp_path / name for name in ("a.json", "b.json", "peer.jsonl", "out.json"))
    a.write_text(json.dumps(measured))
    again = json.loads(a.read_text())
    for row in again["rows"]:
        for repeat in row["repeats"]:
            repeat["step_ms_mean"] += 1
    b.write_text(json.dumps(again))
    profile = {
        "profile": True, "batch": 2, "isl": 24, "steps": 20, "wall_ms_per_step": 11.0,
        "gpu_us_per_step": 9000.0, "kernels_per_step": 490.0, "top": [],
    }  # fmt: skip
    other = peer_line(1.0, num_spec=2)
    second = peer_line(6.0, runner="v2")
    lines.write_text(
        "\n".join([peer_line(10.0), peer_line(14.0), json.dumps(profile), second, other])
    )
    # A file that is named twice counts once.
    arguments = ["merge", str(a), str(b), str(b), "--peer", str(lines), "--out", str(out)]
    assert itl.main(arguments) == 0
    merged = json.loads(out.read_text())
    assert merged["environment"] == measured["environment"]
    assert len(merged["peer"]) == 3
    assert merged["peer"][0]["profile"]["kernels_per_step"] == 490
    for row, before in zip(merged["rows"], measured["rows"], strict=True):
        assert len(row["repeats"]) == 4
        assert row["step_ms"] == pytest.approx(before["step_ms"] + 0.5, rel=1e-4)
        assert row["peers"]["v1"]["repeats"] == 2
        assert row["peer_ratio"] == pytest.approx(row["step_ms"] / 12, rel=1e-4)
        assert row["peers"]["v2"]["ratio"] == pytest.approx(row["step_ms"] / 6, rel=1e-4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (peer_line(1.0, pattern="M-M-"), "the peer's pattern is 'M-M-'"),
        ('{"error": "out of memory"}', "the peer failed: out of memory"),
        ("{", "peer.jsonl:1 is not JSON"),
    ],
)
def test_a_peer_that_cannot_stand_beside_is_refused(
    itl: ModuleType,
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
    assert not out.exists()


def test_figures_are_made_anew_from_the_repeats(measured: dict[str, Any]) -> None:
    row = measured["rows"][0]
    assert aggregate(row)["step_ms"] == pytest.approx(row["step_ms"], rel=1e-4)
    assert list(aggregate(row)) == list(row)


def test_readme_tables_and_pictures_come_from_the_json(
    itl: ModuleType, measured: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "tables"))
    import itl_tables
    import source

    for module in (itl_tables, source):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert {table() for table in itl_tables.TABLES.values()} == {None}
    rows = [row | {"bandwidth": 4e12} for row in measured["rows"]]
    rows += [row | {"strategy": "defer"} for row in rows[:2]]
    rows += [row | {"strategy": "always"} for row in rows[:2]]
    profile = analyse([Operation("gemm", 0, 5), Operation("gemm", 9, 12)], 2)
    rows[2] |= {"profile": profile, "idle_share": 0.25, "operations": 1.0}
    path = tmp_path / "h200" / "itl-8b.json"
    path.parent.mkdir()
    path.write_text(json.dumps(measured | {"rows": rows}))
    path.with_name("itl-8b-strategies.json").write_text(path.read_text())
    tables = {name: table() for name, table in itl_tables.TABLES.items()}
    assert "25.0 %" in tables["itl-peer"]
    assert tables["itl-strategies"].count("| tiny |") == 2
    assert tables["itl-shapes"].count("| tiny |") == 1

    pytest.importorskip("matplotlib")
    assert itl.main(["plot", str(path)]) == 0
    names = {p.name for p in path.parent.iterdir() if p.suffix != ".json"}
    assert names == {"itl-tiny.svg", "itl-tiny-staggered.svg", "timeline-tiny.png"}


@pytest.mark.gpu
def test_on_a_gpu_steady_steps_are_traced(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    load = ["--batches", "4", "--isl", "40", "--osl", "96", "--block-size", "32", "--repeats", "2"]
    turns = ["--lengths", "all", "--strategies", "all", "--profile-steps", "8", "--nvtx"]
    assert main(["bench", str(demo.SHIPPED), *load, *turns, "--json", str(out)]) == 0
    for row in json.loads(out.read_text())["rows"]:
        assert row["floor_ratio"] > 1
        if row["strategy"] in ("auto", "blocking"):
            profile = row["profile"]
            assert profile["steps"] == 8
            parts = [profile[f"{name}_us_per_step"] for name in ("busy", "idle", "short_gaps")]
            assert sum(parts) == pytest.approx(profile["window_us_per_step"], rel=1e-4)
            assert profile["operations_per_step"] > 20
            assert profile["timeline"]
        if row["strategy"] in ("auto", "always"):
            assert row["undeclared_waits"] == row["starved_waits"] == row["implicit_syncs"] == 0
