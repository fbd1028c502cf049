"""Align-mode arithmetic on NumPy arrays: which column a state lives in, and when it must move;
from `replay_snapshot` on, what a step of the replay layout stores.

Words as in docs/how-it-works.md: before a step `computed` (n) tokens are final; the step runs
`scheduled` (s) tokens of which the last `draft` (d) are guesses; `certain` R = n + s - d tokens are
in the state whatever the sampler says; `accepted` (a, 1..d+1) counts the tokens it emitted.
All arguments broadcast; block sizes and positions are in tokens, columns index a block table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]

NEVER = np.iinfo(np.int32).max
"""Position that no sequence reaches: what `next_retained` answers when nothing is retained."""
LONGEST = 2**30
"""Positions, lengths and periods lie below it, so that the sum of two fits int32."""


class RetentionRule(NamedTuple):
    """Boundaries whose snapshot somebody keeps: multiples of `every` (0 = none), and two positions.

    Each `[rows]` in tokens, or one int for all rows, which is cheaper; a position of 0 stands for
    "no such position".
    """

    every: Ints | int
    first: Ints | int = 0
    second: Ints | int = 0

    def keeps(self, boundary: Ints) -> Bools:
        """Whether the snapshot at each `boundary` (tokens, > 0) is kept."""
        every, *pins = self
        if isinstance(every, int) and every > 0:
            kept = boundary % every == 0
        else:
            kept = np.greater(every, 0) & (boundary % np.maximum(every, 1) == 0)
        for pin in pins:
            if not isinstance(pin, int) or pin:
                kept = kept | (boundary == pin)
        return kept & (boundary > 0)

    def of(self, rows: NDArray[np.intp]) -> RetentionRule:
        """Those of some of the rows."""
        return RetentionRule(*(p if isinstance(p, int) else p[rows] for p in self))


class Move(NamedTuple):
    """Copy of one state per row: SSM from column `source + offset`, window from column `source` at
    `offset`. Both land in column `target` at offset 0; rows with `acts` false move nothing.
    """

    acts: Bools
    source: Ints
    offset: Ints
    target: Ints


def blocks_below(position: Ints, block_size: int) -> Ints:
    """position // block_size for 0 <= position < 2**31, by a multiplication.

    NumPy's integer division takes several nanoseconds an element, which at a thousand rows is most
    of what a step may cost. Exact: the inverse is a little too large, so that no multiple falls
    below its quotient, and the product by less than 1 / block_size, so that nothing else rises.
    """
    inverse = (1 + 2.0**-40) / block_size
    blocks: Ints = (position * inverse).astype(np.int64)
    return blocks


def running_column(end: Ints, block_size: int) -> Ints:
    """Column that holds the state while tokens up to `end = n + s >= 1` run: cdiv(end, B) - 1."""
    return blocks_below(end - 1, block_size)


def next_retained(position: Ints, retention: RetentionRule) -> Ints:
    """First retained boundary at or after `position` (tokens, >= 1); `NEVER`: there is none."""
    every, *pins = retention
    if isinstance(every, int) and every > 0:
        found = blocks_below(position + (every - 1), every) * every
    else:
        step = np.maximum(every, 1)
        found = np.where(np.greater(every, 0), (position + step - 1) // step * step, NEVER)
    for pin in pins:
        if not isinstance(pin, int) or pin:
            found = np.minimum(found, np.where((pin > 0) & (pin >= position), pin, NEVER))
    return found


def last_retained(position: Ints, retention: RetentionRule) -> Ints:
    """Last retained boundary at or before `position` (tokens, >= 0); 0: there is none."""
    every, *pins = retention
    if isinstance(every, int) and every > 0:
        found = blocks_below(position, every) * every
    else:
        step = np.maximum(every, 1)
        found = np.where(np.greater(every, 0), position // step * step, 0)
    for pin in pins:
        if not isinstance(pin, int) or pin:
            found = np.maximum(found, np.where(np.less_equal(pin, position), pin, 0))
    return found


def postcopy_candidates(
    certain_min: Ints, certain_max: Ints, draft: Ints, retention: RetentionRule
) -> Bools:
    """Rows for which some accepted count could make `postcopy` act, from bounds on R.

    A retained boundary must lie in [R_min, R_max + d]; without drafts the running column already
    holds the state at its boundary. Exact (sound and tight) when `certain_min == certain_max`.
    """
    last = certain_max + draft
    every, first, second = retention
    if isinstance(every, int) and every and isinstance(first, int) and not (first or second):
        # The common case in the fewest passes: the last multiple below is one that can be reached.
        reachable = blocks_below(last, every) * every >= certain_min
    else:
        reachable = next_retained(certain_min, retention) <= last
    reachable &= draft > 0
    return reachable


def can_skip_mamba_postprocess(
    scheduler_output: Any, input_batch: Any, requests: Any, mamba_block_size: int
) -> bool:
    """True when no accepted count of this step can require a state copy, so nobody need know it.

    Front for runners shaped like the one in vllm-project/vllm#42574, duck-typed:
    `scheduler_output.num_scheduled_tokens` {request id: s}, `.scheduled_spec_decode_tokens`
    {request id: drafts}, `input_batch.req_ids`, `requests[id].num_computed_tokens` (n, before the
    step). Every boundary counts as retained.
    """
    if mamba_block_size < 1:
        raise ValueError(f"mamba_block_size is {mamba_block_size}; it must be at least 1 token")
    ids = [i for i in input_batch.req_ids if i in scheduler_output.num_scheduled_tokens]
    drafts = scheduler_output.scheduled_spec_decode_tokens
    scheduled = np.array([scheduler_output.num_scheduled_tokens[i] for i in ids], np.int64)
    draft = np.array([len(drafts.get(i, ())) for i in ids], np.int64)
    computed = np.array([requests[i].num_computed_tokens for i in ids], np.int64)
    certain = computed + scheduled - draft
    everything = RetentionRule(mamba_block_size)
    return not postcopy_candidates(certain, certain, draft, everything).any()


def postcopy(
    certain: Ints,
    draft: Ints,
    accepted: Ints,
    column: Ints,
    block_size: int,
    retention: RetentionRule,
) -> Move:
    """After a step: the copy that puts the boundary's state where a prefix hit will look for it.

    With n' = R + a - 1 and boundary = (n' // B) * B: when boundary >= R, the state after `boundary`
    tokens lies `boundary - R` columns (or window positions) above the running `column` and belongs
    in column `boundary // B - 1`. `accepted == 0` with drafts is a dead row and moves nothing.
    """
    final = certain + np.maximum(accepted, 1) - 1
    boundary = final // block_size * block_size
    offset = boundary - certain
    acts = (offset >= 0) & (draft > 0) & (accepted > 0) & retention.keeps(boundary)
    # Guesses beyond a boundary at R run in a later column than its own: no copy is onto itself.
    return Move(acts, column, offset, boundary // block_size - 1)


def precopy_candidates(
    column_min: Ints, column_max: Ints, held_min: Ints, held_max: Ints, needs_shift: Bools | None
) -> Bools:
    """Rows whose state may have to move before an in-place forward pass, from bounds.

    `held` is the column that the previous step ran in, `needs_shift` marks rows whose kernel cannot
    read at an offset although the offset may not be 0 (None: no row). A row is ruled out only when
    all four column bounds agree: comparing one side alone misses moves.
    """
    moves = column_min != held_min
    if column_max is not column_min:
        moves |= column_min != column_max
    if held_max is not held_min:
        moves |= held_min != held_max
    if needs_shift is not None:
        moves |= needs_shift
    moves &= held_max >= 0
    return moves


def precopy(held: Ints, offset: Ints, column: Ints, reads_offset: Bools) -> Move:
    """Before an in-place step: bring the state read by this step into its running `column`."""
    moved = (held >= 0) & (column >= 0) & ((held != column) | ((offset > 0) & ~reads_offset))
    return Move(moved, held, offset, column)


def columns_held(
    held_min: Ints, column_min: Ints, column_max: Ints, draft: Ints | int
) -> tuple[Ints, Ints]:
    """First and last column that a request must own until the step that reads them has finished.

    held_min: lowest column that its state may lie in, -1: it has none yet.
    column_min, column_max: bounds on the running column.
    """
    below = np.maximum(column_min - 1, 0)
    return np.where(held_min >= 0, np.minimum(held_min, below), below), column_max + draft


def prompt_cut(
    computed: Ints, certain: Ints, draft: Ints, block_size: int, retention: RetentionRule
) -> Ints:
    """The boundary strictly inside a row without guesses at which it leaves a snapshot, if the
    runner's kernels can do that: the last one there, if it is retained; 0: there is none."""
    inside = blocks_below(np.maximum(certain - 1, 0), block_size) * block_size
    return np.where((draft == 0) & (inside > computed) & retention.keeps(inside), inside, 0)


