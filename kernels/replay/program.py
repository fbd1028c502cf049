"""What one program of the replay layout's state update works on, as its functions pass it on.

A program takes RUN heads of a group in turn, of one row, and of each a tile of its state: rows of P
by all of N. "Row" below is a row of the batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

Pointer: TypeAlias = Any
Value: TypeAlias = Any


class Inputs(NamedTuple):
    """Pointers to the row's first token, and in B and C to the program's group."""

    x: Pointer
    dt: Pointer
    A_log: Pointer
    B: Pointer
    C: Pointer
    D: Pointer
    dt_bias: Pointer


class Guesses(NamedTuple):
    """Pointers to one half of the window cache, at the row's slot, in B at the program's group."""

    x: Pointer
    B: Pointer
    dt: Pointer


class Blocks(NamedTuple):
    """Pointers to states, `[H, P, N]` each.

    read: what the fold starts from, if `Row.reads`.
    write: gets the state after all certain tokens.
    snapshot: gets the state after `Row.snapshot_after` of the folded tokens, if `Row.snapshots`.
    """

    read: Pointer
    write: Pointer
    snapshot: Pointer


class Keys(NamedTuple):
    """By what stored states are rounded, if stochastically."""

    write: Value
    snapshot: Value


class Row(NamedTuple):
    """Counts of the row.

    fold: guesses of the last step to fold in.
    scheduled: tokens.
    certain: tokens that are no guesses.
    reads: there is a state to start from; else it is 0.
    snapshots: a snapshot is stored.
    snapshot_after: how many of the `fold + certain` folded tokens are in it.
    """

    fold: Value
    scheduled: Value
    certain: Value
    reads: Value
    snapshots: Value
    snapshot_after: Value


class Share(NamedTuple):
    """The program's share of the row.

    head: first of its RUN heads.
    p: first row of its tile.
    o_n: columns of a part, `0 .. PART - 1`.
    writes_dt: of the programs that share a time step, this one writes it to the window cache.
    writes_B: likewise B.
    """

    head: Value
    p: Value
    o_n: Value
    writes_dt: Value
    writes_B: Value


class Clamp(NamedTuple):
    """Bounds of the time step."""

    low: Value
    high: Value
