"""The shape of a step, and the few shapes that steps are padded to, so that every one can be
captured as a CUDA graph before it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hybrid_runtime.specdecode.draft_length import DraftLength
from hybrid_runtime.state.rows import StepRows

PROMPT_ROWS = 16
"""Most prompts that share a step."""
ALONE_TOKENS = 128
"""Steps of so few prompt tokens, padded, have sizes without decoding rows: where no row decodes,
padded ones would be up to half as many tokens more."""


class StepShape(NamedTuple):
    """Rows and tokens of a step; padded, the key of its frame and its graphs.

    decode_rows: rows that decode, one certain token and its drafts each; they come first.
    decode_tokens: tokens of all of them.
    prompt_rows: the other rows.
    prompt_tokens: tokens of all of them.
    """

    decode_rows: int
    decode_tokens: int
    prompt_rows: int
    prompt_tokens: int

    @classmethod
    def decoding(cls, rows: int, num_draft: int) -> StepShape:
        """So many rows, each with so many drafts."""
        return cls(rows, rows * (num_draft + 1), 0, 0)

    @classmethod
    def of(cls, rows: StepRows, decode_rows: int) -> StepShape:
        """Of rows of which the first `decode_rows` decode."""
        decode_tokens, prompt_rows = rows.scheduled[:decode_rows].sum(), len(rows) - decode_rows
        prompt_tokens = rows.scheduled[decode_rows:].sum() if prompt_rows else 0
        return cls(decode_rows, int(decode_tokens), prompt_rows, int(prompt_tokens))

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prompt_rows

    @property
    def tokens(self) -> int:
        return self.decode_tokens + self.prompt_tokens

    @property
    def row_tokens(self) -> int:
        """Tokens of each decoding row, if all have as many drafts; 0 without decoding rows."""
        return self.decode_tokens // self.decode_rows if self.decode_rows else 0


class PaddedShapes:
    """The shapes that steps are padded to.

    max_requests: requests that run at once.
    drafts: how many drafts rows may have.
    max_tokens: most tokens of a step.
    max_prompt_tokens: most prompt tokens of a step.
    block_size: tokens between two checkpoints; a chunk of just so many is the most common one.
    """

    def __init__(
        self,
        max_requests: int,
        drafts: DraftLength,
        max_tokens: int,
        max_prompt_tokens: int,
        block_size: int,
    ) -> None:
        self._max_requests, self.drafts = max_requests, drafts
        self._block_size = block_size
        self._prompt_rows = min(PROMPT_ROWS, max_requests)
        self._max_prompt_tokens = min(max_tokens, max_prompt_tokens)

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest step."""
        decoding = StepShape.decoding(self._max_requests, self.drafts.most)
        return decoding.tokens + self._token_size(self._max_prompt_tokens)

    def of(self, shape: StepShape) -> StepShape:
        """The padded shape of a step whose decoding rows have as many drafts each.

        Raises:
            ValueError: more prompts than a step may have.
        """
        if shape.prompt_rows > self._prompt_rows:
            raise ValueError(
                f"shape.prompt_rows is {shape.prompt_rows}; at most {self._prompt_rows} may share "
                "a step"
            )
        num_draft = shape.row_tokens - 1 if shape.decode_rows else self.drafts.beside_prompts
        if not shape.prompt_rows:
            return StepShape.decoding(graph_size(shape.decode_rows, self._max_requests), num_draft)
        return self._mixed(shape.decode_rows, num_draft, self._token_size(shape.prompt_tokens))

    def decoding(self) -> list[StepShape]:
        """The shapes of steps in which all rows decode, with each number of drafts that may be
        chosen, the largest first: the graphs of smaller ones fit into the memory of theirs."""
        most = self._max_requests
        sizes = {graph_size(n, most) for n in range(1, most + 1)}
        shapes = [StepShape.decoding(n, k) for n in sizes for k in self.drafts.levels]
        return sorted(shapes, key=lambda shape: (shape.tokens, shape.rows), reverse=True)

    def mixed(self) -> Iterator[StepShape]:
        """Those of steps with prompts; the largest first."""
        beside = self.drafts.beside_prompts
        for tokens in reversed(self._token_sizes()):
            shapes = {self._mixed(n, beside, tokens) for n in range(self._max_requests)}
            yield from sorted(shapes, reverse=True)

    def _mixed(self, decode_rows: int, num_draft: int, prompt_tokens: int) -> StepShape:
        """Of decoding rows beside prompt tokens that are padded already."""
        alone = decode_rows == 0 and prompt_tokens <= ALONE_TOKENS
        rows = 0 if alone else mixed_size(decode_rows, self._max_requests)
        decoding = StepShape.decoding(rows, num_draft)
        return decoding._replace(prompt_rows=self._prompt_rows, prompt_tokens=prompt_tokens)

    def _token_size(self, tokens: int) -> int:
        size = token_size(tokens)
        return self._block_size if tokens <= self._block_size < size else size

    def _token_sizes(self) -> list[int]:
        most = self._max_prompt_tokens
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


def pad_rows(rows: StepRows, shape: StepShape, to: StepShape) -> StepRows:
    """The rows with padded ones between those that decode and the prompts, as many as `to` has
    decoding rows more than `shape`, the shape of `rows`."""
    first, behind = shape.decode_rows, to.decode_rows
    if first == behind:
        return rows
    fields = np.array(
        [rows.slot, rows.computed_min, rows.computed_max, rows.scheduled, rows.draft], np.int32
    )
    out = np.empty((len(fields), len(rows) + behind - first), np.int32)
    out[:, :first] = fields[:, :first]
    out[:, first:behind] = [[-1], [0], [0], [to.row_tokens], [0]]
    out[:, behind:] = fields[:, first:]
    slot, low, high, scheduled, draft = out
    decodes = save_at = save_to = None
    padded = [first] * (behind - first)
    if rows.decodes is not None:
        decodes = np.insert(rows.decodes, padded, True)
    if rows.saves is not None:
        save_at, save_to = (np.insert(pairs, padded, 0, 0) for pairs in rows.saves)
    high = low if rows.exact_counts else high
    return StepRows(slot, low, high, scheduled, draft, decodes, save_at, save_to)
