"""Open-loop load with everything that goes wrong in service: too little memory, users who leave,
deadlines, failing drafters, allocations and tokenizers. Each finished text must be the one that the
request gets alone; each text that was cut short must be its beginning; nothing may be left behind.

    python benchmarks/engine/soak.py --short
    python benchmarks/engine/soak.py --requests 20000 --seconds 420 --state soak.state \
        --out soak.json
    python benchmarks/engine/soak.py merge a.json b.json --out soak.json

Arrivals are drawn per step, not per second, so a run's load does not depend on the machine. The
long form runs in parts, one after the other (`--state` keeps counters between them) or side by side
with a `--seed` each; `merge` adds them up.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import resource
import sys
import sysconfig
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import numpy as np
import torch
from record import arguments, save

from hybrid_runtime.engine import Engine, QueueFull, Request, SamplingParams
from hybrid_runtime.engine.config import EngineOptions
from hybrid_runtime.kernels.sampling.naive import probabilities_reference, sample_reference
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.specdecode.sampling import (
    TARGET,
    uniform,
)

CHECKPOINT = Path(__file__).parents[2] / "hybrid_runtime" / "checkpoints" / "python-small"
BAD = ("wrong", "beginnings wrong", "unexpected errors", "leaked")
"""Counts that must be 0."""
SAMPLES = 20
"""How often memory is read while the requests come."""
TIE = 1e-3
"""Best logits closer than this, or a random number so close to a token's edge, may go either way:
the batch's shape changes the order of sums."""


@dataclass(frozen=True)
class Case:
    """One of the distinct requests, and what it gets alone."""

    prompt: list[int]
    params: SamplingParams
    alone: list[int]
    text: str


class Injected(RuntimeError):
    """A failure that this benchmark causes."""


class Fault:
    """Raises once after it was armed, wherever it is called; never while a graph is captured."""

    def __init__(self, counts: Counter[str]) -> None:
        self.armed: str | None = None
        self._counts = counts

    def __call__(self, where: str) -> None:
        if self.armed != where:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self.armed = None
        self._counts[f"injected {where}"] += 1
        raise Injected(where)


class FailingDrafter:
    """A drafter that fails when the fault says so."""

    def __init__(self, drafter: Any, fault: Fault) -> None:
        self._drafter, self._fault = drafter, fault

    def propose(self, output: Any, count: int) -> Any:
        self._fault("drafter")
        return self._drafter.propose(output, count)


class FailingStream:
    """In place of a request's decoder: a tokenizer that cannot."""

    def step(self, *_: Any) -> str:
        raise Injected("tokenizer")


def build(args: argparse.Namespace, alone: bool) -> Engine:
    """The engine under load, or the one in which every request is by itself."""
    size: EngineOptions = (
        {"max_requests": 1, "prefix_caching": False, "graphs": False, "steps_ahead": 0}
        if alone
        else {
            "max_requests": args.max_requests,
            "num_blocks": (args.blocks[0], args.blocks[1]),
            "host_blocks": (args.host_blocks[0], args.host_blocks[1]),
            "max_waiting": args.max_waiting,
            "steps_ahead": 1,
        }
    )
    return Engine.from_pretrained(
        args.checkpoint, drafter="mtp", device=args.device, dtype="float32", block_size=16,
        max_model_len=512, max_tokens_per_step=512, state_layout=args.state_layout, **size,
    )  # fmt: skip


def catalogue(args: argparse.Namespace) -> list[Case]:
    """The distinct requests: few beginnings, many ends, greedy and sampled."""
    rng = np.random.default_rng(args.seed)
    root = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(p.read_bytes() for p in sorted(root.glob("*.py"))[:40])

    def piece(low: int, high: int) -> list[int]:
        start = int(rng.integers(len(text) - high))
        return list(text[start : start + int(rng.integers(low, high))])

    shared = [piece(20, 260) for _ in range(10)]
    engine, cases = build(args, alone=True), []
    for number in range(args.distinct):
        prompt = shared[int(rng.integers(len(shared)))] + piece(1, 60)
        params = SamplingParams(
            max_tokens=int(rng.integers(2, args.longest)),
            temperature=0.8 if number % 2 else 0.0,
            top_p=0.95,
            seed=number,
            ignore_eos=True,
        )
        (answer,) = engine.generate([prompt], params)
        cases.append(Case(prompt, params, answer.tokens, answer.text))
    return cases


