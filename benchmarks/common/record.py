"""What benchmarks share: their options, the machine they ran on, their JSON and table, timing."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid_runtime.bench.machine import copy_bandwidth, graph_us, machine, output
from hybrid_runtime.bench.report import dumps, show

__all__ = [
    "arguments",
    "copy_bandwidth",
    "environment",
    "folder",
    "graph_us",
    "host_us",
    "save",
    "show",
]

RESULTS = Path(__file__).parents[1] / "results"


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows a script's docstring, and the option that all scripts have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON file; default under benchmarks/results/")
    return parser


def environment() -> dict[str, Any]:
    """Hardware, versions and commit."""
    # The device machine gets a copy without .git; the caller then says which commit it is.
    commit = os.environ.get("COMMIT") or output("git", "rev-parse", "--short", "HEAD")
    return machine() | {"commit": commit}


def save(name: str, result: dict[str, Any], out: Path | None) -> Path:
    """Write `result` with the environment to `out`, or to the device's folder of results.

    The environment is `result`'s own where it brings one: results merged elsewhere.
    """
    result = {"environment": result.get("environment") or environment()} | result
    path = out or folder(result) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(result) + "\n")
    return path


def folder(result: dict[str, Any]) -> Path:
    """Where results of that device are committed."""
    device: str = result["environment"]["device"]
    return RESULTS / device.lower().replace("nvidia ", "").replace(" ", "-")


def host_us(call: Callable[[], object], repeats: int = 5, number: int = 200) -> list[float]:
    """Microseconds per call on the host: `repeats` means over `number` calls, after a warm-up."""
    for _ in range(number // 4):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(number):
            call()
        times.append((time.perf_counter() - start) / number * 1e6)
    return times
