"""The plug-in's entry point, and the model classes that it registers in place of vLLM's.

Ours are vLLM's own classes, with a method that names our model state. Each is built on first use,
for example as `models.v0_25_1_NemotronHForCausalLM`, so that importing this module needs no vLLM.
The release is part of the name because vLLM caches what it knows of a class under that name.
"""

import functools
import importlib
import re
from typing import Any

from hybrid_runtime.integrations.vllm import hooks, replay_layers, versions
from hybrid_runtime.integrations.vllm.config import (
    checks,
    does_not_replay,
    left_to_vllm,
    logger,
    replay_wanted,
    switch,
)
from hybrid_runtime.integrations.vllm.gdn_layers import GDN
from hybrid_runtime.integrations.vllm.mamba2_layers import MAMBA2
from hybrid_runtime.integrations.vllm.replay_checker import ReplayChecker

KINDS = {versions.MAMBA2: MAMBA2, versions.GDN: GDN}
"""What replay knows of the layers, by the kinds of `versions.ARCHITECTURES`."""


def register() -> None:
    """Register our classes for vLLM's hybrid models, by name, so that none is imported yet.

    The entry point in vLLM's group `vllm.general_plugins`: vLLM calls it in every process, and may
    call it again.
    """
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
        # Without an entry of vLLM's own, `model_class` would not find the class to build on.
        if known is None or module == __name__ or architecture not in _VLLM_MODELS:
            continue
        if module is None or not module.startswith("vllm."):
            left_to_vllm(f"another plug-in has registered {architecture}")
            continue
        path = f"{__name__}:{lazy_name(architecture, version)}"
        ModelRegistry.register_model(architecture, path)


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
    """A subclass of vLLM's class for `architecture`; instances whose states are ours have
    `get_model_state_cls`."""
    registry = importlib.import_module("vllm.model_executor.models.registry")
    module, class_name = registry._VLLM_MODELS[architecture]
    if not module.startswith("vllm."):
        module = f"vllm.model_executor.models.{module}"
    base: Any = getattr(importlib.import_module(module), class_name)
    if hasattr(base, "get_model_state_cls"):
        # In this release the class has a model state of its own.
        return base

    kind = KINDS.get(versions.ARCHITECTURES[architecture])

    class Hybrid(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given: Any = kwargs.get("vllm_config")
            why_not = replay_unhandled(given, kind)
            with replay_layers.collecting(why_not is None) as layers:
                super().__init__(*args, **kwargs)
            if kind and layers and (why_not := replay_layers.unhandled(kind, layers)):
                layers = []
            if kind and layers:
                self.replay_layers = shared = replay_layers.build(kind, layers, given)
                if checks():
                    shared.checker = ReplayChecker(shared, len(shared.rows.whole.slot), logger())
                # Without this attribute vLLM uses its own model state.
                self.get_model_state_cls = replay_state_class
            elif why := unhandled(given):
                left_to_vllm(why)
            else:
                if why_not and replay_wanted():
                    # Without drafts there is nothing to replay, which is no reason to warn.
                    does_not_replay(why_not, "warning" if given.num_speculative_tokens else "info")
                self.get_model_state_cls = model_state_class

        def load_weights(self, *args: Any, **kwargs: Any) -> Any:
            loaded = super().load_weights(*args, **kwargs)
            if hasattr(self, "replay_layers"):
                self.replay_layers.take_weights()
            return loaded

    # vLLM reads the signature to see which arguments a class takes.
    functools.update_wrapper(Hybrid.__init__, base.__init__)
    Hybrid.__name__ = Hybrid.__qualname__ = base.__name__
    Hybrid.__doc__ = base.__doc__
    return Hybrid


def unhandled(vllm_config: Any) -> str | None:
    """Why a model of this configuration is left to vLLM; None if its copies are ours."""
    if vllm_config is None:
        return "its model is built without vllm_config"
    try:
        return versions.unhandled(vllm_config) or hooks.unknown()
    except AttributeError as error:
        return f"its configuration is not as known ({error})"


def replay_unhandled(vllm_config: Any, kind: replay_layers.Kind | None) -> str | None:
    """Why a model of this configuration, with layers of this kind, does not replay; None if it
    does."""
    if not replay_wanted() or vllm_config is None:
        return "it is switched off"
    try:
        if why := versions.replay_unhandled(vllm_config) or versions.platform_unhandled():
            return why
        if kind is None:
            return "its states are neither Mamba-2's nor Gated DeltaNet's"
        why = hooks.unknown() or hooks.unknown_layer(kind.hooks)
        return why or replay_layers.register(kind)
    except (AttributeError, ImportError) as error:
        return f"its configuration is not as known ({error})"


def model_state_class(*_: Any, **__: Any) -> type:
    """`get_model_state_cls` of our models; vLLM calls it without arguments so far."""
    # Imported late: the plug-in is also loaded by processes without a GPU.
    from hybrid_runtime.integrations.vllm import state

    return state.model_state_class()


def replay_state_class(*_: Any, **__: Any) -> type:
    """`get_model_state_cls` of models whose layers replay."""
    from hybrid_runtime.integrations.vllm import replay_state

    return replay_state.model_state_class()
