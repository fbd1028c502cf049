"""Which blocks of states a step's requests must own."""

from __future__ import annotations

from typing import NamedTuple

from hybrid_runtime.state.boundaries import Ints


class BlockDemand(NamedTuple):
    """Columns of its block table that each row's request must own in a step, int `[rows]` each.

    A request owns all of `fresh .. last`, and keeps what it has of `first .. kept`; it gives back
    all others. Between a column that is read and the first that is written it need own none. In
    padded rows there are none. The column that a request owns throughout (`TableRow.always`) comes
    besides.

    first: lowest column that may still be read, or whose snapshot the runner may still file.
    fresh: lowest column that may be written.
    last: highest column that may be written; below `fresh` if nothing is.
    kept: highest column that is not given back.
    """

    first: Ints
    fresh: Ints
    last: Ints
    kept: Ints
