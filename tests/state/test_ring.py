"""When a live state is written, and how far it may lag behind: the host's exact knowledge once
results are read, and that nobody sees a difference."""

from __future__ import annotations

import random

import pytest
from helpers.hash_request import Row
from helpers.replay_model import ReplayRunner
from helpers.toy_recurrences import HASH

from hybrid_runtime.state import StateLayout, StepRows

K, BLOCK = 3, 8


@pytest.mark.parametrize(("k", "window"), [(3, 3), (3, 16), (3, 32), (3, -1), (15, 8), (0, 16)])
def test_a_window_that_does_not_hold_a_step_is_refused(k: int, window: int) -> None:
    least = min(k + 1, 15)
    must = rf"it must be 0, {least}\.\.15 or 31"
    message = rf"ring_tokens is {window} with num_speculative_tokens={k}; {must}"
    with pytest.raises(ValueError, match=message):
        StateLayout(HASH.recurrence, k, 16, kind="replay", ring_tokens=window)
    StateLayout(HASH.recurrence, k, 16, kind="columns", ring_tokens=window)


def test_a_state_is_written_when_the_next_tokens_would_not_fit() -> None:
    """With every draft accepted, after 15 // 4 = 3 steps; with every window that there is."""
    for window in (0, *range(K + 1, 16), 31):
        runs = ReplayRunner(num_draft=K, ring_tokens=window, block_size=BLOCK, columns=40)
        runs.admit(0, list(range(100)))
        runs.retain(0, 0)
        runs.step([(0, 100, [], 1)])
        wrote = []
        for n in range(100, 200, 4):
            before = runs.written
            runs.step([(0, 1, [1, 2, 3], 4)])
            wrote += [n] if runs.written > before else []
        # The prompt's state is whole, a later one lacks three drafts from the start.
        first, later = window // 4, max(window - 3, 0) // 4 + 1
        assert wrote == [*range(100 + 4 * first, 200, 4 * later)]


def test_the_host_knows_exactly_what_is_written_once_results_are_read() -> None:
    runs = ReplayRunner(num_draft=K, block_size=BLOCK, max_requests=2, depth=2)
    for slot in (0, 1):
        runs.admit(slot, list(range(3 + slot)))
    runs.step([(0, 3, [], 1), (1, 4, [], 1)])
    for i in range(40):
        runs.step([(slot, 1, [1, 2, 3][: (i + slot) % 4], 1) for slot in (i % 2, 1 - i % 2)])
    while runs.outstanding:
        runs.read_oldest()  # compares it with the device's
    assert 0 < runs.written < runs.ran


@pytest.mark.parametrize("depth", [0, 2])
def test_the_window_changes_no_checkpoint(depth: int) -> None:
    """Whatever is accepted, retained and released: the same checkpoints at the same time, of the
    same bytes, wherever the states in memory stand."""
    rng = random.Random(depth)
    windows = (0, K + 1, 15, 31)
    all_runs = [
        ReplayRunner(num_draft=K, ring_tokens=w, block_size=BLOCK, depth=depth, columns=40)
        for w in windows
    ]
    for number in range(8):
        prompt = [rng.randrange(99) for _ in range(rng.randint(1, BLOCK))]
        plan: list[Row] = [(0, len(prompt), [], 1)]
        for _ in range(rng.randint(1, 14)):
            drafts = [rng.randrange(99) for _ in range(rng.randint(0, K))]
            plan.append((0, 1, drafts, rng.randint(1, len(drafts) + 1)))
        last = []
        for runs in all_runs:
            runs.admit(0, prompt)
            runs.retain(0, BLOCK * (number % 3))
            for row in plan:
                runs.step([row])
            last.append(runs.manager.last_checkpoint(0))
            runs.release(0)
        assert last == [last[0]] * 4
        while all_runs[0].outstanding:
            for runs in all_runs:
                runs.recent += runs.read_oldest()
    assert all_runs[0].recent
    assert all(runs.recent == all_runs[0].recent for runs in all_runs)
    written = [runs.written for runs in all_runs]
    assert all_runs[0].ran == written[0] > written[1] > written[2] >= written[3]


