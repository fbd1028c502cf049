"""The shape of a step, and the few shapes that steps are padded to, so that every one can be
captured as a CUDA graph before it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hybrid_runtime.specdecode.draft_length import DraftLength, Drafts
from hybrid_runtime.state.rows import StepRows

PROMPT_ROWS = 16
"""Most prompts that share a step."""
ALONE_TOKENS = 128
"""Steps of so few prompt tokens, padded, have sizes without decoding rows: where no row decodes,
padded ones would be up to half as many tokens more."""
UNEVEN_ROWS = 32
"""From so many padded rows on they may have different numbers of drafts in one step: where there
are few, the tokens of all of them cost less than the passes that propose more."""


class StepShape(NamedTuple):
    """Rows and tokens of a step; padded, the key of its frame and its graphs.

    decode_rows: rows that decode, one certain token and its drafts each; they come first.
    decode_tokens: tokens of all of them.
    prompt_rows: the other rows.
    prompt_tokens: tokens of all of them.
    longest: most tokens of a row that decodes, where they differ; 0: all have as many.
    """

    decode_rows: int
    decode_tokens: int
    prompt_rows: int
    prompt_tokens: int
    longest: int = 0

    @classmethod
    def decoding(cls, rows: int, drafts: Drafts) -> StepShape:
        """So many rows with such drafts."""
        longest = drafts.most + 1 if drafts.most > drafts.mean else 0
        return cls(rows, rows * (drafts.mean + 1), 0, 0, longest)

    @classmethod
    def of(cls, rows: StepRows, decode_rows: int) -> StepShape:
        """Of rows of which the first `decode_rows` decode."""
        decode_tokens, prompt_rows = rows.scheduled[:decode_rows].sum(), len(rows) - decode_rows
        prompt_tokens = rows.scheduled[decode_rows:].sum() if prompt_rows else 0
        longest = int(rows.scheduled[:decode_rows].max(initial=0))
        longest *= longest * decode_rows != decode_tokens
        return cls(decode_rows, int(decode_tokens), prompt_rows, int(prompt_tokens), longest)

    @property
    def rows(self) -> int:
        return self.decode_rows + self.prompt_rows

    @property
    def tokens(self) -> int:
        return self.decode_tokens + self.prompt_tokens

    @property
    def row_tokens(self) -> int:
        """Most tokens of a decoding row; 0 without decoding rows."""
        return self.longest or (self.decode_tokens // self.decode_rows if self.decode_rows else 0)

    @property
    def mean_tokens(self) -> int:
        """Tokens of a decoding row in the mean, rounded down; 0 without decoding rows."""
        return self.decode_tokens // self.decode_rows if self.decode_rows else 0

    @property
    def drafts(self) -> Drafts:
        """Of the decoding rows, of which there are some."""
        return Drafts(self.mean_tokens - 1, self.row_tokens - 1)


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
        decoding = StepShape.decoding(self._max_requests, Drafts.alike(self.drafts.most))
        return decoding.tokens + self._token_size(self._max_prompt_tokens)

    def of(self, shape: StepShape) -> StepShape | None:
        """The padded shape of a step; None where its decoding rows have different numbers of drafts
        and are few, beside prompts, or have too many tokens.

        Raises:
            ValueError: more prompts than a step may have.
        """
        if shape.prompt_rows > self._prompt_rows:
            raise ValueError(
                f"shape.prompt_rows is {shape.prompt_rows}; at most {self._prompt_rows} may share "
                "a step"
            )
        if shape.longest:
            return self._uneven(shape)
        if not shape.prompt_rows:
            size = graph_size(shape.decode_rows, self._max_requests)
            return StepShape(size, size * shape.row_tokens, 0, 0)
        num_draft = shape.row_tokens - 1 if shape.decode_rows else self.drafts.beside_prompts
        return self._mixed(shape.decode_rows, num_draft, self._token_size(shape.prompt_tokens))

    def _uneven(self, shape: StepShape) -> StepShape | None:
        """Of decoding rows with different numbers of drafts; padded ones have one token each."""
        size = graph_size(shape.decode_rows, self._max_requests)
        if shape.prompt_rows or size < UNEVEN_ROWS:
            return None
        tokens = shape.decode_tokens + size - shape.decode_rows
        for drafts in self.drafts.uneven():
            if shape.longest <= drafts.most + 1 and tokens <= size * (drafts.mean + 1):
                return StepShape.decoding(size, drafts)
        return None

    def decoding(self) -> list[StepShape]:
        """The shapes of steps in which all rows decode, with all drafts that may be chosen, the
        largest first: the graphs of smaller ones fit into the memory of theirs."""
        most = self._max_requests
        sizes = {graph_size(n, most) for n in range(1, most + 1)}
        alike, uneven = map(Drafts.alike, self.drafts.levels), self.drafts.uneven()
        shapes = [StepShape.decoding(n, drafts) for drafts in alike for n in sizes]
        shapes += [StepShape.decoding(n, one) for one in uneven for n in sizes if n >= UNEVEN_ROWS]
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
        decoding = StepShape.decoding(rows, Drafts.alike(num_draft))
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
