"""README keeps its word: its example runs, its figures are those of the committed JSON."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_runner_example_runs_and_is_short() -> None:
    (example,) = (b for b in blocks("python") if "manager.begin_step" in b)
    assert len(example.splitlines()) < 80
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "steps=30" in done.stdout


def test_the_embedding_example_runs() -> None:
    (example,) = (b for b in blocks("python") if "engine.embed" in b)
    command = [sys.executable, "-P", "-c", example]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1.0000") == 3  # each text is like itself


def test_figures_are_those_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/tables/tables.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_quick_start_is_two_commands() -> None:
    section = README.split("## Quick start")[1].split("\n## ")[0]
    assert len(re.findall(r"^```sh\n.*?^```", section, re.MULTILINE | re.DOTALL)) == 2


def test_user_reports_name_tests_that_exist() -> None:
    tests = ROOT / "tests"
    written = "\n".join(path.read_text() for path in tests.glob("*/test_*.py"))
    lines = (tests / "user_reports.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    rows = [(row[0], row[-1]) for row in cells if row[0] not in ("row", "trap", "property")]
    assert len(rows) > 90
    names = [name for name, _ in rows]
    for number in (*range(1, 67), *(f"P{n}" for n in range(1, 18))):
        assert any(name.split()[0] == str(number) for name in names), f"{number} has no row"
    for name, answer in rows:
        found = re.findall(r"\b(?:test_\w+|Test[A-Z]\w+)", answer)
        assert found or len(answer.split()) > 4, f"row {name} says {answer!r}"
        for test in found:
            begins = f"def {test}(" if test.startswith("test_") else f"\n{test} = "
            assert begins in written, f"row {name} names {test}"
