"""Whole runs of the hash model, which checks each state that is read, folded and stored: any
prompts, drafts, neighbours, row orders and leftovers in memory."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.plain_manager import (
    BLOCK,
    SLOTS,
    K,
)
from helpers.replay_model import RUNNERS, ReplayRunner
from helpers.tensors import all_equal

from hybrid_runtime.state import (
    StepRows,
    Strategy,
)

STRATEGIES = get_args(Strategy)
layouts = pytest.mark.parametrize("kind", sorted(RUNNERS))


@pytest.mark.parametrize("length", range(1, K + 4))
def test_short_prompts_are_prefills_whatever_their_length(length: int) -> None:
    """A prompt as long as a verify step is none (#53051); its first decode starts from it."""
    runs = HashRunner(num_draft=K, max_requests=4, block_size=BLOCK)
    for slot in range(3):
        runs.admit(slot, list(range(length)))
    runs.step([(slot, length, [], 1) for slot in range(3)])
    for _ in range(12):
        runs.step([(slot, 1, [7, 8, 9], 1 + slot) for slot in range(3)])


def test_a_fresh_request_may_begin_with_a_verify() -> None:
    runs = HashRunner(num_draft=K, max_requests=2, block_size=BLOCK)
    runs.admit(0, [5])
    runs.step([(0, 1, [1, 2, 3], 3)])
    runs.step([(0, 1, [1, 2, 3], 4)])


def test_drafts_behind_a_chunk() -> None:
    """The first step of a request may end in drafts, and its certain tokens on a boundary."""
    runs = ReplayRunner(num_draft=K, block_size=BLOCK, max_requests=3)
    for slot, prompt in enumerate((5, 8, 11)):
        runs.admit(slot, list(range(prompt)))
    runs.step([(0, 5, [1, 2, 3], 4), (1, 8, [1, 2, 3], 2), (2, 11, [1], 2)])
    assert [s[:3] for s in runs.recent] == [(1, 0, 8)]
    for i in range(20):
        runs.step([(slot, 1, [i, slot], 1 + (i + slot) % 3) for slot in (2, 0, 1)])
    assert (0, 0, 8, 0) in runs.recent
    assert runs.direct == 0


def test_nan_in_one_request_stays_there() -> None:
    runs = HashRunner(num_draft=K, max_requests=2, block_size=BLOCK)
    for slot in (0, 1):
        runs.admit(slot, [1, 2, 3])
    runs.step([(0, 3, [], 1), (1, 3, [], 1)])
    for block in runs.requests[0].blocks[0].values():
        runs.pool.fill(block, float("nan"))
    for _ in range(20):
        runs.step([(1, 1, [4, 5, 6], 4)])  # the harness checks every state it reads


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_of_padded_rows_changes_no_byte(strategy: Any) -> None:
    """A dummy run among live requests, whose rows hold adversarial leftovers (#49757, #41841)."""
    runs = HashRunner(strategy=strategy, in_place=True)
    for slot in range(SLOTS):
        runs.admit(slot, list(range(6 + slot)))
    runs.step([(slot, 6 + slot, [], 1) for slot in range(SLOTS)])
    runs.step([(slot, 1, [1, 2, 3], 2) for slot in range(SLOTS)])
    before = runs.state_bytes()
    made = runs.manager
    leftovers = StepRows(
        np.full(4, -1, np.int32),
        *(
            np.array(v, np.int32)
            for v in ([5, 0, 99, 7], [9, 0, 99, 7], [4, 1, 8, 2], [3, 0, 1, 1])
        ),
    )
    step = made.begin_step(leftovers)
    assert step.skipped
    made.end_step(step, torch.tensor([4, 0, 9, 2], dtype=torch.int32))
    assert made.published(step) == []
    assert all_equal(before, runs.state_bytes())
    runs.step([(slot, 1, [1, 2, 3], 4) for slot in range(SLOTS)])


def test_row_order_changes_nothing() -> None:
    found = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]):
        runs = HashRunner(own_all=True, columns=12)
        for slot in range(SLOTS):
            runs.admit(slot, list(range(3 + slot)))
        runs.step([(slot, 3 + slot, [], 1) for slot in order])
        for i in range(12):
            runs.step([(s, 1, [s] * ((i + s) % 4), 1 + i % ((i + s) % 4 + 1)) for s in order])
        found.append(runs.state_bytes())
    assert all_equal(found[0], found[1])
    assert all_equal(found[0], found[2])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("garbage", [0.0, float("nan"), 77.0])
