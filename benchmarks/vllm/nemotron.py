"""A Nemotron, or a shape of `common/qwen.py`, with random weights in vLLM, for `engine/serve.py`,
which starts it:

    python benchmarks/engine/serve.py --vllm python
    python benchmarks/vllm/nemotron.py SETTINGS.json

Needs vLLM (0.25.1 was run) and nothing of this package. `SETTINGS.json` is what `serve.py` writes;
runs are then asked for on standard input, see `common/serving.py`. vLLM runs with all its CUDA
graphs, its compiled layers and the launch shapes that it ships, in half of the GPU's memory, since
the other engine lives there too; `settings["vllm"]` changes options. Its weights are filled as ours
are: with the dummy ones that it makes, all within 1e-3, every token goes to the same experts.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from serving import answer
from weights import randomize
from workload import Ask

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Fields of our config that a checkpoint's config.json does not have under that name.
RENAMED = {
    "pattern": "hybrid_override_pattern",
    "mtp_pattern": "mtp_hybrid_override_pattern",
}


def checkpoint(
    model: dict[str, Any], dtype: str, longest: int, plain: list[str] | None = None
) -> str:
    """A folder with config.json of that shape, as in a checkpoint. plain: modules that are not in
    FP8; None: all are plain."""
    if "model_type" in model:  # of common/qwen.py
        return folder_of(model | {"dtype": dtype, "max_position_embeddings": max(longest, 8192)})
    known = {name: value for name, value in model.items() if value is not None}
    config = {RENAMED.get(name, name): value for name, value in known.items()}
    config |= {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "dtype": dtype,
        "num_hidden_layers": len(model["pattern"]), "max_position_embeddings": max(longest, 8192),
        "expand": 2, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "n_shared_experts": 1,
        "attention_bias": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if plain is not None:
        config["quantization_config"] = {
            "quant_method": "modelopt", "quant_algo": "FP8", "ignore": plain,
            "producer": {"name": "modelopt"},
        }  # fmt: skip
    return folder_of(config)


def folder_of(config: dict[str, Any]) -> str:
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def depth(model: dict[str, Any]) -> int:
    """How many layers a shape has."""
    return int(model.get("num_hidden_layers") or len(model["pattern"]))


def has_experts(model: dict[str, Any]) -> bool:
    """Whether it has layers with experts that were tuned for."""
    return "E" in model["pattern"] if "pattern" in model else model["num_experts"] > 2


def options(settings: dict[str, Any]) -> dict[str, Any]:
    """Keywords of `vllm.LLM`."""
    longest = settings["max_model_len"]
    model = checkpoint(settings["model"], settings["dtype"], longest, settings["plain_modules"])
    chosen: dict[str, Any] = {
        "model": model,
        "tokenizer": model,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": settings["dtype"],
        "seed": 0,
        "max_model_len": longest,
        "max_num_seqs": settings["max_requests"],
        "max_num_batched_tokens": settings["max_tokens_per_step"],
        "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
        "mamba_ssm_cache_dtype": settings["ssm_dtype"],
        "attention_config": {"backend": "FLASH_ATTN"},
        "disable_log_stats": True,
    }
    if "model_type" in settings["model"]:
        # The default one compiles itself with nvcc.
        chosen["gdn_prefill_backend"] = "triton"
    if settings["drafts"]:
        chosen["speculative_config"] = {
            "method": "mtp",
            "num_speculative_tokens": settings["drafts"],
            "attention_backend": "FLASH_ATTN",
        }
        if settings["rates"] is not None:
            chosen["speculative_config"] |= {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": settings["rates"],
            }
    chosen.update(settings["vllm"])
    return chosen


def tuned_experts() -> list[str]:
    """Give this device the launch shapes of experts that vLLM ships for the H100, where it ships
    none for the device itself; the names of those files."""
    import torch
    import vllm

    device = torch.cuda.get_device_name(0).replace(" ", "_")
    device = "NVIDIA_H200" if "H200" in device else device
    layers = Path(vllm.__file__).parent / "model_executor" / "layers" / "fused_moe" / "configs"
    folder = Path(tempfile.mkdtemp())
    for path in sorted(layers.glob("*device_name=NVIDIA_H100_80GB_HBM3*.json")):
        own = path.name.replace("NVIDIA_H100_80GB_HBM3", device)
        if not (layers / own).exists():
            shutil.copy(path, folder / own)
    os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(folder)
    return sorted(path.name for path in folder.iterdir())


def fill(worker: Any, depth: int, seed: int = 0) -> int:
    """Random weights in place of the dummy ones, in the model and its draft head; how many."""
    import torch

    runner = worker.model_runner
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)  # V2, V1
    parts = [runner.model] if drafter is None else [runner.model, drafter.model]
    generator = torch.Generator(worker.device).manual_seed(seed)
    for part in parts:
        randomize(part, depth, generator)
        for module in part.modules():
            if type(module).__name__ == "GemmaRMSNorm":  # which scales by 1 + weight
                module.weight.data.zero_()
    return sum(weight.numel() for part in parts for weight in part.parameters())


class Vllm:
    """vLLM's engine in this process, as `serving.drive` takes it."""

    def __init__(self, settings: dict[str, Any], chosen: dict[str, Any]) -> None:
        from vllm import LLM

        # vLLM puts objects of its own into what it is given.
        llm = LLM(**copy.deepcopy(chosen))
        (self.filled,) = llm.collective_rpc(fill, args=(depth(settings["model"]),))
        self.engine: Any = llm.llm_engine
        self._sampling = settings["sampling"]
        self._budget = 0
        self._runs = 0

    def submit(self, number: int, ask: Ask) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **self._sampling,
            seed=number if self._sampling["temperature"] else None,
            max_tokens=ask.output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(f"{self._runs}-{number}", {"prompt_token_ids": ask.prompt}, params)

    def step(self) -> Iterator[tuple[int, int, bool]]:
        for output in self.engine.step():
            # Some releases add a suffix to the id.
            number = int(output.request_id.split("-")[1])
            yield number, sum(len(c.token_ids) for c in output.outputs), output.finished

    def reset(self) -> None:
        self._runs += 1
        for _ in range(3):
            if self.engine.reset_prefix_cache():
                return
            self.engine.step()  # one that was queued ahead holds blocks
        raise RuntimeError("vLLM kept its prefix cache; runs would hit each other's prompts")

    def use(self, setting: Mapping[str, Any]) -> None:
        scheduler = self.engine.engine_core.engine_core.scheduler
        self._budget = self._budget or scheduler.max_num_scheduled_tokens
        scheduler.max_num_scheduled_tokens = setting.get("budget", self._budget)

    @property
    def spare_time(self) -> float:
        return 0.0

    def about(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """What it runs with, as it says itself."""
        import torch
        import vllm

        config = self.engine.vllm_config
        cache, scheduling = config.cache_config, config.scheduler_config
        compilation = config.compilation_config
        return {
            "vllm": vllm.__version__,
            # One that was packed anew, without what is not needed here, has no list of its files.
            "wheel": "repacked" if metadata.files("vllm") is None else "whole",
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(0),
            "environment": {name: os.environ[name] for name in ENVIRONMENT if "VLLM" in name},
            "block_size": cache.block_size,
            "mamba_block_size": cache.mamba_block_size,
            "num_gpu_blocks": cache.num_gpu_blocks,
            "filled_weights": self.filled,
            "async_scheduling": scheduling.async_scheduling,
            "cudagraph_mode": str(compilation.cudagraph_mode),
            "cudagraph_sizes": compilation.cudagraph_capture_sizes,
            "compilation_mode": str(compilation.mode),
            "options": {name: value for name, value in chosen.items() if name != "tokenizer"},
        }


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    tuned = tuned_experts() if has_experts(settings["model"]) else []
    chosen = options(settings)
    engine = Vllm(settings, chosen)
    answer(engine, engine.about(chosen) | {"tuned_experts_of_the_h100": tuned})


if __name__ == "__main__":
    main()
