"""How many blocks an engine gets, and the bytes of all that it takes, before any are taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hybrid_runtime.device.free_memory import DeviceMemory, device_memory, host_memory
from hybrid_runtime.engine.checks import check_fp8
from hybrid_runtime.engine.config import EngineConfig, state_group
from hybrid_runtime.engine.scheduler import overshoot
from hybrid_runtime.kernels.linear.quantize import E4M3
from hybrid_runtime.kernels.sampling.narrow_head import narrow_bytes
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.specdecode.drafter import narrowed_weight
from hybrid_runtime.state.layout import StateLayout

_USABLE = 0.95
"""Of what is free: libraries take some at first use, and allocators round up."""
MOST_BLOCKS = 1 << 20
"""In a pool that fills what is left: the host keeps a list entry for each block."""
STATES_SHARE = 0.6
"""Of the memory of cached prefixes, at most: boundaries leave more checkpoints than are worth their
memory beside the keys of other texts, see `benchmarks/engine/eviction.py`."""
_STEP_WIDTH = 32
"""Activations per token of a step, in hidden sizes; Nemotron-3-Super's 22 experts come to 29."""


class Units(NamedTuple):
    """Bytes of one. kv_block, state_block: of all layers. slot: what a request's place takes
    besides: rings of records, its text, its rows of the block tables."""

    kv_block: int
    state_block: int
    slot: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine takes of its device, bytes but for the counts.

    num_blocks: KV blocks and state blocks.
    kv, state: these blocks.
    slots: what the places of `max_requests` requests take besides.
    step: activations and logits of the largest step, an estimate.
    weights: of model and draft head; 0 once they are loaded.
    draft_copy: the output weight in 8 bits, by which drafts are found.
    """

    num_blocks: tuple[int, int]
    kv: int
    state: int
    slots: int
    step: int
    weights: int
    draft_copy: int

    @property
    def total(self) -> int:
        return self.kv + self.state + self.slots + self.step + self.weights + self.draft_copy

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "output weight in 8 bits": self.draft_copy,
            "keys and values": self.kv,
            "states": self.state,
            "buffers": self.slots + self.step,
        }
        return ", ".join(f"{name} {gib(count)}" for name, count in parts.items() if count)


def longest(config: EngineConfig, device: torch.device) -> int:
    """Tokens of the longest request, and positions beyond them that may be written."""
    return config.max_model_len + overshoot(config.num_draft, config.steps_ahead_on(device))


def units(
    config: EngineConfig, layout: StateLayout, model: HybridModel, head: Any, device: torch.device
) -> Units:
    """Bytes of one block and of one slot. head: the draft head, or None."""
    layers = [model.kv_shape] * len(model.kv_layers)
    if head is not None:
        layers += [head.kv_shape] * len(head.kv_layers)
    elements = sum(2 * heads * size for heads, size in layers)
    states, length = len(state_group(model).layers), longest(config, device)
    kv_block = config.kv_block(layout.block_size)
    words = length + -(-length // kv_block) + layout.table_columns(length)
    drawn = model.vocab_size if config.sampled_drafts and head is not None else 0
    return Units(
        kv_block=elements * config.kv_dtype(model).itemsize * kv_block,
        state_block=layout.page_bytes * states,
        slot=layout.record_bytes * states
        + 4 * words
        + model.vocab_size // 8
        + 4 * config.num_draft * drawn,
    )


class Planner:
    """Plans for one engine, with more or fewer requests. weights: bytes still to be loaded."""

    def __init__(
        self,
        config: EngineConfig,
        layout: StateLayout,
        model: HybridModel,
        head: Any,
        device: torch.device,
        weights: int = 0,
    ) -> None:
        self.config, self._layout, self._model = config, layout, model
        self._device, self._weights = device, weights
        narrowed = narrowed_weight(head, config.sampled_drafts, device)
        self._draft_copy = 0 if narrowed is None else narrow_bytes(narrowed)
        self._units = units(config, layout, model, head, device)
        self._kv_block = config.kv_block(layout.block_size)
        self._columns = -(-longest(config, device) // self._kv_block)
        self._budget = layout.block_budget(config.steps_ahead_on(device))

    def plan(self, memory: DeviceMemory | None = None) -> MemoryPlan:
        """The plan for this device, of which so much is free (None: as it is now).

        Raises:
            ValueError: it does not fit, or keys and values are of a dtype that the device lacks.
        """
        if self.config.kv_dtype(self._model) == E4M3:
            check_fp8(
                f"kv_cache_dtype is {self.config.kv_cache_dtype!r}: keys and values", self._device
            )
        self._check_blocks()
        memory = memory or device_memory(self._device)
        room = self._room(memory)
        least = self.needed(self.config.max_requests)
        if least.total > room:
            raise ValueError(self._refusal(least, room, memory))
        if self.config.num_blocks is not None or self._device.type != "cuda":
            return least
        return self._filled(least, room)

    def needed(self, max_requests: int) -> MemoryPlan:
        """The least that so many requests need: `num_blocks` where that is given; on a CPU, room
        for all of them at full length; on a GPU, all states, and keys and values of one of them."""
        if self.config.num_blocks is not None:
            kv, states = self.config.num_blocks
            return self._with((kv, states), max_requests)
        kv, states = self.full_blocks(max_requests)
        if self._device.type == "cuda":
            kv = self._columns
        return self._with((kv, states), max_requests)

    def full_blocks(self, max_requests: int) -> tuple[int, int]:
        """KV blocks and state blocks for so many requests at full length."""
        states = max_requests * self._budget.typical + self._budget.most
        return max_requests * self._columns, states

    def _with(self, blocks: tuple[int, int], max_requests: int) -> MemoryPlan:
        model, itemsize = self._model, self._model.dtype.itemsize
        emitting = max_requests * (self.config.num_draft + 1)
        prompts = min(self.config.max_prompt_tokens, self.config.max_tokens_per_step)
        tokens = min(emitting + prompts, max(emitting, self.config.max_tokens_per_step))
        if self.config.graphs_on(self._device):  # their memory is apart
            tokens += emitting + prompts
            emitting *= 2
        return MemoryPlan(
            num_blocks=blocks,
            kv=blocks[0] * self._units.kv_block,
            state=blocks[1] * self._units.state_block,
            slots=max_requests * self._units.slot,
            step=tokens * _STEP_WIDTH * model.hidden_size * itemsize
            + emitting * model.vocab_size * (itemsize + 2 * torch.float32.itemsize),
            weights=self._weights,
            draft_copy=self._draft_copy,
        )

    def _check_blocks(self) -> None:
        """Refuse pools in which no request could ever run, and more than the host has."""
        config = self.config
        if config.num_blocks is not None and config.num_blocks[1] < self._budget.most:
            raise ValueError(
                f"num_blocks is {config.num_blocks}; its state blocks must be at least "
                f"{self._budget.most}, which one request can own at once"
            )
        needed, free = self._host_tier, int(host_memory().free * _USABLE)
        if needed > free:
            raise ValueError(
                f"host_blocks is {config.host_blocks}: needs {gib(needed)} of host memory, "
                f"{gib(free)} free; it must be smaller"
            )

    @property
    def _host_tier(self) -> int:
        """Bytes of `host_blocks`."""
        kv, states = self.config.host_blocks or (0, 0)
        return kv * self._units.kv_block + states * self._units.state_block

    def _room(self, memory: DeviceMemory) -> int:
        """Bytes that may be taken: what is free, on a GPU without `num_blocks` no more than
        `memory_fraction` leaves."""
        room = int(memory.free * _USABLE)
        if self._device.type == "cpu":
            room -= self._host_tier
        elif self.config.num_blocks is None:
            used = memory.total - memory.free
            room = min(room, int(memory.total * self.config.memory_fraction) - used)
        return max(room, 0)

    def _filled(self, least: MemoryPlan, room: int) -> MemoryPlan:
        """With blocks for as many tokens as there is room: first keys and values of all requests
        at full length, then of cached prefixes, with the states that `retention` keeps of them."""
        slots, unit = self.config.max_requests, self._units
        (kv, states), left = least.num_blocks, room - least.total
        more = slots * self._columns - kv
        if unit.kv_block:
            more = min(more, left // unit.kv_block)
        kv, left = kv + more, left - more * unit.kv_block
        each = unit.kv_block + self._states_per_block * unit.state_block
        if self.config.prefix_caching and kv == slots * self._columns and each:
            more = min(int(left / each), max(MOST_BLOCKS - kv, 0))
            kv, states = kv + more, states + int(more * self._states_per_block)
        return self._with((kv, states), slots)

    @property
    def _states_per_block(self) -> float:
        """States that a cached prefix keeps, per block of its keys and values: those that it
        leaves, as far as these do not take more of the memory than pays."""
        retention, unit = self.config.retention, self._units
        if retention == "all":
            left = self._kv_block / self._layout.block_size
        elif retention == "prompt":
            left = 2 / (1 + self._columns)  # one a prompt, prompts of half the length
        else:
            left = self._kv_block / retention
        if not (unit.kv_block and unit.state_block):
            return left
        return min(left, STATES_SHARE / (1 - STATES_SHARE) * unit.kv_block / unit.state_block)

    def _refusal(self, least: MemoryPlan, room: int, memory: DeviceMemory) -> str:
        config = self.config
        free = f"{gib(room)} free"
        if self._device.type == "cuda" and config.num_blocks is None:
            free += f" within memory_fraction={config.memory_fraction}"
        free += f" ({gib(memory.total - memory.free)} of {gib(memory.total)} are in use already)"
        if least.weights > room:
            must = "fit, in a narrower dtype or on another device"
            if least.weights <= self._room(DeviceMemory(memory.total, memory.total)):
                must = "fit beside what is in use: close other engines and programs first"
            return (
                f"dtype is {self._model.dtype}: the weights need {gib(least.weights)}, {free}; "
                f"they must {must}"
            )
        what = "max_requests" if config.num_blocks is None else "num_blocks"
        needs = f"{what} is {getattr(config, what)}: needs {gib(least.total)}, {free} ({least})"
        if config.num_blocks is not None:
            return f"{needs}; num_blocks must be smaller, or None"
        fits = self.most_requests(room)
        if fits:
            return f"{needs}: max_requests={fits} fits"
        one = self.needed(1)
        largest = "max_prompt_tokens" if one.step > one.kv + one.state else "max_model_len"
        return f"{needs}; not even max_requests=1 fits: {largest} must be smaller"

    def most_requests(self, room: int) -> int:
        """How many of `max_requests` fit in so many bytes; 0 if none do."""
        low, high = 0, self.config.max_requests
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.needed(middle).total <= room else (low, middle - 1)
        return low


def gib(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