class Judge:
    """Whether a text is that of its request, up to ties."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._engine = args, None

    def __call__(self, case: Case, got: list[int], whole: bool) -> str:
        want = case.alone if whole else case.alone[: len(got)]
        if got == want:
            return "right"
        pairs = list(zip(got, case.alone, strict=False))
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if place is None:
            return "wrong"
        return "flips" if self._tie(case, place, got[place]) else "wrong"

    def _tie(self, case: Case, place: int, token: int) -> bool:
        if self._engine is None:
            self._engine = build(self._args, alone=True)
        found: list[torch.Tensor] = []
        model = self._engine.model
        hook = model.lm_head.register_forward_hook(lambda *a: found.append(a[2][-1:].float()))
        known = case.prompt + case.alone[:place]
        self._engine.generate([known], SamplingParams(max_tokens=1, ignore_eos=True))
        hook.remove()
        logits = found[0]
        if case.params.temperature == 0:
            return float(logits.max() - logits[0, token]) < TIE
        params, device = case.params, logits.device
        sampling = SamplingTensors(
            temperature=torch.tensor([params.temperature], dtype=torch.float32, device=device),
            top_k=torch.tensor([params.top_k], dtype=torch.int32, device=device),
            top_p=torch.tensor([params.top_p], dtype=torch.float32, device=device),
            min_p=torch.tensor([params.min_p], dtype=torch.float32, device=device),
            seed=torch.tensor([params.seed or 0], dtype=torch.int64, device=device),
        )
        chances = probabilities_reference(logits[:, None], sampling)[:, 0]
        at = torch.tensor([len(known)], device=logits.device)
        u = uniform(sampling.seed, at, TARGET)
        moved = [(u + d).clamp(0, 1 - 1e-7) for d in (-TIE, TIE)]
        return token in {int(sample_reference(chances, m)) for m in moved}


def soak(
    args: argparse.Namespace, cases: list[Case], counts: Counter[str], memory: list[list[int]]
) -> Engine:
    """Load until the requests are served or the time is over; then let everything come to rest."""
    rng = np.random.default_rng([args.seed, counts["submitted"]])
    engine, fault, judge = build(args, alone=False), Fault(counts), Judge(args)
    engine.capture()
    engine.runner.drafter = FailingDrafter(engine.runner.drafter, fault)
    engine.model.register_forward_pre_hook(lambda *_: fault("allocation"))
    live: dict[int, tuple[Request, Case]] = {}
    leave: list[tuple[int, int]] = []
    tick, end = 0, time.perf_counter() + args.seconds
    while (counts["submitted"] < args.requests and time.perf_counter() < end) or not engine.idle:
        tick += 1
        more = counts["submitted"] < args.requests and time.perf_counter() < end
        for _ in range(int(rng.poisson(args.rate)) if more else 0):
            case = cases[int(rng.integers(len(cases)))]
            late, soon, tenant = rng.random(3)
            deadline = None if late > 0.04 else float(rng.choice([0.0, 0.02, 0.1]))
            try:
                request = engine.submit(
                    case.prompt, case.params, tenant=f"{tenant < 0.3}", deadline=deadline
                )
            except QueueFull:
                counts["queue full"] += 1
                continue
            counts["submitted"] += 1
            live[request.id] = request, case
            if soon < 0.08:
                heapq.heappush(leave, (tick + int(rng.integers(0, 40)), request.id))
            elif soon < 0.085:
                request.stream = FailingStream()  # type: ignore[assignment]
        if rng.random() < args.faults:
            fault.armed = str(rng.choice(["drafter", "allocation"]))
        if rng.random() < args.faults and more:
            stream = engine.stream(cases[0].prompt, cases[0].params)
            try:
                next(stream, None)
                counts["cancelled consumers"] += 1
            except (QueueFull, Injected) as error:
                counts[f"consumers that got {type(error).__name__}"] += 1
            stream.close()
        while leave and leave[0][0] <= tick:
            request = live.get(heapq.heappop(leave)[1], (None, None))[0]
            if request is not None:
                engine.abort(request)
        engine.step()
        for key in [k for k, (r, _) in live.items() if r.finish_reason is not None]:
            request, case = live.pop(key)
            reason = str(request.finish_reason)
            counts[f"ended by {reason}"] += 1
            if reason == "error" and not isinstance(request.error, Injected):
                counts["unexpected errors"] += 1
                print(repr(request.error), flush=True)
            verdict = judge(case, request.output, reason in ("stop", "length"))
            counts[verdict if reason in ("stop", "length") else f"beginnings {verdict}"] += 1
        if counts["submitted"] >= args.requests * len(memory) // SAMPLES:
            memory.append([counts["submitted"], *used()])
    counts["steps"] += tick
    return engine


def used() -> tuple[int, int]:
    """Bytes that the process holds on the device, and resident on the host."""
    device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return device, int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def left_behind(engine: Engine) -> dict[str, int]:
    """What an engine at rest still holds."""
    scheduler, found = engine.scheduler, {}
    for name, table in (("KV blocks", scheduler.kv), ("state blocks", scheduler.state)):
        found[name] = table.pool.size - table.pool.free
    found["slots"] = engine.manager.max_requests - len(scheduler._slots)
    found["live rows"] = int(engine.manager._ledger.live.sum())
    engine.reset_prefix_cache()
    host = engine.prefix_cache.host
    if host is not None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        usage = [host.tier.usage(group) for group in host.tier.groups]
        found["host blocks"] = sum(u.used + u.in_flight for u in usage)
    return found


def at_rest(engine: Engine, counts: Counter[str], memory: list[list[int]]) -> dict[str, Any]:
    """The result of a run that has ended: its counts with the engine's, and what is left."""
    stats, prefix = engine.stats(), engine.stats().prefix
    counts["preemptions"] += stats.preemptions
    counts["hit tokens"] += prefix.hit_tokens
    counts["queried tokens"] += prefix.queried_tokens
    counts["evictions"] += prefix.evictions
    counts["blocks from the host"] += prefix.host_blocks
    counts.update({f"short: {why}": n for why, n in prefix.short.items()})
    left = left_behind(engine)
    counts["leaked"] += sum(left.values())
    memory.append([counts["submitted"], *used()])
    return {"counts": dict(sorted(counts.items())), "left": left, "memory": memory}


