"""What an engine is asked for: every option, checked before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Self, TypedDict, get_args

import torch

from hybrid_runtime.engine.checks import (
    KV_DTYPES,
    DTypeName,
    KVDTypeName,
    check_blocks,
    check_choice,
    check_dtype,
    check_flag,
    check_integer,
    check_names,
    check_number,
    resolve_dtype,
)
from hybrid_runtime.kernels.conv.spec import ConvLayout
from hybrid_runtime.kernels.replay.ring import default_ring_tokens
from hybrid_runtime.models.model import HybridModel, StateGroup
from hybrid_runtime.models.states import smallest_block
from hybrid_runtime.specdecode.draft_length import LEVELS, UNMEASURED, DraftLength
from hybrid_runtime.specdecode.drafter import DrafterName
from hybrid_runtime.state.checks import Strategy
from hybrid_runtime.state.layout import LayoutKind, StateLayout

RetentionPolicy = Literal["all", "prompt"] | int
_LEAST = {
    "max_requests": 1,
    "max_model_len": 2,
    "max_tokens_per_step": 2,
    "max_prompt_tokens": 1,
}
_LEAST_IF_SET = {
    "max_waiting": 1, "block_size": 1, "kv_block_size": 1, "num_speculative_tokens": 0,
    "ring_tokens": 0,
}  # fmt: skip
KV_BLOCK_SIZES = (64, 32)
"""Tokens; of those that divide a state's block the first is taken. Smaller ones make attention up
to a fifth slower (docs/measured.md)."""


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig`, same names and types, for type checkers to see in a call."""

    drafter: DrafterName | Literal["auto"] | None
    num_speculative_tokens: int | None
    adaptive: bool
    sampled_drafts: bool
    synthetic_acceptance: float | tuple[float | tuple[float, ...], ...] | None
    max_requests: int
    max_model_len: int
    max_tokens_per_step: int
    max_prompt_tokens: int
    max_waiting: int | None
    steps_ahead: int | None
    graphs: bool | None
    strategy: Strategy
    state_layout: LayoutKind
    ring_tokens: int | None
    kv_cache_dtype: torch.dtype | KVDTypeName
    ssm_dtype: torch.dtype | DTypeName
    stochastic_rounding: bool
    conv_layout: ConvLayout
    block_size: int | None
    kv_block_size: int | None
    memory_fraction: float
    num_blocks: tuple[int, int] | None
    prefix_caching: bool
    retention: RetentionPolicy
    host_blocks: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an `Engine`; `ValueError` names the one that is wrong, its value and what it must
    be. What depends on the model is checked by `layout`, which needs no weights."""

    drafter: DrafterName | Literal["auto"] | None = "auto"
    """Who drafts: "mtp" or "eagle" (a draft head), "ngram" (prompt look-up), None (no drafts), or
    "auto": the first of these three that there is."""

    num_speculative_tokens: int | None = None
    """Most drafts of a row per step, K, at most 15. None: 0 without a drafter, else 7, or 3 where
    a request holds a state for every draft (`state_layout="columns"`)."""

    adaptive: bool = True
    """Give each step as many drafts as bring the most tokens per second, none included, by what
    steps cost (measured by `capture`) and by how many drafts were accepted lately. False, and as
    long as nothing is measured: always K, of the default 3."""

    sampled_drafts: bool = False
    """Draw the drafts of MTP and EAGLE at the request's temperature; False takes the likeliest."""

    synthetic_acceptance: float | tuple[float | tuple[float, ...], ...] | None = None
    """Acceptance to pretend, for measurements; the text is then wrong. A number: mean tokens per
    step (1 .. K + 1). K numbers: how often draft 1, 2, ... is accepted with all before it. Several
    times K numbers: a request has those at its seed, modulo how many times there are."""

    max_requests: int = 8
    """Requests that run at once; sizes the memory."""

    max_model_len: int = 2048
    """Tokens of the longest request, prompt and output together; sizes the memory."""

    max_tokens_per_step: int = 4096
    """Most tokens of one step, those of requests that decode among them."""

    max_prompt_tokens: int = 2560
    """Most prompt tokens of a step. More make requests that decode wait longer for their next
    tokens, and prompts that share a step end together, later than the first could. With fewer all
    take more steps."""

    max_waiting: int | None = None
    """Requests that may wait, `submit` raises `QueueFull` beyond. None: any number."""

    steps_ahead: int | None = None
    """Steps queued before the results of the first are read, 0 or 1. None: 1 on a GPU, which then
    never waits for the host."""

    graphs: bool | None = None
    """Pad steps to few sizes and replay CUDA graphs of them; on a CPU only pad them. Those with
    prompts in them are captured by `capture` alone. None: on a GPU."""

    strategy: Strategy = "auto"
    """Who decides when states are saved; see `HybridStateManager`."""

    state_layout: LayoutKind = "replay"
    """What a request holds: one state, into which later steps fold what was accepted ("replay"), or
    one for every draft ("columns")."""

    ring_tokens: int | None = None
    """Replay layout: tokens whose records are kept before a state is written, K + 1 to 15, or 31;
    0: every step writes the states. A longer ring saves memory traffic and costs memory. None: 15
    with up to 7 drafts, 31 with more."""

    kv_cache_dtype: torch.dtype | KVDTypeName = "auto"
    """Of keys and values, the draft head's too: float32, bfloat16, float16, or "fp8" (e4m3, with
    the checkpoint's scales where it has them, else 1). "auto": what the checkpoint says, else the
    dtype of the weights. `Engine.kv_cache_dtype` is what it has become."""

    ssm_dtype: torch.dtype | DTypeName = "auto"
    """Of the SSM states: float32, bfloat16 or float16, or such a name. "auto": the checkpoint's own
    choice, its `mamba_ssm_cache_dtype`."""

    stochastic_rounding: bool = False
    """Round bfloat16 or float16 states of decoding rows stochastically, so that their mean error is
    zero (replay layout). The random numbers depend on the request's seed, the position, the layer
    and the element, not on slot or batch. States at the end of prompt chunks are rounded to
    nearest, so text after a preemption or a prefix hit may differ."""

    conv_layout: ConvLayout = "SD"
    """Of the convolutions' states in memory, see `ConvLayout`."""

    block_size: int | None = None
    """Tokens between two positions at which states can be saved. None: the smallest number whose
    keys and values take as much memory as a state."""

    kv_block_size: int | None = None
    """Tokens of a block of keys and values, a divisor of `block_size`. None: 64, else 32,
    where it is one; else `block_size`."""

    memory_fraction: float = 0.9
    """On a GPU: share of its whole memory that may be in use, weights and other programs' included,
    once there are as many blocks as fit. On a CPU it says nothing."""

    num_blocks: tuple[int, int] | None = None
    """KV blocks and state blocks. None: on a GPU by `memory_fraction`; on a CPU enough for
    `max_requests` requests of full length."""

    prefix_caching: bool = True
    """Let prompts start from what earlier ones with the same beginning and tenant have left."""

    retention: RetentionPolicy = "all"
    """Boundaries whose states are kept for that, besides the ends of texts: "all"; "prompt": where
    a prompt could be hit again or a known prefix ends; a number: those and every so many tokens (a
    multiple of the block)."""

    host_blocks: tuple[int, int] | None = None
    """KV blocks and state blocks in pinned host memory, for what the device has no room for."""

    def __new__(cls, **options: Any) -> Self:
        # Before the generated __init__, which would raise a TypeError.
        check_names("option", options, EngineOptions.__annotations__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_sizes()
        self._check_drafting()
        if self.host_blocks is not None and not self.prefix_caching:
            raise ValueError(
                f"host_blocks is {self.host_blocks} with prefix_caching=False; it must be None, "
                "because only blocks that can be found again go to the host"
            )

    @property
    def num_draft(self) -> int:
        """K, whatever was left to the default."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        if self.drafter is None:
            return 0
        return UNMEASURED if self.state_layout == "columns" or not self.adaptive else LEVELS[-1]

    def draft_length(self) -> DraftLength:
        """How many drafts steps have."""
        first = UNMEASURED if self.num_speculative_tokens is None else self.num_draft
        return DraftLength(self.num_draft, self.adaptive, first, self.max_requests)

    def resolved(self, head: Any) -> EngineConfig:
        """With the drafter that "auto" is beside this draft head (None: there is none);
        `ValueError` for a drafter without its head."""
        if self.drafter in ("mtp", "eagle") and head is None:
            raise ValueError(f"head is None; drafter {self.drafter!r} needs one")
        if self.drafter != "auto":
            return self
        return replace(self, drafter="ngram" if head is None else head.drafter)

    def steps_ahead_on(self, device: torch.device) -> int:
        """`steps_ahead`, whatever was left to the default."""
        return int(device.type == "cuda") if self.steps_ahead is None else self.steps_ahead

    def kv_block(self, block_size: int) -> int:
        """`kv_block_size`, whatever was left to the default, with states at multiples of
        `block_size`."""
        if self.kv_block_size is not None:
            return self.kv_block_size
        return next((size for size in KV_BLOCK_SIZES if block_size % size == 0), block_size)

    def kv_dtype(self, model: HybridModel) -> torch.dtype:
        """`kv_cache_dtype`, whatever was left to the checkpoint."""
        own = model.kv_dtype or model.dtype
        return resolve_dtype("kv_cache_dtype", self.kv_cache_dtype, own, KV_DTYPES)

    def graphs_on(self, device: torch.device) -> bool:
        """`graphs`, whatever was left to the default."""
        return device.type == "cuda" if self.graphs is None else self.graphs

    def layout(self, model: HybridModel) -> StateLayout:
        """State blocks for a model, which needs no values; `ValueError` names the option that does
        not go with the model, or says that it has no states."""
        resolve_dtype("dtype", model.dtype, model.dtype)
        group = state_group(model)
        if self.state_layout not in group.layouts:
            raise ValueError(
                f"state_layout is {self.state_layout!r}; it must be "
                f"{' or '.join(map(repr, group.layouts))} with this model, whose states no other "
                "kernel decodes"
            )
        recurrence = group.recurrence(
            dtype=model.dtype,
            matrix_dtype=resolve_dtype("ssm_dtype", self.ssm_dtype, group.matrix_dtype),
            conv_layout=self.conv_layout,
        )
        block_size = self.block_size
        if block_size is None:
            kv_dtype = self.kv_dtype(model)
            block_size = smallest_block(recurrence, self.num_draft, model.kv_shape, kv_dtype)
            block_size += -block_size % KV_BLOCK_SIZES[-1]  # so that KV blocks can be small
        layout = StateLayout(
            recurrence,
            self.num_draft,
            block_size,
            kind=self.state_layout,
            ring_tokens=default_ring_tokens(self.num_draft)
            if self.ring_tokens is None
            else self.ring_tokens,
        )
        if self.stochastic_rounding and not layout.rounds_stochastically:
            raise ValueError(
                f"stochastic_rounding is True with ssm_dtype={layout.matrix_dtype} and "
                f"state_layout={layout.kind!r}; it must be False unless states are float16 or "
                "bfloat16 in the replay layout"
            )
        if block_size % self.kv_block(block_size):
            raise ValueError(
                f"kv_block_size is {self.kv_block_size}; it must divide the block size "
                f"({block_size})"
            )
        if isinstance(self.retention, int) and self.retention % layout.block_size:
            raise ValueError(
                f"retention is {self.retention}; it must be 'all', 'prompt' or a multiple of the "
                f"block size ({layout.block_size})"
            )
        return layout

    def _check_choices(self) -> None:
        check_choice("drafter", self.drafter, ("auto", *get_args(DrafterName), None))
        check_choice("strategy", self.strategy, get_args(Strategy))
        check_choice("state_layout", self.state_layout, get_args(LayoutKind))
        check_choice("conv_layout", self.conv_layout, get_args(ConvLayout))
        check_choice("steps_ahead", self.steps_ahead, (None, 0, 1))
        check_choice("graphs", self.graphs, (None, False, True))
        check_dtype("kv_cache_dtype", self.kv_cache_dtype, KV_DTYPES)
        check_dtype("ssm_dtype", self.ssm_dtype)
        for name in ("adaptive", "sampled_drafts", "stochastic_rounding", "prefix_caching"):
            check_flag(name, getattr(self, name))

    def _check_sizes(self) -> None:
        for name, least in _LEAST.items():
            check_integer(name, getattr(self, name), least)
        for name, least in _LEAST_IF_SET.items():
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least)
        if self.retention not in ("all", "prompt") and type(self.retention) is not int:
            raise ValueError(
                f"retention is {self.retention!r}; it must be 'all', 'prompt' or an integer"
            )
        if isinstance(self.retention, int):
            check_integer("retention", self.retention, 1)
        for name in ("num_blocks", "host_blocks"):
            if getattr(self, name) is not None:
                check_blocks(name, getattr(self, name))

        check_number("memory_fraction", self.memory_fraction)
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(
                f"memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1"
            )

    def _check_drafting(self) -> None:
        k = self.num_draft
        if (self.drafter is None) != (k == 0) or k < 0:
            raise ValueError(
                f"num_speculative_tokens is {k} with drafter={self.drafter!r}; it must be 0 "
                "without a drafter and at least 1 with one"
            )
        least = max(2, k + 1)
        if self.max_tokens_per_step < least:
            raise ValueError(
                f"max_tokens_per_step is {self.max_tokens_per_step}; with "
                f"num_speculative_tokens={k} it must be at least {least}, or no row could decode"
            )
        self._check_synthetic(k)

    def _check_synthetic(self, k: int) -> None:
        given, right = self.synthetic_acceptance, True
        if isinstance(given, tuple):
            kinds = acceptance_kinds(given)
            for kind in kinds:
                for number in kind:
                    check_number("synthetic_acceptance", number)
                falls = all(later <= rate for rate, later in pairwise(kind))
                right &= len(kind) == k and falls and all(0 <= rate <= 1 for rate in kind)
            right &= given in (kinds, kinds[0])
            must = f"{k} rates from 0 to 1, none above the one before it"
        elif given is not None:
            check_number("synthetic_acceptance", given)
            right = 1 <= given <= k + 1
            must = f"in 1..{k + 1}"
        if not right:
            raise ValueError(
                f"synthetic_acceptance is {given}; with num_speculative_tokens={k} it must be "
                f"{must}"
            )


def state_group(model: HybridModel) -> StateGroup:
    """The group of a model's layers with states; `ValueError` if there is none, or more than one,
    which one layout of state blocks cannot hold."""
    if not model.groups:
        raise ValueError("the model has no layer with a state; it must have one, or more")
    if len(model.groups) > 1:
        raise ValueError(f"the model has {len(model.groups)} kinds of states; it must have one")
    return model.groups[0]


def acceptance_kinds(given: tuple[float | tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    """`EngineConfig.synthetic_acceptance` as rates of several kinds of requests."""
    several = tuple(kind for kind in given if isinstance(kind, tuple))
    return several or (tuple(rate for rate in given if not isinstance(rate, tuple)),)
