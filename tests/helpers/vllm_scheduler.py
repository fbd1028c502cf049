"""vLLM's own scheduler, cache manager, block pool and prefix cache, without a GPU."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.config.cache import CacheConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request

from hybrid_runtime.integrations.vllm import versions

HASH = get_hash_fn_by_name("sha256_cbor")
init_none_hash(HASH)


class Absent(SimpleNamespace):
    """Part of a configuration; what is not given is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Speculation(Absent):
    """A method of a name that asks whether something is used says no."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("use", "needs")):
            return lambda *_, **__: False
        return super().__getattr__(name)


@dataclass(frozen=True)
class Setting:
    """block, drafts: tokens of a block, and drafts per step. blocks: of the pool. requests: at
    a time. budget: tokens per step. length: of a request, at most. spare: blocks for drafts.
    asynchronous, policy: of the scheduler. eagle: the drafter has a cache of its own. retained:
    interval of boundaries that are kept. checkpoints: vLLM keeps states inside of prompts. plain:
    its own code runs rows without drafts, as those of Gated DeltaNet up to 0.31."""

    block: int
    drafts: int
    blocks: int
    requests: int
    budget: int
    length: int
    spare: int
    asynchronous: bool
    policy: str = "fcfs"
    eagle: bool = False
    retained: int | None = None
    checkpoints: bool = False
    plain: bool = False

    @classmethod
    def drawn(cls, rng: random.Random, columns: bool, asynchronous: bool) -> Setting:
        """Small blocks, a pool that is often too small, a budget that cuts prompts."""
        drafts = rng.randint(1, 4)
        block = max(rng.choice([drafts + 1, drafts + 2, 6, 8, 12]), drafts + 1)
        requests = rng.randint(1, 6)
        length = block * rng.randint(6, 12)
        budget = rng.choice([block, 2 * block, 3 * block + 1, 64])
        spare = drafts if columns else 0
        most = -(-length // block) + 5 + spare
        return cls(
            block=block,
            drafts=drafts,
            blocks=1 + most + rng.randint(0, most * requests),
            requests=requests,
            budget=max(budget, block, requests * (drafts + 1)),
            length=length,
            spare=spare,
            asynchronous=asynchronous,
            policy=rng.choice(["fcfs", "priority"]),
            # Up to 0.26 vLLM takes a short prompt's last state for a boundary's where the drafter
            # has a cache; its own layout shows the same holes.
            eagle=rng.random() < 0.7 and versions.parsed(vllm.__version__) >= (0, 27),
            retained=rng.choice([None, None, 0, 2 * block]),
            checkpoints=has_checkpoints() and rng.random() < 0.5,
            plain=not columns and rng.random() < 0.5,
        )


def has_checkpoints() -> bool:
    # 0.29 has them too, but counts them otherwise.
    return "prefill_checkpoint_alignment" in MambaSpec.__dataclass_fields__


def cache_config(setting: Setting) -> KVCacheConfig:
    """One group of attention layers, one of Mamba layers."""
    full = FullAttentionSpec(
        block_size=setting.block, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    kept = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    mamba: Any = MambaSpec(
        block_size=setting.block,
        shapes=((1,), (1,)),
        dtypes=(torch.float32, torch.float32),
        mamba_cache_mode="align",
        num_speculative_blocks=setting.drafts,
        page_size_padded=full.page_size_bytes,
        **(kept if setting.checkpoints else {}),
    )
    if not setting.spare:
        mamba = versions.without_spare_blocks(mamba)
    # Before, vLLM marks no group of such a model, and then takes all for the drafter's.
    marks = versions.parsed(vllm.__version__) >= (0, 29)
    more = {"is_eagle_group": setting.eagle} if marks else {}
    groups = [KVCacheGroupSpec(["attention"], full, **more), KVCacheGroupSpec(["mamba"], mamba)]
    config = KVCacheConfig(num_blocks=setting.blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    if hasattr(config, "prefix_cache_retention_interval"):
        config.prefix_cache_retention_interval = setting.retained
    return config


def scheduler(setting: Setting) -> Any:
    """vLLM's scheduler of a configuration with drafts and prefix caching in align mode."""
    given: dict[str, Any] = {
        "max_num_seqs": setting.requests,
        "max_num_batched_tokens": setting.budget,
        "max_model_len": setting.length,
        "enable_chunked_prefill": True,
        "is_encoder_decoder": False,
        "async_scheduling": setting.asynchronous,
        "policy": setting.policy,
    }
    if "watermark" in SchedulerConfig.__dataclass_fields__:
        given["watermark"] = 0.0
    cache = CacheConfig(block_size=setting.block, enable_prefix_caching=True)
    cache.mamba_cache_mode, cache.mamba_block_size = "align", setting.block
    cache.num_gpu_blocks, cache.prefix_caching_hash_algo = setting.blocks, "sha256_cbor"
    if hasattr(cache, "prefix_cache_retention_interval"):
        cache.prefix_cache_retention_interval = setting.retained

    def eagle() -> bool:
        return setting.eagle

    speculation = Speculation(
        use_eagle=eagle,
        use_eagle_block_drop=eagle,
        needs_eagle_block_drop=eagle,
        disable_eagle_block_drop=False,
        num_speculative_tokens=setting.drafts,
        method="mtp",
        parallel_drafting=False,
        max_num_new_slots_for_drafting=0,
        enable_adaptive_verification=False,
    )
    model = Absent(
        uses_mrope=False,
        is_encoder_decoder=False,
        max_model_len=setting.length,
        runner_type="generate",
        is_diffusion=False,
        supports_multimodal_inputs=False,
        enable_return_routed_experts=False,
        is_multimodal_model=False,
        hf_config=Absent(),
        enable_prompt_embeds=False,
    )
    config = Absent(
        scheduler_config=SchedulerConfig(**given),
        cache_config=cache,
        parallel_config=ParallelConfig(),
        model_config=model,
        observability_config=ObservabilityConfig(),
        speculative_config=speculation,
        is_mm_encoder_only=False,
        num_speculative_tokens=setting.drafts,
        num_lookahead_tokens=setting.drafts if setting.eagle else 0,
        num_prefill_lookahead_tokens=0,
        num_hash_lookahead_tokens=0,
        use_v2_model_runner=True,
        max_in_flight_tokens=2 * setting.budget,
        max_concurrent_batches=1 + setting.asynchronous,
        ec_manager_config=Absent(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=Absent(enabled=False),
        structured_outputs_config=Absent(),
        attention_config=Absent(),
    )
    structured = Absent(
        accept_tokens=lambda *_: True,
        should_advance=lambda *_, **__: False,
        grammar_bitmask=lambda *_, **__: None,
        validate_tokens=lambda _, tokens: tokens,
    )
    kind = AsyncScheduler if setting.asynchronous else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=cache_config(setting),
        structured_output_manager=structured,
        block_size=setting.block,
        log_stats=False,
    )


def request(setting: Setting, name: str, prompt: list[int], tokens: int, priority: int) -> Any:
    given: dict[str, Any] = {}
    if "eos_token_id" in Request.__init__.__code__.co_varnames:
        given["eos_token_id"] = None
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(setting.block, HASH),
        priority=priority,
        **given,
    )
