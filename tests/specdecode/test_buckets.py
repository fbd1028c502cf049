"""Sizes that steps are padded to: every step fits one that is captured, and few there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.specdecode.buckets import (
    PROMPT_ROWS,
    Buckets,
    graph_size,
    mixed_size,
    most_rows,
    pad_rows,
    token_size,
)
from hybrid_runtime.state.rows import StepRows


@given(st.integers(1, 300), st.data())
def test_every_step_has_a_size(max_requests: int, data: st.DataObject) -> None:
    bound, most = data.draw(st.integers(1, 3000)), data.draw(st.integers(4, 9000))
    buckets = Buckets(max_requests, 4, most, bound, data.draw(st.integers(4, 3000)))
    decoding = data.draw(st.integers(0, max_requests - 1))
    prompts = data.draw(st.integers(1, min(PROMPT_ROWS, max_requests - decoding)))
    tokens = data.draw(st.integers(1, min(bound, most)))
    bucket = buckets.of(decoding, prompts, tokens)
    assert bucket in set(buckets.all())
    assert bucket.update_rows >= decoding
    assert bucket.prompt_rows >= prompts
    assert bucket.prompt_tokens >= tokens
    assert bucket.rows <= most_rows(max_requests)
    assert bucket.update_rows * 4 + bucket.prompt_tokens <= buckets.most_tokens


@given(st.integers(1, 300), st.integers(1, 300))
def test_sizes_hold_what_they_are_for(rows: int, most: int) -> None:
    rows = min(rows, most)
    for size in (graph_size(rows, most), mixed_size(rows, most)):
        assert rows <= size <= most
    assert token_size(rows) >= rows


@pytest.mark.parametrize(("max_requests", "count"), [(8, 20), (64, 74), (256, 128)])
def test_sizes_are_few_and_the_largest_comes_first(max_requests: int, count: int) -> None:
    found = list(Buckets(max_requests, 4, 8192, 2048, 1056).all())
    assert len(found) == len(set(found)) == count
    assert any(bucket.prompt_tokens == 1056 for bucket in found)
    tokens = [bucket.prompt_tokens for bucket in found]
    assert tokens == sorted(tokens, reverse=True)


def test_more_prompts_than_may_share_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 3 may share a step"):
        Buckets(3, 4, 64, 64, 16).of(0, 4, 10)


@pytest.mark.parametrize("exact", [True, False])
def test_padded_rows_stand_between_those_that_decode_and_the_prompts(exact: bool) -> None:
    low = np.array([7, 9, 0], np.int32)
    rows = StepRows(
        np.array([4, 0, 2], np.int32), low, low if exact else low + 1,
        np.array([4, 4, 20], np.int32), np.array([3, 3, 0], np.int32),
    )  # fmt: skip
    padded = pad_rows(rows, update_rows=2, to=4, width=4)
    assert padded.slot.tolist() == [4, 0, -1, -1, 2]
    assert padded.scheduled.tolist() == [4, 4, 4, 4, 20]
    assert padded.draft.tolist() == [3, 3, 0, 0, 0]
    assert padded.exact_counts == exact
    assert padded.computed_max[[0, 1, 4]].tolist() == (low + (not exact)).tolist()
    assert pad_rows(rows, 2, 2, 4) is rows
