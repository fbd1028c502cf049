"""Run a batch of requests to its end and time every step and token.

Steady steps are told apart exactly as `run_nemotron.py` does for vLLM: every row of the full batch
emits, none its first tokens, none its last, and the same held for the step before.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hybrid_runtime.engine import Engine, Request, SamplingParams


@dataclass(slots=True)
class Run:
    """Raw figures of one run, times in seconds.

    wall: from the first `submit` to the last result. steady: durations of the steady steps.
    steady_tokens: tokens that each row emitted in each of them.
    """

    requests: list[Request]
    wall: float = 0.0
    steady: list[float] = field(default_factory=list)
    steady_tokens: list[int] = field(default_factory=list)


def drive(
    engine: Engine,
    prompts: list[list[int]],
    osl: int,
    before_step: Callable[[], None] = lambda: None,
) -> Run:
    """Send all prompts, decode `osl` tokens for each.

    Raises:
        RuntimeError: a request failed.
    """
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
    may_begin = False  # an interval, at the last results
    last = start
    while not engine.idle:
        before_step()
        touched = engine.step()
        now = time.perf_counter()
        if not touched:
            continue
        whole = len(touched) == running == full
        begun = finished = 0
        here = []
        for request in touched:
            if isinstance(request.error, torch.OutOfMemoryError):
                raise request.error
            if request.error is not None:
                what = f"request {request.id} failed: {request.error!r}"
                raise RuntimeError(what) from request.error
            here.append(len(request.output) - known[request.id])
            begun += known[request.id] == 0
            known[request.id] = len(request.output)
            finished += request.finish_reason is not None
        steady = whole and not begun and not finished
        if steady and may_begin:
            run.steady.append(now - last)
            run.steady_tokens += here
        # A step of first tokens may begin an interval; one with last tokens may not.
        may_begin = whole and not finished
        last = now
        running -= finished
    run.wall = time.perf_counter() - start
    return run


def summarize(run: Run) -> dict[str, Any]:
    """Figures of one run: named as in `run_nemotron.py` where they mean the same, ms, tokens/s.

    itl_ms: mean steady step over mean tokens per row in it. itl_ms_p50 / _p99: over the requests,
    each its own mean time per token after its first step.
    """
    steps = [1e3 * t for t in run.steady]
    per_request = [
        1e3 * (r.times[-1][0] - r.times[0][0]) / (len(r.output) - 1)
        for r in run.requests
        if len(r.output) > 1 and len(r.times) > 1
    ]
    total = sum(len(r.output) for r in run.requests)
    mean = statistics.fmean(steps) if steps else None
    length = statistics.fmean(run.steady_tokens) if run.steady_tokens else None
    return {
        "wall_s": run.wall,
        "output_tokens": total,
        "output_tok_s": total / run.wall,
        "decode_tok_s": sum(run.steady_tokens) / sum(run.steady) if steps else None,
        "ttft_ms_mean": 1e3 * statistics.fmean(r.times[0][0] - r.submitted for r in run.requests),
        "timed_steps": len(steps),
        "step_ms_mean": mean,
        "step_ms_median": statistics.median(steps) if steps else None,
        "step_ms_p99": percentile(steps, 0.99),
        "mean_acceptance_length": length,
        "itl_ms": mean / length if mean and length else None,
        "itl_ms_p50": percentile(per_request, 0.5),
        "itl_ms_p99": percentile(per_request, 0.99),
    }


def percentile(values: list[float], q: float) -> float | None:
    """As `run_nemotron.py` takes it; None of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None
