"""The arithmetic of align mode against a model that moves states one token at a time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.marks import slow
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.state import boundaries
from hybrid_runtime.state.align import arithmetic
from hybrid_runtime.state.boundaries import RetentionRule

NOBODY = RetentionRule(0)


def cases(block: int, most: int) -> np.ndarray:
    """All (n, s, d) with n <= 3B, s <= 2B, d <= most drafts and at least one certain token."""
    grid = itertools.product(range(3 * block + 1), range(1, 2 * block + 1), range(most + 1))
    return np.array([(n, s, d) for n, s, d in grid if d < s])


def columns_after(n: int, s: int, d: int, block: int) -> tuple[int, dict[int, int]]:
    """Running column, and which token count the SSM state in each column stands for: by walking."""
    column = 0
    while (column + 1) * block < n + s:
        column += 1
    certain = n + s - d
    return column, {column + j: certain + j for j in range(d + 1)}


@pytest.mark.parametrize("block", range(2, 10))
@pytest.mark.parametrize("most", range(5))
def test_postcopy_is_what_a_prefix_hit_needs(block: int, most: int) -> None:
    """Exhaustively: after the copy the boundary's column holds the boundary's state, if and only if
    a boundary was crossed with drafts on; nothing else is touched."""
    if most >= block:
        return
    for n, s, d in cases(block, most):
        column, held = columns_after(n, s, d, block)
        assert arithmetic.running_column(np.array(n + s), block) == column
        certain = n + s - d
        for a in range(1, d + 2):
            move = arithmetic.postcopy(
                np.array(certain),
                np.array(d),
                np.array(a),
                np.array(column),
                block,
                RetentionRule(block),
            )
            final = certain + a - 1
            crossed = [b for b in range(certain, final + 1) if b % block == 0]
            assert len(crossed) <= 1
            state = dict(held)
            if move.acts:
                state[int(move.target)] = held[int(move.source) + int(move.offset)]
            if crossed and d:
                assert state[crossed[0] // block - 1] == crossed[0]
            elif crossed:  # no drafts: it was there already
                assert state[crossed[0] // block - 1] == crossed[0]
                assert not move.acts
            else:
                assert not move.acts
            if move.acts:
                # What the next step reads is still there, at a - 1 or, after a copy home, at 0.
                offset = 0 if int(move.target) == column else a - 1
                assert state[column + offset] == final


@pytest.mark.parametrize("block", range(2, 10))
@pytest.mark.parametrize("most", range(5))
def test_predicate_is_sound_and_tight(block: int, most: int) -> None:
    """Exhaustively: a row is a candidate if and only if some accepted count makes it act."""
    if most >= block:
        return
    n, s, d = cases(block, most).T
    certain, column = n + s - d, arithmetic.running_column(n + s, block)
    for kept in (
        RetentionRule(block),
        RetentionRule(2 * block),
        RetentionRule(0, 2 * block, block),
        NOBODY,
    ):
        acts = np.zeros(len(n), bool)
        for a in range(1, most + 2):
            move = arithmetic.postcopy(certain, d, np.minimum(a, d + 1), column, block, kept)
            acts |= move.acts
        assert (acts == arithmetic.postcopy_candidates(certain, certain, d, kept)).all()


@given(
    st.integers(1, 40), st.integers(0, 12), st.integers(0, 4), st.integers(5, 9),
    st.sampled_from([(1, 0, 0), (2, 0, 0), (0, 0, 0), (0, 3, 0), (0, 2, 5), (3, 4, 0)]),
)  # fmt: skip
def test_interval_rules_out_only_what_no_count_can_reach(
    low: int, spread: int, draft: int, block: int, rule: tuple[int, int, int]
) -> None:
    kept = RetentionRule(*(r * block for r in rule))
    exact = [
        bool(
            arithmetic.postcopy_candidates(np.array([r]), np.array([r]), np.array([draft]), kept)[0]
        )
        for r in range(low, low + spread + 1)
    ]
    bounds = np.array([low]), np.array([low + spread])
    assert arithmetic.postcopy_candidates(*bounds, np.array([draft]), kept)[0] == any(exact)


@given(
    st.integers(1, 200),
    st.integers(1, 12),
    st.integers(0, 3),
    st.lists(st.integers(0, 20), max_size=2),
)
def test_next_retained_is_the_first_that_is_kept(
    position: int, block: int, every: int, pins: list[int]
) -> None:
    kept = RetentionRule(every * block, *(np.array([p * block]) for p in [*pins, 0, 0][:2]))
    found = [b for b in range(position, 500) if b % block == 0 and kept.keeps(np.array([b]))[0]]
    assert boundaries.next_retained(np.array([position]), kept)[0] == (
        found[0] if found else boundaries.NEVER
    )


RULE = st.tuples(*(st.integers(0, most) for most in (3, 8, 8)))


@given(st.lists(st.tuples(st.integers(1, 60), RULE), min_size=1), st.integers(1, 12))
def test_a_rule_for_all_rows_is_that_of_each(
    rows: list[tuple[int, tuple[int, ...]]], block: int
) -> None:
    position, rules = (np.array(part) for part in zip(*rows, strict=True))
    each = RetentionRule(*(rules * block).T)
    for i in range(len(rows)):
        at, one = position[[i]], RetentionRule(*(block * int(r) for r in rules[i]))
        assert one.keeps(at) == each.keeps(position)[i] == each.of(np.array([i])).keeps(at)
        assert boundaries.next_retained(at, one) == boundaries.next_retained(position, each)[i]
        assert boundaries.last_retained(at, one) == boundaries.last_retained(position, each)[i]
        assert one.of(np.array([0])) == one
        assert not one.keeps(at * 0)
        assert not each.keeps(position * 0)[i]


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1), st.integers(1, 2**20))
def test_division_by_multiplication_is_exact(positions: list[int], block: int) -> None:
    edges = [p // block * block + e for p in positions for e in (-1, 0, 1)]
    values = np.array([v for v in [*positions, *edges] if 0 <= v < 2**31], np.int64)
    for dtype in (np.int32, np.int64):
        assert (boundaries.blocks_below(values.astype(dtype), block) == values // block).all()


@pytest.mark.parametrize("block", [*range(2, 7), *slow(7, 8, 9)])
def test_precopy_finds_the_state_wherever_the_last_step_left_it(block: int) -> None:
    """Exhaustively over two steps, columns that move backwards included."""
    backwards = shifted = 0
    for n, s, d in cases(block, min(4, block - 1)):
        held, states = columns_after(n, s, d, block)
        for a, after in itertools.product(range(1, d + 2), range(1, block + 2)):
            final = n + s - d + a - 1
            column = arithmetic.running_column(np.array(final + after), block)
            for reads in (True, False):
                move = arithmetic.precopy(np.array(held), np.array(a - 1), column, np.array(reads))
                read = int(move.source) + int(move.offset)
                assert states[read] == final
                assert bool(move.acts) == (column != held or (a > 1 and not reads))
                may = arithmetic.precopy_candidates(
                    *(np.array([c]) for c in (column, column, held, held)),
                    None if reads else np.array([a > 1]),
                )
                assert bool(may[0]) == bool(move.acts)
            backwards += int(column < held)
            shifted += int(column == held and a > 1)
    assert shifted
    assert backwards or block == 2


def test_the_running_column_moves_backwards() -> None:
    """n = 6, s = 4 runs in column 1; with one accepted and no drafts, column 0 runs again."""
    assert arithmetic.running_column(np.array([10, 8]), 8).tolist() == [1, 0]


def test_a_plain_step_after_drafts_finds_its_state_two_columns_on() -> None:
    """B = 8, n = 1, s = 4, d = 3, a = 3, then s = 1: same column, but the state is in column 2."""
    move = arithmetic.precopy(np.array(0), np.array(2), np.array(0), np.array(False))
    assert (bool(move.acts), int(move.source + move.offset), int(move.target)) == (True, 2, 0)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 4), st.integers(0, 6)), max_size=6),
    st.integers(5, 16),
)
def test_the_duck_typed_front_agrees_with_the_postprocess(
    rows: list[tuple[int, int, int]], block: int
) -> None:
    batch = [(f"r{i}", n, d + 1 + extra, d) for i, (n, d, extra) in enumerate(rows)]
    output = SimpleNamespace(
        num_scheduled_tokens={i: s for i, _, s, _ in batch},
        scheduled_spec_decode_tokens={i: [0] * d for i, _, _, d in batch if d},
    )
    requests = {i: SimpleNamespace(num_computed_tokens=n) for i, n, _, _ in batch}
    skips = arithmetic.can_skip_mamba_postprocess(
        output, SimpleNamespace(req_ids=[*requests, "finished"]), requests, block
    )
    acts = False
    for _, n, s, d in batch:
        certain, column = np.array(n + s - d), arithmetic.running_column(np.array(n + s), block)
        for a in range(1, d + 2):
            final = n + s - d + a - 1
            acts |= bool(d and final // block * block >= certain)
            move = arithmetic.postcopy(
                certain, np.array(d), np.array(a), column, block, RetentionRule(block)
            )
            assert not (move.acts and skips)
    assert skips == (not acts)


@pytest.mark.parametrize("block", [0, -16])
def test_the_front_refuses_a_bad_block_size(block: int) -> None:
    nothing = SimpleNamespace(num_scheduled_tokens={}, scheduled_spec_decode_tokens={})
    with pytest.raises(ValueError, match=f"mamba_block_size is {block}"):
        arithmetic.can_skip_mamba_postprocess(nothing, SimpleNamespace(req_ids=[]), {}, block)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 20), st.integers(-1, 12))
def test_columns_held_cover_all_that_may_be_touched(n: int, s: int, spread: int, held: int) -> None:
    block, k = 10, 3
    low, high = arithmetic.running_column(np.array([n + s, n + spread + s]), block)
    first, last = arithmetic.columns_held(np.array(held), low, high, k)
    assert first <= max(low - 1, 0)  # the boundary below, where a post-copy may land
    assert held < 0 or first <= held  # what is read
    assert last == high + k
    assert first >= 0
