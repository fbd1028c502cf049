"""How often drafts are accepted: by position, and in which rows more often than in others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64] | NDArray[np.int32]

ROWS = 128
"""Rows that have tried a position, after which older ones count for 1 / e."""
PRIOR, PRIOR_ROWS = 0.8, 16.0
"""A draft of which nothing is known is accepted as often as the one before it, the first this
often; so many verified rows weigh as much as that."""
REJECTIONS = 64.0
"""Rejections that a row is expected to have had, after which its older ones count for 1 / e."""
ALIKE = 3.0
"""So many rejections of a row weigh as much as what is true of all rows."""


class RowAcceptance:
    """Survival of drafts, learnt from the steps' results.

    Position j's draft, all before it accepted, is rejected with probability p_j times the risk of
    its row, a factor that is 1 for a row of which nothing is known (relative risk: one number of a
    row is learnt in a few steps, a rate for each position would not be). Both are ratios of
    rejections: p_j that of all rows to the risks that tried j, a row's risk that of its own to
    those that p let expect, each with a prior (the mean of a gamma distribution, for the risk).

    most: most drafts of a row, K.
    slots: rows are known by their slot.

    rejection: p of each position, `[most]`.
    """

    def __init__(self, most: int, slots: int) -> None:
        self.most = most
        # Decaying sums by position: risks that got as far as its draft, and rejections of it.
        self._tried, self._rejected = np.zeros(most), np.zeros(most)
        # Decaying sums by slot: rejections, and those expected at risk 1.
        self._rejections, self._expected = np.zeros(slots), np.zeros(slots)
        self._position = np.arange(most)
        self.rejection = np.full(most, 1 - PRIOR)

    def admit(self, slot: int) -> None:
        """Another request has taken a slot: nothing is known of it."""
        self._rejections[slot] = self._expected[slot] = 0.0

    def learn(self, slots: Ints, tried: Ints, accepted: Ints) -> None:
        """Rows of a step. slots: `[rows]`. tried: drafts of each that were made, `[rows]`.
        accepted: `[rows]`; beyond those tried by luck."""
        accepted = accepted[:, None]
        at = (self._position < tried[:, None]) & (accepted >= self._position)
        fails = at & (accepted == self._position)
        risk, expected = self.risk(slots), at @ self.rejection
        decay = np.exp(at.sum(0) / -ROWS)  # what is not tried now stays as it was
        self._tried = decay * self._tried + risk @ at
        self._rejected = decay * self._rejected + fails.sum(0)
        decay = np.exp(expected / -REJECTIONS)
        self._expected[slots] = decay * self._expected[slots] + expected
        self._rejections[slots] = decay * self._rejections[slots] + fails.any(1)
        p, found = 1 - PRIOR, []
        for rejected, risks in zip(self._rejected.tolist(), self._tried.tolist(), strict=True):
            p = (rejected + PRIOR_ROWS * p) / (risks + PRIOR_ROWS)
            found.append(p)
        self.rejection = np.array(found)

    def risk(self, slots: Ints) -> Floats:
        """`[rows]`, 1 in their mean."""
        risk = (self._rejections[slots] + ALIKE) / (self._expected[slots] + ALIKE)
        return risk * (len(risk) / risk.sum()) if len(risk) else risk

    def survival(self, risk: Floats | float = 1.0) -> Floats:
        """How often the first 1, 2, ... drafts are all accepted, `[..., most]`, in rows of a risk
        `[...]`."""
        rates = 1 - np.minimum(np.multiply.outer(risk, self.rejection), 0.99)
        return rates.cumprod(-1)
