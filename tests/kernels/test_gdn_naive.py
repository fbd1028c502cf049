"""The specification of Gated DeltaNet: token by token as others wrote it, and from a state that
lacks some tokens the same."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from helpers.gdn_cases import Gdn, History, relative, token_inputs
from helpers.interpreter import plain
from helpers.marks import slow
from hypothesis import given
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from hybrid_runtime.kernels.gdn.naive import (
    delta_rule_reference,
    delta_rule_replayed_reference,
    fold_replayed_reference,
    gates,
    replay_update_reference,
)

pytestmark = plain

FP64 = {"x": torch.float64, "states": torch.float64}
SHAPES = st.builds(
    Gdn,
    x=st.just(torch.float64),
    heads=st.sampled_from([2, 4, 6]),
    key_heads=st.sampled_from([1, 2]),
    key=st.integers(1, 9),
    value=st.integers(1, 9),
    kda=st.booleans(),
)


def drawn(shape: Gdn, tokens: int, seed: int) -> tuple[Tensor, list[Tensor]]:
    """A state, and q, k, v, g, beta of each token."""
    generator = torch.Generator().manual_seed(seed)
    given = shape.inputs(generator, tokens) | shape.vectors(generator)
    return torch.randn(shape.matrix, generator=generator, dtype=shape.x), token_inputs(shape, given)


@pytest.mark.parametrize("seed", [0, 3])
def test_token_by_token_as_transformers_has_it(seed: int) -> None:
    """The layer's own kernel on a CPU, which computes in fp32 and keeps states as [K, V]."""
    shape = Gdn(x=torch.float32, heads=6, key_heads=2, key=16, value=8)
    generator = torch.Generator().manual_seed(seed)
    given = shape.inputs(generator, 23) | shape.vectors(generator)
    state = torch.randn(shape.matrix, generator=generator)
    g, beta = gates(*(given[name] for name in ("a", "b", "A_log", "dt_bias")), torch.float32)
    q, k, v = (given[name][None] for name in ("q", "k", "v"))
    theirs, end = torch_recurrent_gated_delta_rule(
        q, k, v, g[None], beta[None], state.mT[None], True, use_qk_l2norm_in_kernel=True
    )
    ours, _, after = delta_rule_reference(state.double(), *token_inputs(shape, given))
    assert relative(theirs[0], ours) < 1e-6
    assert relative(end[0].mT, after) < 1e-6


@given(shape=SHAPES, tokens=st.integers(1, 16), pending=st.integers(0, 31), seed=st.integers(0, 99))
def test_a_state_that_lacks_tokens_gives_the_same(
    shape: Gdn, tokens: int, pending: int, seed: int
) -> None:
    state, every = drawn(shape, pending + tokens, seed)
    _, k, _, g, _ = every
    o, u, after = delta_rule_reference(state, *every)
    past = u[:pending], k[:pending], g[:pending]
    got_o, got_u = delta_rule_replayed_reference(state, past, *(x[pending:] for x in every))
    torch.testing.assert_close(got_o, o[pending:], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(got_u, u[pending:], rtol=1e-11, atol=1e-12)
    folded = fold_replayed_reference(state, u, k, g)
    torch.testing.assert_close(folded, after, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
def test_a_state_that_lacks_tokens_gives_the_same_in_fp32(kda: bool) -> None:
    """Nothing is lost where a token erases the state, nor where keys are all the same."""
    shape = Gdn(x=torch.float64, heads=4, key=32, value=32, kda=kda)
    state, every = drawn(shape, 40, 1)
    every[1][10:20] = every[1][10]
    every[3][5::7] = -300.0
    o, u, _ = delta_rule_reference(state, *every)
    narrow = [part.float() for part in every]
    past = u[:31].float(), narrow[1][:31], narrow[3][:31]
    got_o, got_u = delta_rule_replayed_reference(state.float(), past, *(x[31:] for x in narrow))
    assert relative(got_o, o[31:]) < 5e-7
    assert relative(got_u, u[31:]) < 5e-7


@pytest.mark.parametrize("kda", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("ring_tokens", [0, 4, 15, 31])
@pytest.mark.parametrize("drafts", [0, 1, 3, *slow(15)])
def test_reference_follows_the_recurrence(drafts: int, ring_tokens: int, kda: bool) -> None:
    """Over steps with checkpoints among accepted drafts, behind them, and none."""
    shape = Gdn(**FP64, drafts=drafts, tokens=drafts + 1, ring_tokens=ring_tokens, key=5, value=3)
    history = History(replace(shape, kda=kda), slots=4, seed=drafts, block=drafts + 3)
    for _ in range(25):
        y, want = history.step(replay_update_reference)
        torch.testing.assert_close(y, want, rtol=1e-11, atol=1e-11)
        assert max([0.0, *history.errors()]) < 1e-12
    assert len(history.checkpoints) > 2


def test_states_of_either_order_hold_the_same() -> None:
    """[V, K], and [K, V] seen through its strides."""
    shape = Gdn(x=torch.float32, key=6, value=4)
    runs = [History(replace(shape, transposed=flag), 3, seed=0, block=5) for flag in (False, True)]
    assert runs[0].states.stride() != runs[1].states.stride()
    for _ in range(20):
        outputs = [run.step(replay_update_reference)[0] for run in runs]
        assert torch.equal(*outputs)
    assert torch.equal(*(run.states.nan_to_num() for run in runs))
    assert max(runs[1].errors()) < 1e-6


@pytest.mark.slow
def test_error_of_fp32_stays_small_over_many_tokens() -> None:
    shape = Gdn(x=torch.float32, heads=4, key=32, value=32)
    history = History(shape, slots=1, seed=0)
    worst = 0.0
    for _ in range(1200):
        history.step(replay_update_reference)
        worst = max([worst, *history.errors()])
    assert history.certain[0] > 3000
    assert worst < 1e-6
