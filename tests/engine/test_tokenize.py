"""Which token ids are taken, and what names the first that is not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybrid_runtime.engine.tokenize import encode, encode_instructed, encode_rendered

VOCABULARY = 96
VALID = st.integers(0, VOCABULARY - 1)
ANYTHING = st.one_of(
    VALID,
    st.integers(),
    st.sampled_from(
        [-1, VOCABULARY, 2**63, -(2**64), True, 1.0, np.True_, np.float32(2), "3", None]
    ),
    st.sampled_from([np.int8, np.int32, np.uint64]).flatmap(lambda kind: VALID.map(kind)),
)


def one_by_one(token: object) -> bool:
    """Whether this is a token of the vocabulary."""
    if isinstance(token, bool) or not isinstance(token, int | np.integer):
        return False
    return 0 <= int(token) < VOCABULARY


@given(st.lists(VALID, min_size=1) | st.lists(ANYTHING, min_size=1))
@example([0, VOCABULARY - 1])
def test_token_ids_are_taken_as_a_loop_over_them_would(tokens: list[Any]) -> None:
    wrong = [token for token in tokens if not one_by_one(token)]
    if wrong:
        message = f"prompt holds token {wrong[0]!r}; it must be in 0..{VOCABULARY - 1}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            encode(tokens, None, VOCABULARY)
        return
    for sequence in (tokens, tuple(tokens)):
        taken = encode(sequence, None, VOCABULARY)
        assert taken.dtype == np.int32
        assert taken.tolist() == [int(token) for token in tokens]


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint64, object])
def test_arrays_of_token_ids_are_taken(dtype: type[Any]) -> None:
    tokens = np.array([5, 0, VOCABULARY - 1], dtype)
    taken = encode(tokens, None, VOCABULARY)
    tokens[1] = VOCABULARY  # the caller may go on to change its own
    assert taken.dtype == np.int32
    assert taken.tolist() == [5, 0, VOCABULARY - 1]
    with pytest.raises(ValueError, match=re.escape(f"prompt holds token {tokens[1]!r}; it must")):
        encode(tokens, None, VOCABULARY)


@pytest.mark.parametrize("dtype", [np.float64, np.bool_])
def test_arrays_of_other_numbers_are_refused(dtype: type[np.generic]) -> None:
    tokens: Any = np.array([1, 1], dtype)
    with pytest.raises(ValueError, match=re.escape(f"prompt holds token {tokens[0]!r}; it must")):
        encode(tokens, None, VOCABULARY)


def test_what_holds_nothing_or_cannot_be_encoded_is_refused() -> None:
    nothing: list[Any] = [[], np.array([], np.int32)]
    for empty in nothing:
        with pytest.raises(ValueError, match=r"^prompt is empty"):
            encode(empty, None, VOCABULARY)
        for instruction in ([], [1]):
            with pytest.raises(ValueError, match=r"^prompt is empty"):
                encode_instructed(empty, instruction, None, VOCABULARY)
    with pytest.raises(ValueError, match=r"^messages are text; without a tokenizer"):
        encode_rendered("x", None, VOCABULARY)
