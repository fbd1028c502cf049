"""`serve.py time`: steps of one engine, the adapter's copies and vLLM's taking turns."""

from __future__ import annotations

import argparse
import statistics as stats
import time
from collections.abc import Callable
from typing import Any

import lockstep
from record import save

KERNELS = {
    "vllm": (
        "preprocess_mamba_align_fused_kernel",
        "precopy_mamba_align_fused_kernel",
        "postprocess_mamba_fused_kernel",
    ),
    "ours": ("_decide_move_kernel",),
    "both": ("_scatter_num_accepted_kernel",),
}
PROFILED = 60
PARTS = ("preprocess_state", "postprocess_state")


class HostTime:
    """CPU time of the model state's two hooks, by call. Set on the object, for the measurement."""

    def __init__(self, worker: Any) -> None:
        state = worker.model_runner.model_state
        self.us: dict[str, list[float]] = {part: [] for part in PARTS}
        for part in PARTS:
            setattr(state, part, self._timed(getattr(state, part), self.us[part]))

    def _timed(self, hook: Callable[..., None], us: list[float]) -> Callable[..., None]:
        def timed(*args: Any, **more: Any) -> None:
            start = time.perf_counter()
            hook(*args, **more)
            us.append(1e6 * (time.perf_counter() - start))

        return timed

    def take(self) -> dict[str, Any]:
        found = {}
        for part, us in self.us.items():
            found[part] = {"p50": stats.median(us), "mean": stats.fmean(us)} if us else None
            us.clear()
        return found


def profiled(engine: Any, asked: list[Any], tokens: int, batch: int) -> dict[str, Any]:
    """Kernels per step of full-batch decode, launches and µs, over `PROFILED` steps."""
    import torch
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(asked):
        engine.add_request(f"p{number}-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, params)
    seen: set[str] = set()
    while len(seen) < batch:
        seen |= {output.request_id for output in engine.step()}
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            engine.step()
        torch.cuda.synchronize()
    engine.abort_request(list(seen))
    while engine.has_unfinished_requests():
        engine.step()
    found: dict[str, Any] = {}
    for event in profile.key_averages():
        for names in KERNELS.values():
            for name in (n for n in names if event.key.startswith(n)):
                entry = found.setdefault(name, {"launches": 0.0, "us": 0.0})
                entry["launches"] += event.count / PROFILED
                entry["us"] += event.device_time_total / PROFILED
    return found


def measure(args: argparse.Namespace, set_ours: Any, statistics: Any) -> dict[str, Any]:
    options = lockstep.parse(args.rest)
    started = time.perf_counter()
    driven, about = lockstep.build(options)
    engine, tokens, block = driven.engine, options.osl, about["mamba_block_size"]
    hosts: list[HostTime] = []
    engine.collective_rpc(lambda worker: hosts.append(HostTime(worker)))
    result: dict[str, Any] = {
        "options": vars(options)
        | {"wheel": about["wheel"], "start_s": time.perf_counter() - started},
        "block_size": block,
        "batches": {},
    }
    # A batch that does not fit into its share of the time keeps fewer rounds.
    for place, batch in enumerate(options.batch):
        left = len(options.batch) - place
        end = (
            started
            + result["options"]["start_s"]
            + args.seconds * (1 - (left - 1) / len(options.batch))
        )
        runs: list[dict[str, Any]] = []

        def one(
            ours: bool, seed: int, batch: int = batch, runs: list[dict[str, Any]] = runs
        ) -> None:
            engine.collective_rpc(set_ours, args=(ours,))
            driven.reset()
            before = engine.collective_rpc(statistics)[0]
            timed = lockstep.drive(driven, lockstep.prompts(options, batch, seed, block), tokens)
            after = engine.collective_rpc(statistics)[0]
            ms = sorted(timed.steps)
            counted = {name: after[name] - before.get(name, 0) for name in after}
            run = {"ours": ours, "steps": len(ms), "host_us": hosts[0].take(), "adapter": counted}
            if ms:
                run["ms"] = {
                    "mean": stats.fmean(ms),
                    "p50": ms[len(ms) // 2],
                    "p99": ms[len(ms) * 99 // 100],
                }
                run["tokens_per_step"] = stats.fmean(timed.accepted)
            runs.append(run)

        one(True, 10**6)
        one(False, 10**6)
        runs.clear()
        for number in range(args.rounds):
            for ours in (True, False, False, True):
                one(ours, number)
            if time.perf_counter() > end:
                break
        kernels = {}
        for ours in (True, False):
            engine.collective_rpc(set_ours, args=(ours,))
            driven.reset()
            asked = lockstep.prompts(options, batch, 77, block)
            # Twice the tokens: the first rows must still be running after all are and 60 steps.
            kernels["ours" if ours else "vllm"] = profiled(engine, asked, 2 * tokens, batch)
        hosts[0].take()
        result["batches"][str(batch)] = {"runs": runs, "kernels": kernels, **summary(runs)}
        print(f"batch {batch}: {summary(runs)}\n  {kernels}", flush=True)
        if args.out:
            save("vllm_serve", result, args.out)
    return result


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over runs, and the ratio of ours to vLLM's by pairs of neighbouring runs."""
    timed = [run for run in runs if "ms" in run]
    found: dict[str, Any] = {}
    for name, ours in (("ours_ms", True), ("vllm_ms", False)):
        means = [run["ms"]["mean"] for run in timed if run["ours"] == ours]
        found[name] = stats.median(means) if means else None
    ratios = []
    for one, other in zip(timed[::2], timed[1::2], strict=False):
        a, b = (one, other) if one["ours"] else (other, one)
        ratios.append(a["ms"]["mean"] / b["ms"]["mean"])
    found["ratios"] = ratios
    found["ratio"] = stats.median(ratios) if ratios else None
    return found
