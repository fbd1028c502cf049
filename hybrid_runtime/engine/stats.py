"""What an engine has done so far, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hybrid_runtime.specdecode.draft_length import DraftStats
from hybrid_runtime.state.stats import Stats


@dataclass(slots=True)
class PrefixStats:
    """What was found, since construction.

    queried_tokens, hit_tokens: of requests when they were admitted, after a preemption again.
    evictions: blocks that made room for others.
    host_blocks: blocks that came from the host tier.
    short: admissions by why their hit was not longer, see `Hit`; None is not counted.
    turn_ends: requests whose state was filed where their text ended.
    lost_turn_ends: those whose state was not there any more, because a step that was queued before
        the end was known had gone on: a stop string ended the text.
    turn_hits: admissions that went on at the end of a turn.
    message_ends: checkpoints that prompts have named, when they were filed.
    message_hits: admissions that went on at one of those.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    host_blocks: int = 0
    short: Counter[str] = field(default_factory=Counter)
    turn_ends: int = 0
    lost_turn_ends: int = 0
    turn_hits: int = 0
    message_ends: int = 0
    message_hits: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


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
