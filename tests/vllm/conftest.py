"""The modules of vLLM that the adapter imports, as stand-ins: no vLLM is installed here."""

import dataclasses
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.vllm_stand_in import InputBatch, NewRequestData, VllmState

from hybrid_runtime.integrations.vllm import config, hooks, models, replay_layers, replay_state
from hybrid_runtime.integrations.vllm.state import model_state_class

MODELS = {
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen3NextForCausalLM": "qwen3_next",
    "JambaForCausalLM": "jamba",
}
"""Those that vLLM's registry knows, by module."""


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    mamba_cache_mode: str
    num_speculative_blocks: int


def clear() -> None:
    """Forget the classes that were made of vLLM's."""
    for made in (
        models.model_class,
        model_state_class,
        replay_layers.layer_class,
        replay_state.model_state_class,
    ):
        made.cache_clear()


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Modules of vLLM that the adapter imports, as far as it uses them."""
    registered: dict[str, Any] = {
        name: SimpleNamespace(module_name="vllm.model_executor.models.nemotron_h")
        for name in (*MODELS, "Zamba2ForCausalLM", "LlamaForCausalLM")
    }

    def register_model(name: str, path: str) -> None:
        registered[name] = SimpleNamespace(module_name=path.split(":")[0], path=path)

    replaced: dict[str, Any] = {}

    def register_oot(name: str) -> Any:
        return lambda kind: replaced.setdefault(name, kind)

    class MambaMixer2(torch.nn.Module):
        def __new__(cls, *_: Any, **__: Any) -> Any:
            return super().__new__(replaced.get(cls.__name__, cls))

        def __init__(self, prefix: str = "") -> None:
            super().__init__()
            self.num_heads = self.head_dim = self.ssm_state_size = 4
            self.n_groups = self.tp_size = 1
            self.conv1d = torch.nn.Conv1d(4, 4, 4, groups=4)
            self.A, self.prefix = torch.nn.Parameter(torch.full((4,), -3.0)), prefix

        def conv_ssm_forward(self, projected_states: Any, output: Any) -> None: ...

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return CacheSpec("align", 3)

    class QwenGatedDeltaNetAttention(torch.nn.Module):
        def __new__(cls, *_: Any, **__: Any) -> Any:
            return super().__new__(replaced.get(cls.__name__, cls))

        def __init__(self, prefix: str = "") -> None:
            super().__init__()
            self.num_v_heads, self.num_k_heads, self.tp_size = 4, 2, 1
            self.head_k_dim = self.head_v_dim = 4
            self.conv1d, self.prefix = torch.nn.Conv1d(32, 32, 4, groups=32), prefix

        def _forward_core(self, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None: ...

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return CacheSpec("align", 3)

    class Qwen3NextForCausalLM(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            kind = sys.modules[hooks.GDN.module].QwenGatedDeltaNetAttention
            self.mixers = torch.nn.ModuleList(kind(f"l{i}") for i in range(2))

        def load_weights(self, weights: Any) -> None: ...

    class JambaForCausalLM(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()

    class NemotronHForCausalLM(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            mixers = sys.modules["vllm.model_executor.layers.mamba.mamba_mixer2"]
            self.mixers = torch.nn.ModuleList(mixers.MambaMixer2(f"l{i}") for i in range(2))

        def load_weights(self, weights: Any) -> None:
            for layer in self.mixers:
                torch.nn.init.constant_(layer.get_parameter("A"), weights)

    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.25.1+cu129"},
        "vllm.envs": {
            "VLLM_LOG_STATS_INTERVAL": 10.0,
            "VLLM_PREFIX_CACHE_RETENTION_INTERVAL": None,
        },
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor.models.registry": {
            "ModelRegistry": SimpleNamespace(models=registered, register_model=register_model),
            "_VLLM_MODELS": {name: (module, name) for name, module in MODELS.items()},
        },
        "vllm.model_executor.models.nemotron_h": {"NemotronHForCausalLM": NemotronHForCausalLM},
        "vllm.model_executor.models.qwen3_next": {"Qwen3NextForCausalLM": Qwen3NextForCausalLM},
        "vllm.model_executor.models.jamba": {"JambaForCausalLM": JambaForCausalLM},
        "vllm.model_executor.custom_op": {
            "op_registry_oot": replaced,
            "PluggableLayer": SimpleNamespace(register_oot=register_oot),
        },
        "vllm.platforms": {
            "current_platform": SimpleNamespace(
                is_cuda=lambda: True, has_device_capability=lambda least: True
            )
        },
        "vllm.model_executor.layers.mamba.mamba_mixer2": {"MambaMixer2": MambaMixer2},
        hooks.GDN.module: {"QwenGatedDeltaNetAttention": QwenGatedDeltaNetAttention},
        "vllm.v1.attention.backends.gdn_attn": {
            "GDNAttentionMetadata": dataclasses.make_dataclass(
                "GDNAttentionMetadata", hooks.GDN.fields.split()
            )
        },
        "vllm.v1.attention.backends.mamba2_attn": {
            "Mamba2AttentionMetadata": dataclasses.make_dataclass(
                "Mamba2AttentionMetadata", hooks.MAMBA2.fields.split()
            )
        },
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
    clear()
    yield sys.modules["vllm"]
    clear()
