"""How many drafts the rows of a step get: as many as bring the most tokens per second."""

from __future__ import annotations

import logging
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

LEVELS = (0, 1, 3, 5, 7)
"""Numbers of drafts that steps may have; more would need a longer ring and have not paid."""
UNMEASURED = 3
"""Drafts of a row beside prompts, and by default as long as nobody knows what steps cost."""
HYSTERESIS = 1.03
"""How many times as many tokens per second another number must promise."""
EXPLORE = 32
"""One step in so many tries the next larger number of drafts, and one the next smaller."""
RECENT = 5
"""Steps with a number of drafts by whose median their cost is known: one that was held up by
something else does not count."""
ROWS = 128
"""Rows that have tried a position, after which older ones count for 1 / e."""
PRIOR, PRIOR_ROWS = 0.8, 16.0
"""A draft of which nothing is known is accepted as often as the one before it, the first this
often; so many verified rows weigh as much as that."""


class StepDrafts(NamedTuple):
    """Drafts of a step.

    verify: of each row that decodes.
    made: the first so many of them were proposed; the others are older ones, or none, see
        `Sequences.propose`.
    propose: behind the step, for the next one.
    """

    verify: int
    made: int
    propose: int


class StepCost(NamedTuple):
    """Seconds of a padded step.

    verify: of so many drafts, acceptance included.
    propose: of so many.
    """

    verify: float
    propose: float


class DraftStats(NamedTuple):
    """What is known and chosen now.

    chosen: drafts of a row.
    survival: how often drafts are accepted with all before them, by position.
    expected: tokens that a row gets from a step with so many.
    tokens_per_second: of the last step's rows, by the number of drafts; empty before costs are
        measured.
    """

    chosen: int
    survival: tuple[float, ...]
    expected: float
    tokens_per_second: dict[int, float]


