"""README is short and starts quickly; reports from users of other engines each name their test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_readme_is_one_to_two_screens() -> None:
    assert len(README.splitlines()) <= 105


def test_quick_start_is_two_commands() -> None:
    section = README.split("## Quick start")[1].split("\n## ")[0]
    first, second = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert "demo" in first
    assert "pytest" in second
    assert (ROOT / ".ci" / "run").read_text().endswith(f"\n{second}")


def test_every_page_is_linked() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in README, f"README does not link docs/{page.name}"


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


def test_what_is_said_of_vllm_is_said_on_its_page() -> None:
    """`tests/vllm_release` gives the commands of that page to vLLM itself."""
    page = (ROOT / "docs" / "vllm.md").read_text()
    (command,) = re.findall(r"^vllm serve .*\n.*$", README, re.MULTILINE)
    configs = re.findall(r"'(\{.*?\})'", README)
    assert command in page
    assert len(configs) == 2
    assert all(config in page for config in configs)
    assert "hybrid-runtime replays: one state per request" in page
