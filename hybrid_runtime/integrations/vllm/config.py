"""What every part of the plug-in asks: whether it is switched on, and how it speaks to the user."""

from __future__ import annotations

import os
from typing import Any

SWITCH = "HYBRID_RUNTIME_VLLM"
"""Environment variable: `replay` keeps one state per request where that is handled and is else as
`columns`, which keeps vLLM's layout with our copies; 0 turns the plug-in off. `check` and
`check-columns` are the same and compare with vLLM's kernels. Unset: `replay`."""

VALUES = ("columns", "replay", "check", "check-columns")

DEFAULT = "replay"

_said: set[str] = set()


class Unhandled(Exception):
    """This configuration is left to vLLM; the message says why, in words for the user."""


def switch() -> str:
    """`off` or one of `VALUES`."""
    value = os.environ.get(SWITCH, "").strip().lower()
    if value in ("0", "off", "false", "no"):
        return "off"
    return value if value in VALUES else DEFAULT


def replay_wanted() -> bool:
    return switch() in ("replay", "check")


def checks() -> bool:
    return switch().startswith("check")


def left_to_vllm(reason: str) -> None:
    """Say once per process that vLLM's own path runs, and why."""
    say_once("warning", "hybrid-runtime leaves Mamba states to vLLM: %s.", reason)


def does_not_replay(reason: str, level: str) -> None:
    """Say once per process that a model keeps vLLM's layout, and why."""
    say_once(level, "hybrid-runtime does not replay: %s.", reason)


def say_once(level: str, message: str, *values: Any) -> None:
    """Write a line of the log that other models of this process need not repeat."""
    if message % values not in _said:
        _said.add(message % values)
        getattr(logger(), level)(message, *values)


def logger() -> Any:
    """A logger below vLLM's own, which therefore formats and filters what it writes."""
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.hybrid_runtime")
