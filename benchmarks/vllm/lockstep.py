"""Lockstep decode in vLLM (0.25.1, GPU needed), to stand beside ours in `engine/itl.py merge`.

    python benchmarks/vllm/lockstep.py --shape 8b --batch 1,8,16,32,64 --out vllm.jsonl
    VLLM_USE_V2_MODEL_RUNNER=0 python benchmarks/vllm/lockstep.py --out vllm-v1.jsonl

All requests start together and decode; steps count in which all of them do, and none starts or
ends. One line of JSON per run. Runs in an environment with vLLM and this package, whose plug-in is
off here. `replay_steps.py` and `serve.py time` take their engine, prompts and steps from here.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics as stats
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import nemotron
import workload
from record import arguments, numbers
from shapes import NAMES, SHAPES, measured


class Engine(Protocol):
    """`nemotron.Vllm`, as far as `drive` needs it."""

    def submit(self, number: int, ask: workload.Ask) -> None: ...

    def step(self) -> Iterable[tuple[int, int, bool]]: ...


class Run(NamedTuple):
    """steps: milliseconds of each step that counts. accepted: tokens of each row in them.
    tokens, seconds: of the whole run, prompts included."""

    steps: list[float]
    accepted: list[int]
    tokens: int
    seconds: float


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = arguments(__doc__, "one more line for each run; default: none")
    add = parser.add_argument
    add("--shape", choices=NAMES, default="8b")
    add("--layers", type=int, help="the first so many; default: as the shape says")
    add("--batch", type=numbers, default=[1, 8, 16, 32, 64], help="requests at a time")
    add("--isl", type=int, default=1024, help="tokens of a prompt")
    add("--osl", type=int, default=256, help="tokens of an output")
    add("--num-spec", type=int, default=3, help="drafts")
    add("--acceptance", default="3", help="tokens a step, a published curve, or real")
    add("--dtype", default="bfloat16")
    add("--quantization", choices=["modelopt"], help="of the weights, as in FP8 checkpoints")
    add("--ssm-dtype", default="float32")
    add("--mode", choices=["align", "none"], default="align", help="none: no prefix caching")
    add("--max-num-seqs", type=int, help="default: the largest batch")
    add("--max-model-len", type=int, default=8192)
    add("--max-num-batched-tokens", type=int, default=8192)
    add("--kv-gib", type=float, help="cache; default: by --gpu-mem-util")
    add("--gpu-mem-util", type=float, default=0.85)
    add("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    if args.quantization and args.shape not in SHAPES:
        parser.error(f"--quantization is not for {args.shape}")
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """As `nemotron.Vllm` takes them."""
    rows = {1, 2, 4, *args.batch}
    captured = sorted(rows | {count * (1 + args.num_spec) for count in rows})
    vllm: dict[str, Any] = {
        "gpu_memory_utilization": args.gpu_mem_util,
        "compilation_config": {"cudagraph_capture_sizes": captured},
    }
    if args.kv_gib:
        vllm["kv_cache_memory_bytes"] = int(args.kv_gib * 2**30)
    if args.mode == "none":
        vllm |= {"enable_prefix_caching": False, "mamba_cache_mode": "none"}
    shape = measured(args.shape, args.layers)
    return {
        "model": shape.in_vllm,
        "plain_modules": shape.plain_modules(args.quantization),
        "dtype": args.dtype,
        "ssm_dtype": args.ssm_dtype,
        "drafts": args.num_spec,
        "rates": workload.acceptance(args.acceptance, args.num_spec),
        "sampling": {"temperature": 0.0},
        "max_requests": args.max_num_seqs or max(args.batch),
        "max_tokens_per_step": args.max_num_batched_tokens,
        "max_model_len": args.max_model_len,
        "vllm": vllm,
    }


def build(args: argparse.Namespace) -> tuple[nemotron.Vllm, dict[str, Any]]:
    """The engine, and what it says of itself."""
    for name, value in nemotron.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    asked = settings(args)
    if nemotron.has_experts(asked["model"]):
        nemotron.tuned_experts()
    chosen = nemotron.options(asked)
    engine = nemotron.Vllm(asked, chosen)
    return engine, engine.about(chosen)


def prompts(args: argparse.Namespace, count: int, seed: int, block: int = 0) -> list[list[int]]:
    """Random prompts of `--isl` tokens; with a `block`, their lengths are spread over one, so that
    rows cross boundaries at different steps."""
    rng, vocabulary = random.Random(seed), measured(args.shape).sizes.vocab_size
    made = [
        rng.choices(range(10, vocabulary - 10), k=args.isl + i * block // count)
        for i in range(count)
    ]
    rng.shuffle(made)
    return made


def drive(
    engine: Engine,
    asked: list[list[int]],
    tokens: int,
    look: Callable[[], None] = lambda: None,
) -> Run:
    """Send all prompts at once and run to the end. look: called after each step."""
    start = time.perf_counter()
    for number, prompt in enumerate(asked):
        engine.submit(number, workload.Ask(prompt, tokens))
    steps, accepted, total = [], [], 0
    begun: set[int] = set()
    left, before, whole_before = len(asked), start, False
    while left:
        found = list(engine.step())
        now = time.perf_counter()
        look()
        if not found:
            continue
        ended = sum(done for _, _, done in found)
        whole = len(found) == len(asked) and not ended
        if whole and whole_before and begun.issuperset(number for number, _, _ in found):
            steps.append(1e3 * (now - before))
            accepted += [new for _, new, _ in found]
        begun |= {number for number, new, _ in found if new}
        total += sum(new for _, new, _ in found)
        left, before, whole_before = left - ended, now, whole
    return Run(steps, accepted, total, time.perf_counter() - start)


def figures(run: Run) -> dict[str, Any]:
    """As `engine/peer.py` reads them; no step may count, where the cache holds too few requests."""
    if not run.steps:
        return {"timed_steps": 0}
    cuts = stats.quantiles(run.steps, n=10) if len(run.steps) > 1 else run.steps * 9
    mean, accepted = stats.fmean(run.steps), stats.fmean(run.accepted)
    return {
        "timed_steps": len(run.steps),
        "step_ms_mean": mean,
        "step_ms_median": stats.median(run.steps),
        "step_ms_p10": cuts[0],
        "step_ms_p90": cuts[-1],
        "step_ms_max": max(run.steps),
        "mean_acceptance_length": accepted,
        "itl_ms": mean / accepted,
        "decode_tok_s": 1e3 * sum(run.accepted) / sum(run.steps),
        "output_tok_s": run.tokens / run.seconds,
    }


def described(args: argparse.Namespace, about: dict[str, Any]) -> dict[str, Any]:
    """The options of a line, by the names that `engine/peer.py` reads."""
    sizes = measured(args.shape, args.layers).fields
    real = args.acceptance == "real" or not args.num_spec
    rates = workload.acceptance(args.acceptance, args.num_spec)
    return about | {
        "runner": "v2" if about["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "1" else "v1",
        "num_spec": args.num_spec,
        "synthetic_len": None if real or rates is None else 1 + sum(rates),
        "ssm_dtype": args.ssm_dtype,
        "mode": args.mode,
        "gpu": about["device"],
        "max_model_len": args.max_model_len,
        "pattern": sizes["pattern"],
        "mtp_pattern": sizes["mtp_pattern"],
        "hidden": sizes["hidden_size"],
    }


def main() -> None:
    args = parse()
    os.environ.setdefault("HYBRID_RUNTIME_VLLM", "0")
    engine, about = build(args)
    said = described(args, about)
    for batch in args.batch:
        drive(engine, prompts(args, batch, 10**6 + batch), min(48, args.osl))
        for number in range(args.repeats):
            engine.reset()
            found = figures(drive(engine, prompts(args, batch, 1000 * number + batch), args.osl))
            load = {"batch": batch, "isl": args.isl, "osl": args.osl, "rep": number}
            line = json.dumps(load | found | {"options": said})
            print(line, flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
