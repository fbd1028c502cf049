"""What the GPU does in steady steps, from a profiler trace: busy, idle, kernels, a timeline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hybrid_runtime.bench.drive import drive
from hybrid_runtime.bench.load import Load
from hybrid_runtime.engine import Engine

PLACES = r"^_advance(_replay)?_kernel$"
"""The kernel that every step launches first, once."""
PROMPTS = r"^_conv1d_varlen_kernel$"
"""One that only steps with prompts in them launch."""

LONG_GAP = 5.0
"""us: a longer gap between device operations is idle time, a shorter one belongs to launching."""

# First match wins. Kernels of this project by their whole names, those of libraries by parts.
KINDS = (
    (
        "bookkeeping",
        r"^_(advance|advance_replay|prepare_inputs|commit_tokens|accept_drafts|uniform|fill|part"
        r"|whole|count|penalise|bias|probabilities|select|place_rows|decide_flush|round|best)"
        r"_kernel$",
    ),
    (
        "state",
        r"^_?(selective_state_update|replay_update|flush|move|decide_move|steps|carry|outputs)"
        r"_kernel$",
    ),
    ("convolution", r"conv"),
    ("attention", r"^_(attention|reduce|store_kv)_kernel$|flash|fmha"),
    ("norm", r"^_norm_kernel$"),
    ("experts", r"^_(topk|align_block_size|fused_moe|moe_sum)_kernel$"),
    ("matrix products", r"^_propose_kernel$|gemm|gemv|nvjet|cutlass|splitk|cublas"),
    ("copies", r"memcpy|memset"),
    ("elementwise", r"^_(relu2|embedding|pooling)_kernel$|elementwise|triton_|cat|index"),
)


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel, copy or fill on the device; `start` and `end` in us."""

    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """What it is for, one of `KINDS` or "other"."""
        lower = self.name.lower()
        return next((kind for kind, pattern in KINDS if re.search(pattern, lower)), "other")


@dataclass(frozen=True, slots=True)
class Busy:
    """A trace from its first operation's start to its last one's end, in us.

    window: all of it. busy: while anything ran. idle: the sum of gaps longer than `LONG_GAP`.
    short_gaps: the sum of the others.
    """

    window: float
    busy: float
    idle: float
    short_gaps: float


def busy(operations: Sequence[tuple[float, float]]) -> Busy:
    """Busy and idle time of (start, end) intervals in us, in any order; they may overlap."""
    if not operations:
        return Busy(0.0, 0.0, 0.0, 0.0)
    ordered = sorted(operations)
    start, reached = ordered[0][0], ordered[0][0]
    idle = short = 0.0
    for begin, end in ordered:
        gap = begin - reached
        if gap > LONG_GAP:
            idle += gap
        elif gap > 0:
            short += gap
        reached = max(reached, end)
    window = reached - start
    return Busy(window, window - idle - short, idle, short)


def profile_steady(engine: Engine, load: Load, prompts: list[list[int]]) -> dict[str, Any] | None:
    """Trace `load.profile_steps` steady steps of one run; None where there is no GPU.

    Results lag the steps by one, so the steps are counted as they are launched, between two points
    at which the queue has been drained.
    """
    if load.profile_steps < 1 or engine.model.device.type != "cuda":
        return None
    tracer = profile(activities=[ProfilerActivity.CUDA])
    before: dict[str, Any] = {}
    launched = -1

    def before_step(steady: bool) -> None:
        nonlocal launched
        if launched < 0 and steady:
            _drain()
            before["candidates"] = engine.stats().state.candidate_rows
            tracer.start()
            launched = 0
        elif 0 <= launched < load.profile_steps:
            launched += 1
            if launched == load.profile_steps:
                _drain()
                tracer.stop()
                before["after"] = engine.stats().state.candidate_rows

    drive(engine, prompts, load.profile_osl, before_step)
    if launched < load.profile_steps:
        if launched >= 0:
            tracer.stop()
        return None
    report = analyse(device_operations(tracer), load.profile_steps)
    return report | {"candidates": before["after"] - before["candidates"]}


