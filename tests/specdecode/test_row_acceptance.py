"""What is learnt of drafts: by position, and which rows' are accepted more often."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.specdecode.row_acceptance import RowAcceptance

ROWS = np.arange(4)


def test_rejection_counts_only_drafts_that_were_made() -> None:
    known = RowAcceptance(3, slots=4)
    for _ in range(100):
        known.learn(ROWS, np.full(4, 1), np.array([1, 3, 0, 1], np.int32))
    first, *later = known.survival()
    assert first == pytest.approx(0.75, abs=0.01)
    # Nothing is known of these; each goes on as the one before.
    assert later == pytest.approx([first * 0.75, first * 0.75**2], abs=0.02)


def test_a_row_is_known_by_its_own_drafts() -> None:
    """Its rate at a position is that of all rows, as far from theirs as its others have been."""
    rates, luck = np.array([[0.9, 0.9], [0.5, 0.5]]), np.random.default_rng(0)
    known = RowAcceptance(2, slots=9)
    slots = np.array([8, 3])
    for _ in range(400):
        accepted = (luck.random((2, 2)) < rates).cumprod(1).sum(1).astype(np.int32)
        known.learn(slots, np.full(2, 2), accepted)
    found = known.survival(known.risk(slots))
    assert found == pytest.approx(rates.cumprod(1), abs=0.08)
    known.admit(3)  # another request
    risk = known.risk(slots)
    assert risk[0] < risk[1] < 2 * risk[0] + 1
    assert known.risk(np.array([3])) == pytest.approx([1.0])


@given(st.data())
def test_survival_falls_along_a_row_and_with_risk(data: st.DataObject) -> None:
    most = data.draw(st.integers(0, 7))
    known = RowAcceptance(most, slots=4)
    for _ in range(data.draw(st.integers(0, 20))):
        tried = data.draw(st.lists(st.integers(0, most), min_size=4, max_size=4))
        accepted = [data.draw(st.integers(0, most)) for _ in range(4)]
        known.learn(ROWS, np.array(tried), np.array(accepted, np.int32))
    risk = known.risk(ROWS)
    found = known.survival(risk)
    assert found.shape == (4, most)
    assert risk.mean() == pytest.approx(1.0)
    assert ((found > 0) & (found <= 1)).all()
    assert (np.diff(found, axis=1) <= 0).all()
    assert (np.diff(found[risk.argsort()], axis=0) <= 1e-12).all()
