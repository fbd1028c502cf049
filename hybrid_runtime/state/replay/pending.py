"""How many tokens a live state may lack, as far as the host knows before it has read the counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.state import boundaries
from hybrid_runtime.state.ledger import Ledger
from hybrid_runtime.state.replay import arithmetic
from hybrid_runtime.state.step import Step

_Known = NDArray[np.int64]
"""Bounds, `[4, slots]`: tokens computed; those certain before the last guesses; tokens that the
state lacks; and 1 if it lies elsewhere than in the live column."""


def pending_bounds(
    table: Ledger, queued: Sequence[Step], live: int, block_size: int, window: int
) -> tuple[boundaries.Ints, boundaries.Ints]:
    """Least and most tokens, `[max_requests]`, that the state of each slot may lack after the
    queued steps, whatever they accept; from the exact counts of those before.

    queued: steps whose counts the host has not read, oldest first. live: the live column.
    """
    exact = [table.computed, table.certain, table.computed - table.written, table.held != live]
    low, high = np.array(exact, np.int64), np.array(exact, np.int64)
    for step in queued:
        rows = np.flatnonzero(step.current(table.generation, table.live))
        slot = step.rows.slot[rows]
        low[:, slot], high[:, slot] = _after(
            low[:, slot], high[:, slot], step, rows, block_size, window
        )
    return low[2], high[2]


def _after(
    low: _Known, high: _Known, step: Step, rows: NDArray[np.intp], block_size: int, window: int
) -> tuple[_Known, _Known]:
    """The bounds after a step, of those of its rows that are named."""
    scheduled, draft = step.rows.scheduled[rows], step.rows.draft[rows]
    kept = step.kept.of(rows)
    (least, last_least, pending_least, _), (most, last_most, pending_most, _) = low, high
    certain_least, certain_most = least + scheduled - draft, most + scheduled - draft
    first = arithmetic.first_stored(last_least, certain_least, most - last_most)
    may_store = boundaries.next_retained(first, kept) <= certain_most
    stored = arithmetic.replay_snapshot(last_least, least, certain_least, draft, block_size, kept)
    # Where only the last acceptance is open, the least one must reach the boundary.
    reached = np.where(least == most, stored.extra, kept.keeps(last_least + scheduled - draft))
    must_store = (last_least == last_most) & reached
    plain = draft == 0
    pending = arithmetic.pending_after(
        (pending_least, pending_most), scheduled, draft, plain | (high[3] > 0) | may_store,
        plain | (low[3] > 0) | must_store, window,
    )  # fmt: skip
    moves = plain & (boundaries.next_retained(certain_least, kept) <= certain_most)
    surely = plain & (certain_least == certain_most) & kept.keeps(certain_least)
    return (
        np.array([certain_least, certain_least, pending[0], surely], np.int64),
        np.array([certain_most + draft, certain_most, pending[1], moves], np.int64),
    )
