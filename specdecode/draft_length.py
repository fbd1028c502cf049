"""How many drafts the rows of a step get: as many as bring the most tokens per second."""

from __future__ import annotations

import logging
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.specdecode.row_acceptance import Floats, Ints, RowAcceptance

logger = logging.getLogger(__name__)

LEVELS = (0, 1, 3, 5, 7)
"""Numbers of drafts that steps may have; more would need a longer ring and have not paid."""
UNMEASURED = 3
"""Drafts of a row beside prompts, and by default as long as nobody knows what steps cost."""
HYSTERESIS = 1.03
"""How many times as many tokens per second another number must promise."""
EXPLORE = 64
"""One step in so many tries the next larger number of drafts, and one the next smaller."""
RECENT = 5
"""Steps with a number of drafts by whose median their cost is known: one that was held up by
something else does not count."""


class Drafts(NamedTuple):
    """Drafts that rows verify.

    mean: of a row in the mean; the step's size is of so many for each.
    most: of any row. More than `mean`, the next level: rows whose drafts are accepted more often
        have some that others do without.
    """

    mean: int
    most: int

    @classmethod
    def alike(cls, number: int) -> Drafts:
        """So many in every row."""
        return cls(number, number)

    def __str__(self) -> str:
        return str(self.mean) + (f" (up to {self.most})" if self.most > self.mean else "")


class StepDrafts(NamedTuple):
    """Drafts of a step.

    verify: of the rows that decode.
    made: the first so many of a row were proposed; the others are older ones, or none, see
        `Sequences.propose`.
    propose: behind the step, for the next one.
    """

    verify: Drafts
    made: int
    propose: int


class StepCost(NamedTuple):
    """Seconds of a padded step.

    verify: of such drafts, acceptance included.
    propose: of as many as are the most of a row.
    """

    verify: float
    propose: float


class DraftStats(NamedTuple):
    """What is known and chosen now.

    chosen: drafts of a row.
    survival: how often drafts are accepted with all before them, by position, in the mean of the
        last step's rows.
    expected: tokens that a row gets from a step with so many.
    tokens_per_second: of the last step's rows, by drafts; empty before costs are measured.
    """

    chosen: Drafts
    survival: tuple[float, ...]
    expected: float
    tokens_per_second: dict[Drafts, float]


