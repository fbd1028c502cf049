"""What an engine has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_runtime.engine.prefix_cache import PrefixStats
from hybrid_runtime.state.stats import Stats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since construction.

    mean_acceptance_length: emitted tokens per step of a row that had drafts (1 .. K + 1), counted
    before the request's own limits cut its end; nan without drafts.
    """

    steps: int
    emitted: int
    mean_acceptance_length: float
    state: Stats
    preemptions: int
    prefix: PrefixStats
