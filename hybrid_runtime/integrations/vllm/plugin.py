"""Entry point in vLLM's group `vllm.general_plugins`, called in every process, even repeatedly."""

from __future__ import annotations

from hybrid_runtime.integrations.vllm import models, versions
from hybrid_runtime.integrations.vllm.config import left_to_vllm, switch


def register() -> None:
    """Register our model classes for vLLM's hybrid models, by name: none is imported yet."""
    if switch() == "off":
        return
    import vllm

    version: str = vllm.__version__
    if not versions.supported(version):
        oldest, newest = (".".join(map(str, v)) for v in (versions.OLDEST, versions.NEWEST))
        left_to_vllm(f"vLLM is {version}; {oldest} to {newest} are supported")
        return
    try:
        _register(version)
    except (AttributeError, ImportError, TypeError) as error:
        left_to_vllm(f"the model registry of vLLM {version} is not as known ({error!r})")


def _register(version: str) -> None:
    from vllm.model_executor.models.registry import _VLLM_MODELS, ModelRegistry

    for architecture in versions.ARCHITECTURES:
        known = ModelRegistry.models.get(architecture)
        module = getattr(known, "module_name", None)
        # Without an entry of vLLM's own, `models` would not find the class to build on.
        if known is None or module == models.__name__ or architecture not in _VLLM_MODELS:
            continue
        if module is None or not module.startswith("vllm."):
            left_to_vllm(f"another plug-in has registered {architecture}")
            continue
        path = f"{models.__name__}:{models.lazy_name(architecture, version)}"
        ModelRegistry.register_model(architecture, path)
