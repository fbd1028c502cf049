"""The machine that a benchmark runs on: hardware and versions."""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Hardware and versions."""
    gpu = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    return {
        "device": "CPU" if gpu is None else gpu.name,
        "gpu_uuid": None if gpu is None else str(gpu.uuid),
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
