"""Benchmarks of replay inside vLLM, as far as they run without it: their arithmetic and tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"device": "D", "cpu": "C", "commit": "abc", "torch": "T"}


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

    class Engine:
        def __init__(self, side: str, *_: Any) -> None:
            self.side = side
            started.append(side)

        def answer(self) -> dict[str, Any]:
            return {}

        def ask(self, batch: int, seed: int) -> dict[str, Any]:
            return {"mean": (seed + 1) * batch * (0.5 if self.side == "replay" else 1.0)}

        def close(self) -> None: ...

    monkeypatch.setattr(replay_steps, "Engine", Engine)
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


def test_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import openai_server
    import source
    import vllm_replay_tables as tables

    for module in (source, tables):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    optional = ("served", "logprobs", "poisoned", "checked", "histories")
    assert {getattr(tables, name)() for name in optional} == {None}
    runs = [served("replay", 3.0), served("vllm", 2.0)]
    spread = dict.fromkeys(("compared", "mean", "p99", "max"), 7)
    checked = {
        f"{how}_{what}": 0
        for how in ("checked", "different", "worst")
        for what in ("states", "outputs", "boundaries")
    }
    fit = {"tokens_per_s": 1.0}
    comparison = {
        "different_text": 0,
        "requests": 200,
        "different_prefix_hits": 0,
        "metrics": {"hits": [5, 5]},
    }
    finite = {"tokens": 5, "not_finite": 0, "steps": 340}
    changed = {"guess_bytes": 0, "state_bytes": 0}
    kind = {"histories": 2000, "holes": [], "steps": 9, "preemptions": 8, "boundaries": 7}
    files: dict[str, dict[str, Any]] = {
        "h200/vllm_openai_server": {
            "options": {"drafts": 3, "acceptance": "x", "per_place": 4, "kv_gib": [30, 58]},
            "rows": {"8": {"runs": runs, **openai_server.summary(runs)}},
        },
        "h200/vllm_replay_steps": {
            "options": ["--num-spec", "3", "--kv-gib", "40"],
            "batches": {"8": {"ratios": [0.9, 0.8], "ratio": 0.85}},
        },
        "h200/vllm_replay_requests": {
            "options": ["--num-spec", "3", "--kv-gib", "40"],
            "fit": {"replay": fit | {"running": 284}, "vllm": fit | {"running": 91}},
        },
        "h200/vllm_logprobs": {
            "options": {"tokens": 64, "batches": [1, 4]},
            "mean": -1.0,
            "unexpected_tokens": 0,
            "spread": {"replay": spread},
        },
        "h200/vllm-check-replay": {"runs": [{"adapter": [{**checked, "checked_steps": 3000}]}]},
        "h200/vllm_poison": {
            "options": {"drafts": 3, "graphs": True},
            "runs": {
                "poisoned": finite | {"comparison": comparison},
                "captures": finite | changed | {"captures": 17},
            },
        },
        "cpu/vllm-histories": {
            "releases": {
                release: {"commit": "abc", "synchronous": kind, "asynchronous": kind}
                for release in ("0.31.0", "0.4.0")
            }
        },
    }
    for name, content in files.items():
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"environment": ENVIRONMENT, **content}))
    assert "| 8 | 3 : 2 | 1.50 |" in tables.served()
    assert "at most 5 requests ran at once" in tables.served()
    assert "| 8 | 0.85 | 0.80 to 0.90 |" in tables.gained()
    assert "284 requests ran at once with replay, 91 without" in tables.gained()
    assert "| replay | 7 |" in tables.logprobs()
    assert "3000 steps" in tables.checked()
    nan, capture = tables.poisoned().splitlines()[2:4]
    assert nan.endswith("| 0 of 200 | identical | 0 of 5 | 340 | - | - | - | abc |")
    assert capture.endswith("| a capture | - | - | 0 of 5 | 340 | - | 17 | 0 | abc |")
    assert tables.histories().index("vLLM 0.4.0") < tables.histories().index("vLLM 0.31.0")
