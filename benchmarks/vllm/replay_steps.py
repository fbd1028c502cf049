"""Steps of vLLM (0.25.1, GPU needed) with replay and without, and how many requests run at once.

    python benchmarks/vllm/replay_steps.py --fit 400 --out steps.json -- --v2 --batch 1,16,64 ...

The layout of the cache is fixed when an engine starts, so there are two, each in a process of its
own, which take turns (ABBA) on one GPU. Two of a model that fills more than half of the GPU's
memory run one after another, the first once more in the end (`--alone`). They are started by a tool
named run_nemotron.py, in the folder `--peer`; what follows `--` goes to that tool. The JSON is
written after every batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics as stats
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from record import arguments, numbers, save
from serving import Child, say
from time_steps import prompts

SIDES = {"replay": "replay", "vllm": "0"}
"""Names of the engines, and what the plug-in's switch is set to."""


def serve(args: argparse.Namespace, rest: list[str]) -> None:
    """The engine's process: runs what it is asked for, line by line."""
    sys.path.insert(0, str(args.peer))
    import run_nemotron as tool  # type: ignore[import-not-found]

    options = tool.parse_args(rest)
    tool.set_env(options)
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    tool.write_config(options)
    from vllm import LLM

    started = time.perf_counter()
    llm = LLM(**tool.llm_kwargs(options))
    engine, (length, *_), (tokens, *_) = llm.llm_engine, options.isl, options.osl
    cache = engine.vllm_config.cache_config
    block = cache.mamba_block_size
    block = block if cache.enable_prefix_caching else length
    kind = llm.collective_rpc(lambda worker: type(worker.model_runner.model_state).__name__)
    said = {"model_state": kind[0], "block_size": block, "blocks": cache.num_gpu_blocks}
    say({"start_s": time.perf_counter() - started} | said)
    for line in sys.stdin:
        what = json.loads(line)
        engine.reset_prefix_cache()
        if "fit" in what:
            say(fit(tool, engine, options, what["fit"], length, tokens))
            continue
        asked = prompts(tool, options, what["batch"], length, block, what["seed"])
        raw = tool.drive(engine, asked, tokens, what["batch"], options)
        ms = sorted(1e3 * step for step in raw["step_dt"])
        found = {"steps": len(ms), **dict.fromkeys(("tokens_per_step", "mean", "p50", "p99"))}
        if ms:
            found |= {"tokens_per_step": stats.fmean(raw["acc"]) if raw["acc"] else None}
            found |= {"mean": stats.fmean(ms), "p50": ms[len(ms) // 2]}
            found |= {"p99": ms[len(ms) * 99 // 100]}
        say(found)


def fit(
    tool: Any, engine: Any, options: Any, requests: int, length: int, tokens: int
) -> dict[str, Any]:
    """All requests at once: how many ever run at a time, and the tokens per second of them all."""
    running = engine.engine_core.engine_core.scheduler.running
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, len(running))

    asked = tool.make_prompts(options, requests, length, 4242)
    raw = tool.drive(engine, asked, tokens, requests, options, on_step=look)
    return {
        "running": most,
        "tokens_per_s": sum(raw["ntok"].values()) / raw["wall"],
        "seconds": raw["wall"],
    }


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
    command = [sys.executable, __file__, "--serve", "--peer", str(args.peer), "--", *rest]
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
    parser.add_argument("--peer", type=Path, default=Path(".peer"), help="run_nemotron.py's folder")
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
