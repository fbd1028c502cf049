"""What every part of the plug-in asks: whether it is switched on, and how it speaks to the user."""

from __future__ import annotations

import os
from typing import Any

SWITCH = "HYBRID_RUNTIME_VLLM"
"""Environment variable: 0 turns the plug-in off, `check` compares steps with vLLM's kernels."""

_said: set[str] = set()


class Unhandled(Exception):
    """This configuration is left to vLLM; the message says why, in words for the user."""


def switch() -> str:
    """`off`, `on` or `check`."""
    value = os.environ.get(SWITCH, "").strip().lower()
    if value in ("0", "off", "false", "no"):
        return "off"
    return "check" if value == "check" else "on"


def left_to_vllm(reason: str) -> None:
    """Say once per process that vLLM's own path runs, and why."""
    if reason not in _said:
        _said.add(reason)
        logger().warning("hybrid-runtime leaves Mamba states to vLLM: %s.", reason)


def logger() -> Any:
    """A logger below vLLM's own, which therefore formats and filters what it writes."""
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.hybrid_runtime")
