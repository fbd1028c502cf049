"""How long queued steps will keep the device busy, told from how long such steps took before."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import NamedTuple

from hybrid_runtime.specdecode.shape import StepShape

RECENT, ENOUGH = 8, 3
"""Steps of a size that are remembered, and how many of them tell its cost."""
AT_ONCE = 50e-6
"""Seconds. Results that were there sooner had been waiting to be read."""
MARGIN = 300e-6
"""Seconds by which a step is queued too early at least: sleeping threads wake up late."""


class Took(NamedTuple):
    """How long a step kept the device busy, where that can be told."""

    shape: StepShape
    seconds: float


class Pace:
    """When the next step must be queued, so that the device never waits for it.

    A request that comes while a step is queued waits for all of that step. So the next one should
    be queued late, but before the last queued one has run. A step has taken from when the results
    before it were there, or from when it was queued if that came later, until its own results were
    there. Its estimate is the shortest of the last few of its size, or of the next smaller size
    that is known, with fewer rows or fewer drafts of a row: it errs towards queueing too early,
    which is what is done without it.

    All times are seconds of one clock.
    """

    def __init__(self) -> None:
        # Of rows that decode, by tokens of a row: drafts may cost as much as rows.
        self._decode: defaultdict[int, _Costs] = defaultdict(lambda: _Costs(8))
        self._prompt = _Costs(256)
        self._queued: deque[tuple[int, StepShape, float]] = deque()
        self._lead: deque[float] = deque([0.0], RECENT)
        self._began = self._read = 0.0
        self._due = math.inf  # when a host that was told to wait should begin

    def begin(self, now: float) -> None:
        """The host begins to make a step."""
        self._began = now

    def queued(self, number: int, shape: StepShape, now: float) -> None:
        """Step `number` has been queued."""
        self._queued.append((number, shape, now))
        self._lead.append(now - min(self._began, self._due))
        self._due = math.inf

    def read(self, number: int, asked: float, now: float) -> Took | None:
        """The results of step `number` were asked for, and are there now; how long it took, unless
        it had been done for some time. Steps queued before it have been given up."""
        exact = None
        while self._queued and self._queued[0][0] <= number:
            found, shape, since = self._queued.popleft()
            if found == number:
                took = now - max(self._read, since)
                if now - asked < AT_ONCE:  # it had been done for some time
                    took = 0.9 * min(took, self._cost(shape) or took)
                else:
                    exact = Took(shape, took)
                self._learn(shape, took)
        self._read = now
        return exact

    def spare(self, now: float) -> float:
        """Seconds for which the next step need not be begun; 0 where nothing is queued."""
        if not self._queued:
            return 0.0
        start = max(self._read, self._queued[0][2])
        end = start + sum(self._cost(shape) for _, shape, _ in self._queued)
        spare = max(end - max(self._lead) - MARGIN - now, 0.0)
        if spare:
            self._due = now + spare
        return spare

    def _cost(self, shape: StepShape) -> float:
        rows, decode = shape.decode_rows, 0.0
        tokens = shape.decode_tokens // max(rows, 1)
        while not decode and tokens:
            if tokens in self._decode:
                decode = self._decode[tokens].of(rows)
            tokens -= 1
        return decode + self._prompt.of(shape.prompt_tokens)

    def _learn(self, shape: StepShape, took: float) -> None:
        decode = self._decode[shape.decode_tokens // max(shape.decode_rows, 1)]
        if not shape.prompt_tokens:
            decode.add(shape.decode_rows, took)
        elif not shape.decode_rows or decode.knows(shape.decode_rows):
            self._prompt.add(shape.prompt_tokens, took - decode.of(shape.decode_rows))


class _Costs:
    """Seconds by size; sizes up to the same multiple of `multiple` are one."""

    def __init__(self, multiple: int) -> None:
        self._multiple = multiple
        self._seen: dict[int, deque[float]] = {}

    def add(self, size: int, seconds: float) -> None:
        self._seen.setdefault(-(-size // self._multiple), deque(maxlen=RECENT)).append(seconds)

    def knows(self, size: int) -> bool:
        return len(self._seen.get(-(-size // self._multiple), ())) >= ENOUGH

    def of(self, size: int) -> float:
        """The least that a step of this size costs; 0.0 if nothing is known of it or smaller
        ones."""
        for at in range(-(-size // self._multiple), 0, -1):
            seen = self._seen.get(at, ())
            if len(seen) >= ENOUGH:
                return max(min(seen), 0.0)
        return 0.0