class DraftLength:
    """Chooses the number of drafts, on the host, from results that it has anyway.

    A step of `rows` rows with k drafts each brings rows * (1 + S_1 + ... + S_k) tokens, where S_j,
    the survival of position j, is how often the first j drafts are all accepted. It costs what its
    padded size took when it was captured, whose rows are all padding, and what real rows add by
    their states and contexts: learnt from the steps themselves, for each size and number. A number
    that a size has not had yet is taken to add as much a token as the nearest one that it has had.
    The best number of drafts has the most tokens per second; the choice changes for `HYSTERESIS`
    times as many.

    A step of the same size may give its drafts to where they are accepted most: `RowAcceptance`
    knows S_j of each row, and the drafts with the largest S are verified, wherever they are. The
    drafter must then propose the most of a row for all of them.

    most: most drafts of a row, K.
    adaptive: choose; False: always K.
    first: how many until costs are measured; None: K.
    slots: requests that run at once.
    levels: what can be chosen for all rows, ascending.
    beside_prompts: drafts of rows whose step has prompts too: there each costs as much as a token
        of a prompt, and there are many sizes already.
    chosen: what pays, by the last rows asked for.
    acceptance: of all rows; learns it from what steps bring.
    """

    def __init__(self, most: int, adaptive: bool, first: int | None = None, slots: int = 1) -> None:
        self.most, self.adaptive = most, adaptive
        self.levels = tuple(sorted({*(k for k in LEVELS if adaptive and k < most), most}))
        self.beside_prompts = self._level(UNMEASURED)
        self.chosen = Drafts.alike(self._level(most if first is None else first))
        self.acceptance = RowAcceptance(most, slots)
        self._proposed = self.beside_prompts
        self._costs: dict[int, dict[Drafts, StepCost]] = {}
        self._sizes: list[int] = []
        # By size and drafts, seconds that the last steps took beyond padded ones, and their
        # medians.
        self._more: dict[int, dict[Drafts, deque[float]]] = {}
        self._median: dict[int, dict[Drafts, float]] = {}
        # Steps until a larger number is proposed, and whether the last step has done so.
        self._until_explored, self._tries = EXPLORE, False
        self._last_slots: Ints = np.zeros(1, np.int64)

    def uneven(self) -> list[Drafts]:
        """What can be chosen besides the same for all rows: drafts that the drafter proposes behind
        steps with as many in the mean anyway, see `after`."""
        return [Drafts(k, more) for k, more in pairwise(self.levels) if k]

    def after(self, verified: Drafts) -> tuple[int, ...]:
        """How many drafts may be proposed behind a step that verifies those: as many as the most of
        a row, or, where all rows have as many, the next larger number. A step verifies no more than
        were proposed, and fewer at once."""
        if verified.most > verified.mean:
            return (verified.most,)
        at = self.levels.index(verified.most)
        return self.levels[at : at + 2]

    def plan(self, slots: Ints, prompts: bool) -> StepDrafts:
        """Of the next step, in which the rows of these slots decode; `queued` tells that it was
        queued."""
        if prompts:
            beside = self.beside_prompts
            return StepDrafts(Drafts.alike(beside), min(self._proposed, beside), beside)
        if len(slots):
            self._last_slots = slots
        wanted = self._choose(slots)
        if self._tries:
            verify = Drafts.alike(self._proposed)
        elif wanted.most <= self._proposed:
            verify = wanted
        else:
            verify = Drafts.alike(min(wanted.mean, self._proposed))
        if self._until_explored == EXPLORE // 2 and self._sizes:
            # The next smaller number, or the same for all rows.
            verify = Drafts.alike(self._level(verify.most - 1))
        propose = verify.most
        if wanted.most > propose:
            propose = min(wanted.most, self.after(verify)[-1])
        return StepDrafts(verify, verify.most, propose)

    def numbers(self, slots: Ints, size: Drafts, limit: int) -> NDArray[np.int32]:
        """Drafts of each of these rows, int32 `[rows]`: those that survive most often of all, as
        many as there is room for in a step of that size, padded rows' share among them. limit: most
        drafts of all rows."""
        survival = self._survival(slots, size.most)
        room = min(self._size(len(slots)) * size.mean, survival.size, limit)
        if not room:
            return np.zeros(len(slots), np.int32)
        # Survival falls along a row, so that these are the first drafts of each.
        best = np.argpartition(survival, survival.size - room, axis=None)[survival.size - room :]
        return np.bincount(best // size.most, minlength=len(slots)).astype(np.int32)

    def queued(self, drafts: StepDrafts) -> None:
        """The last step planned was queued."""
        self._proposed, self._tries = drafts.propose, self._until_explored <= 1
        self._until_explored = EXPLORE if self._until_explored <= 1 else self._until_explored - 1

    def _choose(self, slots: Ints) -> Drafts:
        if not self.adaptive or not len(slots) or not self._sizes:
            return self.chosen
        expected = self.tokens_per_second(slots)
        now = self.chosen if self.chosen in expected else Drafts.alike(self.chosen.mean)
        best = max(expected, key=expected.__getitem__)
        if expected[best] > HYSTERESIS * expected[now]:
            logger.info(
                "drafts of a row: %s, were %s: %d rows should get %.0f tokens/s, not %.0f",
                best, now, len(slots), expected[best], expected[now],
            )  # fmt: skip
            now = best
        self.chosen = now
        if self._until_explored > 1 or now.most > now.mean:
            return now
        return Drafts.alike(self.after(now)[-1])

    def tokens_per_second(self, slots: Ints) -> dict[Drafts, float]:
        """What the rows of these slots are expected to get, by drafts; empty before costs are
        measured."""
        if not self._sizes:
            return {}
        size, survival = self._size(len(slots)), self._survival(slots, self.most)
        alike, found = [0.0, *survival.sum(0).cumsum().tolist()], {}
        for drafts in self._costs[size]:
            kept: float = alike[drafts.most]
            if drafts.most > drafts.mean:
                all_rows = survival[:, : drafts.most].flatten()
                rest = all_rows.size - min(size * drafts.mean, all_rows.size)
                all_rows.partition(rest)
                kept = float(all_rows[rest:].sum())
            found[drafts] = (len(slots) + kept) / self._expected(size, drafts)
        return found

    def _survival(self, slots: Ints, most: int) -> Floats:
        """Of the drafts of these rows, `[rows, most]`."""
        return self.acceptance.survival(self.acceptance.risk(slots))[:, :most]

    def _expected(self, size: int, drafts: Drafts) -> float:
        """Seconds of a step of that padded size."""
        known, cost = self._median.get(size, {}), self._costs[size][drafts]
        more = known.get(drafts)
        if more is None and known:
            near = min(known, key=lambda one: (abs(one.mean - drafts.mean), one.most))
            more = known[near] * (drafts.mean + 1) / (near.mean + 1)
        return cost.verify + cost.propose + (more or 0.0)

    def stats(self) -> DraftStats:
        survival = self._survival(self._last_slots, self.most)
        chosen = np.full(len(survival), self.chosen.most)
        if self.chosen.most > self.chosen.mean:
            chosen = self.numbers(self._last_slots, self.chosen, survival.size)
        made = np.arange(self.most) < chosen[:, None]
        return DraftStats(
            self.chosen,
            tuple(survival.mean(0).tolist()),
            1 + float((survival * made).sum() / len(survival)),
            self.tokens_per_second(self._last_slots),
        )

    def measured(self, costs: Mapping[tuple[int, Drafts], StepCost]) -> None:
        """Learn what padded steps cost, by (rows, drafts), of all levels for each size, and of what
        else can be chosen there."""
        for (rows, drafts), cost in costs.items():
            self._costs.setdefault(rows, {})[drafts] = cost
        self._sizes = sorted(self._costs)

    def took(self, rows: int, verified: Drafts, proposed: int, seconds: float) -> None:
        """Learn that a step of so many rows, all decoding, took so long."""
        if not self._sizes:
            return
        size = self._size(rows)
        costs, most = self._costs[size], Drafts.alike(proposed)
        if verified not in costs or most not in costs:
            return
        padded = costs[verified].verify + costs[most].propose
        recent = self._more.setdefault(size, {}).setdefault(verified, deque(maxlen=RECENT))
        recent.append(max(seconds - padded, 0.0))
        self._median.setdefault(size, {})[verified] = statistics.median(recent)

    def _level(self, drafts: int) -> int:
        """The largest that is not above, or the smallest."""
        return max((k for k in self.levels if k <= drafts), default=self.levels[0])

    def _size(self, rows: int) -> int:
        return self._sizes[min(bisect_left(self._sizes, rows), len(self._sizes) - 1)]
