"""What is measured: batch, lengths, drafts, strategies; and the prompts that make it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, get_args

import torch

from hybrid_runtime.engine.config import EngineConfig
from hybrid_runtime.engine.scheduler import overshoot
from hybrid_runtime.kernels.replay.ring import default_window
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.state.checks import Strategy
from hybrid_runtime.state.layout import LayoutKind, StateLayout

Lengths = Literal["equal", "staggered"]
STOCHASTIC = "-stochastic"
SSM_DTYPES = ("float32", "float16", "bfloat16", f"float16{STOCHASTIC}", f"bfloat16{STOCHASTIC}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One batch of requests, sent at once and decoded to the end, and how it is measured.

    batch: requests. drafts: per step. isl, osl: tokens of a prompt (the mean, if staggered) and of
    its output. ssm_dtype: one of `SSM_DTYPES`; stochastic rounding needs the replay layout.
    acceptance: mean emitted tokens per step to pretend, capped to drafts + 1; None = as the drafts
    deserve. lengths: "equal" prompts cross their block boundaries together; "staggered" ones are
    spread evenly over one block, as those of unrelated users would be. strategies, repeats: what is
    timed, and how often. warmup_osl: output tokens of the run before the timed ones. profile_steps:
    steady steps to trace after them, under the strategies that are also in `profiled`. block_size:
    in tokens; None = derived from the layout. max_model_len: what the engine is made for, in tokens
    (more where the load needs it). max_tokens_per_step, graphs, state_layout, window: as of
    `EngineConfig`. nvtx: mark each timed step with an NVTX range. seed: of lengths.
    """

    batch: int = 1
    drafts: int = 3
    isl: int = 1024
    osl: int = 256
    ssm_dtype: str = "float32"
    acceptance: float | None = None
    lengths: tuple[Lengths, ...] = ("equal",)
    strategies: tuple[Strategy, ...] = ("auto",)
    repeats: int = 5
    warmup_osl: int = 48
    profile_steps: int = 20
    profiled: tuple[Strategy, ...] = get_args(Strategy)
    block_size: int | None = None
    max_model_len: int = 8192
    max_tokens_per_step: int = 8192
    graphs: bool | None = None
    state_layout: LayoutKind = "replay"
    window: int | None = None
    nvtx: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"batch": 1, "isl": 1, "osl": 2, "drafts": 0, "repeats": 1, "warmup_osl": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")
        if self.ssm_dtype not in SSM_DTYPES:
            raise ValueError(f"ssm_dtype is {self.ssm_dtype!r}; it must be one of {SSM_DTYPES}")
        for name, values, known in (
            ("strategies", self.strategies, get_args(Strategy)),
            ("profiled", self.profiled, get_args(Strategy)),
            ("lengths", self.lengths, get_args(Lengths)),
        ):
            if not values or not set(values) <= set(known):
                raise ValueError(f"{name} is {values}; each must be one of {known}")

    @property
    def state_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.ssm_dtype.removesuffix(STOCHASTIC))
        return dtype

    @property
    def stochastic_rounding(self) -> bool:
        return self.ssm_dtype.endswith(STOCHASTIC)

    @property
    def synthetic_acceptance(self) -> float | None:
        """As the engine takes it."""
        if self.acceptance is None or self.drafts == 0:
            return None
        return min(self.acceptance, self.drafts + 1.0)

    @property
    def key(self) -> dict[str, Any]:
        """What tells results of different loads apart, strategy and lengths aside."""
        pretended = self.synthetic_acceptance
        return {
            "batch": self.batch,
            "drafts": self.drafts,
            "isl": self.isl,
            "osl": self.osl,
            "ssm_dtype": self.ssm_dtype,
            "state_layout": self.state_layout if self.drafts else "columns",
            "window": default_window(self.drafts) if self.window is None else self.window,
            "acceptance": "real" if pretended is None else pretended,
        }

    def turns(self) -> list[tuple[Strategy, Lengths]]:
        """All timed runs in order: every second repeat goes through the strategies backwards
        (ABBA), so that a drift of the machine falls on all alike."""
        once = list(product(self.strategies, self.lengths))
        return [turn for i in range(self.repeats) for turn in (once if i % 2 == 0 else once[::-1])]

    def profile_turns(self) -> list[tuple[Strategy, Lengths]]:
        """The traced runs that come after them."""
        chosen = [s for s in self.strategies if s in self.profiled]
        return list(product(chosen, self.lengths)) if self.profile_steps else []

    def layout(self, model: HybridModel) -> StateLayout:
        """The state layout that the engine will use."""
        return EngineConfig(
            drafter="auto" if self.drafts else None,
            num_speculative_tokens=self.drafts,
            ssm_dtype=self.state_dtype,
            block_size=self.block_size,
            state_layout=self.state_layout,
            window=self.window,
        ).layout(model)

    def prompt_lengths(self, lengths: Lengths, block_size: int) -> list[int]:
        """Tokens of each prompt."""
        if lengths == "equal":
            return [self.isl] * self.batch
        low = max(self.isl - block_size // 2, 1)
        spread = [low + i * block_size // self.batch for i in range(self.batch)]
        random.Random(self.seed).shuffle(spread)
        return spread

    def prompts(
        self, lengths: Lengths, block_size: int, vocabulary: int, seed: int
    ) -> list[list[int]]:
        """Random tokens, other ones for every seed."""
        rng = random.Random(seed)
        low, high = min(10, vocabulary // 2), max(vocabulary - 10, vocabulary // 2 + 1)
        return [
            [rng.randrange(low, high) for _ in range(n)]
            for n in self.prompt_lengths(lengths, block_size)
        ]

    @property
    def profile_osl(self) -> int:
        """Output tokens of the profiled run: enough for its steps, whatever is accepted, and for
        those before the batch is steady."""
        return (self.profile_steps + 12) * (self.drafts + 1) if self.profile_steps else 1

    def longest(self, block_size: int) -> int:
        """Tokens of the longest request of any run."""
        most = max(max(self.prompt_lengths(kind, block_size)) for kind in self.lengths)
        return most + max(self.osl, self.warmup_osl, self.profile_osl)

    def blocks(self, layout: StateLayout) -> tuple[int, int]:
        """KV and state blocks that this load needs, whatever the engine is made for."""
        block = layout.block_size
        columns = -(-(self.longest(block) + overshoot(self.drafts, 1)) // block)
        return self.batch * columns, self.batch * layout.block_budget(1).most


def sweep(
    base: Load,
    batches: list[int],
    drafts: list[int],
    isls: list[int],
    osls: list[int],
    ssm_dtypes: list[str],
    state_layouts: list[LayoutKind],
) -> list[Load]:
    """Every combination, the batch varying fastest."""
    return [
        replace(base, batch=b, drafts=k, isl=i, osl=o, ssm_dtype=s, state_layout=kind)
        for k, s, i, o, kind, b in product(drafts, ssm_dtypes, isls, osls, state_layouts, batches)
    ]