def run(args: argparse.Namespace) -> dict[str, Any]:
    state = json.loads(args.state.read_text()) if args.state and args.state.exists() else {}
    counts: Counter[str] = Counter(state.get("counts", {}))
    memory = state.get("memory", [])
    cases = catalogue(args)
    started = time.perf_counter()
    engine = soak(args, cases, counts, memory)
    counts["seconds"] += round(time.perf_counter() - started)
    result = at_rest(engine, counts, memory)
    if args.state:
        args.state.write_text(json.dumps(result))
    options = {k: str(v) for k, v in vars(args).items() if k not in ("out", "state")}
    return {"options": options} | result


def merge(argv: list[str]) -> None:
    """Results of several runs as one, with the sums of their counts by layout and of all."""
    parser = argparse.ArgumentParser(prog="soak.py merge", description=merge.__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="default: under benchmarks/results/")
    args = parser.parse_args(argv)
    parts = [json.loads(path.read_text()) for path in args.results]
    sums: dict[str, Counter[str]] = {}
    for part in parts:
        for name in ("all", part["options"]["state_layout"]):
            sums.setdefault(name, Counter(dict.fromkeys(BAD, 0))).update(part["counts"])
    counts = {name: dict(sorted(each.items())) for name, each in sums.items()}
    environment = parts[0]["environment"]
    parts = [{k: v for k, v in part.items() if k != "environment"} for part in parts]
    print(save("soak", {"environment": environment, "counts": counts, "parts": parts}, args.out))


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__, "default: none")
    parser.add_argument("--requests", type=int, default=20000)
    parser.add_argument("--seconds", type=float, default=420, help="no request comes after these")
    parser.add_argument("--distinct", type=int, default=400)
    parser.add_argument("--longest", type=int, default=48, help="tokens that a request asks for")
    parser.add_argument("--rate", type=float, default=6.0, help="arrivals per step")
    parser.add_argument("--faults", type=float, default=0.01, help="chance of each kind per step")
    parser.add_argument("--max-requests", type=int, default=64)
    parser.add_argument("--max-waiting", type=int, default=64)
    parser.add_argument("--blocks", type=int, nargs=2, default=(640, 260), help="KV and state")
    parser.add_argument("--host-blocks", type=int, nargs=2, default=(400, 200))
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="with an MTP head")
    parser.add_argument("--state-layout", default="replay")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, help="counters that parts of a run share")
    parser.add_argument("--short", action="store_true", help="what the tests run: ends by count")
    args = parser.parse_args(argv)
    if args.short:  # stops by count: a test must not depend on the machine's speed
        small = {
            "requests": 200, "seconds": math.inf, "distinct": 16, "longest": 48, "rate": 0.5,
            "faults": 0.015, "max_requests": 6, "max_waiting": 12, "blocks": (30, 14),
            "host_blocks": (60, 40),
        }  # fmt: skip
        args = argparse.Namespace(**vars(args) | small)
    return args


def main() -> None:
    if sys.argv[1:2] == ["merge"]:
        merge(sys.argv[2:])
        return
    args = parsed()
    torch.set_float32_matmul_precision("highest")
    result = run(args)
    for name, value in result["counts"].items():
        print(f"{name:28} {value}")
    print("left behind:", result["left"], "memory:", result["memory"])
    if args.out:
        print(save("soak", result, args.out))
    sys.exit(any(result["counts"].get(name, 0) for name in BAD))


if __name__ == "__main__":
    main()
