"""How many drafts the rows of a step get: as many as bring the most tokens per second."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
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
"""One step in so many tries the next larger number of drafts."""
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
    padded size took when it was captured, whose rows are all padding, and for each row what its
    state and its context add: learnt from the steps themselves. The best number of drafts has the
    most tokens per second; the choice changes for `HYSTERESIS` times as many.

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
        self._costs: dict[int, dict[int, float]] = {}
        self._sizes: list[int] = []
        # Decaying sums: rows that got as far as a position's draft, and those that accepted it;
        # seconds that steps took beyond their padded size, and their rows.
        self._reached, self._accepted = np.zeros(most), np.zeros(most)
        self._more, self._rows = 0.0, 0.0
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
        costs = self._costs[self._size(rows)]
        more = rows * self._more / self._rows if self._rows else 0.0
        tokens = np.concatenate([[1.0], 1 + self.survival().cumsum()])
        return {k: float(rows * tokens[k] / (costs[k] + more)) for k in self.levels}

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

    def measured(self, costs: Mapping[tuple[int, int], float]) -> None:
        """Learn what padded steps cost: seconds by (rows, drafts), of all levels for each size."""
        for (rows, drafts), seconds in costs.items():
            self._costs.setdefault(rows, {})[drafts] = seconds
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

    def took(self, rows: int, drafts: int, seconds: float) -> None:
        """Learn that a step of so many rows, all decoding, took so long."""
        if not self._sizes or drafts not in self.levels:
            return
        decay, padded = math.exp(-rows / ROWS), self._costs[self._size(rows)][drafts]
        self._more = decay * self._more + max(seconds - padded, 0.0)
        self._rows = decay * self._rows + rows

    def _level(self, drafts: int) -> int:
        """The largest that is not above, or the smallest."""
        return max((k for k in self.levels if k <= drafts), default=self.levels[0])

    def _size(self, rows: int) -> int:
        return self._sizes[min(bisect_left(self._sizes, rows), len(self._sizes) - 1)]