class DraftLength:
    """Chooses the number of drafts, on the host, from results that it has anyway.

    A step of `rows` rows with k drafts each brings rows * (1 + S_1 + ... + S_k) tokens, where S_j,
    the survival of position j, is how often the first j drafts are all accepted. It costs what its
    padded size took when it was captured, whose rows are all padding, and what real rows add by
    their states and contexts: learnt from the steps themselves, for each size and number. A number
    that a size has not had yet is taken to add as much a token as the nearest one that it has had.
    The best number of drafts has the most tokens per second; the choice changes for `HYSTERESIS`
    times as many.

    most: most drafts of a row, K.
    adaptive: choose; False: always K.
    first: how many until costs are measured; None: K.
    levels: what can be chosen, ascending.
    beside_prompts: drafts of rows whose step has prompts too: there each costs as much as a token
        of a prompt, and there are many sizes already.
    chosen: the number of drafts, by the last rows asked for.
    """

    def __init__(self, most: int, adaptive: bool, first: int | None = None) -> None:
        self.most, self.adaptive = most, adaptive
        self.levels = tuple(sorted({*(k for k in LEVELS if adaptive and k < most), most}))
        self.beside_prompts = self._level(UNMEASURED)
        self.chosen = self._level(most if first is None else first)
        self._proposed = self.beside_prompts
        self._costs: dict[int, dict[int, StepCost]] = {}
        self._sizes: list[int] = []
        # By size and number of drafts, seconds that the last steps took beyond padded ones, and
        # their medians.
        self._more: dict[int, dict[int, deque[float]]] = {}
        self._median: dict[int, dict[int, float]] = {}
        # Decaying sums: rows that got as far as a position's draft, and those that accepted it.
        self._reached, self._accepted = np.zeros(most), np.zeros(most)
        # Steps until a larger number is proposed, and whether the last step has done so.
        self._until_explored, self._tries = EXPLORE, False
        self._last_rows = 1

    def after(self, verified: int) -> tuple[int, ...]:
        """How many drafts may be proposed behind a step whose rows verify so many: as many, or the
        next larger number. A step verifies no more than were proposed, and fewer at once."""
        at = self.levels.index(verified)
        return self.levels[at : at + 2]

    def plan(self, rows: int, prompts: bool) -> StepDrafts:
        """Of the next step, in which so many rows decode; `queued` tells that it was queued."""
        if prompts:
            return StepDrafts(
                self.beside_prompts, min(self._proposed, self.beside_prompts), self.beside_prompts
            )
        self._last_rows = max(rows, 1)
        wanted = self._choose(rows)
        verify = self._proposed if self._tries else min(wanted, self._proposed)
        if self._until_explored == EXPLORE // 2 and self._sizes:
            verify = self._below(verify)
        propose = wanted if wanted <= verify else min(wanted, self.after(verify)[-1])
        return StepDrafts(verify, verify, propose)

    def queued(self, drafts: StepDrafts) -> None:
        """The last step planned was queued."""
        self._proposed, self._tries = drafts.propose, self._until_explored <= 1
        self._until_explored = EXPLORE if self._until_explored <= 1 else self._until_explored - 1

    def _choose(self, rows: int) -> int:
        if not self.adaptive or not rows or not self._sizes:
            return self.chosen
        expected = self.tokens_per_second(rows)
        best = max(expected, key=expected.__getitem__)
        if expected[best] > HYSTERESIS * expected[self.chosen]:
            logger.info(
                "drafts of a row: %d, were %d: %d rows should get %.0f tokens/s, not %.0f",
                best, self.chosen, rows, expected[best], expected[self.chosen],
            )  # fmt: skip
            self.chosen = best
        return self.chosen if self._until_explored > 1 else self.after(self.chosen)[-1]

    def tokens_per_second(self, rows: int) -> dict[int, float]:
        """What so many rows are expected to get, by the number of drafts; empty before costs are
        measured."""
        if not self._sizes:
            return {}
        size = self._size(rows)
        tokens = np.concatenate([[1.0], 1 + self.survival().cumsum()])
        return {k: float(rows * tokens[k] / self._expected(size, k)) for k in self.levels}

    def _expected(self, size: int, drafts: int) -> float:
        """Seconds of a step of that padded size."""
        known, cost = self._median.get(size, {}), self._costs[size][drafts]
        more = known.get(drafts)
        if more is None and known:
            near = min(known, key=lambda k: abs(k - drafts))
            more = known[near] * (drafts + 1) / (near + 1)
        return cost.verify + cost.propose + (more or 0.0)

    def stats(self) -> DraftStats:
        survival = self.survival()
        return DraftStats(
            self.chosen,
            tuple(survival.tolist()),
            1 + float(survival[: self.chosen].sum()),
            self.tokens_per_second(self._last_rows),
        )

    def survival(self) -> NDArray[np.float64]:
        """S of each position, `[most]`."""
        survival, rate, whole = np.empty(self.most), PRIOR, 1.0
        for j in range(self.most):
            rate = (self._accepted[j] + PRIOR_ROWS * rate) / (self._reached[j] + PRIOR_ROWS)
            whole *= rate
            survival[j] = whole
        return survival

    def measured(self, costs: Mapping[tuple[int, int], StepCost]) -> None:
        """Learn what padded steps cost, by (rows, drafts), of all levels for each size."""
        for (rows, drafts), cost in costs.items():
            self._costs.setdefault(rows, {})[drafts] = cost
        self._sizes = sorted(self._costs)

    def verified(self, made: int, accepted: NDArray[np.int32]) -> None:
        """Learn from rows of a step which drafts were accepted. made: as of `StepDrafts`;
        accepted: `[rows]`, beyond `made` by luck."""
        position = np.arange(self.most)
        tried = (position < made) & (accepted[:, None] >= position)
        reached, kept = tried.sum(0), (tried & (accepted[:, None] > position)).sum(0)
        decay = np.exp(-reached / ROWS)  # what is not tried now stays as it was
        self._reached = decay * self._reached + reached
        self._accepted = decay * self._accepted + kept

    def took(self, rows: int, verified: int, proposed: int, seconds: float) -> None:
        """Learn that a step of so many rows, all decoding, took so long."""
        if not self._sizes or verified not in self.levels or proposed not in self.levels:
            return
        size = self._size(rows)
        padded = self._costs[size][verified].verify + self._costs[size][proposed].propose
        recent = self._more.setdefault(size, {}).setdefault(verified, deque(maxlen=RECENT))
        recent.append(max(seconds - padded, 0.0))
        self._median.setdefault(size, {})[verified] = statistics.median(recent)

    def _level(self, drafts: int) -> int:
        """The largest that is not above, or the smallest."""
        return max((k for k in self.levels if k <= drafts), default=self.levels[0])

    def _below(self, drafts: int) -> int:
        """The next smaller level, or the smallest."""
        return self._level(drafts - 1)

    def _size(self, rows: int) -> int:
        return self._sizes[min(bisect_left(self._sizes, rows), len(self._sizes) - 1)]
