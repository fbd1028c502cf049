"""README and docs keep their word: examples run, figures are those of the committed JSON, links
lead somewhere, and what can be set or run is named.

A ```python block runs as a program of its own, from the repository's root; behind the page's first
block if that says `# begins every program on this page`. What it prints stands below it, behind
`It prints` and a colon, in a ```text block. One whose first line is `# needs a GPU`,
`# needs a server` or `# needs vLLM` is only compiled.
"""

import dataclasses
import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from hybrid_runtime import cli
from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.engine.config import EngineConfig
from hybrid_runtime.engine.request import FinishReason, ShortHit
from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.state import BlockDemand, HybridStateManager, Stats, StepRows, Strategy

ROOT = Path(__file__).parents[2]
PAGES = {
    path.name: path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
SCRIPTS = sorted(
    path for path in (ROOT / "benchmarks").rglob("*.py") if "__main__" in path.read_text()
)

SHARED_OPTIONS = {
    "options.add_options(": "hybrid_runtime/bench/options.py",
    "arguments(__doc__": "benchmarks/common/record.py",
}
"""Files with the options of the scripts that say this."""


def fenced(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def programs(page: str) -> list[tuple[str, str]]:
    """Each with what the page says that it prints; "": nothing."""
    printed = r"(?:\nIt prints\b[^\n]*:\n\n```text\n(.*?)^```)?"
    blocks = re.findall(rf"^```python\n(.*?)^```\n{printed}", PAGES[page], re.M | re.S)
    if blocks and blocks[0][0].startswith("# begins every program on this page\n"):
        beginning = blocks.pop(0)[0]
        return [(beginning + program, text) for program, text in blocks]
    return blocks


PROGRAMS = [
    pytest.param(*program, id=f"{page}-{number}")
    for page in PAGES
    for number, program in enumerate(programs(page), 1)
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "printed"), PROGRAMS)
def test_program(
    program: str,
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    code = compile(program, request.node.name, "exec")
    if program.startswith(("# needs a GPU\n", "# needs a server\n", "# needs vLLM\n")):
        return
    monkeypatch.chdir(ROOT)
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out == printed


@pytest.mark.slow
def test_programs_are_well_typed(tmp_path: Path) -> None:
    """Those that use the engine, as a user's mypy sees them: by this package's py.typed."""
    package = tmp_path / "hybrid_runtime"
    package.mkdir()
    for path in (*(ROOT / "hybrid_runtime").iterdir(), ROOT / "kernels", ROOT / "specdecode"):
        (package / path.name).symlink_to(path)
    assert (package / "py.typed").is_file()
    # Of other rooms, and of torch, nothing needs to be known: that would take a minute.
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {tmp_path}\nfollow_imports = skip\nignore_missing_imports = True\n"
        "[mypy-hybrid_runtime.engine.*,hybrid_runtime.specdecode.sampling]\n"
        "follow_imports = silent\n"
    )
    files = []
    for page in PAGES:
        for number, (program, _) in enumerate(programs(page), 1):
            if "hybrid_runtime.engine" in program:
                files.append(f"{page.removesuffix('.md').lower()}_{number}.py")
                (tmp_path / files[-1]).write_text(program)
    (tmp_path / "wrong.py").write_text(
        "from hybrid_runtime.engine import Engine\nEngine.from_pretrained('.').chat('hello')\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir=/dev/null", *files, "wrong.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = [line for line in ran.stdout.splitlines() if ": error: " in line]
    assert len(files) >= 5
    assert [error.split(":")[0] for error in errors] == ["wrong.py"], ran.stdout + ran.stderr


@pytest.mark.parametrize(("page", "least"), [("README.md", 1), ("runner.md", 5), ("engine.md", 2)])
def test_page_has_programs_that_run(page: str, least: int) -> None:
    assert sum(not program.startswith("# needs") for program, _ in programs(page)) >= least


def test_tables_are_those_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/tables/tables.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    said = "run `python benchmarks/tables/tables.py` before you commit"
    assert done.returncode == 0, f"{said}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_stands_outside_a_table(page: str) -> None:
    """What was measured comes from JSON: prose names no time, rate or percentage of its own."""
    prose = re.sub(r"<!-- ([a-z0-9-]+) -->\n.*?<!-- /\1 -->", "", PAGES[page], flags=re.DOTALL)
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", prose, flags=re.MULTILINE | re.DOTALL)
    measured = r"(?<!more than )\b\d[\d.,]*\s?(?:ns|µs|us|ms|%|[GT]B/s|tokens/s|times)(?!\w)"
    assert re.findall(measured, prose) == []


def anchors(text: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for link in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = folder / name if name else folder / page
        assert target.exists(), f"{page} links {link}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page} links {link}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_is_documented(script: Path) -> None:
    """With its command, and with options that it has."""
    path = script.relative_to(ROOT).as_posix()
    commands = re.findall(rf"python {re.escape(path)}([^`\n]*)", PAGES["benchmarks.md"])
    assert commands, f"docs/benchmarks.md has no command of {path}"
    known = script.read_text()
    for maker, file in SHARED_OPTIONS.items():
        known += (ROOT / file).read_text() if maker in known else ""
    for command in commands:
        for option in re.findall(r"--[a-z][\w-]*", command.split(" -- ")[0]):
            assert f'"{option}"' in known, f"{path} has no {option}"


def test_commands_parse() -> None:
    """Of the command line, wherever a page shows it."""
    shown = [
        line
        for page in PAGES
        for block in fenced(page, "sh")
        for line in block.splitlines()
        if line.startswith(".venv/bin/hybrid-runtime")
    ]
    assert shown
    for line in shown:
        cli.parser().parse_args(shlex.split(line)[1:])


def named(page: str, header: str) -> set[str]:
    """Names in the first column of the tables with this header there."""
    rows = re.findall(
        rf"^\| {re.escape(header)} \|.*\n\| :-.*\n((?:\|.*\n)+)", PAGES[page], re.MULTILINE
    )
    cells = [line.split(" | ")[0] for table in rows for line in table.splitlines()]
    return {name for cell in cells for name in re.findall(r'`"?(\w+)"?`', cell)}


def fields(kind: Any) -> set[str]:
    """Fields that somebody gives; derived ones are in the docstring only."""
    return {field.name for field in dataclasses.fields(kind) if field.init}


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("field of `StepRows`", fields(StepRows)),
        ("field of `BlockDemand`", set(BlockDemand._fields)),
        ("counter of `stats()`", fields(Stats)),
        (
            "option of `HybridStateManager`",
            set(inspect.signature(HybridStateManager).parameters),
        ),
        ("field of `rows`", {*StateRows._fields, *ReplayRows._fields}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_runner_page_names_all(header: str, names: set[str]) -> None:
    assert named("runner.md", header) == names


def test_runner_page_names_every_call() -> None:
    calls = "\n".join(re.findall(r"^\| (`.*?) \| ", PAGES["runner.md"], re.MULTILINE))
    for name in vars(HybridStateManager):
        if not name.startswith("_"):
            assert re.search(rf"`{name}[`(]", calls), f"docs/runner.md does not list {name}"


def test_engine_page_names_every_call() -> None:
    calls = "\n".join(re.findall(r"^\| (`.*?) \| ", PAGES["engine.md"], re.MULTILINE))
    for name in vars(Engine):
        if not name.startswith("_"):
            assert re.search(rf"`(?:engine|Engine)\.{name}[`(]", calls), f"engine.md: no {name}"


@pytest.mark.parametrize(
    ("page", "header", "values"),
    [
        ("engine.md", "`finish_reason`", get_args(FinishReason)),
        ("memory.md", "`hit.short`", get_args(ShortHit)),
        ("how-it-works.md", "strategy", get_args(Strategy)),
    ],
    ids=["finish_reason", "hit.short", "strategy"],
)
def test_pages_name_every_value(page: str, header: str, values: tuple[str, ...]) -> None:
    assert named(page, header) - {"None"} == set(values)


@pytest.mark.parametrize("page", PAGES)
def test_what_pages_name_exists(page: str) -> None:
    """Paths, and modules of `kernels`."""
    code = re.sub(r"^```.*?^```", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`([\w./-]+)`", code):
        if re.fullmatch(r"[\w./-]+/(?:[\w.-]+\.(?:py|md|json))?", name):
            places = (ROOT, ROOT / "benchmarks", ROOT / "hybrid_runtime" / "integrations" / "vllm")
            assert any((place / name).exists() for place in places), f"{page} names {name}"
        elif re.fullmatch(r"kernels(?:\.\w+){2,}", name):
            module, _, item = f"hybrid_runtime.{name}".rpartition(".")
            if not hasattr(importlib.import_module(module), item):
                importlib.import_module(f"hybrid_runtime.{name}")


@pytest.mark.parametrize("options", [EngineConfig, SamplingParams])
def test_every_option_is_documented(options: Any) -> None:
    """With its default, in the table of its class; the table names nothing else."""
    section = {"EngineConfig": "Options", "SamplingParams": "SamplingParams"}[options.__name__]
    text = PAGES["engine.md"].split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, re.MULTILINE))
    defaults = {field.name: repr(field.default) for field in dataclasses.fields(options)}
    assert {name: value.replace('"', "'") for name, value in rows.items()} == defaults
