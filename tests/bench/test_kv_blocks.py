"""The tiny form of `benchmarks/kernels/kv_blocks.py`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / "kernels"), str(BENCHMARKS / "common")]
kv_blocks = importlib.import_module("kv_blocks")


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_all_sizes_give_the_same_and_are_timed(dtype: str, tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    sizes = ["--rows", "2", "--contexts", "40", "--chunk", "9", "--behind", "30"]
    few = ["--device", "cpu", "--shape", "tiny", "--blocks", "8,48", "--repeats", "1"]
    few += ["--kv-cache-dtype", dtype]
    assert kv_blocks.main([*few, *sizes, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["rows"], r["tokens"]) for r in rows] == [(2, 1), (2, 4), (1, 9)]
    assert all(set(r["us"]) == {"8", "48"} for r in rows)
