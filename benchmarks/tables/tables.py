"""Writes the tables of README and docs from the committed JSON, and from shapes.

    python benchmarks/tables/tables.py           writes them
    python benchmarks/tables/tables.py --check   only tells whether they are current

A page holds a table wherever it says `<!-- NAME -->`, up to `<!-- /NAME -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import checkpoint_tables
import lockstep_tables
import memory_tables
import sampling_tables
import serve_tables
import server_tables
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
    **lockstep_tables.TABLES,
    **memory_tables.TABLES,
    **sampling_tables.TABLES,
    **serve_tables.TABLES,
    **server_tables.TABLES,
    **state_tables.TABLES,
    **vllm_replay_tables.TABLES,
    **vllm_tables.TABLES,
}


def filled(page: str, made: dict[str, str]) -> str:
    """The page with every table that it names as made from the JSON."""

    def table(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in made:
            raise ValueError(f"<!-- {name} --> names no table; there are {', '.join(made)}")
        return f"<!-- {name} -->\n{made[name]}\n<!-- /{name} -->"

    marked = r"<!-- (?P<name>[a-z-]+) -->\n.*?<!-- /(?P=name) -->"
    return re.sub(marked, table, page, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    made = {name: table() for name, table in TABLES.items()}
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
