"""How much memory a device has, and how much of it is free."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import NamedTuple

import torch

_CGROUPS = (
    # Version 2, then version 1: limit, usage, statistics; as a container sees its own.
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


class DeviceMemory(NamedTuple):
    """Bytes. total: of the device, or of the host for the CPU. free: that can still be taken."""

    free: int
    total: int


def device_memory(device: torch.device) -> DeviceMemory:
    """Memory of a GPU or, for the CPU, of the host; a container's limit counts."""
    if device.type != "cuda":
        return host_memory()
    gc.collect()  # engines that are not used any more hold theirs in cycles
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemory(free + unused, total)


def host_memory(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> DeviceMemory:
    """Memory of the host, or of the container that this runs in where that has less."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    free, total = kib["MemAvailable"] << 10, kib["MemTotal"] << 10
    for names in _CGROUPS:
        limit, usage, stat = (_read(cgroup / name) for name in names)
        if not limit.strip().isdigit() or not usage.strip().isdigit():
            continue  # no such version, or no limit ("max")
        # Files that were read count as used, and give way when memory is wanted.
        pairs = (line.split() for line in stat.splitlines())
        cached = sum(int(value) for name, value in pairs if name == "inactive_file")
        total = min(total, int(limit))
        free = min(free, int(limit) - int(usage) + cached)
    return DeviceMemory(max(free, 0), total)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
