"""The wire format of a step: what the host sends, and what the bookkeeping launch makes of it.

The host packs a step into one int32 table `entries`, `[lines, ENTRY_FIELDS]`: a line per row of the
step, then a line per slot whose previous step only has to be finished. `advance` turns it into two
int32 tables by row, `placed` `[4, rows]` and `moves` `[3, rows]`. All readers and writers of these
tables use the names below.
"""

from __future__ import annotations

from hybrid_runtime.kernels.common.constant import Constant

ENTRY_FIELDS = Constant(16)
"""int32 words of a line of `entries`."""

SLOT = Constant(0)
"""The row's slot, -1 = padded row."""
SCHEDULED = Constant(1)
"""Tokens that the row runs; 0 finishes the slot's previous step without placing a row."""
DRAFT = Constant(2)
"""How many of them, at the end, are drafts."""
PREVIOUS = Constant(3)
"""Row of the slot in the previous step, -1 = it took no part or has been finished."""
ADMIT = Constant(4)
"""1 = a new, resumed or prefix-hit request takes the slot, with the next two fields."""
ADMIT_COMPUTED = Constant(5)
"""Its computed tokens."""
ADMIT_COLUMN = Constant(6)
"""Column that holds their state, -1 = none (zero state)."""
DECODES = Constant(7)
"""1 = the row's kernel reads a state at an offset (columns layout), or folds pending tokens and
records the row's own (replay layout)."""
EVERY = Constant(8)
"""Retained are boundaries at multiples of so many tokens, 0 = none,"""
FIRST = Constant(9)
"""and at this position, 0 = none,"""
SECOND = Constant(10)
"""and at this one, 0 = none."""
FIRST_SAVE = Constant(8)
"""Replay layout, in place of the rule and the list: a checkpoint is wanted at this position, 0 =
none,"""
FIRST_COLUMN = Constant(9)
"""and goes to this column."""
SECOND_SAVE = Constant(10)
"""The same of a second one."""
SECOND_COLUMN = Constant(11)
"""Its column."""
CANDIDATE = Constant(11)
"""A list from the first line on, whatever the line's row: rows that may need the post-copy."""
PRECANDIDATE = Constant(12)
"""The same of rows that may need the pre-copy."""
GENERATION = Constant(13)
"""Generation of the slot; only the host reads it."""

CERTAIN = Constant(0)
"""Row of `placed`: tokens in the state whatever is accepted, R = n + s - d."""
COLUMN = Constant(1)
"""Row of `placed`: running column (replay layout: write column), -1 = the row does not run."""
PLACED_DRAFT = Constant(2)
"""Row of `placed`: drafts."""
RESETS = Constant(3)
"""Row of `placed`: 1 = when all drafts are accepted, the post-copy moves the state to offset 0 of
the running column. Not used in the replay layout."""

SOURCE = Constant(0)
"""Row of `moves`: column that holds the state."""
OFFSET = Constant(1)
"""Row of `moves`: offset at which it starts."""
TARGET = Constant(2)
"""Row of `moves`: column to move it to, -1 = it stays."""

DEAD = Constant(-2)
"""Column of a slot whose step was discarded, or whose text has ended: never read or written again
until re-admitted."""
