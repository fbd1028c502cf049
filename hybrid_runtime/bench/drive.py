"""Run a batch of requests to its end and time every step and token.

Steady steps are told apart exactly as `run_nemotron.py` does for vLLM: every row of the full batch
emits, none its first tokens, none its last, and the same held for the step before.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.cuda.nvtx import range as nvtx_range

from hybrid_runtime.engine import Engine, Request, SamplingParams
from hybrid_runtime.state import sync_guard

NOTHING_QUEUED = "nothing queued behind"
"""In the reason of a declared wait that the engine enters with less than a full step queued."""
_IMPLICIT = "synchronizing CUDA operation"


@dataclass(slots=True)
class HostWaits:
    """Waits of the host.

    count, seconds: explicit waits, and the time spent in them. undeclared: those outside `allowed`.
    starved: those entered with less than a full step queued: all undeclared ones, and the declared
    ones that say so. implicit: synchronising CUDA operations, not counted among the others.
    """

    count: int = 0
    seconds: float = 0.0
    undeclared: int = 0
    starved: int = 0
    implicit: int = 0

    def plus(self, now: HostWaits, before: HostWaits) -> HostWaits:
        """With what was added between two readings."""
        a, b, c = asdict(self), asdict(now), asdict(before)
        return HostWaits(**{name: a[name] + b[name] - c[name] for name in a})


@dataclass(slots=True)
class Run:
    """Raw figures of one run, times in seconds.

    wall: from the first `submit` to the last result. output_steps: steps that emitted tokens.
    steady: durations of the steady steps. steady_tokens: tokens that each row emitted in each of
    them. waits: of the host, in steady steps. state: the manager's `Stats`, from the first steady
    step to the last.
    """

    requests: list[Request]
    wall: float = 0.0
    output_steps: int = 0
    steady: list[float] = field(default_factory=list)
    steady_tokens: list[int] = field(default_factory=list)
    waits: HostWaits = field(default_factory=HostWaits)
    state: dict[str, float] = field(default_factory=dict)


def drive(
    engine: Engine,
    prompts: list[list[int]],
    osl: int,
    before_step: Callable[[bool], None] | None = None,
    nvtx: bool = False,
) -> Run:
    """Send all prompts, decode `osl` tokens for each.

    before_step: called before each step of the engine; the argument says whether the last results
    were those of a steady step. nvtx: mark each step with an NVTX range, "steady step" or "step".

    Raises:
        RuntimeError: a request failed.
    """
    with _watch() as read_waits:
        start = time.perf_counter()
        # Seeds of their own per row, the same in every run: strategies then emit the same tokens.
        run = Run(
            [
                engine.submit(prompt, SamplingParams(max_tokens=osl, ignore_eos=True, seed=row))
                for row, prompt in enumerate(prompts)
            ]
        )
        full = running = len(prompts)
        known = dict.fromkeys((r.id for r in run.requests), 0)
        steady = last_steady = False
        last, last_waits = start, read_waits()
        first_state: dict[str, float] | None = None
        while not engine.idle:
            if before_step is not None:
                before_step(steady)
            with nvtx_range("steady step" if steady else "step") if nvtx else nullcontext():
                touched = engine.step()
            now = time.perf_counter()
            if not touched:
                continue
            waits = read_waits()
            run.output_steps += 1
            whole = len(touched) == running == full
            begun = finished = 0
            here = []
            for request in touched:
                if request.error is not None:
                    if isinstance(request.error, torch.OutOfMemoryError):
                        raise request.error
                    what = f"request {request.id} failed: {request.error!r}"
                    raise RuntimeError(what) from request.error
                here.append(len(request.output) - known[request.id])
                begun += known[request.id] == 0
                known[request.id] = len(request.output)
                finished += request.finish_reason is not None
            steady = whole and not begun and not finished
            if steady and last_steady:
                run.steady.append(now - last)
                run.steady_tokens += here
                run.waits = run.waits.plus(waits, last_waits)
            if steady and first_state is None:
                first_state = asdict(engine.stats().state)
            if finished and first_state is not None and not run.state:
                run.state = _difference(asdict(engine.stats().state), first_state)
            # A step of first tokens may begin an interval; one with last tokens may not.
            last_steady = whole and not finished
            last, last_waits = now, waits
            running -= finished
        run.wall = time.perf_counter() - start
    return run


def summarize(run: Run) -> dict[str, Any]:
    """Figures of one run: named as in `run_nemotron.py` where they mean the same, ms, tokens/s.

    itl_ms: mean steady step over mean tokens per row in it. itl_ms_p50 / _p99: over the requests,
    each its own mean time per token after its first step. token_ms_p50 / _p99: over all tokens; a
    step's time is shared by the tokens that it emitted. steps: of the state manager, while steady.
    """
    steps = [1e3 * t for t in run.steady]
    first = [r.times[0] for r in run.requests]
    per_request = [
        1e3 * (r.times[-1][0] - r.times[0][0]) / (len(r.output) - 1)
        for r in run.requests
        if len(r.output) > 1 and len(r.times) > 1
    ]
    per_token = []
    for r in run.requests:
        for (before, _), (now, count) in pairwise(r.times):
            per_token += [1e3 * (now - before) / count] * count
    total = sum(len(r.output) for r in run.requests)
    mean = statistics.fmean(steps) if steps else None
    length = statistics.fmean(run.steady_tokens) if run.steady_tokens else None
    histogram = Counter(run.steady_tokens)
    return {
        "wall_s": run.wall,
        "output_tokens": total,
        "output_tok_s": total / run.wall,
        "decode_tok_s": sum(run.steady_tokens) / sum(run.steady) if steps else None,
        "ttft_ms_mean": 1e3
        * statistics.fmean(t - r.submitted for (t, _), r in zip(first, run.requests, strict=True)),
        "output_steps": run.output_steps,
        "timed_steps": len(steps),
        "step_ms_mean": mean,
        "step_ms_median": statistics.median(steps) if steps else None,
        "step_ms_p10": percentile(steps, 0.1),
        "step_ms_p90": percentile(steps, 0.9),
        "step_ms_p99": percentile(steps, 0.99),
        "step_ms_max": max(steps, default=None),
        "mean_acceptance_length": length,
        "itl_ms": mean / length if mean and length else None,
        "itl_ms_wall": statistics.fmean(per_request) if per_request else None,
        "itl_ms_p50": percentile(per_request, 0.5),
        "itl_ms_p99": percentile(per_request, 0.99),
        "token_ms_p50": percentile(per_token, 0.5),
        "token_ms_p99": percentile(per_token, 0.99),
        "tokens_per_step_hist": {str(k): histogram[k] for k in sorted(histogram)},
        "waits": asdict(run.waits),
        "state": run.state,
    }


def percentile(values: list[float], q: float) -> float | None:
    """As `run_nemotron.py` takes it; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


@contextmanager
def _watch() -> Iterator[Callable[[], HostWaits]]:
    """Count waits; implicit ones are counted too, where the guard by itself would raise."""
    implicit = 0

    def read() -> HostWaits:
        nonlocal implicit
        implicit += sum(_IMPLICIT in str(w.message) for w in caught)
        caught.clear()
        declared = sum(n for why, n in waits.reasons.items() if NOTHING_QUEUED in why)
        starved = waits.undeclared + declared
        return HostWaits(waits.count, waits.seconds, waits.undeclared, starved, implicit)

    with warnings.catch_warnings(record=True) as caught, sync_guard() as waits:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        yield read


def _difference(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: now[name] - before[name] for name in now}
