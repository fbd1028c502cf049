"""Benchmarks of replay inside vLLM, as far as they run without it: their arithmetic and tables."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

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
