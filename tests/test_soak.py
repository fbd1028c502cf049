"""The short form of `benchmarks/soak.py`: load, faults and too little memory, on the CPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
soak = importlib.import_module("soak")


@pytest.mark.parametrize("layout", ["replay", "columns"])
def test_every_text_is_right_and_nothing_is_left(layout: str) -> None:
    result = soak.run(soak.parsed(["--short", "--device", "cpu", "--state-layout", layout]))
    counts = result["counts"]
    assert not any(result["left"].values())
    for bad in ("wrong", "beginnings wrong", "unexpected errors"):
        assert counts.get(bad, 0) == 0
    # What the load is meant to bring about did happen.
    for name in (
        "right", "beginnings right", "preemptions", "hit tokens", "evictions", "ended by abort",
        "ended by deadline", "ended by error", "cancelled consumers", "blocks from the host",
    ):  # fmt: skip
        assert counts.get(name, 0) > 0, (name, counts)