def device_operations(tracer: Any) -> list[Operation]:
    """Kernels, copies and fills of a finished trace, by start."""
    found = [
        Operation(event.name, event.time_range.start, event.time_range.end)
        for event in tracer.events()
        if str(event.device_type).endswith("CUDA")
        and not event.is_user_annotation
        and not re.search(r"ProfilerStep|Sync|Wait Event|Event Record", event.name)
    ]
    return sorted(found, key=lambda o: o.start)


def analyse(operations: list[Operation], steps: int) -> dict[str, Any]:
    """Per-step figures of a trace of `steps` steps: us, shares of the window, kernels by name, and
    one step's timeline as lines "start duration kind", us."""
    total = busy([(o.start, o.end) for o in operations])
    by_name: dict[str, list[float]] = {}
    by_kind: dict[str, float] = {}
    for o in operations:
        by_name.setdefault(o.name, []).append(o.end - o.start)
        by_kind[o.kind] = by_kind.get(o.kind, 0.0) + o.end - o.start
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    return {
        "steps": steps,
        "window_us_per_step": total.window / steps,
        "busy_us_per_step": total.busy / steps,
        "idle_us_per_step": total.idle / steps,
        "short_gaps_us_per_step": total.short_gaps / steps,
        "idle_share": total.idle / total.window if total.window else 0.0,
        "operations_per_step": len(operations) / steps,
        "us_by_kind": {
            kind: us / steps for kind, us in sorted(by_kind.items(), key=lambda item: -item[1])
        },
        "top": [
            {"name": name[:120], "us_per_step": sum(t) / steps, "per_step": len(t) / steps}
            for name, t in top[:30]
        ],
        "timeline": [
            f"{o.start - first:.1f} {o.end - o.start:.1f} {o.kind}"
            for first, part in [_one_step(operations, steps)]
            for o in part
        ],
    }


def cut_into_steps(operations: Sequence[Operation]) -> list[list[Operation]]:
    """The operations of each whole step: from one launch that places a step to the next."""
    starts = [i for i, o in enumerate(operations) if re.search(PLACES, o.name)]
    return [list(operations[a:b]) for a, b in pairwise(starts)]


def step_shares(operations: Sequence[Operation]) -> dict[str, dict[str, float]]:
    """Of steps with prompts in them ("mixed") and of the others ("decode"): how many, and per step
    us of window, busy and idle, and operations. A step's window ends where the next one begins."""
    found: dict[str, list[tuple[Busy, int]]] = {"mixed": [], "decode": []}
    steps = cut_into_steps(operations)
    for step, following in pairwise(steps):
        kind = "mixed" if any(re.search(PROMPTS, o.name) for o in step) else "decode"
        end = (following[0].start, following[0].start)
        found[kind].append((busy([*((o.start, o.end) for o in step), end]), len(step)))
    shares: dict[str, dict[str, float]] = {}
    for kind, parts in found.items():
        window = sum(b.window for b, _ in parts)
        if window:
            shares[kind] = {
                "steps": len(parts),
                "window_us_per_step": window / len(parts),
                "busy_us_per_step": sum(b.busy for b, _ in parts) / len(parts),
                "idle_share": sum(b.idle for b, _ in parts) / window,
                "operations_per_step": sum(n for _, n in parts) / len(parts),
            }
    return shares


def _one_step(operations: list[Operation], steps: int) -> tuple[float, list[Operation]]:
    """A step from the middle of the trace, and when it starts: from one launch of a kernel that
    every step launches once to the next; the first such kernel in a step."""
    counts = Counter(o.name for o in operations)
    marks = next((o.name for o in operations if counts[o.name] == steps), None)
    starts = [i for i, o in enumerate(operations) if o.name == marks]
    if len(starts) < 2:
        return (operations[0].start if operations else 0.0), operations
    middle = (len(starts) - 1) // 2
    part = operations[starts[middle] : starts[middle + 1]]
    return part[0].start, part


def _drain() -> None:
    # Inside `drive` a synchronisation would be counted as one of the engine's.
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
