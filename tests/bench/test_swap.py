"""The benchmark of the host tier runs on a CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "engine"))
swap = importlib.import_module("swap")


def test_every_way_of_moving_blocks_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "swap.json"
    arguments = ["--device", "cpu", "--shapes", "tiny", "--blocks", "1,3", "--repeats", "2"]
    assert swap.main([*arguments, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["path"] == "memmove"
    # Two kinds of blocks, two counts, two directions, scattered and in a row.
    assert len(result["cases"]) == 2 * 2 * 2 * 2
    for case in result["cases"]:
        assert case["submitted"] <= case["asked"]
        both = {"batched", "loop of copy_"}
        assert case["submit_us"].keys() == (
            both if case["placement"] == "scattered" else {"batched"}
        )
