"""Where the figures come from: the committed JSON, and the line that says what measured them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
BESIDE_VLLM = (
    "lockstep", "serving", "serving-arrivals", "serving-budgets", "serving-queueing",
    "serving-smaller",
)  # fmt: skip
"""Tables beside those of the plug-in that have figures of vLLM."""
LOADED: list[dict[str, Any]] = []
"""What the table that is being made has read."""


def load(device: str, name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / device / f"{name}.json").read_text())
    LOADED.append(result)
    return result


def repacked_vllm(table: str, result: dict[str, Any]) -> bool:
    """Whether a result of a GPU has figures of a vLLM whose wheel was packed anew. Those that do
    not say which wheel it was, had such a one."""
    engines = result.get("engines", {})
    if (not table.startswith("vllm-") and table not in BESIDE_VLLM) or "before" in engines:
        return False
    wheels = {part.get("wheel") for part in (result["environment"], engines.get("vllm", {}))}
    return "NVIDIA" in result["environment"]["device"] and "whole" not in wheels


def machine(result: dict[str, Any]) -> str:
    """Device and commit."""
    env = result["environment"]
    return f"{env['device']}, commit {env['commit']}."


def where(result: dict[str, Any]) -> str:
    """Device, processor and commit."""
    env = result["environment"]
    return f"{env['device']}, {env['cpu']}, commit {env['commit']}."


def environment(result: dict[str, Any]) -> str:
    """Device, processor, versions and commit, and what was changed on the device besides."""
    env = result["environment"]
    return f"{versions(result)}, commit {env['commit']}{env.get('changed', '')}."


def versions(result: dict[str, Any]) -> str:
    """Device, processor and versions."""
    env = result["environment"]
    return (
        f"{env['device']}, {env['cpu']}, torch {env['torch']}, Triton {env['triton']}, "
        f"NumPy {env['numpy']}"
    )
