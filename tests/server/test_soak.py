"""The short form of `benchmarks/engine/soak_http.py`: clients that leave, floods and faults."""

import importlib
import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "engine"))
soak_http = importlib.import_module("soak_http")
BAD = importlib.import_module("soak").BAD


@pytest.mark.slow
def test_every_text_is_right_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("uvicorn", "hybrid_runtime"):  # the script takes their logs for itself
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    result = soak_http.run(soak_http.parsed(["--short"]))
    counts = result["counts"]
    assert not any(result["left"].values())
    for bad in BAD:
        assert counts.get(bad, 0) == 0
    for name in (
        "right", "beginnings right", "hit tokens", "evictions", "queue full", "ended by deadline",
        "ended by error", "ended by left",
    ):  # fmt: skip
        assert counts.get(name, 0) > 0, (name, counts)
