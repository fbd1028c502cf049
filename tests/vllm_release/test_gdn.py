"""vLLM's own Gated DeltaNet layer with replay, under vLLM's own model state and metadata, in
Triton's interpreter: outputs, states and boundaries are what the rule says, token by token."""

from __future__ import annotations

import logging
import random

import pytest
import torch
import vllm
from helpers.interpreter import CUDA, elsewhere, kernels, run_in_interpreter
from helpers.vllm_gdn import SLOTS, GdnRunner, Row

from hybrid_runtime.integrations.vllm import versions
from hybrid_runtime.integrations.vllm.replay_checker import ReplayChecker

K = 3
alone = pytest.mark.skipif(CUDA, reason="vLLM's files alone have no CUDA libraries")


@elsewhere
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def drawn(runner: GdnRunner, rng: random.Random, plain: float) -> tuple[list[Row], list[int]]:
    """Rows of a step in any order: prompts in pieces, decode rows of any length, and with
    probability `plain` without drafts."""
    rows, accepted = [], []
    for slot in rng.sample(range(SLOTS), rng.randint(2, SLOTS)):
        request = runner.requests.get(slot)
        if request is None or request.computed > 60:
            runner.admit(slot, rng.randint(2, 14))
            request = runner.requests[slot]
        left = request.prompt - request.computed
        if left > 0:
            rows.append(Row(slot, rng.randint(2, left) if left > 2 else left, 0))
            accepted.append(1)
            continue
        drafts = 0 if rng.random() < plain else rng.randint(1, K)
        rows.append(Row(slot, 1 + drafts, drafts))
        accepted.append(rng.randint(1, 1 + drafts))
    return rows, accepted


def prefilled(runner: GdnRunner, slots: list[int], prompt: int) -> None:
    for slot in slots:
        runner.admit(slot, prompt)
    runner.step([Row(slot, prompt, 0) for slot in slots], [1] * len(slots))


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    bound = 2e-5 * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


@kernels
@alone
@pytest.mark.parametrize(
    ("mode", "channels_first"), [("align", False), ("align", True), ("none", False)]
)
def test_random_steps(mode: str, channels_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that mix prompts, drafts and rows without drafts, in any order."""
    runner = GdnRunner(mode, True, K, monkeypatch, channels_first)
    rng = random.Random(1)
    mixed = boundaries = 0
    for _ in range(14):
        rows, accepted = drawn(runner, rng, plain=0.3)
        out, expected = runner.step(rows, accepted)
        near(out, expected)
        mixed += any(row.draft for row in rows) and not all(row.draft for row in rows)
        for row in rows:
            request = runner.requests[row.slot]
            if runner.align and request.computed % 8 == 0:
                near(runner.boundary(row.slot), request.state)
                boundaries += 1
    assert mixed > 3
    assert boundaries > 2 * runner.align - 1


@kernels
@alone
@pytest.mark.parametrize("plain", [0.0, 0.5])
def test_vllms_own_is_right_but_for_rows_without_drafts(
    plain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner itself is right; and up to 0.31 vLLM starts a row without drafts from the state
    before the drafts that it accepted, where replay does not."""
    runner, rng = GdnRunner("none", False, K, monkeypatch), random.Random(2)
    worst = 0.0
    for _ in range(8):
        rows, accepted = drawn(runner, rng, plain)
        # If its decode rows do not come first, 0.25 to 0.27 also give them other rows' gates.
        both = sorted(zip(rows, accepted, strict=True), key=lambda pair: not pair[0].draft)
        rows, accepted = [row for row, _ in both], [kept for _, kept in both]
        out, expected = runner.step(rows, accepted)
        worst = max(worst, float((out - expected).abs().max() / expected.abs().max()))
    if plain and versions.plain_rows_run_as_prompts():
        assert worst > 0.01
    else:
        assert worst < 2e-5


@kernels
@alone
def test_a_captured_graphs_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = GdnRunner("align", True, K, monkeypatch)
    prefilled(runner, [3, 0, 2], 6)
    for accepted in ([1, 3, 4], [2, 1, 2], [4, 4, 1]):
        near(*runner.step([Row(slot, 1 + K, K) for slot in (2, 3, 0)], accepted, padded=2))


@kernels
@alone
def test_check_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds nothing, in a mixed batch too, and finds a state that is spoiled."""
    runner = GdnRunner("align", True, K, monkeypatch)
    prefilled(runner, [4, 1, 0], 5)
    runner.shared.checker = checker = ReplayChecker(runner.shared, SLOTS, logging.getLogger())
    drafts = [Row(slot, 1 + K, K) for slot in (0, 4, 1)]
    for accepted in ([3, 2, 4], [4, 1, 1]):
        runner.step(drafts, accepted)
    runner.admit(2, 9)
    runner.step([drafts[0], Row(2, 9, 0), drafts[2]], [2, 1, 3])
    found = checker.statistics()
    assert (found["checked_states"], found["checked_outputs"]) == (6, 6 * (1 + K))
    assert found["checked_boundaries"] > 0
    kinds = ("states", "outputs", "boundaries")
    assert [found[f"different_{kind}"] for kind in kinds] == [0, 0, 0]
    assert 0 < found["worst_states"] < 1e-5
    runner.layer.kv_cache[1][runner.table[1]] += 1
    runner.step(drafts, [1, 1, 1])
    found = checker.statistics()
    assert found["different_states"] == 1
    assert found["different_outputs"] == 1 + K


@kernels
@alone
def test_a_dummy_run_touches_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = GdnRunner("align", True, K, monkeypatch)
    prefilled(runner, [0, 1], 6)
    rows = [Row(slot, 1 + K, K) for slot in (0, 1)]
    runner.step(rows, [2, 3])
    # Block 0 is the null block, into which the convolution may write.
    states = (*runner.shared.rings, *(part[1:] for part in runner.layer.kv_cache))
    before = [part.clone() for part in states]
    runner.dummy(rows)
    for part, own in zip(states, before, strict=True):
        assert torch.equal(part.nan_to_num(), own.nan_to_num())
    near(*runner.step(rows, [1, 1]))


@kernels
@alone
def test_vllms_fused_kernel_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.28 on it would bypass `_forward_core`, and needs a state for every draft."""
    runner = GdnRunner("align", True, K, monkeypatch)
    there = hasattr(type(runner.layer).__mro__[3], "_can_use_fused_gdn_mtp_decode")
    assert there == (versions.parsed(vllm.__version__) >= (0, 28))
    assert not runner.layer._can_use_fused_gdn_mtp_decode(None)
