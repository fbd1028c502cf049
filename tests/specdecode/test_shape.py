"""Shapes that steps are padded to: every step fits one, and few there are."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.specdecode.draft_length import DraftLength, Drafts
from hybrid_runtime.specdecode.shape import (
    PROMPT_ROWS,
    UNEVEN_ROWS,
    PaddedShapes,
    StepShape,
    graph_size,
    mixed_size,
    most_rows,
    pad_rows,
    token_size,
)
from hybrid_runtime.state.rows import StepRows

K = 3


@given(st.integers(1, 300), st.data())
def test_every_step_has_a_padded_shape(max_requests: int, data: st.DataObject) -> None:
    bound, most = data.draw(st.integers(1, 3000)), data.draw(st.integers(4, 9000))
    drafts = DraftLength(K, data.draw(st.booleans()))
    shapes = PaddedShapes(max_requests, drafts, most, bound, data.draw(st.integers(4, 3000)))
    decode_rows = data.draw(st.integers(0, max_requests))
    most_prompts = min(PROMPT_ROWS, max_requests - decode_rows)
    prompt_rows = data.draw(st.integers(0 if decode_rows else 1, most_prompts))
    tokens = data.draw(st.integers(1, min(bound, most))) if prompt_rows else 0
    num_draft = data.draw(st.sampled_from(drafts.levels))
    shape = StepShape.decoding(decode_rows, Drafts.alike(num_draft))
    shape = shape._replace(prompt_rows=prompt_rows, prompt_tokens=tokens)
    padded = shapes.of(shape)
    assert padded is not None
    assert all(size >= rows for size, rows in zip(padded, shape, strict=True))
    assert padded.decode_tokens % max(padded.decode_rows, 1) == 0
    assert padded.rows <= most_rows(max_requests)
    assert padded.tokens <= shapes.most_tokens
    if decode_rows:
        assert padded.row_tokens == shape.row_tokens == num_draft + 1
    if not prompt_rows or num_draft == drafts.beside_prompts or not decode_rows:
        assert padded in {*(shapes.mixed() if prompt_rows else shapes.decoding())}


@given(st.data())
def test_many_rows_with_different_drafts_have_a_padded_shape(data: st.DataObject) -> None:
    drafts = DraftLength(7, True)
    max_requests = data.draw(st.integers(1, 300))
    shapes = PaddedShapes(max_requests, drafts, 8192, 2048, 1056)
    rows = data.draw(st.integers(1, max_requests))
    number = data.draw(st.lists(st.integers(0, 7), min_size=rows, max_size=rows))
    given = StepRows.exact(list(range(rows)), [0] * rows, [1 + k for k in number], number)
    shape = StepShape.of(given, rows)
    padded = shapes.of(shape)
    assert (shape.longest > 0) == (len({*number}) > 1)
    if padded is None:
        size = graph_size(rows, max_requests)
        assert shape.longest
        assert size < UNEVEN_ROWS or all(
            max(number) > one.most or size - rows + shape.tokens > size * (one.mean + 1)
            for one in drafts.uneven()
        )
        return
    if shape.longest or number[0] in drafts.levels:
        assert padded in {*shapes.decoding()}
    assert padded.rows >= rows
    # Padded rows have a token each where rows differ.
    behind = (padded.rows - rows) * (1 if shape.longest else padded.row_tokens)
    assert padded.tokens >= shape.tokens + behind
    assert padded.row_tokens >= max(number) + 1
    assert padded.tokens <= shapes.most_tokens
    # A step with prompts too is not padded where rows differ.
    if shape.longest:
        assert shapes.of(shape._replace(prompt_rows=1, prompt_tokens=9)) is None


@given(st.integers(1, 300), st.integers(1, 300))
def test_sizes_hold_what_they_are_for(rows: int, most: int) -> None:
    rows = min(rows, most)
    for size in (graph_size(rows, most), mixed_size(rows, most)):
        assert rows <= size <= most
    assert token_size(rows) >= rows
    assert mixed_size(rows, 10**6) < max(9, min(2 * rows, rows + 64))


@pytest.mark.parametrize(("max_requests", "count"), [(8, 20), (64, 74), (256, 128)])
def test_shapes_are_few_and_the_largest_comes_first(max_requests: int, count: int) -> None:
    shapes = PaddedShapes(max_requests, DraftLength(K, False), 8192, 2048, 1056)
    found = list(shapes.mixed())
    assert len(found) == len(set(found)) == count
    assert any(shape.prompt_tokens == 1056 for shape in found)
    assert found == sorted(found, key=lambda s: (s.prompt_tokens, s.decode_rows), reverse=True)
    assert shapes.decoding() == sorted(set(shapes.decoding()), reverse=True)


def test_more_prompts_than_may_share_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt_rows is 4; at most 3 may share a step"):
        PaddedShapes(3, DraftLength(K, False), 64, 64, 16).of(StepShape(0, 0, 4, 10))


def test_the_shape_of_rows() -> None:
    rows = StepRows.exact([4, 0, 2], [7, 9, 0], [4, 2, 20], [3, 1, 0])
    assert StepShape.of(rows, 2) == (2, 6, 1, 20, 4)
    assert StepShape.of(rows, 0) == (0, 0, 3, 26, 0)
    assert StepShape.of(rows, 3) == (3, 26, 0, 0, 20)


@pytest.mark.parametrize("exact", [True, False])
def test_padded_rows_stand_between_those_that_decode_and_the_prompts(exact: bool) -> None:
    low = np.array([7, 9, 0], np.int32)
    rows = StepRows(
        np.array([4, 0, 2], np.int32), low, low if exact else low + 1,
        np.array([4, 4, 20], np.int32), np.array([3, 3, 0], np.int32),
    )  # fmt: skip
    shape = StepShape.of(rows, 2)
    padded = pad_rows(rows, shape, to=StepShape(4, 16, 2, 64))
    assert padded.slot.tolist() == [4, 0, -1, -1, 2]
    assert padded.scheduled.tolist() == [4, 4, 4, 4, 20]
    assert padded.draft.tolist() == [3, 3, 0, 0, 0]
    assert padded.exact_counts == exact
    assert padded.computed_max[[0, 1, 4]].tolist() == (low + (not exact)).tolist()
    assert pad_rows(rows, shape, shape) is rows
    pairs = np.arange(6, dtype=np.int32).reshape(3, 2)
    said = replace(rows, decodes=np.array([True, True, False]), save_at=pairs, save_to=pairs + 9)
    padded = pad_rows(said, shape, to=StepShape(4, 16, 2, 64))
    assert padded.decodes is not None
    assert padded.decodes[[0, 1, 4]].tolist() == [True, True, False]
    assert padded.saves is not None
    for found, wanted in zip(padded.saves, (pairs, pairs + 9), strict=True):
        assert found[[0, 1, 4]].tolist() == wanted.tolist()
        assert not found[[2, 3]].any()
