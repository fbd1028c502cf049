"""Drive an engine through a list of requests and time every token; the same code for every engine.

`answer` makes a process of an engine, which a `Child` talks to: one line of JSON per run each way,
so that several engines can take turns on one GPU. Standard library only, as `workload`.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import workload
from workload import Ask

Row = dict[str, Any]


class Served(Protocol):
    """An engine."""

    def submit(self, number: int, ask: Ask) -> None:
        """Queue request `number`."""

    def step(self) -> Iterable[tuple[int, int, bool]]:
        """Run one step: request, how many tokens it just got, and whether it has ended."""

    def reset(self) -> None:
        """Forget cached prefixes."""

    def use(self, setting: Mapping[str, Any]) -> None:
        """From now on. budget: at most so many tokens a step, of prompts in ours, of all in vLLM;
        others are ours, see `serve_ours.py`."""

    @property
    def spare_time(self) -> float:
        """Seconds for which it is better to wait for requests than to call `step`."""


class Timed:
    """One request as its user sees it: seconds at which it was sent, and (seconds, tokens) of every
    arrival."""

    def __init__(self, sent: float) -> None:
        self.sent = sent
        self.arrivals: list[tuple[float, int]] = []


def drive(engine: Served, asks: Sequence[Ask], places: int | None) -> tuple[list[Timed], float]:
    """Serve all requests; their times, and seconds from the start to the last token.

    places: in a closed loop the next request is sent when one of so many ends. None: each is sent
    at its own time, from which it is timed even where the engine was busy then.
    """
    waiting = deque(enumerate(asks))
    timed: dict[int, Timed] = {}
    running = 0
    start = time.perf_counter()
    while waiting or running:
        now = time.perf_counter() - start
        while waiting:
            number, ask = waiting[0]
            if running >= places if places is not None else (ask.at or 0.0) > now:
                break
            waiting.popleft()
            timed[number] = Timed(now if places is not None else ask.at or 0.0)
            engine.submit(number, ask)
            running += 1
        arrives = places is None and waiting
        upcoming = max((waiting[0][1].at or 0.0) - now, 0.0) if arrives else math.inf
        if not running:
            time.sleep(upcoming)
            continue
        if spare := engine.spare_time:
            time.sleep(min(spare, upcoming))
            if upcoming < spare:
                continue
        results = engine.step()
        now = time.perf_counter() - start
        for number, tokens, ended in results:
            if tokens:
                timed[number].arrivals.append((now, tokens))
            running -= ended
    return [timed[number] for number in range(len(asks))], time.perf_counter() - start


def figures(
    timed: Sequence[Timed], wall: float, objective: Mapping[str, float], opening: int = 0
) -> Row:
    """What users feel: ms, s, tokens/s, requests/s.

    Tokens that arrive together share the time since the arrival before them. ttft_ms: without the
    first `opening` requests, which a closed loop sends all at once. itl_ms: over tokens, each
    request's first arrival left out. goodput: requests per second whose time to first token and own
    mean time per token are within `objective` (ms, keys "ttft" and "itl").
    """
    ttft, itl, whole, good = [], [], [], 0
    for one in timed:
        first, last = one.arrivals[0][0], one.arrivals[-1][0]
        ttft.append(1e3 * (first - one.sent))
        whole.append(last - one.sent)
        for (before, _), (now, count) in pairwise(one.arrivals):
            itl += [1e3 * (now - before) / count] * count
        later = sum(count for _, count in one.arrivals[1:])
        mean = 1e3 * (last - first) / later if later else 0.0
        good += ttft[-1] <= objective["ttft"] and mean <= objective["itl"]
    tokens = sum(count for one in timed for _, count in one.arrivals)
    arrivals = [count for one in timed for _, count in one.arrivals[1:]]
    return {
        "wall_s": wall,
        "output_tokens": tokens,
        "output_tok_s": tokens / wall,
        "requests_s": len(timed) / wall,
        "goodput_s": good / wall,
        "good_share": good / len(timed),
        "ttft_ms": spread(ttft[opening:]),
        "opening_ttft_ms": spread(ttft[:opening]),
        "itl_ms": spread(itl),
        "e2e_s": spread(whole),
        "tokens_per_arrival": statistics.fmean(arrivals) if arrivals else None,
    }


def spread(values: Sequence[float]) -> Row:
    """Mean, p50 and p99."""
    if not values:
        return {"mean": None, "p50": None, "p99": None}
    ordered = sorted(values)
    p50, p99 = (ordered[round((len(ordered) - 1) * share)] for share in (0.50, 0.99))
    return {"mean": statistics.fmean(ordered), "p50": p50, "p99": p99}


def answer(engine: Served, about: Row) -> None:
    """Serve the parent: say `about`, then run each list it names and say the figures."""
    say(about)
    for line in sys.stdin:
        asked = json.loads(line)
        engine.reset()
        engine.use(asked["setting"])
        asks, places = workload.read(Path(asked["requests"])), asked["places"]
        timed, wall = drive(engine, asks, places)
        say(figures(timed, wall, asked["objective"], places or 0))


_MARK = "serving: "


def say(value: Row) -> None:
    """To the parent. Engines print too, some of them to standard output."""
    print(_MARK + json.dumps(value), flush=True)


class Child:
    """A process that answers lines of JSON with lines of JSON.

    name: of the engine in it. switch: of vLLM's plug-in, which vLLM finds wherever this package is
    installed. log: where it writes what is no answer; None: to our standard error.
    """

    def __init__(
        self, name: str, command: Sequence[str], switch: str = "0", log: Path | None = None
    ) -> None:
        self.name, self.log = name, log
        with log.open("w") if log else nullcontext() as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | {"HYBRID_RUNTIME_VLLM": switch},
            )

    def ask(self, asked: Row) -> Row:
        """The figures of one run."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def hear(self) -> Row:
        """What it says next; first of all, once it is ready, of itself."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                said: Row = json.loads(line.removeprefix(_MARK))
                return said
            print(line, end="", file=sys.stderr)
        where = self.log or "above"
        raise RuntimeError(f"{self.name} ended with {self._process.wait()}; why: see {where}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