def test_what_a_block_held_before_does_not_matter(garbage: float, in_place: bool) -> None:
    """Blocks that are not zeroed when they are handed out: nothing unwritten is ever read."""

    class Careless(HashRunner):
        def _new(self, request: Any, group: int, column: int) -> None:
            super()._new(request, group, column)
            self.pool.fill(request.blocks[group][column], garbage)

    runs = Careless(in_place=in_place)
    runs.admit(0, list(range(30)))
    for certain in (8, 3, 5, 13, 1):
        runs.step([(0, certain, [], int(certain == 1))])
    for i in range(20):
        runs.step([(0, 1, [1, 2, 3], 1 + i % 4)])
    assert runs.manager.stats().rows_copied


@pytest.mark.parametrize("drafts", [(3, 0, 1, 3, 0), (0, 0, 3, 2), (1, 3, 0, 3), (2, 2, 0, 0, 3)])
@pytest.mark.parametrize("in_place", [False, True])
def test_any_order_of_draft_counts(drafts: tuple[int, ...], in_place: bool) -> None:
    """A step without drafts after one with them starts from the accepted state (#52942)."""
    for offset in range(BLOCK):
        runs = HashRunner(max_requests=1, layers=1, in_place=in_place)
        runs.admit(0, list(range(1 + offset)))
        runs.step([(0, 1 + offset, [], 1)])
        for d in drafts * 3:
            for a in {1, d + 1}:
                runs.step([(0, 1, [9] * d, a)])


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("columns", {}), ("columns", {"conv_layout": "DS"}), ("columns", {"in_place": True}),
    ("columns", {"in_place": True, "conv_layout": "DS"}), ("replay", {}),
    ("replay", {"conv_layout": "DS"}), ("replay", {"ring_tokens": 0}),
    ("replay", {"ring_tokens": "shortest"}),
]  # fmt: skip


@pytest.mark.parametrize("k", [0, 1, 2, 8, 15])
@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=str)
def test_any_number_of_drafts(k: int, kind: str, options: dict[str, Any]) -> None:
    if options.get("ring_tokens") == "shortest":
        options = {"ring_tokens": min(k + 1, 15)}
    runs = RUNNERS[kind](num_draft=k, block_size=k + 1 + k % 2, columns=90, **options)
    runs.admit(0, [1, 2, 3])
    runs.step([(0, 3, [], 1)])
    for i in range(40):
        d = k if i % 3 else i % (k + 1)
        runs.step([(0, 1, [i] * d, 1 + i % (d + 1))])


@layouts
def test_a_prefix_deep_in_the_table_is_resumed_in_every_group(kind: str) -> None:
    """The column of a hit follows from the state's block size, in each group's own table."""
    runs = RUNNERS[kind](groups=3, layers=3, columns=40, max_requests=3)
    runs.admit(0, list(range(200)))
    for _ in range(25):
        runs.step([(0, 8, [], 0)])
        for checkpoint in runs.recent:
            runs.keep(checkpoint)
        runs.recent.clear()
    for slot, kept in ((1, runs.kept[23]), (2, runs.kept[0])):
        runs.admit(slot, [*kept.tokens, 1, 2, 3], kept)
    runs.step([(2, 3, [], 1), (1, 3, [], 1)])
    for _ in range(12):
        runs.step([(1, 1, [1, 2, 3], 3), (2, 1, [1, 2, 3], 2)])
