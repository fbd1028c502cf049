"""Committed results say what was measured and how, not on whose machine it lay."""

import json
from pathlib import Path

from record import RESULTS, save, without_folders


def test_committed_results_name_no_folder_of_a_machine() -> None:
    for path in RESULTS.rglob("*.json"):
        result = json.loads(path.read_text())
        assert without_folders(result) == result, path


def test_saved_paths_lose_their_folders(tmp_path: Path) -> None:
    result = {"run": ["env A=/tmp/x/y python3 /root/a b/c", 1], "rate": "tokens/s", "ask": "/ping"}
    path = save("any", {"environment": {"device": "any"}} | result, tmp_path / "any.json")
    saved = json.loads(path.read_text())
    assert {name: saved[name] for name in result} == result | {"run": ["env A=y python3 a b/c", 1]}
