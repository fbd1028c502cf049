"""The model classes that are registered in place of vLLM's: the same, but for their model state.

Each is built on first use, `models.v0_25_1_NemotronHForCausalLM` for example, so that importing
this module needs no vLLM. The release stands in the name because vLLM caches what it knows of a
class under that name.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

from hybrid_runtime.integrations.vllm import versions
from hybrid_runtime.integrations.vllm.config import left_to_vllm


def lazy_name(architecture: str, version: str) -> str:
    """The attribute of this module under which `architecture` is found."""
    return "v" + "_".join(map(str, versions.parsed(version))) + "_" + architecture


def __getattr__(name: str) -> Any:
    found = re.fullmatch(r"v\d+_\d+_\d+_(\w+)", name)
    if found is None or found[1] not in versions.ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return model_class(found[1])


@functools.cache
def model_class(architecture: str) -> type:
    """vLLM's class for `architecture` with `get_model_state_cls` added."""
    registry = importlib.import_module("vllm.model_executor.models.registry")
    module, class_name = registry._VLLM_MODELS[architecture]
    if not module.startswith("vllm."):
        module = f"vllm.model_executor.models.{module}"
    base: Any = getattr(importlib.import_module(module), class_name)
    if hasattr(base, "get_model_state_cls"):
        # vLLM gave it a state of its own in this release.
        return base

    class Hybrid(base):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.hybrid_runtime_unhandled = versions.unhandled(vllm_config)
            if self.hybrid_runtime_unhandled:
                left_to_vllm(self.hybrid_runtime_unhandled)

        def get_model_state_cls(self) -> type:
            # Not with the plug-in, which processes without a GPU load too.
            from hybrid_runtime.integrations.vllm.state import model_state_class

            return model_state_class(ours=not self.hybrid_runtime_unhandled)

    Hybrid.__name__ = Hybrid.__qualname__ = base.__name__
    Hybrid.__doc__ = base.__doc__
    return Hybrid
