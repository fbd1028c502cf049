"""What an engine is made of, in the log; and each choice that gives less than was asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from hybrid_runtime.engine.config import EngineConfig, state_group
from hybrid_runtime.engine.memory_plan import MemoryPlan, gib, longest
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.state.layout import StateLayout

logger = logging.getLogger(__name__)


def log_engine(
    config: EngineConfig, layout: StateLayout, model: HybridModel, plan: MemoryPlan
) -> None:
    """Log what was chosen (INFO), and what was given up for which reason (WARNING)."""
    if not logger.isEnabledFor(logging.WARNING):
        return
    for line in _chosen(config, layout, model, plan):
        logger.info(line)
    for line in _given_up(config, layout, model, plan):
        logger.warning(line)


def _chosen(
    config: EngineConfig, layout: StateLayout, model: HybridModel, plan: MemoryPlan
) -> list[str]:
    ahead, layers = config.steps_ahead_on(model.device), len(state_group(model).layers)
    drafts = "none"
    if config.num_draft:
        pay = "as many as pay, at most " if config.adaptive else ""
        drafts = f"{pay}{config.num_draft} a step by {config.drafter}"
    blocks, most = plan.num_blocks, layout.block_budget(ahead).most
    graphs = config.graphs_on(model.device) and model.device.type == "cuda"
    return [
        f"states: layout {layout.kind}, ring of {layout.ring_tokens} tokens, "
        f"{layout.matrix_dtype}, "
        f"saved every {layout.block_size} tokens, "
        f"{gib(layout.bytes_per_request(layers, checkpoints=1))} per request with a checkpoint, "
        f"at most {most} blocks of {gib(layers * layout.page_bytes)} each",
        f"memory: {config.max_requests} slots for requests of up to {config.max_model_len} tokens, "
        f"{blocks[0]} KV blocks of {config.kv_block(layout.block_size)} tokens, "
        f"{blocks[1]} state blocks ({plan}), keys and values in {config.kv_dtype(model)}",
        f"steps: drafts {drafts}, strategy {config.strategy}, {ahead} ahead, "
        f"{'CUDA' if graphs else 'no'} graphs, retention "
        f"{config.retention if config.prefix_caching else 'of nothing (no prefix cache)'}",
    ]


def _given_up(
    config: EngineConfig, layout: StateLayout, model: HybridModel, plan: MemoryPlan
) -> Iterator[str]:
    block, device, trained = layout.block_size, model.device, model.max_positions
    if trained is not None and config.max_model_len > trained:
        yield (
            f"max_model_len is {config.max_model_len}, more than the {trained} tokens that the "
            "model was made for (max_position_embeddings); longer texts may be worse"
        )
    if config.prefix_caching and block >= config.max_model_len:
        ends = " but where a text has ended" if layout.replays else ""
        yield (
            f"no prefix can be found again{ends}: states are saved every {block} tokens and "
            f"requests have at most {config.max_model_len} (max_model_len); a smaller block_size "
            "would let them"
        )
    full = config.max_requests * -(-longest(config, device) // config.kv_block(block))
    if config.num_blocks is None and plan.num_blocks[0] < full:
        fit = plan.num_blocks[0] * config.max_requests // full
        yield (
            f"not all {config.max_requests} requests fit at full length, about {fit} do: "
            f"{plan.num_blocks[0]} of {full} KV blocks; beyond that the youngest is preempted and "
            "computed again"
        )
    if config.sampled_drafts and config.drafter not in ("mtp", "eagle"):
        yield f"sampled_drafts does nothing: drafter {config.drafter!r} draws no drafts"
    if config.graphs and device.type != "cuda":
        yield f"no CUDA graphs: they need a GPU, and the device is {device}"
