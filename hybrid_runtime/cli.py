"""Command line: `hybrid-runtime demo`, `generate MODEL`, `bench DIR` and `serve DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from hybrid_runtime import demo
from hybrid_runtime.bench import options as bench_options
from hybrid_runtime.bench import report
from hybrid_runtime.bench.machine import copy_bandwidth, machine
from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.models.checkpoint import load_mtp, load_nemotron_h, resolve
from hybrid_runtime.server.command import add_command as add_serve
from hybrid_runtime.specdecode.drafter import DrafterName
from hybrid_runtime.state.checks import Strategy


def generate(args: argparse.Namespace) -> None:
    """Stream one completion to standard output."""
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
    )
    engine = Engine.from_pretrained(
        args.model,
        drafter=None if args.drafter == "none" else args.drafter,
        num_speculative_tokens=args.drafts,
        eagle_path=args.eagle,
        device=args.device,
        dtype=getattr(torch, args.dtype),
        strategy=args.strategy,
        max_requests=1,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
    )
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    sys.stdout.write(prompt)
    for piece in engine.stream(prompt, params):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if args.stats:
        print(engine.stats(), file=sys.stderr)


def bench(args: argparse.Namespace) -> None:
    """Inter-token latency of a checkpoint with its own MTP head: a table, and JSON if asked for."""
    wanted = bench_options.loads(args)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    bandwidth = copy_bandwidth() if on_gpu else None
    directory = resolve(args.model)
    dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    model = load_nemotron_h(directory, device, getattr(torch, dtype))
    head = load_mtp(directory, model) if any(load.drafts for load in wanted) else None
    rows = bench_options.run(model, head, wanted, bandwidth)
    report.table(f"{directory.name}, {machine()['device']}, {dtype}", rows)
    if args.json is not None:
        result = {"environment": machine(), "model": str(directory), "dtype": dtype, "rows": rows}
        args.json.write_text(report.dumps(result) + "\n")


def show_demo(args: argparse.Namespace) -> None:
    """The shipped model writes code; then a table of drafters and strategies."""
    demo.run(args.model, args.device)


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="hybrid-runtime", description="Hybrid Mamba/attention models without waiting."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    d = commands.add_parser("demo", help="complete some code, then compare drafters and strategies")
    d.add_argument("--model", default=str(demo.SHIPPED), help="default: the shipped checkpoint")
    d.add_argument("--device", help="default: a GPU where there is one")
    d.set_defaults(run=show_demo)

    g = commands.add_parser(
        "generate",
        help="complete one prompt",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    g.add_argument("model", metavar="MODEL", help="checkpoint directory or hub id")
    g.add_argument("--prompt", "-p", required=True, help="text to continue, - for standard input")
    g.add_argument("--max-tokens", type=int, default=128)
    g.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    g.add_argument("--top-k", type=int, default=0, help="0 = off")
    g.add_argument("--top-p", type=float, default=1.0)
    g.add_argument("--seed", type=int, help="same seed, same text")
    g.add_argument("--stop", action="append", default=[], help="end at this text; may be repeated")
    g.add_argument("--drafter", choices=("none", *get_args(DrafterName)), default="mtp")
    g.add_argument("--drafts", type=int, help="drafts per step; 3 with a drafter")
    g.add_argument("--eagle", metavar="MODEL", help="EAGLE head; sub-directory eagle of MODEL")
    g.add_argument("--strategy", choices=get_args(Strategy), default="auto")
    g.add_argument("--device", help="a GPU where there is one")
    g.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    g.add_argument("--max-model-len", type=int, default=2048)
    g.add_argument("--block-size", type=int, help="tokens per block; derived from the layout")
    g.add_argument("--stats", action="store_true", help="counters on standard error at the end")
    g.set_defaults(run=generate)

    b = commands.add_parser(
        "bench",
        help="measure inter-token latency",
        description="Measure inter-token latency with random prompts. Lists are separated by "
        "commas; every combination is run.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    b.add_argument("model", metavar="DIR", help="checkpoint directory or hub id")
    bench_options.add_options(b, repeats=5)
    b.add_argument("--device", help="a GPU where there is one")
    b.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="by the device")
    b.add_argument("--json", type=Path, metavar="FILE", help="all figures, of every repeat too")
    b.set_defaults(run=bench)

    add_serve(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 2 and one line on standard error for input that can't be used."""
    args = parser().parse_args(arguments)
    try:
        args.run(args)
    except (ValueError, RuntimeError) as error:
        print(f"hybrid-runtime: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has what it wanted; closing stderr keeps the interpreter from complaining.
        sys.stderr.close()
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
