"""Registration with vLLM, and which of the model classes that it builds get our model state."""

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.vllm_stand_in import VllmState, vllm_config

from hybrid_runtime.integrations.vllm import config, models, versions
from hybrid_runtime.integrations.vllm.state import AlignedStates

MODEL = models.lazy_name("NemotronHForCausalLM", "0.25.1+cu129")


@pytest.mark.parametrize(
    "change",
    [
        {"use_v2_model_runner": False},
        {"cache_config__mamba_cache_mode": "all"},
        {"kv_transfer_config": "connector"},
        {"parallel_config__decode_context_parallel_size": 2},
        {"speculative_config__enable_adaptive_verification": True},
        {"cache_config__use_kda_recoverssm": True},
        {},
    ],
)
def test_model_class_and_its_state(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    kind = getattr(models, MODEL)
    assert kind is getattr(models, MODEL)
    assert kind.__name__ == "NemotronHForCausalLM"
    for _ in range(2):
        model = kind(vllm_config=vllm_config(**change), prefix="model")
        # Without it vLLM chooses as if the plug-in were not there.
        assert hasattr(model, "get_model_state_cls") != bool(change)
        if not change:
            assert issubclass(model.get_model_state_cls(), AlignedStates)
            assert issubclass(model.get_model_state_cls(), VllmState)
    assert len(caplog.records) == bool(change)


def test_registration_is_idempotent_and_lazy(vllm: ModuleType) -> None:
    registry = sys.modules["vllm.model_executor.models.registry"].ModelRegistry.models
    registry["Zamba2ForCausalLM"] = SimpleNamespace(module_name="another.plugin")
    for _ in range(2):
        models.register()
    ours = f"{models.__name__}:v0_25_1_NemotronHForCausalLM"
    assert registry["NemotronHForCausalLM"].path == ours
    assert registry["Zamba2ForCausalLM"].module_name == "another.plugin"
    assert registry["LlamaForCausalLM"].module_name.startswith("vllm.")
    assert registry["Qwen3NextForCausalLM"].path.endswith(":v0_25_1_Qwen3NextForCausalLM")
    assert {"NemotronHForCausalLM", "Zamba2ForCausalLM", "LlamaForCausalLM"} <= set(registry)
    with pytest.raises(AttributeError, match="v0_25_1_LlamaForCausalLM"):
        _ = models.v0_25_1_LlamaForCausalLM


@pytest.mark.parametrize(
    ("version", "switch", "warnings"),
    [("0.25.0", "", 1), ("0.34.0", "", 1), ("0.33.1rc1", "", 1), ("0.25.1", "0", 0)],
)
def test_left_alone(
    vllm: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    switch: str,
    warnings: int,
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setenv(config.SWITCH, switch)
    for _ in range(2):
        models.register()
    registry = sys.modules["vllm.model_executor.models.registry"].ModelRegistry.models
    assert all(known.module_name.startswith("vllm.") for known in registry.values())
    assert len(caplog.records) == warnings


@pytest.mark.parametrize("version", ["0.25.1", "0.27.1", "0.29.0", "0.31.0", "0.33.0", "0.33.0+x"])
def test_supported_versions(version: str) -> None:
    assert versions.supported(version)


def test_a_model_is_built_as_vllm_builds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["vllm.model_executor.models.nemotron_h"]

    class Wider(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "", tower: int = 0) -> None:
            super().__init__()
            self.tower = tower

    monkeypatch.setattr(module, "NemotronHForCausalLM", Wider)
    kind = getattr(models, MODEL)
    # vLLM reads the signature to see what a class takes.
    assert inspect.signature(kind.__init__) == inspect.signature(Wider.__init__)
    model = kind(vllm_config=vllm_config(), prefix="model", tower=3)
    assert model.tower == 3
    assert issubclass(model.get_model_state_cls("more", lane=1), AlignedStates)


def test_another_registry_is_left_alone(vllm: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    registry: Any = sys.modules["vllm.model_executor.models.registry"]
    known = registry.ModelRegistry.models
    registry.ModelRegistry = SimpleNamespace(models=known)
    models.register()
    del registry._VLLM_MODELS
    models.register()
    first, second = (record.getMessage() for record in caplog.records)
    assert "register_model" in first
    assert "_VLLM_MODELS" in second
    assert all(entry.module_name.startswith("vllm.") for entry in known.values())
