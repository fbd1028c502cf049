"""The switch of the plug-in, and the lines that it writes to vLLM's log."""

import os
from typing import Any

SWITCH = "HYBRID_RUNTIME_VLLM"
"""Environment variable that selects what the plug-in does.

replay: one state per request where that is handled, else as `columns`; this is the default.
columns: vLLM's layout with our copies.
check, check-columns: as `replay` and `columns`, and compare with vLLM's kernels.
0, off, false, no: nothing.
"""

VALUES = ("columns", "replay", "check", "check-columns")

DEFAULT = "replay"

_said: set[str] = set()


class Unhandled(Exception):
    """This configuration is left to vLLM; the message is for the user and says why."""


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
    """Log once per process that vLLM's own path runs, and why."""
    say_once("warning", "hybrid-runtime leaves Mamba states to vLLM: %s.", reason)


def does_not_replay(reason: str, level: str) -> None:
    """Log once per process that a model keeps vLLM's layout, and why."""
    say_once(level, "hybrid-runtime does not replay: %s.", reason)


def say_once(level: str, message: str, *values: Any) -> None:
    """Log a line, unless this process has logged the same one before."""
    if message % values not in _said:
        _said.add(message % values)
        getattr(logger(), level)(message, *values)


def logger() -> Any:
    """A logger below vLLM's own, so that vLLM's handlers and levels apply to it."""
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.hybrid_runtime")
