"""One batch of requests that is measured, its prompts, and the engine that it needs."""

import random
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hybrid_runtime.engine import EngineConfig
from hybrid_runtime.engine.checks import KVDTypeName
from hybrid_runtime.state.checks import Strategy
from hybrid_runtime.state.layout import LayoutKind

Lengths = Literal["equal", "staggered"]
STOCHASTIC = "-stochastic"
SSM_DTYPES = ("float32", "float16", "bfloat16", f"float16{STOCHASTIC}", f"bfloat16{STOCHASTIC}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that are sent at once and decode together to their end.

    batch: requests. drafts: per step. isl, osl: tokens of a prompt (the mean, if staggered) and of
    its output. ssm_dtype: one of `SSM_DTYPES`; stochastic rounding needs the replay layout.
    acceptance: mean emitted tokens per step to pretend, capped to drafts + 1; None = as the drafts
    deserve. lengths: "equal" prompts cross their block boundaries together; "staggered" ones are
    spread evenly over one block, as those of unrelated users would be. repeats: how often it is
    timed. block_size: in tokens; None = derived from the layout. max_model_len: what the engine is
    made for, in tokens (more where the load needs it). strategy, state_layout, ring_tokens,
    max_tokens_per_step, memory_fraction, graphs, kv_cache_dtype: as of `EngineConfig`.
    """

    batch: int = 1
    drafts: int = 3
    isl: int = 1024
    osl: int = 256
    ssm_dtype: str = "float32"
    kv_cache_dtype: KVDTypeName = "auto"
    acceptance: float | None = None
    lengths: Lengths = "equal"
    strategy: Strategy = "auto"
    state_layout: LayoutKind = "replay"
    ring_tokens: int | None = None
    repeats: int = 5
    block_size: int | None = None
    max_model_len: int = 8192
    max_tokens_per_step: int = 8192
    memory_fraction: float = 0.9
    graphs: bool | None = None

    def __post_init__(self) -> None:
        for name, low in {"batch": 1, "isl": 1, "osl": 2, "drafts": 0, "repeats": 1}.items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {low}")

    @property
    def pretended(self) -> float | None:
        """Mean emitted tokens per step, as the engine takes it."""
        if self.acceptance is None or self.drafts == 0:
            return None
        return min(self.acceptance, self.drafts + 1.0)

    @property
    def config(self) -> EngineConfig:
        """Of the engine that it needs, for prompts of equal lengths."""
        return EngineConfig(
            drafter="auto" if self.drafts else None,
            num_speculative_tokens=self.drafts,
            adaptive=False,
            strategy=self.strategy,
            max_requests=self.batch,
            max_model_len=max(self.max_model_len, self.isl + self.osl),
            max_tokens_per_step=self.max_tokens_per_step,
            memory_fraction=self.memory_fraction,
            block_size=self.block_size,
            ssm_dtype=getattr(torch, self.ssm_dtype.removesuffix(STOCHASTIC)),
            stochastic_rounding=self.ssm_dtype.endswith(STOCHASTIC),
            synthetic_acceptance=self.pretended,
            graphs=self.graphs,
            kv_cache_dtype=self.kv_cache_dtype,
            state_layout=self.state_layout,
            ring_tokens=self.ring_tokens,
        )

    @property
    def key(self) -> dict[str, Any]:
        """What tells results of different loads apart."""
        return {
            "strategy": self.strategy,
            "lengths": self.lengths,
            "batch": self.batch,
            "drafts": self.drafts,
            "isl": self.isl,
            "osl": self.osl,
            "ssm_dtype": self.ssm_dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "state_layout": self.state_layout,
            "acceptance": "real" if self.pretended is None else self.pretended,
        }

    def prompt_lengths(self, block_size: int) -> list[int]:
        """Tokens of each prompt."""
        if self.lengths == "equal":
            return [self.isl] * self.batch
        low = max(self.isl - block_size // 2, 1)
        spread = [low + i * block_size // self.batch for i in range(self.batch)]
        random.Random(0).shuffle(spread)
        return spread

    def prompts(self, block_size: int, vocabulary: int, seed: int) -> list[list[int]]:
        """Random tokens, other ones for every seed."""
        rng = random.Random(seed)
        low, high = min(10, vocabulary // 2), max(vocabulary - 10, vocabulary // 2 + 1)
        return [
            [rng.randrange(low, high) for _ in range(n)] for n in self.prompt_lengths(block_size)
        ]
