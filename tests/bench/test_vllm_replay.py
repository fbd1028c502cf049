"""Benchmarks of replay inside vLLM, as far as they run without it: their arithmetic and tables."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_runtime.bench.shapes import SHAPES, config
from hybrid_runtime.models.registry import FAMILIES

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("common", "tables", "vllm"):
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / folder))


def test_engine_options_as_flags_of_the_server() -> None:
    import openai_server

    chosen = {
        "model": "DIR",
        "tokenizer": "DIR",
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "max_num_seqs": 8,
        "speculative_config": {"method": "mtp"},
    }
    assert openai_server.flags(chosen) == [
        "DIR", "--enable-prefix-caching", "--no-async-scheduling", "--max-num-seqs", "8",
        "--speculative-config", '{"method": "mtp"}',
    ]  # fmt: skip


def served(side: str, speed: float) -> dict[str, Any]:
    import openai_server

    return {"side": side, "running": 5.0} | dict.fromkeys(openai_server.FIGURES, speed)


def test_ratios_are_of_neighbours_with_the_plug_in_first() -> None:
    import openai_server

    order = ("replay", "vllm", "vllm", "replay")
    runs = [served(side, speed) for side, speed in zip(order, (3.0, 2.0, 4.0, 10.0), strict=True)]
    found = openai_server.summary(runs)
    assert found["ratio"]["output_throughput"] == 2.0  # of 1.5 and 2.5
    assert found["replay"]["p99_itl_ms"] == 6.5


def test_one_engine_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neighbours are runs with the same prompts, however far apart they ran."""
    import replay_steps

    started = []

    class Child:
        def __init__(self, name: str, *_: Any) -> None:
            self.name = name
            started.append(name)

        def hear(self) -> dict[str, Any]:
            return {}

        def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
            share = 0.5 if self.name == "replay" else 1.0
            return {"mean": (asked["seed"] + 1) * asked["batch"] * share}

        def close(self) -> None: ...

    monkeypatch.setattr(replay_steps, "Child", Child)
    out = tmp_path / "steps.json"
    monkeypatch.setattr(
        sys, "argv", ["x", "--alone", "--batches", "4,1", "--rounds", "2,1", "--out", str(out)]
    )
    replay_steps.main()
    assert started == ["replay", "vllm", "replay"]
    batches = json.loads(out.read_text())["batches"]
    assert batches["4"]["ratios"] == [0.5] * 4
    assert batches["1"]["ratios"] == [0.5] * 2


def test_neighbours_are_of_both_sides() -> None:
    """A run that its cache had no room for has none, and leaves the others theirs."""
    import replay_steps

    means = [("replay", 8.0), ("vllm", None), ("vllm", None), ("replay", 1.0)]
    means += [("replay", 1.0), ("vllm", 2.0)]
    found = replay_steps.summary([{"side": side, "mean": mean} for side, mean in means])
    assert found == {"replay_ms": 1.0, "vllm_ms": 2.0, "ratios": [0.5], "ratio": 0.5}


class Lockstep:
    """Two of three rows get their first token in the first step, all decode from the second on."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.calls = 0

    def submit(self, number: int, ask: Any) -> None:
        self.left[number] = ask.output

    def step(self) -> list[tuple[int, int, bool]]:
        self.calls += 1
        if self.calls == 3:
            return []  # one that was queued ahead
        found = []
        for number in list(self.left)[: 2 if self.calls == 1 else None]:
            new = min(3, self.left[number])
            self.left[number] -= new
            found.append((number, new, not self.left[number]))
            if not self.left[number]:
                del self.left[number]
        return found


def test_lockstep_counts_the_steps_in_which_all_decode() -> None:
    """Not the one with a first token, nor those in which one ends: steps 4 and 5 of 7."""
    import lockstep

    looks: list[int] = []
    run = lockstep.drive(Lockstep(), [[1], [2], [3]], 15, lambda: looks.append(1))
    assert (len(run.steps), run.accepted, run.tokens, len(looks)) == (2, [3] * 6, 45, 7)
    found = lockstep.figures(run)
    assert found["itl_ms"] == pytest.approx(found["step_ms_mean"] / 3)
    assert lockstep.figures(run._replace(steps=[])) == {"timed_steps": 0}


@pytest.mark.parametrize("name", ["tiny", "qwen-tiny"])
def test_lockstep_lines_are_read_as_the_peers(name: str, tmp_path: Path) -> None:
    import lockstep
    import peer
    import shapes

    args = lockstep.parse(["--shape", name, "--batch", "2,3"])
    asked = lockstep.settings(args)
    assert asked["rates"] == (1.0, 1.0, 0.0)
    sizes = asked["vllm"]["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == [1, 2, 3, 4, 8, 12, 16]
    lengths = [len(prompt) for prompt in lockstep.prompts(args, 4, seed=1, block=8)]
    assert sorted(lengths) == [1024, 1026, 1028, 1030]
    about = {"environment": {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "device": "any"}
    run = lockstep.Run([1.0, 3.0], [3, 3], 6, 1.0)
    load = {"batch": 2, "isl": args.isl, "osl": args.osl, "rep": 0}
    line = load | lockstep.figures(run) | {"options": lockstep.described(args, about)}
    (tmp_path / "vllm.jsonl").write_text(json.dumps(line))
    (entry,) = peer.read(tmp_path / "vllm.jsonl")
    assert [entry[name] for name in ("runner", "drafts", "acceptance")] == ["v2", 3, 3.0]
    assert entry["repeats"][0]["step_ms_mean"] == 2.0
    whole, few = ({"config": shapes.measured(name, n).fields, "rows": []} for n in (None, 3))
    assert peer.attach(whole, [entry])["peer"] == [entry]
    with pytest.raises(ValueError, match="the peer's pattern is"):
        peer.attach(few, [entry])


def test_documented_options_of_the_engine_are_known() -> None:
    import lockstep

    page = (ROOT / "docs" / "benchmarks.md").read_text()
    shown = re.findall(r" -- (--[^`]*)`", page)
    assert len(shown) >= 5
    for options in shown:
        lockstep.parse(options.split())


def test_shapes_of_qwen() -> None:
    """A dense shape has the weights of one, though vLLM's class asks for a layer with experts."""
    import nemotron
    import qwen

    for name in SHAPES:
        shape = qwen.config(name)
        assert shape["layer_types"].count("full_attention") == shape["num_hidden_layers"] // 4
        assert nemotron.depth(shape) == shape["num_hidden_layers"] == len(shape["layer_types"])
        if nemotron.has_experts(shape):
            assert "mlp_only_layers" not in shape
            read = FAMILIES["qwen3_next"].read_config(shape)
            assert read == replace(config(name), interleaved=True)
            continue
        assert shape["mlp_only_layers"] == list(range(1, shape["num_hidden_layers"]))
        assert shape["num_experts_per_tok"] == shape["num_experts"]
        assert shape["moe_intermediate_size"] * shape["num_experts"] == shape["intermediate_size"]
    small = qwen.small()
    assert small["layer_types"].count("linear_attention") == 6
    assert small["moe_intermediate_size"] * small["num_experts"] == small["intermediate_size"]
    short = qwen.config("qwen3.5-27b", 8)
    assert (len(short["layer_types"]), short["mlp_only_layers"][-1]) == (8, 7)
    folder = nemotron.checkpoint(short, "bfloat16", 100)
    written = json.loads((Path(folder) / "config.json").read_text())
    assert written == short | {"dtype": "bfloat16", "max_position_embeddings": 8192}
