"""Align-mode arithmetic on NumPy arrays: which column a state is in, and when it must move.

Words and shapes as in `state.boundaries`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hybrid_runtime.state.boundaries import (
    Bools,
    Ints,
    RetentionRule,
    blocks_below,
    next_retained,
)


class Move(NamedTuple):
    """Copy of one state per row, `[rows]` each.

    acts: whether the row moves anything.
    source: column of the conv_state.
    offset: input at which the conv_state starts there; the matrix is so many columns further.
    target: column that gets both, at offset 0.
    """

    acts: Bools
    source: Ints
    offset: Ints
    target: Ints


def running_column(end: Ints, block_size: int) -> Ints:
    """Column that holds the state while tokens up to `end = n + s >= 1` run: cdiv(end, B) - 1."""
    return blocks_below(end - 1, block_size)


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
    """True when no accepted count of this step can require a state copy.

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
    tokens lies `boundary - R` columns (or conv_state positions) above the running `column` and
    belongs in column `boundary // B - 1`. A row with drafts and `accepted == 0` is dead and moves
    nothing.
    """
    final = certain + np.maximum(accepted, 1) - 1
    boundary = final // block_size * block_size
    offset = boundary - certain
    acts = (offset >= 0) & (draft > 0) & (accepted > 0) & retention.keeps(boundary)
    # Drafts beyond a boundary at R run in a later column than its own: no copy is onto itself.
    return Move(acts, column, offset, boundary // block_size - 1)


def prompt_cut(
    computed: Ints, certain: Ints, draft: Ints, block_size: int, retention: RetentionRule
) -> Ints:
    """The boundary strictly inside a row without drafts at which it leaves a checkpoint, if the
    runner's kernels can do that: the last one there, if it is retained; 0: there is none."""
    inside = blocks_below(np.maximum(certain - 1, 0), block_size) * block_size
    return np.where((draft == 0) & (inside > computed) & retention.keeps(inside), inside, 0)


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
