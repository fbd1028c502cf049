"""Prompt chunks that pass a retained boundary and leave its checkpoint on the way."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.hash_model import HashRunner
from helpers.hash_request import TOKENS
from helpers.replay_model import RUNNERS
from helpers.toy_recurrences import HASH

from hybrid_runtime.state import HybridStateManager, StateLayout

K, BLOCK = 3, 8
layouts = pytest.mark.parametrize("kind", sorted(RUNNERS))


def runner(kind: str, **options: Any) -> HashRunner:
    return RUNNERS[kind](num_draft=K, block_size=BLOCK, prompt_cuts=True, **options)


def finish(runs: HashRunner, slot: int, rng: random.Random, steps: int) -> None:
    """Decode for a while: `step` checks all states that it reads."""
    for _ in range(steps):
        drafts = [rng.randrange(TOKENS) for _ in range(K)]
        runs.step([(slot, 1, drafts, rng.randrange(1, K + 2))])


@layouts
@pytest.mark.parametrize(("depth", "groups"), [(0, 1), (2, 2)])
def test_states_of_every_chunk_that_passes_one_boundary(kind: str, depth: int, groups: int) -> None:
    """From each position to ends up to a block behind the boundary, one of them a boundary itself;
    then the rest of the prompt, drafts, and a request that starts from the cut."""
    rng = random.Random(0)
    for start in range(2 * BLOCK):
        boundary = (start // BLOCK + 1) * BLOCK
        for end in range(boundary + 1, boundary + BLOCK + 1, 1 + start % 3):
            runs = runner(kind, depth=depth, groups=groups)
            prompt = [rng.randrange(TOKENS) for _ in range(end + 2)]
            runs.admit(0, prompt)
            if start > BLOCK:
                runs.step([(0, BLOCK, [], 0)])
            if start % BLOCK or start == BLOCK:
                runs.step([(0, start - runs.requests[0].computed, [], 0)])
            start_of_step = runs.requests[0].computed
            runs.step([(0, end - start_of_step, [], 0)])
            while runs.outstanding:
                runs.recent += runs.read_oldest()
            found = {s.position: s for s in runs.recent if s.position > start_of_step}
            assert set(found) == {boundary} | ({end} if end % BLOCK == 0 else set())
            assert runs.cuts == 1
            assert runs.manager.stats().lost_checkpoints == 0
            runs.keep(found[boundary])
            finish(runs, 0, rng, 2)
            runs.admit(1, prompt, runs.kept[0])
            runs.step([(1, len(prompt) - boundary, [], 1)])
            finish(runs, 1, rng, 2)


@layouts
def test_boundaries_that_nobody_keeps_are_not_cut(kind: str) -> None:
    runs = runner(kind)
    runs.admit(0, list(range(3 * BLOCK)))
    runs.retain(0, 2 * BLOCK)
    runs.step([(0, BLOCK + 3, [], 0)])
    assert runs.cuts == 0
    assert not runs.recent
    runs.step([(0, BLOCK, [], 0)])
    assert runs.cuts == 1
    while runs.outstanding:
        runs.recent += runs.read_oldest()
    assert [s.position for s in runs.recent] == [2 * BLOCK]


@layouts
def test_an_early_boundary_is_lost(kind: str) -> None:
    """A row leaves the last one inside; debug mode refuses to lose the other."""
    runs = runner(kind)
    runs.admit(0, list(range(4 * BLOCK)))
    runs.step([(0, 2 * BLOCK + 1, [], 0)])
    assert runs.manager.stats().lost_checkpoints == 1
    while runs.outstanding:
        runs.recent += runs.read_oldest()
    assert [s.position for s in runs.recent] == [2 * BLOCK]


def test_the_last_checkpoint_of_a_queued_step_is_its_cut() -> None:
    runs = runner("replay", depth=2)
    runs.admit(0, list(range(2 * BLOCK)))
    runs.step([(0, BLOCK + 2, [], 0)])
    checkpoint = runs.manager.last_checkpoint(0)
    assert checkpoint is not None
    assert (checkpoint.position, checkpoint.column) == (BLOCK, 0)
    runs.release(0)  # looks at its bytes


def test_in_place_kernels_cannot_cut() -> None:
    layout = StateLayout(HASH.recurrence, K, BLOCK)
    with pytest.raises(ValueError, match="prompt_cuts is True with in_place=True"):
        HybridStateManager(layout, 2, K, "cpu", in_place=True, prompt_cuts=True)
