"""Bounds on the counts of requests, and the candidates of a step that follow from them."""

import numpy as np
import pytest
from helpers.vllm_stand_in import B, K

from hybrid_runtime.integrations.vllm.bounds import Bounds


@pytest.mark.parametrize("seed", range(20))
def test_candidates_against_every_possible_history(seed: int) -> None:
    """One row with unknown counts: whatever some count within reach would move is listed, and a
    boundary that none can reach is not."""
    random = np.random.default_rng(seed)
    bounds = Bounds(1, B, asynchronous=True)
    start = int(random.integers(3)) * B
    bounds.admit(0, start)
    # Every pair (tokens computed, running column) that the accepted counts so far allow.
    possible, optimistic = {(start, (start - 1) // B)}, start
    for _ in range(60):
        d = int(random.integers(K + 1)) if optimistic else 0
        s = d + 1 if optimistic else int(random.integers(1, 2 * B))
        found = bounds.candidates(*(np.array([v]) for v in (0, optimistic, s, d, 0)))
        columns = {(n, held): -(-(n + s) // B) - 1 for n, held in possible}
        assert len(found.precopy) or all(c == held for (_, held), c in columns.items())
        acts = {
            n + s - d + a - 1
            for n, _ in possible
            for a in range(1, d + 2)
            if d and (n + s - d + a - 1) // B * B >= n + s - d
        }
        assert bool(len(found.postcopy)) == bool(acts)
        assert bounds.low[0] == min(n + s - d for n, _ in possible)
        # The step's result is known one step later.
        true_n = sorted(n for n, _ in possible)[int(random.integers(len(possible)))]
        possible = {
            (true_n + s - d + a - 1, columns[n, held])
            for (n, held) in possible
            if n == true_n
            for a in range(1, d + 2)
        }
        optimistic = true_n + s
        assert not bounds.lost[0]


@pytest.mark.parametrize("interval", [0, 4 * B])
def test_a_prompts_end_is_kept_beside_rows_that_are_past_theirs(interval: int) -> None:
    bounds = Bounds(2, B, asynchronous=False)
    bounds.retain(interval)
    bounds.admit(0, 3 * B + 1)
    bounds.admit(1, 2 * B - 1)
    slot, computed, prompt = (
        np.array([0, 1]),
        np.array([3 * B + 1, 2 * B - 1]),
        np.array([B, 2 * B]),
    )
    found = bounds.candidates(slot, computed, np.array([2, 2]), np.array([1, 1]), prompt)
    assert found.postcopy.tolist() == [1]
    assert found.first[1] == 2 * B


def test_a_count_out_of_bounds_makes_the_row_a_candidate_until_it_is_readmitted() -> None:
    bounds = Bounds(2, 64, asynchronous=True)

    def listed(computed: int) -> tuple[int, int]:
        found = bounds.candidates(*(np.array([v]) for v in (1, computed, 2, 1, 0)))
        return len(found.precopy), len(found.postcopy)

    bounds.admit(1, 8)
    assert listed(8) == (0, 0)
    assert listed(15) == (1, 1)
    assert listed(17) == (1, 1)
    bounds.admit(1, 8)
    assert listed(8) == (0, 0)
