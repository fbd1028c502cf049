"""The replay layout over many steps: its reference and its kernel against the columns layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.interpreter import CUDA, elsewhere, kernels, plain, run_in_interpreter
from helpers.marks import slow
from helpers.replay_cases import ROUNDS, History, Ssm

from hybrid_runtime.kernels.mamba2.naive import replay_update_reference
from hybrid_runtime.kernels.mamba2.replay_update import replay_update
from hybrid_runtime.kernels.replay.ring import SHORT_RING_TOKENS


@pytest.mark.slow
@elsewhere
def test_kernels_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@plain
@pytest.mark.parametrize("ring_tokens", ["0", "tightest", "15", "31"])
@pytest.mark.parametrize("drafts", [0, 1, 3, *slow(15)])
def test_reference_follows_the_columns_layout(drafts: int, ring_tokens: str) -> None:
    """With the states in memory as old as the ring allows."""
    most = min(drafts + 1, SHORT_RING_TOKENS) if ring_tokens == "tightest" else int(ring_tokens)
    shape = Ssm(
        x=torch.float64, states=torch.float64, drafts=drafts, tokens=drafts + 1, ring_tokens=most
    )
    checkpoints = 0
    for seed in range(2):
        history = History(shape, slots=4, seed=seed, block=drafts + 3)
        for _ in range(25):
            y, wide = history.step(replay_update_reference)
            torch.testing.assert_close(y, wide, rtol=1e-11, atol=1e-11)
            checkpoints += history.check(1e-12)
    assert checkpoints > 15


@plain
def test_the_longest_window_is_used_whole() -> None:
    shape = Ssm(x=torch.float64, states=torch.float64)
    history = History(shape, slots=1, seed=0, block=1 << 30)
    lacks = []
    for _ in range(200):
        y, wide = history.step(replay_update_reference)
        torch.testing.assert_close(y, wide, rtol=1e-11, atol=1e-11)
        lacks.append(history.certain[0] + history.fold[0] - history.written[0])
    assert max(lacks) == SHORT_RING_TOKENS


def plain_decode(update: Any, ring_tokens: int, tolerance: float) -> None:
    """One token a step, with every number of pending ones, several times round the ring."""
    shape = Ssm(x=torch.float32, drafts=0, tokens=1, heads=1, groups=1, ring_tokens=ring_tokens)
    history = History(shape, slots=1, seed=ring_tokens, block=1 << 30)
    written = []
    for number in range(3 * ring_tokens + 5):
        y, wide = history.step(update)
        torch.testing.assert_close(y, wide, rtol=tolerance, atol=tolerance)
        history.check(tolerance)
        written += [number] if history.written[0] == number + 1 else []
    assert written == [*range(0, 3 * ring_tokens + 5, ring_tokens + 1)]


@plain
@pytest.mark.parametrize("ring_tokens", [0, 4, 15, 31])
def test_plain_decode_by_the_reference(ring_tokens: int) -> None:
    plain_decode(replay_update_reference, ring_tokens, 1e-5)


@kernels
@pytest.mark.parametrize("ring_tokens", [4, 15, 31])
def test_plain_decode_by_the_kernel(ring_tokens: int) -> None:
    plain_decode(replay_update, ring_tokens, 1e-5)


def histories(update: Any, shape: Ssm, rings: list[int], steps: int, tolerance: float) -> None:
    """The same requests with rings of several lengths: the same outputs and checkpoints."""
    block = shape.drafts + 3
    runs = [History(replace(shape, ring_tokens=w), slots=3, seed=5, block=block) for w in rings]
    checkpoints = 0
    for _ in range(steps):
        (want, _), *others = [run.step(update) for run in runs]
        for got, _ in others:
            assert (got - want).abs().max() <= tolerance * want.abs().max()
        for slot in runs[0].checkpoints:
            kept, *theirs = [run.live(1)[slot] for run in runs]
            for state in theirs:
                assert (state - kept).abs().max() <= tolerance * kept.abs().max()
            checkpoints += 1
    assert checkpoints > steps // 2
    assert len({tuple(run.written) for run in runs}) > 1


@plain
@pytest.mark.parametrize("states", [torch.float32, *slow(torch.float16)], ids=str)
def test_the_window_changes_nothing(states: torch.dtype) -> None:
    """Not a bit, as far as states are not rounded when they are written."""
    shape = Ssm(x=torch.float32, states=states)
    tolerance = 0.0 if states == torch.float32 else 4 * ROUNDS[states]
    histories(replay_update_reference, shape, [0, 4, 15, 31], 40, tolerance)


@kernels
@pytest.mark.parametrize("states", [torch.float32, torch.float16], ids=str)
def test_the_window_changes_nothing_in_the_kernel(states: torch.dtype) -> None:
    shape = Ssm(x=torch.float32, states=states, heads=1, groups=1)
    histories(replay_update, shape, [0, 4, 15, 31], 40 if CUDA else 12, 4 * ROUNDS[states])


@pytest.mark.slow
@plain
def test_error_of_fp32_stays_small_over_many_tokens() -> None:
    shape = Ssm(x=torch.float32, heads=8, groups=2)
    history = History(shape, slots=2, seed=0, block=1 << 30)
    for _ in range(800):
        history.step(replay_update_reference)
    history.check(5e-6)
    assert min(history.certain) > 1000


@kernels
@pytest.mark.parametrize(
    ("drafts", "ring_tokens"),
    [(0, 15), (1, 15), (3, 0), (3, 4), (3, 15), (3, 31), (5, 15), (15, 0), (15, 15), (15, 31)],
)
def test_kernel_follows_the_columns_layout(drafts: int, ring_tokens: int) -> None:
    shape = Ssm(
        x=torch.float32,
        drafts=drafts,
        tokens=drafts + 1,
        heads=1,
        groups=1,
        ring_tokens=ring_tokens,
    )
    history = History(shape, slots=4, seed=drafts, block=drafts + 2)
    checkpoints = 0
    for _ in range(40 if CUDA else 15):
        y, wide = history.step(replay_update)
        assert (y - wide).abs().max() <= 1e-5 * wide.abs().max()
        checkpoints += history.check(1e-5)
    assert checkpoints > 5
