"""Few sizes of steps, so that every one can be captured as a CUDA graph before it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hybrid_runtime.state.rows import StepRows

PROMPT_ROWS = 16
"""Most prompts that share a step."""
ALONE_TOKENS = 128
"""Steps of so few prompt tokens, padded, have sizes without decoding rows: where nobody decodes,
padded rows would be up to half as many tokens more."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A size of steps with prompts in them, in rows and tokens, padding included.

    update_rows: rows that decode, each with K + 1 tokens.
    prompt_rows, prompt_tokens: the others, and the tokens of all of them.
    """

    update_rows: int
    prompt_rows: int
    prompt_tokens: int

    @property
    def rows(self) -> int:
        return self.update_rows + self.prompt_rows


class Buckets:
    """The sizes that steps are padded to.

    max_requests: requests that run at once.
    width: tokens of a row that decodes, K + 1.
    max_tokens: most tokens of a step.
    max_prompt_tokens: most prompt tokens of a step.
    block_size: tokens between two snapshots; a chunk of just so many is the most common one.
    """

    def __init__(
        self,
        max_requests: int,
        width: int,
        max_tokens: int,
        max_prompt_tokens: int,
        block_size: int,
    ) -> None:
        self.width = width
        self._max_requests, self._block_size = max_requests, block_size
        self._prompt_rows = min(PROMPT_ROWS, max_requests)
        self._max_prompt_tokens = min(max_tokens, max_prompt_tokens)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest step."""
        return self._max_requests * self.width + self._token_size(self._max_prompt_tokens)

    def of(self, update_rows: int, prompt_rows: int, prompt_tokens: int) -> Bucket:
        """The bucket of a step with so many rows and tokens.

        Raises:
            ValueError: more prompts than a step may have.
        """
        if prompt_rows > self._prompt_rows:
            raise ValueError(
                f"{prompt_rows} rows run prompts; at most {self._prompt_rows} may share a step"
            )
        tokens = self._token_size(prompt_tokens)
        return Bucket(self._row_size(update_rows, tokens), self._prompt_rows, tokens)

    def all(self) -> Iterator[Bucket]:
        """The largest first, so that the graphs of smaller ones fit into the memory of theirs."""
        for tokens in reversed(self._sizes(self._max_prompt_tokens)):
            rows = {self._row_size(n, tokens) for n in range(self._max_requests)}
            for n in sorted(rows, reverse=True):
                yield Bucket(n, self._prompt_rows, tokens)

    def _row_size(self, update_rows: int, tokens: int) -> int:
        """Decoding rows, padded, beside so many prompt tokens, padded."""
        if update_rows == 0 and tokens <= ALONE_TOKENS:
            return 0
        return mixed_size(update_rows, self._max_requests)

    def _token_size(self, tokens: int) -> int:
        size = token_size(tokens)
        return self._block_size if tokens <= self._block_size < size else size

    def _sizes(self, most: int) -> list[int]:
        edges = (1, *range(64, most, 64), min(self._block_size, most), most)
        return sorted({self._token_size(n) for n in edges})


def most_rows(max_requests: int) -> int:
    """Rows of the largest step, padding included."""
    return max_requests + min(PROMPT_ROWS, max_requests)


def graph_size(rows: int, max_rows: int) -> int:
    """Rows of the graph that serves `rows` decoding ones alone: a power of two up to 8, then a
    multiple of 8, above 64 of 32; at most `max_rows`."""
    if rows <= 8:
        size = 1 << (rows - 1).bit_length()
    else:
        multiple = 8 if rows <= 64 else 32
        size = -(-rows // multiple) * multiple
    return min(size, max_rows)


def mixed_size(rows: int, max_rows: int) -> int:
    """Decoding rows beside prompts, from none on: a power of two from 8 to 64, then a multiple of
    64; at most `max_rows`. There are few, since each exists for every number of tokens."""
    size = max(1 << (rows - 1).bit_length(), 8) if 0 < rows <= 64 else max(-(-rows // 64) * 64, 8)
    return min(size, max_rows)


def token_size(tokens: int) -> int:
    """Prompt tokens: 64, or a multiple of 128, above 4096 of 512. Each padded token costs as much
    as a real one."""
    if tokens <= 64:
        return 64
    multiple = 128 if tokens <= 4096 else 512
    return -(-tokens // multiple) * multiple


def pad_rows(rows: StepRows, update_rows: int, to: int, width: int) -> StepRows:
    """The rows with padded ones of `width` tokens between those that decode and the prompts, so
    that `to` rows stand before the prompts.

    update_rows: how many of `rows` decode; they stand first.
    """
    if update_rows == to:
        return rows
    fields = np.array(
        [rows.slot, rows.computed_min, rows.computed_max, rows.scheduled, rows.draft], np.int32
    )
    out = np.empty((len(fields), len(rows) + to - update_rows), np.int32)
    out[:, :update_rows] = fields[:, :update_rows]
    out[:, update_rows:to] = [[-1], [0], [0], [width], [0]]
    out[:, to:] = fields[:, update_rows:]
    slot, low, high, scheduled, draft = out
    return StepRows(slot, low, low if rows.exact_counts else high, scheduled, draft)
