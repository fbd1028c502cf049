"""Did a change of the code change its speed? Two checkouts on one GPU, taking turns.

    python benchmarks/engine/regress.py --before ../old --after . --warm
    python benchmarks/engine/regress.py --before ../old --after . --out regress.json

The first compiles the kernels of both and times nothing; the second measures.

Runs each checkout's own `itl.py`, `verify.py` and `postprocess.py` in the order before, after,
after, before, and compares the medians of every figure that both have. What has been measured is
written after each run, so a time limit costs only the last ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from record import save, show

ORDER = ("before", "after", "after", "before")


class Script(NamedTuple):
    """One benchmark.

    name: of its file.
    options: what it is run with.
    tables: lists of rows in its JSON.
    keys: fields that say what a row is of.
    figures: fields that are compared.
    """

    name: str
    options: tuple[str, ...]
    tables: tuple[str, ...]
    keys: tuple[str, ...]
    figures: tuple[str, ...]


ITL = "--shape 8b --batches {batches} --acceptance 3 --repeats 3 --profile-steps 0"
SCRIPTS = (
    Script("itl", tuple(ITL.split()), ("rows",), ("state_layout", "batch"), ("step_ms", "ttft_ms")),
    Script(
        "verify", ("--tokens", "4"), ("gpu",), ("state", "rows", "tokens"),
        ("update", "replay", "conv"),
    ),
    Script(
        "postprocess", (), ("gpu", "host"), ("rows", "crossing", "readback"),
        ("always", "auto", "whole both", "again both"),
    ),
)  # fmt: skip


def importable(tree: Path, folder: Path) -> Path:
    """A folder that gives `import hybrid_runtime` the three packages of a checkout."""
    package = folder / "hybrid_runtime"
    package.mkdir(parents=True)
    for part in (*(tree / "hybrid_runtime").iterdir(), tree / "kernels", tree / "specdecode"):
        (package / part.name).symlink_to(part.resolve())
    return folder


def command(tree: Path, script: Script, batches: str, out: Path, *more: str) -> list[str]:
    """How to run a checkout's script, which lies where that checkout keeps it."""
    file = min((tree / "benchmarks").rglob(f"{script.name}.py"))
    options = (option.format(batches=batches) for option in script.options)
    return [sys.executable, str(file), *options, *more, "--out", str(out)]


def figures(script: Script, result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Every figure of one run by a name that both checkouts give it."""
    for table in script.tables:
        for row in result.get(table, ()):
            what = " ".join(f"{key}={row[key]}" for key in script.keys if key in row)
            for figure in script.figures:
                if isinstance(row.get(figure), int | float):
                    yield f"{script.name} {what} {figure}", float(row[figure])


def compared(measured: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Medians of what both checkouts have measured, and after over before."""
    rows = []
    for name, before in measured["before"].items():
        after = measured["after"].get(name)
        if not after:
            continue
        old, new = statistics.median(before), statistics.median(after)
        rows.append({"figure": name, "before": old, "after": new, "ratio": new / old})
        rows[-1] |= {"repeats": {"before": before, "after": after}}
    return rows


def warm(
    trees: dict[str, Path],
    environments: dict[str, dict[str, str]],
    scripts: list[Script],
    batches: str,
) -> None:
    """Run both checkouts side by side, so that their kernels are compiled when it counts."""
    for script in scripts:
        once = ("--repeats", "1") if script.name in ("itl", "verify") else ()
        runs = [
            subprocess.Popen(
                command(tree, script, batches, Path(os.devnull), *once),
                env=environments[name],
                stdout=subprocess.DEVNULL,
            )
            for name, tree in trees.items()
        ]
        for run in runs:
            run.wait()


def measure(
    trees: dict[str, Path],
    environments: dict[str, dict[str, str]],
    scripts: list[Script],
    args: argparse.Namespace,
) -> None:
    """Run the scripts in turn, write and print what they compare to."""
    start = time.perf_counter()
    measured: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
    commits = dict(zip(trees, args.commits, strict=True))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        for script, name in itertools.product(scripts, ORDER):
            if time.perf_counter() - start > args.seconds:
                break
            call = command(trees[name], script, args.batches, out)
            subprocess.run(call, env=environments[name], stdout=subprocess.DEVNULL, check=True)
            for figure, value in figures(script, json.loads(out.read_text())):
                measured[name].setdefault(figure, []).append(value)
            spent = time.perf_counter() - start
            print(f"{script.name} {name}: {spent:.0f} s", file=sys.stderr, flush=True)
            rows = compared(measured)
            if rows:
                save("regress", {"commits": commits, "order": ORDER, "rows": rows}, args.out)
    if rows:
        show("after over before", [{k: v for k, v in r.items() if k != "repeats"} for r in rows])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="a checkout")
    parser.add_argument("--after", type=Path, required=True, help="a checkout")
    parser.add_argument("--commits", nargs=2, default=("", ""), help="names of both, for the JSON")
    parser.add_argument("--batches", default="1,16,64", help="requests at once, of itl.py")
    parser.add_argument("--scripts", default="itl,verify,postprocess")
    parser.add_argument("--seconds", type=float, default=540, help="start no run after so many")
    parser.add_argument("--warm", action="store_true", help="run both at once, without results")
    parser.add_argument("--out", type=Path, help="JSON file; default under benchmarks/results/")
    args = parser.parse_args()
    trees = {"before": args.before, "after": args.after}
    chosen = [script for script in SCRIPTS if script.name in args.scripts.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        environments = {
            name: os.environ | {"PYTHONPATH": str(importable(tree, Path(folder) / name))}
            for name, tree in trees.items()
        }
        if args.warm:
            warm(trees, environments, chosen, args.batches)
        else:
            measure(trees, environments, chosen, args)


if __name__ == "__main__":
    main()
