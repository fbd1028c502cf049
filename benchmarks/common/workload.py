"""Request lists for `serve.py`: lengths, arrivals and acceptance by name. Standard library only, so
that a peer's process can read it whatever is installed there."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Uniform:
    """Whole numbers from `low` to `high`."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Whole numbers whose logarithm is normal around that of `median`, cut to `low .. high`."""

    median: int
    sigma: float
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        value = rng.lognormvariate(math.log(self.median), self.sigma)
        return min(max(round(value), self.low), self.high)


LENGTHS: dict[str, tuple[Uniform | LogNormal, Uniform | LogNormal]] = {
    "uniform": (Uniform(128, 2048), Uniform(64, 384)),
    "chat": (LogNormal(400, 1.1, 16, 8192), LogNormal(220, 0.8, 16, 1024)),
    "equal": (Uniform(1024, 1024), Uniform(256, 256)),
    "tiny": (Uniform(8, 40), Uniform(4, 12)),
}
"""Tokens of prompt and output, by name. "uniform" and "equal" are the loads of earlier tables,
"chat" is shaped like conversations: most are short, a few are long."""

CURVES = {
    "qwen3.5": (1.93, 2.73, 3.39, 3.97, 4.41, 4.80, 5.04, 5.21),
    "kimi-k3": (1.84, 2.45, 2.87, 3.22, 3.44, 3.54, 3.78, 3.88),
}
"""Tokens per step with 1, 2, ... drafts: Qwen3.5's MTP and Kimi-K3's DSpark on code, published in
InferenceX's `golden_al_distribution`."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: prompt, tokens of output, and seconds from the start at which it arrives; None:
    as soon as a place is free."""

    prompt: list[int]
    output: int
    at: float | None = None


def acceptance(name: str, drafts: int) -> tuple[float, ...] | None:
    """How often draft 1, 2, ... is accepted together with all before it. Where a published curve
    says more often than the one before, both have their mean.

    name: of `CURVES`; or a number, the mean tokens per step, which then vary as little as possible;
        or "real", as the model judges them: None.

    Raises:
        ValueError: another name, a number outside 1 .. drafts + 1, or a curve that is not known for
            so many drafts.
    """
    if name == "real" or not drafts:
        return None
    if name in CURVES:
        curve = (1.0, *CURVES[name])
        if drafts >= len(curve):
            raise ValueError(
                f"drafts is {drafts} with acceptance {name!r}; it must be at most {len(curve) - 1}"
            )
        return _falling([b - a for a, b in pairwise(curve[: drafts + 1])])
    try:
        mean = float(name)
    except ValueError:
        mean = math.nan
    if not 1 <= mean <= drafts + 1:
        known = ", ".join(CURVES)
        raise ValueError(
            f"acceptance is {name!r}; it must be real, {known} or a number in 1..{drafts + 1}"
        )
    return tuple(min(max(mean - 1 - i, 0.0), 1.0) for i in range(drafts))


def _falling(rates: list[float]) -> tuple[float, ...]:
    """Means of as few neighbours as make them fall."""
    means: list[tuple[float, int]] = []
    for rate in rates:
        mean, count = rate, 1
        while means and means[-1][0] < mean:
            before, number = means.pop()
            mean = (mean * count + before * number) / (count + number)
            count += number
        means.append((mean, count))
    return tuple(round(mean, 6) for mean, count in means for _ in range(count))


def make(
    lengths: str,
    count: int,
    vocabulary: int,
    seed: int,
    rate: float | None = None,
    prefixes: int = 0,
    prefix_tokens: int = 0,
) -> list[Ask]:
    """Requests with random tokens.

    lengths: of `LENGTHS`. rate: mean arrivals per second (Poisson); None: a closed loop.
    prefixes, prefix_tokens: each prompt starts with one of so many texts of so many tokens, besides
    its own.
    """
    rng = random.Random(seed)
    low, high = min(10, vocabulary // 2), max(vocabulary - 10, vocabulary // 2 + 1)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(low, high) for _ in range(n)]

    shared = [tokens(prefix_tokens) for _ in range(prefixes)]
    prompt, output = LENGTHS[lengths]
    asks = []
    for _ in range(count):
        begin = rng.choice(shared) if shared else []
        asks.append(Ask([*begin, *tokens(prompt.draw(rng))], output.draw(rng)))
    if rate is not None:
        times = accumulate(rng.expovariate(rate) for _ in asks)
        asks = [Ask(a.prompt, a.output, at) for a, at in zip(asks, times, strict=True)]
    return asks


def longest(lengths: str, prefix_tokens: int = 0) -> int:
    """Most tokens of a request, prompt and output together."""
    return prefix_tokens + sum(part.high for part in LENGTHS[lengths])


def write(path: Path, asks: Sequence[Ask]) -> None:
    """Both engines read the same file."""
    path.write_text(json.dumps([asdict(ask) for ask in asks]))


def read(path: Path) -> list[Ask]:
    return [Ask(**ask) for ask in json.loads(path.read_text())]
