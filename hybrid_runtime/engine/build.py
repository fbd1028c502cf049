"""The parts of an engine, each made from its config."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.engine.config import EngineConfig, acceptance_kinds, state_group
from hybrid_runtime.engine.memory import Memory
from hybrid_runtime.engine.memory_plan import MemoryPlan, Planner, longest
from hybrid_runtime.engine.offload.cache import HostCache
from hybrid_runtime.engine.pooler import Pooler
from hybrid_runtime.engine.prefix_cache import PrefixCache
from hybrid_runtime.engine.prompt_logprobs import PromptLogprobs
from hybrid_runtime.engine.scheduler import Scheduler
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.specdecode.acceptance import (
    Acceptance,
    greedy,
    rejection,
    synthetic_acceptance,
    synthetic_rates,
)
from hybrid_runtime.specdecode.draft_length import DraftLength
from hybrid_runtime.specdecode.drafter import make_drafter
from hybrid_runtime.specdecode.runner import SpecDecodeRunner
from hybrid_runtime.specdecode.sequences import Sequences
from hybrid_runtime.specdecode.shape import most_rows
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.replay.flush import FlushInputs


def state_manager(
    config: EngineConfig, layout: StateLayout, device: torch.device
) -> HybridStateManager:
    """The manager, not bound to any memory yet."""
    return HybridStateManager(
        layout,
        config.max_requests,
        config.num_draft,
        device,
        config.strategy,
        steps_in_flight=config.steps_ahead_on(device),
        readback=config.strategy in ("blocking", "defer"),
        prompt_cuts=True,
        max_rows=most_rows(config.max_requests) if config.graphs_on(device) else None,
    )


def token_buffers(config: EngineConfig, model: HybridModel, head: Any) -> Sequences:
    """Texts, drafts and sampling parameters of all slots, on the device."""
    drawn = config.sampled_drafts and head is not None
    return Sequences(
        config.max_requests,
        longest(config, model.device) + 1,  # one more than can be computed, see `device_tokens`
        config.num_draft,
        model.device,
        model.vocab_size,
        drawn,
        config.steps_ahead_on(model.device),
    )


def memory_plan(
    config: EngineConfig, layout: StateLayout, model: HybridModel, head: Any
) -> MemoryPlan:
    """What the engine will take; `ValueError` if it does not fit. The weights are there already."""
    return Planner(config, layout, model, head, model.device).plan()


def cache_memory(
    config: EngineConfig,
    layout: StateLayout,
    model: HybridModel,
    head: Any,
    num_blocks: tuple[int, int],
    waits: Waits,
) -> Memory:
    """Blocks of keys, values and states, and the tables over them."""
    return Memory.allocate(
        model,
        head,
        layout,
        config.max_requests,
        longest(config, model.device),
        num_blocks,
        config.kv_block(layout.block_size),
        config.kv_dtype(model),
        config.steps_ahead_on(model.device) + 2,
        waits,
    )


def bind_states(
    config: EngineConfig,
    manager: HybridStateManager,
    memory: Memory,
    model: HybridModel,
    sequences: Sequences,
) -> None:
    """Show the manager the state blocks."""
    flush_inputs = None
    if memory.records:
        seed = sequences.rounding_seed if config.stochastic_rounding else None
        params = tuple(torch.stack(layers) for layers in state_group(model).params)
        flush_inputs = FlushInputs(memory.records, params, seed)
    manager.bind(memory.states, memory.state.device_table, flush_inputs=flush_inputs)


def prefix_cache(config: EngineConfig, memory: Memory, block_size: int) -> PrefixCache:
    """The prefix cache over the device's blocks, and over the host's if there are any."""
    host = config.host_blocks
    return PrefixCache(
        memory.kv,
        memory.state,
        block_size,
        config.kv_block(block_size),
        config.retention,
        config.num_draft,
        memory.copy_keys,
        None if host is None else HostCache(memory.host_tier(host)),
    )


def scheduler(
    config: EngineConfig,
    manager: HybridStateManager,
    memory: Memory,
    cache: PrefixCache,
    drafts: DraftLength,
) -> Scheduler:
    """Queue, running requests and blocks."""
    return Scheduler(
        manager,
        memory.kv,
        memory.state,
        config.max_requests,
        config.max_tokens_per_step,
        config.max_prompt_tokens,
        config.max_model_len,
        config.steps_ahead_on(manager.device),
        cache if config.prefix_caching else None,
        config.max_waiting,
        config.kv_block(manager.layout.block_size),
        drafts,
    )


def runner(
    config: EngineConfig,
    model: HybridModel,
    head: Any,
    manager: HybridStateManager,
    memory: Memory,
    sequences: Sequences,
    drafts: DraftLength,
) -> SpecDecodeRunner:
    """What runs a step on the device."""
    assert config.drafter != "auto", "resolved by the engine"
    caches = memory.caches
    return SpecDecodeRunner(
        model,
        manager,
        sequences,
        caches,
        make_drafter(config.drafter, head, caches, config.sampled_drafts),
        config.max_tokens_per_step,
        config.steps_ahead_on(model.device),
        config.max_prompt_tokens if config.graphs_on(model.device) else None,
        config.stochastic_rounding,
        drafts,
    )


def pooler(config: EngineConfig, model: HybridModel, waits: Waits) -> Pooler:
    """What makes embeddings of hidden states."""
    ahead = config.steps_ahead_on(model.device)
    return Pooler(config.max_requests, model.hidden_size, ahead, model.device, waits)


def prompt_logprobs(config: EngineConfig, model: HybridModel, waits: Waits) -> PromptLogprobs:
    """What makes log-probabilities of prompts."""
    ahead = config.steps_ahead_on(model.device)
    return PromptLogprobs(
        model.logits, model.vocab_size, config.max_prompt_tokens, ahead, model.device, waits
    )


def acceptances(config: EngineConfig, device: torch.device) -> tuple[Acceptance, Acceptance]:
    """How drafts are verified in steps in which no row samples, and in the others."""
    rates = config.synthetic_acceptance
    if rates is None:
        return greedy, rejection
    if not isinstance(rates, tuple):
        rates = synthetic_rates(rates, config.num_draft)
    forced = synthetic_acceptance(acceptance_kinds(rates), device)
    return forced, forced
