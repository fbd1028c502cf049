"""What one program of the replay layout's state update works on, as its functions pass it on.

A program takes some heads of a group in turn, of one row, and of each a tile of its state: some
rows of P by all of N. "Row" below is a row of the batch.
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


class Cache(NamedTuple):
    """Pointers to the window cache at the row's slot, in B at the program's group."""

    x: Pointer
    B: Pointer
    dt: Pointer


class Row(NamedTuple):
    """Counts of the row.

    scheduled: its tokens.
    pending: tokens of the window cache that come before them.
    cursor: ring index of the first of those.
    lacks: so many of the pending ones, all or none, are not in the state that is read.
    folds: so many of those it lacks and then of its own tokens are in the state that is written.
    taken: so many of its own tokens are among them.
    skipped: its first tokens, so many, are not stored in the window cache.
    silent: its first tokens, so many, have no outputs here.
    reads: there is a state to start from; else it is 0.
    """

    scheduled: Value
    pending: Value
    cursor: Value
    lacks: Value
    folds: Value
    taken: Value
    skipped: Value
    silent: Value
    reads: Value


class Share(NamedTuple):
    """The program's share of the row.

    head: first of its heads.
    p: first row of its tile.
    writes_dt: of the programs that share a time step, this one writes it to the window cache.
    writes_B: likewise B.
    """

    head: Value
    p: Value
    writes_dt: Value
    writes_B: Value


class Clamp(NamedTuple):
    """Bounds of the time step."""

    low: Value
    high: Value
