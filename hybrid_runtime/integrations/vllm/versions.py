"""How vLLM releases differ, and which configurations are left to vLLM."""

import dataclasses
import os
import re
from typing import Any

from hybrid_runtime.kernels.replay.ring import MAX_TOKENS

OLDEST, NEWEST = (0, 25, 1), (0, 33, 0)

PLAIN_ROWS_DECODE = (0, 32)
"""The first release in which rows without drafts are decode rows of Gated DeltaNet."""

MAMBA2, GDN, OTHER = "Mamba-2", "Gated DeltaNet", "other"
"""Kinds of layers with states; of the last, none replays."""

ARCHITECTURES = {
    "AliceAIForCausalLM": OTHER,
    "FalconH1ForCausalLM": MAMBA2,
    "GraniteMoeHybridForCausalLM": MAMBA2,
    "JambaForCausalLM": OTHER,
    "NemotronHForCausalLM": MAMBA2,
    "NemotronHPuzzleForCausalLM": MAMBA2,
    "NemotronH_Nano_Omni_Reasoning_V3": MAMBA2,
    "NemotronH_Nano_VL_V2": MAMBA2,
    "NemotronH_Omni_Reasoning_V3": MAMBA2,
    "NemotronH_Super_Omni_Reasoning_V3": MAMBA2,
    "OlmoHybridForCausalLM": OTHER,
    "Qwen3NextForCausalLM": GDN,
    "Qwen3_5ForCausalLM": GDN,
    "Qwen3_5ForConditionalGeneration": GDN,
    "Qwen3_5MoeForCausalLM": GDN,
    "Qwen3_5MoeForConditionalGeneration": GDN,
    "Zamba2ForCausalLM": MAMBA2,
}
"""Hybrid models with one conv_state and one matrix per layer, and which kind of layer it is; a
release knows some of them."""


