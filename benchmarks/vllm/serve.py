"""vLLM (0.25.1, GPU needed) with and without the adapter: `serve` compares tokens, acceptance and
prefix hits, `time` compares step times. With `HYBRID_RUNTIME_VLLM=columns` one engine hands its
state copies from one to the other between runs; replay has an engine of its own, compared by file.

    HYBRID_RUNTIME_VLLM=columns python benchmarks/vllm/serve.py serve --drafts 3 --out serve.json
    HYBRID_RUNTIME_VLLM=columns python benchmarks/vllm/serve.py serve --check --out check.json
    HYBRID_RUNTIME_VLLM=0 python benchmarks/vllm/serve.py serve --drafts 3 --out without.json
    HYBRID_RUNTIME_VLLM=replay python benchmarks/vllm/serve.py serve --drafts 3 --out replay.json
    python benchmarks/vllm/serve.py compare without.json replay.json
    python benchmarks/vllm/serve.py time --out time.json -- --batch 16,64 ...

Texts are compared in true fp32: Triton's products of fp32 would else be rounded to TF32, and a
prompt that starts from a cached prefix gets other roundings than a whole one. With `--qwen` take
`--batched-tokens 32768`: where the tokens of a step run out, rows lose their drafts, and vLLM
0.25.1 runs such rows from a stale state.

What follows `--` of `time` are options of `lockstep.py`, whose engine it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from comparison import compared, digest, line
from record import environment, save
from shipped import ENVIRONMENT, PRECISE, serving_engine
from traffic import drive, empty, held_back, traffic

COUNTED = (
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
)

COPIES, REPLAY = "HybridRuntimeModelState", "HybridRuntimeReplayState"
"""Our model states: an engine with the first can change to vLLM's copies and back."""


def model_state(worker: Any) -> str:
    """The name of the model state's class."""
    return type(worker.model_runner.model_state).__name__


def set_ours(worker: Any, ours: bool) -> None:
    """Hand the state copies to us or to vLLM. For engines at rest: a request that is running would
    stay a candidate of everything."""
    if model_state(worker) == COPIES:
        worker.model_runner.model_state.ours = ours


def statistics(worker: Any) -> dict[str, int]:
    """The adapter's counters; empty without it."""
    state = worker.model_runner.model_state
    found: dict[str, int] = state.statistics() if hasattr(state, "statistics") else {}
    return found


def difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What was counted between; a largest value stays as it is."""
    return {n: v if n.startswith("worst") else v - before.get(n, 0) for n, v in after.items()}


def counters(llm: Any) -> dict[str, float]:
    return {m.name: m.value for m in llm.get_metrics() if m.name in COUNTED}


class Run(NamedTuple):
    """ours: our state copies, where the engine can change them. blocks: of the cache; fewer than
    the engine has are a tighter pool. reads: requests start from cached prefixes."""

    ours: bool
    blocks: int
    reads: bool = True


def serve(args: argparse.Namespace) -> dict[str, Any]:
    if args.check:
        columns = os.environ.get("HYBRID_RUNTIME_VLLM") == "columns"
        os.environ["HYBRID_RUNTIME_VLLM"] = "check-columns" if columns else "check"
    started = time.perf_counter()
    llm = serving_engine(args)
    cache = llm.llm_engine.vllm_config.cache_config
    requests = traffic(args)
    (kind, *_) = llm.collective_rpc(model_state)
    result: dict[str, Any] = {
        "environment": environment(),
        "options": {k: v for k, v in vars(args).items() if k not in ("out", "run", "rest")},
        "start_s": time.perf_counter() - started,
        "block_size": cache.mamba_block_size,
        "model_state": kind,
        "runs": [],
        "comparison": [],
    }
    for number, run in enumerate(_runs(args, llm, kind)):
        empty(llm)
        llm.collective_rpc(set_ours, args=(run.ours,))
        before, counted = llm.collective_rpc(statistics), counters(llm)
        with held_back(llm, max(args.blocks) - run.blocks):
            found = drive(llm, requests, args.at_once, f"r{number}", run.reads)
        after = llm.collective_rpc(statistics)
        found |= run._asdict() | {
            "ours": run.ours and kind in (COPIES, REPLAY),
            "metrics": difference(counters(llm), counted),
            "adapter": [difference(a, b) for a, b in zip(after, before, strict=True)],
        }
        print(f"run {number}, {run}: {found['metrics']} {found['adapter'][:1]}", flush=True)
        if number:
            result["comparison"].append(compared(result["runs"][0], found))
            print(line(result["comparison"][-1]), flush=True)
        result["runs"].append(found)
        if args.out:
            save("vllm_serve", _kept(result, args.keep_tokens), args.out)
    return _kept(result, args.keep_tokens)


def _kept(result: dict[str, Any], whole: bool) -> dict[str, Any]:
    """What is written: texts only as digests, if not `whole`."""
    if whole:
        return result
    runs = [{**run, "tokens": [digest(text) for text in run["tokens"]]} for run in result["runs"]]
    for run in runs:
        del run["gaps"]
    return {**result, "runs": runs}


def _runs(args: argparse.Namespace, llm: Any, kind: str) -> Iterator[Run]:
    """With our copies and vLLM's in one engine: vLLM's twice, so that its own repeatability shows
    beside ours. Else each pool once, and the largest without the prefix cache. In check mode
    the same until enough steps were compared."""
    if not args.check:
        if kind == COPIES:
            yield from (Run(ours, args.blocks[0]) for ours in (False, True, True, False))
            return
        yield from (Run(True, blocks) for blocks in args.blocks)
        if args.unread:
            yield Run(True, max(args.blocks), reads=False)
        return
    end = time.perf_counter() + args.seconds
    while True:
        yield Run(True, args.blocks[0])
        done = llm.collective_rpc(statistics)[0].get("checked_steps", 0)
        if done >= args.steps or time.perf_counter() > end:
            return


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Each run of one file with the run on the same pool of another; of one file alone, with its
    first run. The files keep their tokens (`--keep-tokens`)."""
    one, *others = (json.loads(Path(path).read_text()) for path in args.files)
    if others:
        pools = {(run["blocks"], run["reads"]): run for run in reversed(one["runs"])}
        found = [
            (pools.get((r["blocks"], r["reads"])), r) for other in others for r in other["runs"]
        ]
    else:
        found = [(one["runs"][0], run) for run in one["runs"][1:]]
    result = {
        "environment": one["environment"],
        "options": [file["options"] for file in (one, *others)],
        "comparison": [compared(first, run) for first, run in found if first],
    }
    for comparison in result["comparison"]:
        print(line(comparison))
    return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import time_steps

    return time_steps.measure(args, set_ours, statistics)


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Arguments before and after a `--`, which releases of argparse treat differently."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("serve")
    one.add_argument("--drafts", type=int, default=3)
    one.add_argument("--prompts", type=int, default=200)
    one.add_argument("--tokens", type=int, default=700, help="at most so many are generated")
    one.add_argument("--at-once", type=int, default=32)
    one.add_argument("--batched-tokens", type=int, default=1024)
    one.add_argument(
        "--blocks",
        type=lambda text: [int(count) for count in text.split(",")],
        default=[420],
        help="of the cache; few: preemption; several: a run with each",
    )
    one.add_argument("--unread", action="store_true", help="a run that reads no cached prefix too")
    one.add_argument(
        "--mode", choices=("align", "none"), default="align", help="of the state cache"
    )
    one.add_argument("--kv-gib", type=float, default=0, help="cache, so that engines share a GPU")
    one.add_argument("--dtype", default="float32")
    one.add_argument("--graphs", action="store_true", help="CUDA graphs instead of eager")
    one.add_argument("--synchronous", action="store_true", help="no asynchronous scheduling")
    one.add_argument("--tensor-parallel", type=int, default=1)
    one.add_argument("--qwen", action="store_true", help="Gated DeltaNet, with random weights")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--keep-tokens", action="store_true", help="in the JSON, instead of digests")
    one.add_argument("--check", action="store_true", help="compare with vLLM's kernels")
    one.add_argument("--steps", type=int, default=2000, help="to compare in check mode")
    one.add_argument("--seconds", type=float, default=240, help="for these comparisons")
    one.set_defaults(run=serve)
    two = commands.add_parser("time")
    two.add_argument("--rounds", type=int, default=5, help="of ABBA each")
    two.add_argument("--seconds", type=float, default=300, help="for all rounds of all batches")
    two.set_defaults(run=measure)
    three = commands.add_parser("compare")
    three.add_argument("files", nargs="+")
    three.set_defaults(run=compare)
    for command in (one, two, three):
        command.add_argument("--out", type=Path)
    argv, rest = _split(sys.argv[1:])
    args = parser.parse_args(argv, argparse.Namespace(rest=rest))
    for key, value in (ENVIRONMENT | (PRECISE if args.run is serve else {})).items():
        os.environ.setdefault(key, value)
    result = args.run(args)
    if args.out:
        save("vllm_serve", result, args.out)


if __name__ == "__main__":
    main()
