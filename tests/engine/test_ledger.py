"""The ledger: what queued steps and results make of its numbers, and which tokens are plain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hybrid_runtime.engine import Request, SamplingParams
from hybrid_runtime.engine.ledger import Ledger
from hybrid_runtime.kernels.step.commit_tokens import MAX_ENDS
from hybrid_runtime.state.rows import StepRows

EOS = (2,)


def admitted(ledger: Ledger, slot: int, text: bool = False, **params: Any) -> Request:
    """A request with a prompt of 5 tokens, all computed."""
    prompt = np.zeros(5, np.int32)
    request = Request(slot, prompt, SamplingParams(**{"max_tokens": 20} | params), 0, slot=slot)
    ledger.admit(request, hit=0, filed=0, turn=0)
    ledger.expect(request, EOS, text)
    return request


def numbers(request: Request) -> tuple[int, int, int]:
    return request.computed, request.computed_min, request.computed_max


def test_bounds_are_the_sums_over_queued_steps() -> None:
    ledger = Ledger(3, 100)
    one, other = admitted(ledger, 2), admitted(ledger, 0)
    first = StepRows.exact([2, 0], [0, 0], [5, 3], [0, 0])
    later = StepRows.exact([0, 2], [0, 0], [2, 4], [0, 3])
    ledger.queue(first)
    ledger.queue(later)
    assert [numbers(r) for r in (one, other)] == [(0, 6, 9), (0, 5, 5)]
    # One token emitted behind its prompt, none in the middle of the other's.
    ledger.settle(first, np.array([1, 0]), np.ones(2, bool))
    assert [numbers(r) for r in (one, other)] == [(5, 6, 9), (3, 5, 5)]
    # Two of three drafts are accepted; the row of a request that has left changes nothing.
    ledger.settle(later, np.array([1, 3]), np.array([False, True]))
    assert [numbers(r) for r in (one, other)] == [(8, 8, 8), (3, 5, 5)]


def test_a_request_keeps_its_numbers_when_its_slot_has_another_one() -> None:
    ledger = Ledger(1, 100)
    one = admitted(ledger, 0)
    one.computed = 7
    epoch = int(ledger.epoch[0])
    ledger.leave(one)
    admitted(ledger, 0)
    assert (one.computed, ledger.computed[0]) == (7, 0)
    assert ledger.epoch[0] != epoch
    one.forget()
    assert (one.computed, one.slot, one.restarts) == (0, -1, 1)


@pytest.mark.parametrize(
    ("params", "text", "emitted", "plain"),
    [
        ({}, False, [7, 8, -1, -1, 2], True),
        ({}, False, [-1, -1, -1, -1, 0], False),
        ({}, False, [7, 2, -1, -1, 2], False),
        ({"ignore_eos": True}, False, [7, 2, -1, -1, 2], True),
        ({"stop_token_ids": (8, 9)}, False, [7, 9, -1, -1, 2], False),
        ({"stop_token_ids": (8, 9)}, False, [7, 6, -1, -1, 2], True),
        ({"stop_token_ids": tuple(range(20, 21 + MAX_ENDS))}, False, [7, 6, -1, -1, 2], False),
        ({"max_tokens": 3}, False, [7, 8, -1, -1, 2], True),
        ({"max_tokens": 3}, False, [7, 8, 9, -1, 3], False),
        ({}, False, [7, -5, -1, -1, 2], False),
        ({"logprobs": 1}, False, [7, 8, -1, -1, 2], False),
        ({"stop": ("x",)}, False, [7, 8, -1, -1, 2], False),
        ({}, True, [7, 8, -1, -1, 2], False),
    ],
)
def test_tokens_that_may_end_a_request_or_make_text_are_looked_at(
    params: dict[str, Any], text: bool, emitted: list[int], plain: bool
) -> None:
    ledger = Ledger(2, 100)
    admitted(ledger, 1)
    admitted(ledger, 0, text, **params)
    both = np.array([[7, 8, 9, 6, 4], emitted], np.int32)
    assert ledger.go_on(np.array([1, 0]), both).tolist() == [True, plain]


def test_the_longest_text_ends_a_request() -> None:
    ledger = Ledger(1, 8)
    admitted(ledger, 0)
    for count, plain in ((2, True), (3, False)):
        tokens = [7] * count + [-1] * (4 - count) + [count]
        assert ledger.go_on(np.zeros(1, int), np.array([tokens])).tolist() == [plain]


def test_output_from_before_a_preemption_counts_to_its_end() -> None:
    ledger = Ledger(1, 100)
    request = admitted(ledger, 0, max_tokens=6)
    request.output += [7, 8, 9]
    ledger.leave(request)
    ledger.admit(request, hit=4, filed=1, turn=0)
    assert (request.prefill, ledger.most[0]) == (8, 11)
    for count, plain in ((2, True), (3, False)):
        tokens = [7] * count + [-1] * (4 - count) + [count]
        assert ledger.go_on(np.zeros(1, int), np.array([tokens])).tolist() == [plain]


def test_what_a_slot_expected_is_forgotten_with_its_request() -> None:
    ledger = Ledger(1, 100)
    admitted(ledger, 0, stop_token_ids=(7, 8), temperature=1.0)
    ledger.leave(admitted(ledger, 0))
    admitted(ledger, 0, ignore_eos=True)
    assert ledger.wants[0] == 0
    assert ledger.go_on(np.zeros(1, int), np.array([[7, 8, 2, 6, 4]])).tolist() == [True]
