"""Steps of vLLM (0.25.1, GPU needed) with replay and without, and how many requests run at once.

    python benchmarks/vllm/replay_steps.py --fit 400 --out steps.json -- --batch 1,16,64 ...

The layout of the cache is fixed when an engine starts, so there are two, each in a process of its
own, which take turns (ABBA) on one GPU. Two of a model that fills more than half of the GPU's
memory run one after another, the first once more in the end (`--alone`). What follows `--` are
options of `lockstep.py`, whose engine they are. The JSON is written after every batch.
"""

from __future__ import annotations

import argparse
import json
import statistics as stats
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import lockstep
from record import arguments, numbers, save
from serving import Child, say

SIDES = {"replay": "replay", "vllm": "0"}
"""Names of the engines, and what the plug-in's switch is set to."""


def serve(args: argparse.Namespace, rest: list[str]) -> None:
    """The engine's process: runs what it is asked for, line by line."""
    options = lockstep.parse(rest)
    started = time.perf_counter()
    engine, about = lockstep.build(options)
    block = about["mamba_block_size"] if options.mode == "align" else options.isl
    kind = engine.engine.collective_rpc(
        lambda worker: type(worker.model_runner.model_state).__name__
    )
    said = {"model_state": kind[0], "block_size": block, "blocks": about["num_gpu_blocks"]}
    say({"start_s": time.perf_counter() - started} | said | {"wheel": about["wheel"]})
    for line in sys.stdin:
        what = json.loads(line)
        engine.reset()
        if "fit" in what:
            say(fit(engine, options, what["fit"]))
            continue
        asked = lockstep.prompts(options, what["batch"], what["seed"], block)
        run = lockstep.drive(engine, asked, options.osl)
        ms = sorted(run.steps)
        found = {"steps": len(ms), **dict.fromkeys(("tokens_per_step", "mean", "p50", "p99"))}
        if ms:
            found |= {"tokens_per_step": stats.fmean(run.accepted)}
            found |= {"mean": stats.fmean(ms), "p50": ms[len(ms) // 2]}
            found |= {"p99": ms[len(ms) * 99 // 100]}
        say(found)


def fit(engine: Any, options: argparse.Namespace, requests: int) -> dict[str, Any]:
    """All requests at once: how many ever run at a time, and the tokens per second of them all."""
    scheduler = engine.engine.engine_core.engine_core.scheduler
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, len(scheduler.running))

    run = lockstep.drive(engine, lockstep.prompts(options, requests, 4242), options.osl, look)
    return {"running": most, "tokens_per_s": run.tokens / run.seconds, "seconds": run.seconds}


def compare(args: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """Start both engines, and have them take turns."""
    sides = {side: start(side, args, rest) for side in SIDES}
    result: dict[str, Any] = {"options": rest, "batches": {}}
    result["engines"] = {side: engine.hear() for side, engine in sides.items()}
    print(json.dumps(result["engines"]), flush=True)
    end = time.perf_counter() + args.seconds
    for batch, most in rounds(args):
        runs: list[dict[str, Any]] = []
        for engine in sides.values():
            engine.ask({"batch": batch, "seed": 10**6})
        for number in range(most):
            for side in ("replay", "vllm", "vllm", "replay"):
                asked = {"batch": batch, "seed": number}
                runs.append({"side": side} | sides[side].ask(asked))
            if time.perf_counter() > end:
                break
        result["batches"][str(batch)] = {"runs": runs, **summary(runs)}
        print(f"batch {batch}: {summary(runs)}", flush=True)
        if args.out:
            save("vllm_replay_steps", result, args.out)
    if args.fit:
        result["fit"] = {side: engine.ask({"fit": args.fit}) for side, engine in sides.items()}
        print(f"fit: {result['fit']}", flush=True)
    for engine in sides.values():
        engine.close()
    return result


def alone(args: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """One engine at a time, in the order ABBA: half of the rounds, all of them with vLLM's, the
    other half. Neighbours are the runs of both with the same prompts."""
    result: dict[str, Any] = {"options": rest, "engines": {}, "batches": {}}
    engine: Child | None = None
    for side, half in (("replay", 0), ("vllm", 0), ("vllm", 1), ("replay", 1)):
        if engine is None or engine.name != side:
            if engine is not None:
                engine.close()
            engine = start(side, args, rest)
            result["engines"].setdefault(side, engine.hear())
            for batch in args.batches:
                engine.ask({"batch": batch, "seed": 10**6})
        for batch, most in rounds(args):
            found = result["batches"].setdefault(str(batch), {"runs": []})
            for seed in range(half * most, (half + 1) * most):
                asked = {"batch": batch, "seed": seed}
                found["runs"].append({"side": side, "seed": seed} | engine.ask(asked))
            both = {r["seed"] for r in found["runs"] if r["side"] != side}
            paired = [run for run in found["runs"] if run["seed"] in both]
            found |= summary(sorted(paired, key=lambda run: run["seed"]))
            print(f"{side}, batch {batch}: {found['runs'][-1]}, {found['ratios']}", flush=True)
            if args.out:
                save("vllm_replay_steps", result, args.out)
    if engine is not None:
        engine.close()
    return result


def start(side: str, args: argparse.Namespace, rest: list[str]) -> Child:
    command = [sys.executable, __file__, "--serve", "--", *rest]
    logs = args.out.parent if args.out else Path()
    return Child(side, command, SIDES[side], logs / f"engine-{side}.log")


def rounds(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Each batch, and its rounds."""
    most = args.rounds if len(args.rounds) > 1 else args.rounds * len(args.batches)
    return list(zip(args.batches, most, strict=True))


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each side's means, and of the ratios of neighbouring runs. A run has no mean if
    its cache did not hold all requests at once."""
    means = {side: [r["mean"] for r in runs if r["side"] == side and r["mean"]] for side in SIDES}
    ratios = []
    for one, other in zip(runs[::2], runs[1::2], strict=False):
        a, b = (one, other) if one["side"] == "replay" else (other, one)
        if a["mean"] and b["mean"]:
            ratios.append(a["mean"] / b["mean"])
    medians = {f"{side}_ms": stats.median(ms) if ms else None for side, ms in means.items()}
    return {**medians, "ratios": ratios, "ratio": stats.median(ratios) if ratios else None}


def main() -> None:
    parser = arguments(__doc__, "default: none")
    parser.add_argument("--batches", type=numbers, default=[1, 16])
    parser.add_argument("--rounds", type=numbers, default=[2], help="of ABBA, of each batch or all")
    parser.add_argument("--seconds", type=float, default=150, help="no new round after")
    parser.add_argument("--fit", type=int, default=0, help="requests sent at once, in the end")
    parser.add_argument("--alone", action="store_true", help="one engine at a time")
    parser.add_argument("--serve", action="store_true", help="be one of the engines")
    place = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, rest = parser.parse_args(sys.argv[1:place]), sys.argv[place + 1 :]
    if args.serve:
        serve(args, rest)
        return
    result = alone(args, rest) if args.alone else compare(args, rest)
    if args.out:
        save("vllm_replay_steps", result, args.out)


if __name__ == "__main__":
    main()
