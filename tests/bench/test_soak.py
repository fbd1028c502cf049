"""The short form of `benchmarks/engine/soak.py`: load, faults and too little memory, on the CPU."""

import json
from pathlib import Path

import pytest
import soak
from helpers.qwen import small_checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replay", "columns", "Gated DeltaNet"])
def test_every_text_is_right_and_nothing_is_left(kind: str, tmp_path: Path) -> None:
    more = ["--state-layout", kind]
    if kind == "Gated DeltaNet":
        small_checkpoint(tmp_path)
        more = ["--checkpoint", str(tmp_path)]
    result = soak.run(soak.parsed(["--short", "--device", "cpu", *more]))
    counts = result["counts"]
    assert not any(result["left"].values())
    for bad in soak.BAD:
        assert counts.get(bad, 0) == 0
    assert result["memory"][-1][0] == counts["submitted"]
    # What the load is meant to bring about did happen.
    for name in (
        "right", "beginnings right", "preemptions", "hit tokens", "evictions", "ended by abort",
        "ended by deadline", "ended by error", "cancelled consumers", "blocks from the host",
    ):  # fmt: skip
        assert counts.get(name, 0) > 0, (name, counts)


def test_parts_are_added_up_by_layout(tmp_path: Path) -> None:
    paths = []
    for number, layout in enumerate(("replay", "columns", "replay")):
        part = {"options": {"state_layout": layout}, "counts": {"submitted": 10 + number}}
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(part | {"environment": {"device": "CPU"}}))
    out = tmp_path / "all.json"
    soak.merge([*map(str, paths), "--out", str(out)])
    result = json.loads(out.read_text())
    found = {name: counts["submitted"] for name, counts in result["counts"].items()}
    assert found == {"all": 33, "replay": 22, "columns": 11}
    assert all(counts["wrong"] == 0 for counts in result["counts"].values())
    assert len(result["parts"]) == 3
