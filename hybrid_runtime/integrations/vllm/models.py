"""The model classes that are registered in place of vLLM's: the same, but they name a model state.

Each is built on first use, `models.v0_25_1_NemotronHForCausalLM` for example, so that importing
this module needs no vLLM. The release stands in the name because vLLM caches what it knows of a
class under that name.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

from hybrid_runtime.integrations.vllm import hooks, mixer, replay_layers, versions
from hybrid_runtime.integrations.vllm.config import (
    checks,
    does_not_replay,
    left_to_vllm,
    logger,
    replay_wanted,
)
from hybrid_runtime.integrations.vllm.replay_checker import ReplayChecker


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
    """vLLM's class for `architecture`; instances that are ours have `get_model_state_cls`."""
    registry = importlib.import_module("vllm.model_executor.models.registry")
    module, class_name = registry._VLLM_MODELS[architecture]
    if not module.startswith("vllm."):
        module = f"vllm.model_executor.models.{module}"
    base: Any = getattr(importlib.import_module(module), class_name)
    if hasattr(base, "get_model_state_cls"):
        # vLLM gave it a state of its own in this release.
        return base

    class Hybrid(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given: Any = kwargs.get("vllm_config")
            why_not = replay_unhandled(given)
            with mixer.collecting(why_not is None) as layers:
                super().__init__(*args, **kwargs)
            if layers and (why_not := replay_layers.unhandled(layers)):
                layers = []
            if layers:
                self.replay_layers = shared = replay_layers.build(layers, given)
                if checks():
                    shared.checker = ReplayChecker(shared, len(shared.rows.whole.slot), logger())
                # Without this attribute vLLM chooses as if we were not there.
                self.get_model_state_cls = replay_state_class
            elif why := unhandled(given):
                left_to_vllm(why)
            else:
                if why_not and replay_wanted():
                    # Without drafts nothing is lost: a user may want it so.
                    does_not_replay(why_not, "warning" if given.num_speculative_tokens else "info")
                self.get_model_state_cls = model_state_class

        def load_weights(self, *args: Any, **kwargs: Any) -> Any:
            loaded = super().load_weights(*args, **kwargs)
            if hasattr(self, "replay_layers"):
                self.replay_layers.take_weights()
            return loaded

    # vLLM reads the signature to see what a class takes.
    functools.update_wrapper(Hybrid.__init__, base.__init__)
    Hybrid.__name__ = Hybrid.__qualname__ = base.__name__
    Hybrid.__doc__ = base.__doc__
    return Hybrid


def unhandled(vllm_config: Any) -> str | None:
    """Why a model of this configuration is left to vLLM, or None when it is ours."""
    if vllm_config is None:
        return "its model is built without vllm_config"
    try:
        return versions.unhandled(vllm_config) or hooks.unknown()
    except AttributeError as error:
        return f"its configuration is not as known ({error})"


def replay_unhandled(vllm_config: Any) -> str | None:
    """Why a model of this configuration does not replay, or None when its Mamba-2 layers do."""
    if not replay_wanted() or vllm_config is None:
        return "it is switched off"
    try:
        why = versions.replay_unhandled(vllm_config) or versions.platform_unhandled()
        return why or hooks.unknown() or hooks.unknown_layer() or mixer.register()
    except (AttributeError, ImportError) as error:
        return f"its configuration is not as known ({error})"


def model_state_class(*_: Any, **__: Any) -> type:
    """`get_model_state_cls` of our models; vLLM calls it without arguments so far."""
    # Not with the plug-in, which processes without a GPU load too.
    from hybrid_runtime.integrations.vllm import state

    return state.model_state_class()


def replay_state_class(*_: Any, **__: Any) -> type:
    """The same of models whose layers replay."""
    from hybrid_runtime.integrations.vllm import replay_state

    return replay_state.model_state_class()
