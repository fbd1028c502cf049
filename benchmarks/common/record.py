"""What benchmarks share: their options, the machine they ran on, their JSON and table, timing."""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hybrid_runtime.bench.machine import machine, output
from hybrid_runtime.bench.report import dumps
from hybrid_runtime.bench.report import show as show

RESULTS = Path(__file__).parents[1] / "results"
# The folders of an absolute path that is a string or a word of one; an endpoint is none.
FOLDERS = re.compile(r"(?<![^\s=])/(?!v1/)(?:[^/\s]+/)+")


def arguments(
    doc: str | None, out: str = "default under benchmarks/results/"
) -> argparse.ArgumentParser:
    """A parser that shows a script's docstring, and the option that all scripts have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help=f"JSON file; {out}")
    return parser


def numbers(text: str) -> list[int]:
    """Integers of an option, separated by commas."""
    return [int(part) for part in text.split(",")]


def plain(rows: list[dict[str, Any]], *hidden: str) -> list[dict[str, Any]]:
    """Rows as a table shows them: without the fields whose names end so."""
    return [{k: v for k, v in row.items() if not k.endswith(hidden)} for row in rows]


def environment() -> dict[str, Any]:
    """Hardware, versions and commit; where vLLM is installed, whether its wheel is PyPI's."""
    found = machine() | {"commit": os.environ.get("COMMIT") or commit(RESULTS)}
    try:
        # A wheel that was packed anew has no list of its files.
        wheel = "repacked" if metadata.files("vllm") is None else "whole"
    except metadata.PackageNotFoundError:
        return found
    return found | {"wheel": wheel}


def commit(folder: Path) -> str | None:
    """Of the checkout around `folder`, with -dirty behind it where a tracked file is changed; None
    where there is no checkout. A copy whose git does not know its commit is told it by the variable
    COMMIT."""
    return output("git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*")


def save(name: str, result: dict[str, Any], out: Path | None) -> Path:
    """Write `result` with the environment to `out`, or to the device's folder of results.

    The environment is `result`'s own where it brings one: results merged elsewhere. Absolute paths
    lose their folders: a committed file does not tell how somebody's machine is laid out.
    """
    result = {"environment": result.get("environment") or environment()} | result
    result = without_folders(result)
    path = out or folder(result) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(result) + "\n")
    return path


def without_folders(value: Any) -> Any:
    """`value` with every absolute path in its strings cut down to its last part."""
    if isinstance(value, str):
        return FOLDERS.sub("", value)
    if isinstance(value, dict):
        return {name: without_folders(item) for name, item in value.items()}
    return [without_folders(item) for item in value] if isinstance(value, list | tuple) else value


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


def graph_us(calls: list[Callable[[], object]], repeats: int = 7, number: int = 20) -> list[float]:
    """GPU microseconds per call: a CUDA graph of all `calls`, replayed, timed by events.

    Calls should work on distinct data, more of it than the L2 cache holds.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(number):
            graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (number * len(calls)))
    return times


def copy_bandwidth(gib: int = 4) -> float:
    """Streaming bandwidth of the device in bytes per second, read plus written."""
    source = torch.ones(gib << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    # A kernel: a copy node of a graph goes through the copy engine, which is slower.
    us = statistics.median(graph_us([lambda: torch.neg(source, out=target)], number=5))
    return 2 * source.numel() * 4 / (us * 1e-6)
