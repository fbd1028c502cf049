"""What vLLM makes of its arguments, and whether the plug-in then replays, as on one NVIDIA GPU.

A process of its own, since vLLM's modules keep the platform that they first saw. Reads a JSON list
of `{"arguments", "environment"}`, prints a JSON list of what `decided` gives.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from types import ModuleType
from typing import Any

import torch

LIBRARIES = (
    "_C",
    "_C_stable_libtorch",
    "_moe_C",
    "cumem_allocator",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)
"""Compiled parts of vLLM, which are imported but not called before a model runs."""

ASKED = ("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8")
"""Operators that are asked on import what the GPU can do."""


def pretend_gpu() -> None:
    """Have vLLM's own CUDA platform chosen, of compute capability 9.0."""
    for name in LIBRARIES:
        sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    for name in ASKED:
        setattr(torch.ops._C, name, lambda capability: False)
    platforms: Any = importlib.import_module("vllm.platforms")
    platform: Any = importlib.import_module("vllm.platforms.cuda").NonNvmlCudaPlatform
    capability = importlib.import_module("vllm.platforms.interface").DeviceCapability(9, 0)
    answers = {
        "get_device_capability": capability,
        "has_device_capability": True,
        "get_device_name": "a GPU",
        "get_device_total_memory": 1 << 37,
        "device_count": 1,
    }
    for name, answer in answers.items():
        setattr(platform, name, classmethod(lambda cls, *_, answer=answer, **__: answer))
    platforms._current_platform = platform()
    # vLLM asks a model's class what it can do in a process that has not been told of the above.
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda inspect: inspect()


def decided(arguments: list[str]) -> dict[str, Any]:
    """`replays`: None, or why not; `error`: of vLLM; `shown`: whether the log has our lines."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from hybrid_runtime.integrations.vllm import config, models, versions

    given = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(arguments)
    try:
        made = EngineArgs.from_cli_args(given).create_engine_config()
    except (NotImplementedError, ValueError) as error:
        return {"error": str(error)}
    kind = versions.ARCHITECTURES[made.model_config.architectures[0]]
    return {
        "v2": made.use_v2_model_runner,
        "drafts": made.num_speculative_tokens,
        "mode": made.cache_config.mamba_cache_mode,
        "asynchronous": made.scheduler_config.async_scheduling,
        "why_not": models.replay_unhandled(made, models.KINDS.get(kind)),
        "shown": config.logger().isEnabledFor(logging.INFO),
    }


if __name__ == "__main__":
    pretend_gpu()
    results = []
    for command in json.load(sys.stdin):
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
        os.environ.update(command["environment"])
        results.append(decided(command["arguments"]))
    print(json.dumps(results))
