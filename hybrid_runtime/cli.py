"""Command line: `hybrid-runtime demo` and `hybrid-runtime generate MODEL`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

import torch

from hybrid_runtime import demo
from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.engine.engine import DrafterName
from hybrid_runtime.state.manager import Strategy


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
