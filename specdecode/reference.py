"""One speculative decoding step on one page: one request, plain torch, one line after another.

Order and letters are those of algorithm 1 in Leviathan et al. 2023 (arXiv 2211.17192): p is the
target's distribution, q the drafter's. What the paper leaves out is the state of a recurrent model,
which every token overwrites: here the step keeps one per position and picks that of the accepted
count. `runner.py` is the same step for many requests on a GPU; tests hold it against this page.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_runtime.specdecode.sampling import ACCEPT, DRAFT, TARGET

State = Any
"""What a target remembers of the tokens that it has read. Never changed in place."""

Random = Callable[[int, int], float]
"""A number in [0, 1) for a stream (DRAFT, ACCEPT or TARGET) and an index of the emitted tokens."""

Accept = Callable[[list[Tensor], list[Tensor], list[int], Random], tuple[int, int]]
"""From p `[V]` at every position, q `[V]` of every draft, the drafts, and random numbers: how many
drafts are accepted, and the target's token after them."""


class Target(Protocol):
    """A model that reads one token at a time."""

    def advance(self, state: State, token: int) -> State:
        """The state after one more token."""

    def probs(self, state: State) -> Tensor:
        """The distribution of the next token, float `[V]`; one-hot at temperature 0."""


Drafter = Callable[[State, Sequence[int]], Tensor]
"""The distribution of the next draft, float `[V]`, given the target's state and the tokens that
follow on it: the certain one and the drafts so far."""


class SpeculativeStep(NamedTuple):
    """What a step results in.

    tokens: accepted drafts, then one token of the target's own, which the next step reads first.
    state: the target's, after all tokens but the last.
    """

    tokens: list[int]
    state: State


def speculative_step(
    target: Target,
    drafter: Drafter,
    state: State,
    token: int,
    num_draft: int,
    accept: Accept,
    random: Random,
) -> SpeculativeStep:
    """Emit 1 .. num_draft + 1 tokens after `token`, the last one known, which is not in `state`."""
    # Draft: K tokens, each drawn from q given those before it.
    drafts: list[int] = []
    q: list[Tensor] = []
    for i in range(num_draft):
        q.append(drafter(state, [token, *drafts]))
        drafts.append(draw(q[i], random(DRAFT, i)))

    # Verify: one pass of the target over the certain token and all drafts.
    states: list[State] = []
    for read in [token, *drafts]:
        state = target.advance(state, read)
        states.append(state)
    p = [target.probs(state) for state in states]

    # Accept: n drafts, and a token of the target's own.
    n, own = accept(p, q, drafts, random)

    # Roll back: the states of rejected drafts are dropped.
    return SpeculativeStep([*drafts[:n], own], states[n])


def rejection(
    p: list[Tensor], q: list[Tensor], drafts: list[int], random: Random
) -> tuple[int, int]:
    """Speculative sampling: emitted tokens are distributed as p, whatever q is."""
    # Draft x is accepted with probability min(1, p(x) / q(x)), if those before it were.
    n = 0
    while n < len(drafts) and random(ACCEPT, n) * q[n][drafts[n]] < p[n][drafts[n]]:
        n += 1
    if n == len(drafts):
        return n, draw(p[n], random(TARGET, n))  # the bonus token
    residual = (p[n] - q[n]).clamp(min=0)
    # Only rounding can reject a draft where nothing is left of p - q.
    return n, draw(residual if residual.any() else p[n], random(TARGET, n))


def matching(
    p: list[Tensor], q: list[Tensor], drafts: list[int], random: Random
) -> tuple[int, int]:
    """Rejection for drafts that were chosen, not drawn: sample from p as if there were no drafts,
    and go on for as long as the tokens are those that were drafted."""
    n = 0
    while n < len(drafts) and draw(p[n], random(TARGET, n)) == drafts[n]:
        n += 1
    return n, draw(p[n], random(TARGET, n))


def draw(weights: Tensor, u: float) -> int:
    """The first token at which the cumulative share of `weights` `[V]` exceeds `u` in [0, 1)."""
    cumulative = weights.double().cumsum(0)
    return int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