def parsed(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `0.25.1+cu129` is (0, 25, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def supported(version: str) -> bool:
    """Whether this file knows the release; development builds and candidates count as unknown."""
    released = re.fullmatch(r"\d+\.\d+\.\d+(\.post\d+)?", version.split("+")[0])
    return released is not None and OLDEST <= parsed(version) <= NEWEST


def unhandled(vllm_config: Any) -> str | None:
    """Why this configuration is left to vLLM; None if its copies are ours."""
    cache = vllm_config.cache_config
    if why := unhandled_by_both(vllm_config):
        return why
    if cache.mamba_cache_mode != "align":
        return (
            f"mamba_cache_mode is {cache.mamba_cache_mode!r}; states are saved and moved in "
            "'align' only (--enable-prefix-caching --mamba-cache-mode align)"
        )
    return None


def unhandled_by_both(vllm_config: Any) -> str | None:
    """Why neither our copies nor replay handle this configuration, or None."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    if not vllm_config.use_v2_model_runner:
        return "it runs the V1 model runner (VLLM_USE_V2_MODEL_RUNNER=1 selects V2)"
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector may change what has been computed"
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        return "context parallelism splits its batches"
    # From 0.29 on.
    if getattr(cache, "use_kda_recoverssm", False):
        return "RecoverSSM keeps other states"
    # From 0.31 on: how many drafts a row runs is then known to the device alone.
    if getattr(speculative, "enable_adaptive_verification", False):
        return "adaptive verification splits the drafts on the device"
    return None


def replay_unhandled(vllm_config: Any) -> str | None:
    """Why this configuration does not replay; None if it does.

    Asked before the first layer is built: without blocks for drafts, no step can be handed to
    vLLM's kernels later.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    speculative, drafts = vllm_config.speculative_config, vllm_config.num_speculative_tokens
    if why := unhandled_by_both(vllm_config):
        return why
    if not drafts:
        return "there are no drafts (--speculative-config gives them)"
    if drafts >= MAX_TOKENS:
        return f"a step has {drafts} drafts, the kernel takes up to {MAX_TOKENS - 1}"
    if cache.mamba_cache_mode not in ("align", "none"):
        return f"mamba_cache_mode is {cache.mamba_cache_mode!r}"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism"
    if getattr(parallel, "enable_dbo", False):
        return "dual batch overlap"
    if getattr(speculative, "method", None) == "draft_model":
        return "a draft model may have Mamba layers of its own"
    mamba = getattr(vllm_config, "mamba_config", None)
    backend = getattr(getattr(mamba, "backend", None), "name", "TRITON")
    # vLLM asks it for decode rows only, which are ours.
    if backend not in ("TRITON", "FLASHINFER"):
        return f"the Mamba backend is {backend} (--mamba-backend triton replays)"
    # From 0.27 on.
    if getattr(cache, "use_replayssm", False):
        return "vLLM's own --use-replayssm is on (without it the plug-in replays)"
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        return "VLLM_BATCH_INVARIANT asks for results that do not depend on the batch"
    if os.environ.get("VLLM_USE_HW_AGNOSTIC", "0") not in ("", "0"):
        return "VLLM_USE_HW_AGNOSTIC selects other layers"
    return None


def platform_unhandled() -> str | None:
    """Why layers on this device do not replay, or None."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return "the device is not NVIDIA's"
    if not current_platform.has_device_capability(80):
        return "the GPU is older than compute capability 8.0"
    return None


def plain_rows_run_as_prompts() -> bool:
    """Whether the decode rows of Gated DeltaNet that have no drafts run through vLLM's code for
    prompts, which starts from the state in the running column."""
    from vllm import __version__

    return parsed(__version__) < PLAIN_ROWS_DECODE


def without_spare_blocks(spec: Any) -> Any:
    """The spec of a layer's cache without blocks for drafts."""
    from vllm import __version__

    if parsed(__version__) < (0, 27) and spec.mamba_cache_mode == "align":
        from hybrid_runtime.integrations.vllm.spec import replay_spec

        return replay_spec(spec)
    return dataclasses.replace(spec, num_speculative_blocks=0)


def pipeline_unhandled(vllm_config: Any, slot_tables: Any) -> str | None:
    """Why this pipeline is left to vLLM, or None. Up to 0.31 block tables come in batch order only,
    and later steps overwrite them before an earlier step of a pipeline ends."""
    if vllm_config.parallel_config.pipeline_parallel_size > 1 and slot_tables is None:
        return "pipeline parallelism before vLLM 0.32"
    return None


def seed_block_size(cache_config: Any, slot_tables: Any) -> int:
    """Tokens by which vLLM's `add_request` divides for a request's first column. Up to 0.31 this is
    not always the Mamba block size."""
    size: int = cache_config.block_size if slot_tables is None else cache_config.mamba_block_size
    return size


def retained(kv_cache_config: Any) -> int | None:
    """Interval (tokens) at which boundaries of generated tokens are kept: None = all, 0 = none."""
    # From 0.29 on in the configuration, before in the environment.
    if hasattr(kv_cache_config, "prefix_cache_retention_interval"):
        interval: int | None = kv_cache_config.prefix_cache_retention_interval
        return interval
    import vllm.envs as envs

    older: int | None = envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL
    return older


def clear_dummy_tables(block_tables: tuple[Any, ...]) -> None:
    """Point the rows of a dummy run at the null block. Up to 0.26 they name the blocks of the step
    before, which may be a cached prefix by now, and the convolution would write into them."""
    from vllm import __version__

    if parsed(__version__) < (0, 27):
        for table in block_tables:
            table.zero_()


def copy_context(
    state: Any, kv_cache_config: Any, groups: list[int], block_tables: tuple[Any, ...]
) -> Any:
    """The context that vLLM's own copy kernels run from. Up to 0.31 it is made on first use."""
    if hasattr(state, "_ensure_align_ctx"):
        return state._ensure_align_ctx(kv_cache_config, groups, block_tables)
    return state._mamba_ctx
