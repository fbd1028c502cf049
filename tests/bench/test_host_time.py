"""The host's own work in a step of steady decode, by count. Nothing is timed."""

import json
from pathlib import Path

import host_time
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("drafts", [3, 0])
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_a_step_makes_few_python_calls(rows: int, drafts: int) -> None:
    """Whatever NumPy does for all rows at once is done once; blocks that fill up cost some more."""
    with host_time.steady(rows, drafts, 40) as engine:
        calls = host_time.calls(engine, 40)
    assert calls["total"] <= 150 + 8 * rows, calls
    assert calls["schedule"] > 0
    assert calls["hand_out"] > 0


@pytest.mark.slow
def test_two_checkouts_stand_in_one_result(tmp_path: Path) -> None:
    out = tmp_path / "host.json"
    few = ["--rows", "2", "--drafts", "3", "--steps", "4", "--repeats", "1"]
    assert host_time.main([*few, "--before", str(ROOT), "--out", str(out)]) == 0
    ours, before = json.loads(out.read_text())["rows"]
    assert (ours["engine"], before["engine"]) == ("ours", "before")
    # Results that have been there for some time are read by a call or two more.
    timed = {"read", "total"}
    for name in ours["calls"].keys() - timed:
        assert ours["calls"][name] == before["calls"][name]
    assert ours["calls"].keys() == before["calls"].keys() > timed
    assert len(ours["repeats"]) == 1
