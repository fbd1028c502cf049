"""What the host knows of running requests: one table, a column for each number, by slot."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hybrid_runtime.kernels.step.commit_tokens import MAX_ENDS
from hybrid_runtime.specdecode.sampling import SamplingParams
from hybrid_runtime.state.rows import StepRows

Ints = NDArray[Any]
Bools = NDArray[np.bool_]

(
    COMPUTED, COMPUTED_MIN, COMPUTED_MAX, PREFILL, LENGTH, MOST, PROMPT, HIT, FILED, TURN, WANTS,
    EPOCH,
) = COLUMNS = range(12)  # fmt: skip

SAMPLED, ADJUSTED, ALLOWED, LOGPROBS, ONE_BY_ONE = (1 << bit for bit in range(5))
"""Bits of WANTS. Temperature above 0; other logits than the model's; only some tokens allowed;
log-probabilities of its output; each token must be looked at, since it makes text or may end it."""

_NO_TOKEN = np.iinfo(np.int64).min


class HasLine(Protocol):
    """What the table keeps numbers of: a `Request`."""

    slot: int
    line: NDArray[np.int64]
    prompt: Ints
    params: SamplingParams

    @property
    def bans(self) -> Sequence[Any]: ...

    @property
    def length(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...


class Column:
    """One number of a request, in its line of the table."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, request: HasLine, owner: type | None = None) -> int:
        return int(request.line[self._index])

    def __set__(self, request: HasLine, value: int) -> None:
        request.line[self._index] = value


def blank_line() -> NDArray[np.int64]:
    """The line of a request that has no slot."""
    return np.zeros(len(COLUMNS), np.int64)


class Ledger:
    """Columns by slot, int64 `[slots]`, all in tokens except the last four. They mean nothing in
    free slots, except `epoch`.

    computed: tokens whose KV and state are final, as far as results have been read.
    computed_min, computed_max: the same once all queued steps have run, if no draft is accepted,
        and if all are.
    prefill: known when it was admitted; all of them run before it decodes.
    length: known now, prompt and output.
    most: prompt and output at their longest.
    prompt: of the prompt.
    hit: found in the prefix cache.
    filed: boundaries up to which others can find its keys and values.
    turn: prompts run in the order of these, see `Scheduler`.
    wants: bits, see `SAMPLED`.
    epoch: changes when a request leaves the slot, so that late results are dropped.

    table: all columns, `[columns, slots]`; a request's `line` is its slot's.
    """

    def __init__(self, slots: int, max_length: int) -> None:
        self.table = np.zeros((len(COLUMNS), slots), np.int64)
        (
            self.computed, self.computed_min, self.computed_max, self.prefill, self.length,
            self.most, self.prompt, self.hit, self.filed, self.turn, self.wants, self.epoch,
        ) = self.table  # fmt: skip
        self._ends = np.full((slots, 1, MAX_ENDS), _NO_TOKEN)
        self._most_ends = 0  # of any request so far; no more columns are looked at
        self._max_length = max_length

    def admit(self, request: HasLine, hit: int, filed: int, turn: int) -> None:
        """Give a request its slot, with so many tokens computed."""
        prompt, length = len(request.prompt), request.length
        most = min(prompt + request.max_tokens, self._max_length)
        line = self.table[:, request.slot]
        line[:EPOCH] = hit, hit, hit, length, length, most, prompt, hit, filed, turn, 0
        request.line = line

    def expect(self, request: HasLine, eos: Collection[int], text: bool) -> tuple[int, ...]:
        """Note what a running request wants of each step; the tokens that end its text, none if
        there are more than `MAX_ENDS`, which each token must be compared with. eos: those of any
        text. text: its output is decoded."""
        params = request.params
        wants = SAMPLED * (params.temperature != 0)
        wants |= ADJUSTED * bool(request.bans or params.adjusts)
        wants |= ALLOWED * (params.allowed_token_ids is not None)
        wants |= LOGPROBS * (params.logprobs is not None)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
        if text or params.stop or params.logprobs is not None or len(ends) > MAX_ENDS:
            wants |= ONE_BY_ONE
        else:
            self._most_ends = max(self._most_ends, len(ends))
            self._ends[request.slot] = _NO_TOKEN
            self._ends[request.slot, 0, : len(ends)] = list(ends)
        self.wants[request.slot] = wants
        return tuple(ends) if len(ends) <= MAX_ENDS else ()

    def leave(self, request: HasLine) -> None:
        """Take a request out of its slot; it keeps its numbers."""
        request.line = request.line.copy()
        self.epoch[request.slot] += 1

    def queue(self, rows: StepRows) -> None:
        """A step of these rows has been queued."""
        self.computed_min[rows.index] += rows.certain
        self.computed_max[rows.index] += rows.scheduled

    def settle(self, rows: StepRows, count: Ints, live: Bools) -> None:
        """The results of the oldest queued step have been read: tokens that each row emitted,
        `[rows]`. live: rows whose request still has its slot."""
        accepted = np.maximum(count, 1) - 1
        index, certain, refused = rows.index, rows.certain, rows.draft - accepted
        if np.count_nonzero(live) < len(live):
            index, certain, refused = index[live], certain[live], refused[live]
            accepted = accepted[live]
        self.computed[index] += certain + accepted
        self.computed_min[index] += accepted
        self.computed_max[index] -= refused

    def go_on(self, index: Ints, emitted: Ints) -> Bools:
        """Rows that have emitted tokens which just follow their text: none of them can end it, or
        means broken logits.

        index: their slots.
        emitted: int `[rows, K + 2]`, tokens and their count.
        """
        tokens, count = emitted[:, :-1], emitted[:, -1]
        ends = self._ends[index, :, : self._most_ends]
        ends = (tokens[:, :, None] == ends).reshape(len(index), -1).any(1)
        plain = (count > 0) & (self.length[index] + count < self.most[index])
        plain &= (self.wants[index] & ONE_BY_ONE) == 0
        plain &= ~(ends | (tokens < -1).any(1))
        return plain
