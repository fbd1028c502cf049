"""Writes the tables of README and docs from the committed JSON, and from shapes.

    python benchmarks/tables/tables.py           writes them
    python benchmarks/tables/tables.py --check   only tells whether they are current

A page holds a table wherever it says `<!-- NAME -->`, up to `<!-- /NAME -->`. A table that was
measured before its code changed says so in its caption (`stale.py`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import checkpoint_tables
import draft_tables
import fp8_tables
import lockstep_tables
import memory_tables
import sampling_tables
import serve_tables
import server_tables
import source
import stale
import state_tables
import vllm_replay_tables
import vllm_tables

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "hybrid_runtime" / "checkpoints" / "python-small" / "README.md",
)
TABLES: dict[str, Callable[[], str]] = {
    **checkpoint_tables.TABLES,
    **draft_tables.TABLES,
    **fp8_tables.TABLES,
    **lockstep_tables.TABLES,
    **memory_tables.TABLES,
    **sampling_tables.TABLES,
    **serve_tables.TABLES,
    **server_tables.TABLES,
    **state_tables.TABLES,
    **vllm_replay_tables.TABLES,
    **vllm_tables.TABLES,
}


class Table(NamedTuple):
    """text: the table and its caption. note: that it is older than its code; empty if it is not,
    None if git cannot tell."""

    text: str
    note: str | None


def make(name: str, root: Path = ROOT) -> Table:
    source.LOADED.clear()
    text = TABLES[name]()
    if any(source.repacked_vllm(name, result) for result in source.LOADED):
        text += " vLLM's wheel was repacked."
    measured = set().union(*map(stale.commits, source.LOADED))
    return Table(text, stale.note(root, measured, stale.CODE[name]) if measured else "")


def filled(page: str, made: dict[str, Table]) -> str:
    """The page with every table that it names as made from the JSON. Where git cannot tell whether
    a table is older than its code, its caption goes on to say what it says."""

    def table(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in made:
            raise ValueError(f"<!-- {name} --> names no table; there are {', '.join(made)}")
        text, note = made[name]
        if note is None:
            kept = stale.NOTE.search(found["text"])
            note = kept[0] if kept else ""
        gap = "\n\n" if text.endswith("|") else " "
        return f"<!-- {name} -->\n{text}{gap + note if note else ''}\n<!-- /{name} -->"

    marked = r"<!-- (?P<name>[a-z0-9-]+) -->\n(?P<text>.*?)\n?<!-- /(?P=name) -->"
    return re.sub(marked, table, page, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    made = {name: make(name) for name in TABLES}
    pages = {path: path.read_text() for path in PAGES}
    for name in made:
        if not any(f"<!-- {name} -->\n" in text for text in pages.values()):
            raise ValueError(f"no page has a place for {name}; one must say <!-- {name} -->")
    stale = {path: new for path, old in pages.items() if (new := filled(old, made)) != old}
    for path, text in stale.items():
        name = path.relative_to(ROOT)
        if args.check:
            print(f"{name} differs from the JSON")
        else:
            path.write_text(text)
            print(f"{name} written")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
