"""What a step of the replay layout writes, and what it stores, on NumPy arrays.

Words and shapes as in `state.boundaries`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hybrid_runtime.state.boundaries import (
    Bools,
    Ints,
    RetentionRule,
    last_retained,
    next_retained,
)


class Stored(NamedTuple):
    """Checkpoints of one step, `[rows]`.

    position: tokens in the checkpoint; 0: there is none.
    after: the same less the tokens computed before the step.
    extra: it costs a write beside the state's.
    """

    position: Ints
    after: Ints
    extra: Bools


def replay_checkpoint(
    last_certain: Ints,
    computed: Ints,
    certain: Ints,
    draft: Ints,
    retention: RetentionRule,
) -> Stored:
    """What a step of the replay layout leaves behind, from exact counts.

    `last_certain` tokens were certain in the last step, `computed` are now, the drafts that were
    accepted besides, and the step goes on to `certain`: a position in (last_certain, computed] is
    stored on the way, one at `certain` at the end, without drafts as the state itself. Those
    between `computed` and `certain` are those of `save_inside`. There is at most one, because a
    row's positions are further apart than it has drafts, and a step that follows drafts runs one
    certain token.
    """
    passed = next_retained(last_certain + 1, retention)
    passes = passed <= computed
    ends = retention.keeps(certain)
    position = np.where(passes, passed, np.where(ends, certain, 0))
    return Stored(
        position, np.where(position > 0, position - computed, 0), passes | (ends & (draft > 0))
    )


def save_inside(computed: Ints, certain: Ints, draft: Ints, retention: RetentionRule) -> Ints:
    """The position strictly inside a row without drafts at which it leaves a checkpoint, if the
    runner's kernels can do that: the last one there; 0: there is none."""
    inside = last_retained(np.maximum(certain - 1, 0), retention)
    return np.where((draft == 0) & (inside > computed), inside, 0)


def replay_writes(
    pending: Ints,
    scheduled: Ints,
    decodes: Bools,
    stores: Bools | bool,
    live: Bools,
    ring_tokens: int,
) -> Bools:
    """Whether a step of the replay layout writes its states, from exact counts.

    pending: tokens computed before it that are not in the state.
    decodes: it can fold these and record its own; it writes in any case if not.
    stores: it stores a checkpoint, beside the state or as that.
    live: the state lies in the live column.
    ring_tokens: most tokens that may be pending.
    """
    writes: Bools = ~decodes | stores | ~live | (pending + scheduled > ring_tokens)
    return writes


def first_stored(last_certain_min: Ints, certain_min: Ints, last_draft: Ints) -> Ints:
    """Least position that a step may store: drafts of the last step may lie before its own tokens.
    The greatest is `certain_max`."""
    return np.where(last_draft > 0, last_certain_min + 1, certain_min)


def replay_candidates(
    first: Ints,
    computed_max: Ints,
    certain_max: Ints,
    draft: Ints,
    last_draft: Ints,
    retention: RetentionRule,
) -> Bools:
    """Rows for which `replay_checkpoint` may find an extra write, from bounds and `first_stored`.

    Exact when the counts are; a row without drafts ends on a position at no extra cost.
    """
    last = np.where(draft > 0, certain_max, computed_max)
    reachable: Bools = next_retained(first, retention) <= last
    reachable &= (draft > 0) | (last_draft > 0)
    return reachable
