"""Entry point in vLLM's group `vllm.general_plugins`, called in every process, even repeatedly."""

from __future__ import annotations

import os
from typing import Any

from hybrid_runtime.integrations.vllm import versions

SWITCH = "HYBRID_RUNTIME_VLLM"
"""Environment variable: 0 turns the plug-in off, `check` compares steps with vLLM's kernels."""

_said: set[str] = set()


def switch() -> str:
    """`off`, `on` or `check`."""
    value = os.environ.get(SWITCH, "").strip().lower()
    if value in ("0", "off", "false", "no"):
        return "off"
    return "check" if value == "check" else "on"


def register() -> None:
    """Register our model classes for vLLM's hybrid models, by name: nothing is imported yet."""
    if switch() == "off":
        return
    import vllm  # type: ignore[import-not-found]

    version: str = vllm.__version__
    if not versions.supported(version):
        oldest, newest = (".".join(map(str, v)) for v in (versions.OLDEST, versions.NEWEST))
        left_to_vllm(f"vLLM is {version}; {oldest} to {newest} are supported")
        return
    from vllm.model_executor.models.registry import (  # type: ignore[import-not-found]
        ModelRegistry,
    )

    from hybrid_runtime.integrations.vllm import models

    for architecture in versions.ARCHITECTURES:
        known = ModelRegistry.models.get(architecture)
        module = getattr(known, "module_name", None)
        if known is None or module == models.__name__:
            continue
        if module is None or not module.startswith("vllm."):
            left_to_vllm(f"another plug-in has registered {architecture}")
            continue
        path = f"{models.__name__}:{models.lazy_name(architecture, version)}"
        ModelRegistry.register_model(architecture, path)


def left_to_vllm(reason: str) -> None:
    """Say once per process that vLLM's own path runs, and why."""
    if reason not in _said:
        _said.add(reason)
        logger().warning("hybrid-runtime leaves Mamba states to vLLM: %s.", reason)


def logger() -> Any:
    """vLLM formats and filters what is logged below its own name."""
    from vllm.logger import init_logger  # type: ignore[import-not-found]

    return init_logger("vllm.plugins.hybrid_runtime")
