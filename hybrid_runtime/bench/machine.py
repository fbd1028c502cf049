"""The machine that a benchmark runs on: its name and versions, GPU time, copy bandwidth."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Hardware and versions."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "driver": output(
            "nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{
            name: installed_version(name) for name in ("torch", "triton", "numpy", "hybrid-runtime")
        },
        "time": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


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


def output(*command: str) -> str | None:
    """What a command prints; None where it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def installed_version(name: str) -> str | None:
    """Of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None  # run from a checkout that is not installed


def _cpu() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text()
        return next(
            line.split(":")[1].strip() for line in info.splitlines() if "model name" in line
        )
    except (OSError, StopIteration):
        return platform.machine()
