"""Requests as they reach a server: which beginnings they share, and how often they come back.

A trace is an endless sequence of `Arrival`, the same one for the same arguments. No token is drawn:
what has not been said before gets numbers that nothing else has, because only what is equal counts.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, cycle
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
GENERATION_PROMPT = 4
"""Tokens between the end of the last message and the answer."""


class Arrival(NamedTuple):
    """prompt, answer: tokens. ends: positions that the prompt names, as `Engine.chat` names them.
    kind: what has sent it."""

    prompt: Tokens
    answer: Tokens
    ends: tuple[int, ...]
    kind: str


class Source:
    """Draws lengths, and hands out tokens that nobody has had before."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._next = 0

    def fresh(self, tokens: int) -> Tokens:
        self._next += tokens
        return np.arange(self._next - tokens, self._next, dtype=np.int32)

    def about(self, tokens: int) -> Tokens:
        """Between half of it and half more."""
        return self.fresh(self.draw.randint(tokens // 2, tokens * 3 // 2))


@dataclass
class Chat:
    """A system prompt that others share; each message and each answer stays."""

    source: Source
    head: Tokens
    turns: int
    said: list[Tokens] = field(default_factory=list)

    def turn(self) -> Arrival:
        self.said.append(self.source.about(200))
        prompt = np.concatenate([self.head, *self.said, self.source.fresh(GENERATION_PROMPT)])
        answer = self.source.about(300)
        self.said += [prompt[-GENERATION_PROMPT:], answer]
        self.turns -= 1
        return Arrival(prompt, answer, (len(self.head), len(prompt) - GENERATION_PROMPT), "chat")


@dataclass
class Agent:
    """A head with tools that others share, a context of its own, user messages, and behind each
    some calls of tools. What it thinks is dropped from the text at the next user message."""

    source: Source
    head: Tokens
    turns: int
    calls: int = 0
    said: list[Tokens] = field(default_factory=list)
    since: list[tuple[Tokens, bool]] = field(default_factory=list)

    def turn(self) -> Arrival:
        source = self.source
        if not self.said:
            self.said.append(source.about(10000))
        if not self.calls:
            self.said += [tokens for tokens, thought in self.since if not thought]
            self.said.append(source.about(600))
            self.since, self.calls = [], source.draw.randint(1, 5)
        else:
            self.since.append((source.about(1200), False))
        last = np.concatenate([self.head, *self.said])
        prompt = np.concatenate(
            [last, *(tokens for tokens, _ in self.since), source.fresh(GENERATION_PROMPT)]
        )
        thought, answer = source.about(800), source.about(250)
        self.since += [(prompt[-GENERATION_PROMPT:], False), (thought, True), (answer, False)]
        self.calls -= 1
        self.turns -= 1
        ends = len(self.head), len(last)
        return Arrival(prompt, np.concatenate([thought, answer]), ends, "agent")


@dataclass
class Document:
    """A long text that is asked about once."""

    source: Source

    def turn(self) -> Arrival:
        prompt = self.source.fresh(self.source.draw.randint(8000, 32000))
        ends = (len(prompt) - GENERATION_PROMPT,)
        return Arrival(prompt, self.source.about(300), ends, "document")


@dataclass
class FewShot:
    """Examples that others share, and a question of its own."""

    source: Source
    head: Tokens

    def turn(self) -> Arrival:
        prompt = np.concatenate([self.head, self.source.about(100)])
        ends = len(self.head), len(prompt) - GENERATION_PROMPT
        return Arrival(prompt, self.source.about(20), ends, "few-shot")


class Popular:
    """Draws among `count`, the one of rank `r` in proportion to `r ** -skew`."""

    def __init__(self, source: Source, count: int, skew: float) -> None:
        self._draw = source.draw
        self._sums = [*accumulate(rank**-skew for rank in range(1, count + 1))]

    def __call__(self) -> int:
        return bisect(self._sums, self._draw.random() * self._sums[-1])


@dataclass(frozen=True)
class Mix:
    """What a trace is made of.

    chats, agents: that are open at any time; one that has said all is replaced. skew: of how often
    they come back, the exponent of Zipf's law; 0: all alike.
    shares: of all arrivals, by kind.
    heads: shared beginnings, of chats, agents and few-shot prompts.
    in_turn: they come back in turn, whatever `skew` is.
    """

    chats: int
    agents: int
    skew: float
    shares: dict[str, float]
    heads: tuple[int, int, int] = (8, 3, 4)
    in_turn: bool = False


def trace(mix: Mix, seed: int = 0) -> Iterator[Arrival]:
    source = Source(seed)
    draw = source.draw

    def heads(count: int, tokens: int) -> Callable[[], Tokens]:
        made, which = [source.about(tokens) for _ in range(count)], Popular(source, count, 1.0)
        return lambda: made[which()]

    def chosen(count: int) -> Callable[[], int]:
        return cycle(range(count)).__next__ if mix.in_turn else Popular(source, count, mix.skew)

    system, tools, examples = map(heads, mix.heads, (2000, 6000, 3000))
    chats = [Chat(source, system(), draw.randint(2, 16)) for _ in range(mix.chats)]
    agents = [Agent(source, tools(), draw.randint(3, 24)) for _ in range(mix.agents)]
    which_chat, which_agent = map(chosen, (mix.chats, mix.agents))
    kinds, shares = [*mix.shares], [*mix.shares.values()]
    while True:
        kind = draw.choices(kinds, shares)[0]
        if kind == "chat":
            at = which_chat()
            yield chats[at].turn()
            if not chats[at].turns:
                chats[at] = Chat(source, system(), draw.randint(2, 16))
        elif kind == "agent":
            at = which_agent()
            yield agents[at].turn()
            if not agents[at].turns:
                agents[at] = Agent(source, tools(), draw.randint(3, 24))
        elif kind == "document":
            yield Document(source).turn()
        else:
            yield FewShot(source, examples()).turn()
