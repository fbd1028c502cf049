"""Committed results say what was measured and how, not on whose machine it lay."""

import json
import subprocess
from pathlib import Path

from record import RESULTS, commit, save, without_folders


def test_committed_results_name_no_folder_of_a_machine() -> None:
    for path in RESULTS.rglob("*.json"):
        result = json.loads(path.read_text())
        assert without_folders(result) == result, path


def test_saved_paths_lose_their_folders(tmp_path: Path) -> None:
    result = {"run": ["env A=/any/x/y python3 /some/a b/c", 1], "rate": "tokens/s", "ask": "/ping"}
    path = save("any", {"environment": {"device": "any"}} | result, tmp_path / "any.json")
    saved = json.loads(path.read_text())
    assert {name: saved[name] for name in result} == result | {"run": ["env A=y python3 a b/c", 1]}


def test_a_changed_checkout_is_marked(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True)

    assert commit(tmp_path) is None
    git("init", "-q")
    (tmp_path / "code.py").write_text("")
    git("add", "code.py")
    git("commit", "-q", "-m", "first")
    clean = commit(tmp_path)
    (tmp_path / "code.py").write_text("changed")
    assert clean is not None
    assert commit(tmp_path) == f"{clean}-dirty"
