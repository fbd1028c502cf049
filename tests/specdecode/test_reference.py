"""The reference step emits exactly the target's distribution, whatever the drafts."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from hybrid_runtime.specdecode.reference import (
    Accept,
    SpeculativeStep,
    matching,
    rejection,
    speculative_step,
)
from hybrid_runtime.specdecode.sampling import ACCEPT, DRAFT, TARGET

# By the token before. Every number that a random one is compared with is a multiple of the grid's
# spacing: its midpoints stand for all random numbers, and shares of steps are exact.
P = torch.tensor([[4, 2, 1, 1], [1, 3, 2, 2], [3, 3, 1, 1], [2, 2, 2, 2]]) / 8
Q = torch.tensor([[1, 1, 1, 1], [2, 2, 0, 0], [1, 1, 1, 1], [0, 2, 0, 2]]) / 4
EIGHTHS = [(i + 0.5) / 8 for i in range(8)]
QUARTERS = [(i + 0.5) / 4 for i in range(4)]
State = tuple[int, ...]


class Chain:
    """A target whose state is all tokens that it has read."""

    def advance(self, state: State, token: int) -> State:
        return (*state, token)

    def probs(self, state: State) -> Tensor:
        return P[state[-1]]


def drawn(state: State, follow: Sequence[int]) -> Tensor:
    return Q[follow[-1]]


def chosen(state: State, follow: Sequence[int]) -> Tensor:
    """One-hot, and right now and then."""
    return torch.eye(4)[Q[follow[-1]].argmax()]


def all_steps(accept: Accept, num_draft: int, first: int) -> list[SpeculativeStep]:
    """The step under every combination of random numbers; all are equally likely."""
    grids = [[*product(QUARTERS, repeat=num_draft)], [*product(QUARTERS, repeat=num_draft)]]
    if accept is rejection:  # one token is the target's own, wherever it stands
        grids.append([(u,) * (num_draft + 1) for u in EIGHTHS])
    else:  # one at each position, and nothing else
        grids = [[(0.5,) * num_draft]] * 2 + [[*product(EIGHTHS, repeat=num_draft + 1)]]
    drafter = drawn if accept is rejection else chosen
    steps = []
    for numbers in product(*grids):
        by_stream = dict(zip((DRAFT, ACCEPT, TARGET), numbers, strict=True))
        random = partial(lambda known, stream, i: known[stream][i], by_stream)
        steps.append(speculative_step(Chain(), drafter, (9,), first, num_draft, accept, random))
    return steps


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("num_draft", [0, 1, 2])
@pytest.mark.parametrize("accept", [rejection, matching], ids=["rejection", "matching"])
def test_tokens_are_distributed_as_the_targets(accept: Accept, num_draft: int, first: int) -> None:
    steps = all_steps(accept, num_draft, first)
    counts: Counter[State] = Counter()
    for step in steps:
        for length in range(len(step.tokens) + 1):
            counts[tuple(step.tokens[:length])] += 1
    assert counts[()] == len(steps)
    # Of the steps that emit a token after some others, the share that emits x is p(x).
    for before in list(counts):
        follow = [counts[(*before, x)] for x in range(4)]
        p = P[before[-1] if before else first]
        assert follow == (p * sum(follow)).tolist(), before


def test_acceptance_is_as_high_as_it_can_be() -> None:
    # Corollary 3.6 of the paper: a draft is accepted with probability sum(min(p, q)).
    for first in range(4):
        lengths = [len(step.tokens) - 1 for step in all_steps(rejection, 1, first)]
        assert sum(lengths) / len(lengths) == torch.minimum(P[first], Q[first]).sum()


@pytest.mark.parametrize("accept", [rejection, matching], ids=["rejection", "matching"])
def test_the_state_is_that_of_all_tokens_but_the_last(accept: Accept) -> None:
    lengths = set()
    for step in all_steps(accept, 2, 1):
        assert step.state == (9, 1, *step.tokens[:-1])
        lengths.add(len(step.tokens))
    assert lengths == {1, 2, 3}
