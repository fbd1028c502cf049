"""The modules of vLLM that the adapter imports, as stand-ins: no vLLM is installed here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.vllm_stand_in import InputBatch, NewRequestData, VllmState

from hybrid_runtime.integrations.vllm import config, models
from hybrid_runtime.integrations.vllm.state import model_state_class


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Modules of vLLM that the adapter imports, as far as it uses them."""
    registered: dict[str, Any] = {
        name: SimpleNamespace(module_name="vllm.model_executor.models.nemotron_h")
        for name in ("NemotronHForCausalLM", "Zamba2ForCausalLM", "LlamaForCausalLM")
    }

    def register_model(name: str, path: str) -> None:
        registered[name] = SimpleNamespace(module_name=path.split(":")[0], path=path)

    class NemotronHForCausalLM(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()

    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.25.1+cu129"},
        "vllm.envs": {
            "VLLM_LOG_STATS_INTERVAL": 10.0,
            "VLLM_PREFIX_CACHE_RETENTION_INTERVAL": None,
        },
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor.models.registry": {
            "ModelRegistry": SimpleNamespace(models=registered, register_model=register_model),
            "_VLLM_MODELS": {"NemotronHForCausalLM": ("nemotron_h", "NemotronHForCausalLM")},
        },
        "vllm.model_executor.models.nemotron_h": {"NemotronHForCausalLM": NemotronHForCausalLM},
        "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": lambda: False},
        "vllm.v1.core.sched.output": {"NewRequestData": NewRequestData},
        "vllm.v1.worker.gpu.input_batch": {"InputBatch": InputBatch},
        "vllm.v1.worker.gpu.model_states.mamba_hybrid": {"MambaHybridModelState": VllmState},
    }
    for path, names in contents.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if depth == len(parts) or name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(names)
        if len(parts) > 1:
            setattr(sys.modules[path.rpartition(".")[0]], parts[-1], sys.modules[path])
    monkeypatch.delenv(config.SWITCH, raising=False)
    config._said.clear()
    models.model_class.cache_clear()
    model_state_class.cache_clear()
    yield sys.modules["vllm"]
    models.model_class.cache_clear()
    model_state_class.cache_clear()
