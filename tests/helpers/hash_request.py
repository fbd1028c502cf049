"""What the rolling-hash model keeps for each request and step, beside the manager: the truth that
`hash_model` checks it against."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_runtime.state.step import Step

Row = tuple[int, int, list[int], int]
"""(slot, certain tokens, drafts, accepted); accepted 0: unfinished prefill, or dead with drafts."""
PRIME = 2039  # every hash is an integer below 2**11: exact in float16
TOKENS = 251  # every token is below 2**8: exact in bfloat16


def prefix_hash(tokens: list[int]) -> int:
    value = 1
    for token in tokens:
        value = (value * 31 + token + 1) % PRIME
    return value


def assert_state(window: Tensor, ssm: Tensor, tokens: list[int]) -> None:
    """A window `[3, channels]` and an SSM state are those of exactly `tokens`."""
    last = ([0, 0, 0] + [t + 1 for t in tokens])[-3:]
    want, got = prefix_hash(tokens), ssm.float().flatten().tolist()
    assert got == [want] * len(got), (got[0], want)
    assert window.float().tolist() == [[t] * window.shape[1] for t in last]


def store_state(window: Tensor, ssm: Tensor, tokens: list[int]) -> None:
    """Make a window `[>= 3, channels]` and an SSM state those of exactly `tokens`."""
    last = torch.tensor(([0, 0, 0] + [t + 1 for t in tokens])[-3:])
    window[:3] = last.to(window)[:, None]
    ssm.fill_(prefix_hash(tokens))


@dataclass
class Request:
    """A request with its exact history, and what its host is allowed to know of it."""

    slot: int
    tokens: list[int]  # prompt and everything emitted: the token at position n is fed next
    computed: int = 0
    known: int = 0  # computed tokens as of the last result that the host has read
    generation: int = 0
    blocks: list[dict[int, int]] = field(default_factory=list)  # per group {column: block id}
    in_flight: list[tuple[int, int]] = field(default_factory=list)  # (most, least) advance
    rule: tuple[int, tuple[int, ...]] = (0, ())  # which boundaries are retained
    named: tuple[int, ...] = ()  # replay: positions that its last row named
    place: tuple[int, int] = (-1, 0)  # where its state lies: column and offset
    certain: int = 0  # replay: computed tokens without the drafts that were accepted last
    written: int = 0  # replay: tokens in that state
    stepped: bool = False  # replay: a verify pass has run
    dead: bool = False
    taken: Counter[int] = field(default_factory=Counter)  # how often a column has got new blocks
    published: dict[int, int] = field(default_factory=dict)  # that number when its checkpoint was

    def still_has(self, column: int) -> bool:
        """Whether a column that held a checkpoint does so: none of its blocks was given back."""
        return self.published.get(column, self.taken[column]) == self.taken[column]

    def keeps(self, boundary: int) -> bool:
        every, positions = self.rule
        return bool(every and boundary % every == 0) or boundary in positions

    def passes(self, certain: int, block: int) -> list[int]:
        """Retained boundaries that so many more tokens reach or pass."""
        reached = range(self.computed + 1, self.computed + certain + 1)
        return [b for b in reached if b % block == 0 and self.keeps(b)]


@dataclass(eq=False)
class Open:
    """A begun step: its rows, whose they are (None: padded), and the checkpoints it may leave."""

    step: Step
    plan: list[Row]
    requests: list[Request | None]
    starts: list[int]  # tokens computed before
    checkpoints: list[set[int]]  # boundaries retained when it began
    ran: bool = False
    abandoned: bool = False


@dataclass
class Kept:
    """A published checkpoint that holds on to its blocks, one per group."""

    tokens: list[int]
    blocks: list[int]
