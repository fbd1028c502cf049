"""What an engine has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_runtime.engine.prefix_cache import PrefixStats
from hybrid_runtime.specdecode.draft_length import DraftStats
from hybrid_runtime.state.stats import Stats


@dataclass(slots=True)
class Counts:
    """Results read so far.

    steps: steps.
    emitted: tokens added to texts.
    draft_steps, draft_emitted: rows with drafts, and the tokens that they emitted.
    """

    steps: int = 0
    emitted: int = 0
    draft_steps: int = 0
    draft_emitted: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        return self.draft_emitted / self.draft_steps if self.draft_steps else float("nan")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since construction.

    mean_acceptance_length: emitted tokens per step of a row that had drafts (1 .. K + 1), counted
    before the request's own limits cut its end; nan without drafts.
    """

    steps: int
    emitted: int
    mean_acceptance_length: float
    drafts: DraftStats
    state: Stats
    preemptions: int
    prefix: PrefixStats