def lost_boundaries(
    computed: Ints, certain: Ints, retention: RetentionRule, cut: Ints | int
) -> Ints:
    """The last retained boundary that a row passes on its way from `computed` to `certain` tokens
    without ending on one, so that no snapshot of it can exist; 0: there is none.

    cut: `prompt_cut`, for the one that the row leaves a snapshot of; 0: it leaves none.
    """
    last = last_retained(np.where(np.greater(cut, 0), cut - 1, certain), retention)
    return np.where((last > computed) & (last < certain), last, 0)


class Stored(NamedTuple):
    """Snapshots of one step, `[rows]`: the boundary in tokens (0 = none), how many tokens it lies
    behind those computed before the step (negative: before their end), and whether it costs a write
    beside the state's."""

    boundary: Ints
    after: Ints
    extra: Bools


def replay_snapshot(
    last_certain: Ints,
    computed: Ints,
    certain: Ints,
    draft: Ints,
    block_size: int,
    retention: RetentionRule,
) -> Stored:
    """What a step of the replay layout leaves behind, from exact counts.

    `last_certain` tokens were certain in the last step, `computed` are now, the guesses that were
    accepted besides, and the step goes on to `certain`: a retained boundary in (last_certain,
    computed] is stored on the way, one at `certain` at the end, without guesses as the state
    itself. Others between `computed` and `certain` are not stored. There is at most one, because
    there are fewer guesses than tokens in a block, and a step that follows guesses runs one certain
    token.
    """
    passed = (last_certain // block_size + 1) * block_size
    passes = (passed <= computed) & retention.keeps(passed)
    ends = retention.keeps(certain)
    boundary = np.where(passes, passed, np.where(ends, certain, 0))
    return Stored(
        boundary, np.where(boundary > 0, boundary - computed, 0), passes | (ends & (draft > 0))
    )


def replay_writes(
    pending: Ints, scheduled: Ints, draft: Ints, stores: Bools, live: Bools, window: int
) -> Bools:
    """Whether a step of the replay layout writes its states, from exact counts.

    pending: tokens computed before it that the state lacks.
    stores: it stores a snapshot beside the state (`Stored.extra`).
    live: the state lies in the live column.
    window: most tokens that a state may lack.
    """
    writes: Bools = (draft == 0) | stores | ~live | (pending + scheduled > window)
    return writes


def pending_after(
    pending: tuple[Ints, Ints],
    scheduled: Ints,
    draft: Ints,
    may_write: Bools,
    must_write: Bools,
    window: int,
) -> tuple[Ints, Ints]:
    """Bounds on the tokens that a state may lack after a step, whatever is accepted, from those
    before it; sound, and tight if every count between the given bounds is possible.

    may_write, must_write: for another reason than that the tokens would not fit.
    """
    low, high = pending
    room = window - scheduled
    may = may_write | (high > room)
    may_not = ~must_write & (low <= room)
    return (
        np.where(may, 0, low + scheduled - draft),
        np.where(may_not, np.minimum(high, room) + scheduled, draft),
    )


def first_stored(last_certain_min: Ints, certain_min: Ints, last_draft: Ints) -> Ints:
    """Least boundary that a step may store: guesses of the last step may lie before its own tokens.
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
    """Rows for which `replay_snapshot` may find an extra write, from bounds and `first_stored`.

    Exact when the counts are; a row without guesses ends on a boundary at no extra cost.
    """
    last = np.where(draft > 0, certain_max, computed_max)
    reachable: Bools = next_retained(first, retention) <= last
    reachable &= (draft > 0) | (last_draft > 0)
    return reachable