@pytest.mark.parametrize("num_draft", [0, K])
@pytest.mark.parametrize("window", [0, 4, 15, 31])
def test_decoding_rows_without_drafts_write_when_the_ring_is_full(
    num_draft: int, window: int
) -> None:
    """And where they end on a retained boundary: its column, then the live one again."""
    runs = ReplayRunner(num_draft=num_draft, ring_tokens=window, says_decodes=True, columns=40)
    runs.admit(0, list(range(100)))
    runs.retain(0, 0)
    runs.step([(0, 100, [], 1)])
    wrote = []
    for n in range(100, 196):
        if n == 150:
            runs.retain(0, 0, (160,))
        before = runs.written
        runs.step([(0, 1, [], 1)])
        wrote += [n] if runs.written > before else []
    every = window + 1
    full = {*range(100 + window, 159, every), *range(160 + every, 196, every)}
    assert wrote == sorted(full | {159, 160})
    assert num_draft or runs.layout.steps_per_write(1) == every


def test_rows_with_and_without_drafts_decode_in_turn() -> None:
    """Whatever the others of the step do; a prompt row and rows that run nothing among them."""
    rng = random.Random(0)
    runs = ReplayRunner(num_draft=K, says_decodes=True, max_requests=4, columns=60, depth=1)
    for slot in range(3):
        runs.admit(slot, [rng.randrange(99) for _ in range(1 + 4 * slot)])
        runs.step([(slot, 1 + 4 * slot, [], 1)] if slot != 2 else [(2, 8, [], 0)])
    runs.step([(0, 1, [], 1), (2, 1, [], 1), (1, 1, [7], 2)])
    for _ in range(80):
        plan: list[Row] = []
        for slot in range(3):
            drafts = [rng.randrange(99)] * rng.randrange(K + 1)
            plan.append((slot, 1, drafts, rng.randint(1, len(drafts) + 1)))
        rng.shuffle(plan)
        runs.step([*plan[:1], (-1, 1, [], 1), *plan[1:]])
    assert 0 < runs.written < runs.ran / 2


def test_a_prompt_kernel_is_refused_where_records_wait() -> None:
    """It can neither fold nor record; nothing has changed then."""
    runs = ReplayRunner(num_draft=K, says_decodes=True, max_requests=1)
    runs.admit(0, [1, 2, 3])
    runs.step([(0, 3, [], 1)])
    runs.step([(0, 1, [], 1)])
    made = runs.manager

    def begin(scheduled: int, draft: int, decodes: bool) -> None:
        made.begin_step(StepRows.exact([0], [4], [scheduled], [draft], [decodes]))

    with pytest.raises(ValueError, match=r"decodes\[0\] is False; .* whose last step decoded"):
        begin(1, 0, False)
    with pytest.raises(ValueError, match=r"decodes\[0\] is False; it must be True in a row with"):
        begin(4, 3, False)
    with pytest.raises(ValueError, match=r"scheduled\[0\] is 2; it must be 1 in a row that dec"):
        begin(2, 0, True)
    with pytest.raises(ValueError, match=r"scheduled\[0\] is 5; it must be draft \+ 1"):
        begin(5, 3, True)
    runs.step([(0, 1, [], 1)])


def test_rows_that_say_otherwise_are_not_repeated() -> None:
    """Steady decode sends nothing; the model checks that each step writes as its own rows say."""
    runs = ReplayRunner(num_draft=0, block_size=64, says_decodes=True, max_requests=1)
    runs.admit(0, [1, 2, 3])
    runs.step([(0, 3, [], 1)])
    for says in (True, False, True):
        runs.says_decodes = says
        before = runs.manager.stats().uploads
        for _ in range(4):
            runs.step([(0, 1, [], 1)])
        assert runs.manager.stats().uploads <= before + 2
