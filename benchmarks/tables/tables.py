"""Writes README's figures from the committed JSON, between `<!-- NAME -->` and `<!-- /NAME -->`.

python benchmarks/tables/tables.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import itl_tables
import memory_tables
import vllm_tables
from markdown import markdown

RESULTS = Path(__file__).parents[1] / "results"
README = Path(__file__).parents[2] / "README.md"


def load(device: str, name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / device / f"{name}.json").read_text())
    return result


def us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def environment(result: dict[str, Any]) -> str:
    env = result["environment"]
    return (
        f"{env['device']}, {env['cpu']}, torch {env['torch']}, Triton {env['triton']}, "
        f"NumPy {env['numpy']}, commit {env['commit']}."
    )


def postcopy() -> str:
    result = load("h200", "postprocess")
    words = {"none": "nothing to copy", "one": "one row", "all": "all rows"}
    rows = [
        [
            str(row["rows"]),
            words[row["crossing"]],
            us(row["always"]),
            us(row["auto"]) if "auto" in row else "no launch",
            us(row["vLLM"]),
            us(row["floor"]) if row["floor"] else "-",
        ]
        for row in result["gpu"]
    ]
    header = ["rows", "crossing", "`always`", "`auto`", "vLLM 0.33.0", "floor"]
    return markdown(header, rows) + "\n\n" + environment(result)


def host() -> str:
    result = load("h200", "postprocess")
    names = ("again both", "again best", "whole both", "whole best")
    parts = ("check", "plan and pack", "upload", "launch")
    rows = [
        [str(row["rows"]), "yes" if row["readback"] else "no", *(us(row[k]) for k in names + parts)]
        for row in result["host"]
    ]
    header = ["rows", "readback", "repeated step", "its best", "whole step", "its best"]
    other = load("h200", "postprocess-second-host")
    slow, fast = (
        next(r for r in source["host"] if r["rows"] == 256 and not r["readback"])
        for source in (other, result)
    )
    note = (
        "The processor under the same GPU differs from lease to lease: on a second machine, where "
        f"the parts took {slow['check'] / fast['check']:.1f} times as long, the repeated step "
        f"of 256 rows took {us(slow['again both'])} and the whole one {us(slow['whole both'])}."
    )
    table = markdown([*header, *(f"of it: {p}" for p in parts)], rows)
    return f"{table}\n\n{note} {environment(result)}"


def predicate() -> str:
    result = load("h200", "predicate")
    names = ("python loop", "post-copy list", "with pre-copy")
    rows = [[str(row["rows"]), *(us(row[n]) for n in names)] for row in result["rows"]]
    table = markdown(["rows", "Python loop", "candidate list", "with the pre-copy's"], rows)
    return f"{table}\n\n{environment(result)}"


def acceptance() -> str:
    result = load("cpu", "acceptance")
    words = {"mtp": "MTP head", "eagle": "EAGLE head", "ngram": "n-gram look-up"}
    rows = [
        [words[row["drafter"]], f"{row['length']:.2f}", f"{row['same text']} of {row['texts']}"]
        for row in result["rows"]
        if row["drafter"] in words
    ]
    table = markdown(["drafter", "tokens per step", "text as without drafts"], rows)
    return f"{table}\n\nOn a CPU, commit {result['environment']['commit']}."


def numerics() -> str:
    result = load("h200", "numerics")
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for row in result["rows"]:
        errors = " / ".join(
            f"{row[name]:.1e}" for name in ("outputs rms", "outputs", "final state")
        )
        cells.setdefault(row["state"], {})[row["layout"], row["rounding"]] = errors
    kinds = ("columns", "to nearest"), ("replay", "to nearest"), ("replay", "by chance")
    rows = [[state, *(line.get(kind, "-") for kind in kinds)] for state, line in cells.items()]
    apart = result["fp32 replay against columns"]
    of_head = max(value for name, value in apart.items() if "all heads" not in name)
    of_all = max(value for name, value in apart.items() if "all heads" in name)
    note = (
        f"{result['tokens']} tokens, {result['drafts']} drafts, {result['sequences']} sequences. "
        f"In float32 the layouts are {of_all:.1e} of the largest entry apart, {of_head:.1e} of the "
        f"largest entry of the head. {environment(result)}"
    )
    header = ["state", "`columns`", "`replay`", "`replay`, rounded by chance"]
    return markdown(header, rows) + "\n\n" + note


def verify() -> str:
    """GPU time of the state update of one layer at 4 tokens a row: both layouts, and the plain form
    of columns."""
    result = load("h200", "verify")
    rows = []
    for row in result["gpu"]:
        if row["tokens"] != 4:
            continue
        share = row["replay TB/s"] * 1e12 / row["bandwidth"]
        rows.append(
            [
                row["state"],
                str(row["rows"]),
                *(us(row[name]) for name in ("baseline", "update", "floor")),
                *(us(row[name]) for name in ("replay", "replay floor")),
                *(f"{row['replay'] / row[name]:.3f}" for name in ("baseline", "update")),
                f"{100 * share:.0f} %",
            ]
        )
    header = [
        "state", "rows", "plain", "`columns`", "floor", "`replay`", "floor", "÷ plain",
        "÷ `columns`", "of bandwidth",
    ]  # fmt: skip
    return markdown(header, rows) + "\n\n" + environment(result)


# A table may say None as long as nothing has been measured for it; README is then left alone.
TABLES: dict[str, Callable[[], str | None]] = {
    "acceptance": acceptance,
    "postcopy": postcopy,
    "host": host,
    "predicate": predicate,
    "numerics": numerics,
    "verify": verify,
    **itl_tables.TABLES,
    **memory_tables.TABLES,
    **vllm_tables.TABLES,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only tell whether README is current")
    args = parser.parse_args()
    text = now = README.read_text()
    for name, table in TABLES.items():
        made = table()
        if made is None:
            continue
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        if not re.search(pattern, text, re.DOTALL):
            raise ValueError(f"README.md has no place for {name}; it must hold <!-- {name} -->")
        body = f"{made}\n"
        text = re.sub(pattern, lambda m, body=body: m[1] + body + m[2], text, flags=re.DOTALL)
    if args.check:
        print("README.md is current" if text == now else "README.md differs from the JSON")
        return int(text != now)
    README.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
