"""What every benchmark shares: the machine it ran on, its JSON, its table, medians with repeats."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Hardware, versions and commit."""
    cuda = torch.cuda.is_available()
    names = ("torch", "triton", "numpy")
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
        # The device machine gets a copy without .git; the caller then says which commit it is.
        "commit": os.environ.get("COMMIT") or _output("git", "rev-parse", "--short", "HEAD"),
        "time": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


def save(name: str, result: dict[str, Any], out: Path | None) -> Path:
    """Write `result` with the environment to `out`, or to this device's folder of results."""
    env = environment()
    folder = env["device"].lower().replace("nvidia ", "").replace(" ", "-")
    path = out or RESULTS / folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": env, **result}, indent=1) + "\n")
    return path


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows of equal keys as a table; floats with three significant digits."""
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=160).print(table)


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


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
        return next(
            line.split(":")[1].strip() for line in info.splitlines() if "model name" in line
        )
    except (OSError, StopIteration):
        return platform.machine()
