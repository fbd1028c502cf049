"""Command line: `hybrid-runtime demo`, `generate MODEL`, `bench DIR` and `serve DIR`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from hybrid_runtime import __version__, demo
from hybrid_runtime.bench import checkpoint
from hybrid_runtime.bench import options as bench_options
from hybrid_runtime.bench.shapes import SHAPES
from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.engine.checks import DTypeName, KVDTypeName
from hybrid_runtime.engine.load import QuantizationName
from hybrid_runtime.engine.threads import use_threads
from hybrid_runtime.server.command import add_command as add_serve
from hybrid_runtime.specdecode.drafter import DrafterName
from hybrid_runtime.state.checks import Strategy


def generate(args: argparse.Namespace) -> None:
    """Stream one completion to standard output."""
    prompt = _text(args.prompt)
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        max_tokens=args.max_tokens,
        stop=tuple(filter(None, args.stop)),
    )
    engine = Engine.from_pretrained(
        args.model,
        drafter=None if args.drafter == "none" else args.drafter,
        num_speculative_tokens=args.drafts,
        eagle_path=args.eagle,
        device=args.device,
        dtype=args.dtype,
        quantization=args.quantization,
        strategy=args.strategy,
        max_requests=1,
        max_model_len=args.max_model_len,
        block_size=args.block_size,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    _check_fits(engine, prompt, params)
    use_threads(args.threads, engine.model)
    sys.stdout.write(prompt)
    for piece in engine.stream(prompt, params):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if args.stats:
        print(engine.stats(), file=sys.stderr)


def _check_fits(engine: Engine, prompt: str, params: SamplingParams) -> None:
    """`ValueError`, as in the server, for more output than fits; the engine would cut it."""
    length, most = len(engine.prepare(prompt, params).prompt), engine.config.max_model_len
    if length + params.max_tokens > most:
        raise ValueError(
            f"max_tokens is {params.max_tokens}; with the {length} tokens of the prompt it must be "
            f"at most {most - length}, so that both fit max_model_len ({most})"
        )


def _text(prompt: str) -> str:
    """The prompt, or standard input for `-`; `ValueError` for bytes that are not UTF-8."""
    name = "prompt" if prompt != "-" else "standard input"
    # Bytes of an argument that are not UTF-8 arrive as surrogates.
    given = sys.stdin.buffer.read() if prompt == "-" else prompt.encode(errors="surrogateescape")
    try:
        return given.decode()
    except UnicodeDecodeError as error:
        at = f"byte {given[error.start]:#04x} at {error.start}"
        raise ValueError(f"{name} has {at}; it must be UTF-8") from error


def show_demo(args: argparse.Namespace) -> None:
    """Have the shipped model write code, then print a table of drafters and strategies."""
    demo.run(args.model, args.device)


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="hybrid-runtime", description="Hybrid Mamba/attention models without waiting."
    )
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    d = commands.add_parser("demo", help="complete some code, then compare drafters and strategies")
    d.add_argument("--model", default=str(demo.SHIPPED), help="default: the shipped checkpoint")
    _add_common(d)
    d.set_defaults(run=show_demo)

    g = commands.add_parser(
        "generate",
        help="complete one prompt",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    g.add_argument("model", metavar="MODEL", help="checkpoint directory or hub id")
    g.add_argument("--prompt", "-p", required=True, help="text to continue, - for standard input")
    g.add_argument("--max-tokens", type=int, default=128, help="most tokens to generate")
    g.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    g.add_argument("--top-k", type=int, default=0, help="likeliest tokens to keep; 0 = all")
    g.add_argument("--top-p", type=float, default=1.0, help="share of likeliest tokens to keep")
    g.add_argument("--seed", type=int, help="same seed, same text")
    g.add_argument("--stop", action="append", default=[], help="end at this text; may be repeated")
    g.add_argument(
        "--drafter", choices=("auto", "none", *get_args(DrafterName)), default="auto",
        help="what drafts tokens; auto: the first of MTP, EAGLE and n-gram look-up that there is",
    )  # fmt: skip
    g.add_argument("--drafts", type=int, help="drafts per step; 3 with a drafter")
    g.add_argument("--eagle", metavar="MODEL", help="EAGLE head; sub-directory eagle of MODEL")
    g.add_argument(
        "--strategy",
        choices=get_args(Strategy),
        default="auto",
        help="when states are saved",
    )
    g.add_argument("--max-model-len", type=int, default=2048, help="tokens, prompt and output")
    g.add_argument("--block-size", type=int, help="tokens per block; derived from the layout")
    g.add_argument(
        "--kv-cache-dtype", choices=get_args(KVDTypeName), default="auto",
        help="of keys and values; auto: as the checkpoint says",
    )  # fmt: skip
    g.add_argument("--stats", action="store_true", help="counters on standard error at the end")
    _add_common(g)
    _add_model(g)
    g.set_defaults(run=generate)

    b = commands.add_parser(
        "bench",
        help="measure inter-token latency, or the perplexity of a text",
        description="Measure inter-token latency with random prompts. Lists are separated by "
        "commas; every combination is run. Interrupted, it shows what it has. With --perplexity: "
        "how well the checkpoint predicts a text, with --quantization rounded too.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    b.add_argument("model", nargs="?", metavar="DIR", help="checkpoint directory or hub id")
    b.add_argument(
        "--shape", choices=SHAPES, help="instead of DIR: a published shape with random weights"
    )
    b.add_argument("--layers", type=int, help="of --shape, the first so many only")
    bench_options.add_options(b)
    b.add_argument(
        "--perplexity", type=Path, metavar="FILE",
        help="a text in UTF-8 to predict, in windows side by side, instead of measuring time",
    )  # fmt: skip
    b.add_argument("--window", type=int, help="tokens of a window; default: --max-model-len")
    b.add_argument("--json", type=Path, metavar="FILE", help="all figures, of every repeat too")
    _add_common(b)
    _add_model(b)
    b.set_defaults(run=checkpoint.run)

    add_serve(commands)
    return top


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", help="default: a GPU where there is one")
    command.add_argument("--verbose", "-v", action="store_true", help="log what is done, and why")


def _add_model(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--dtype", choices=get_args(DTypeName), help="auto on a GPU, float32 on a CPU")
    add(
        "--quantization", choices=get_args(QuantizationName),
        help="round weights to 8 bits as they are loaded; as the checkpoint says without",
    )  # fmt: skip
    add("--threads", type=int, help="of a CPU; 1 for a small model")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 2, with one line on standard error, for wrong input."""
    args = parser().parse_args(arguments)
    if hasattr(args, "verbose"):  # `serve` has a log of its own
        level = logging.INFO if args.verbose else logging.WARNING
        logging.basicConfig(level=level, format="%(name)s: %(message)s")
    try:
        args.run(args)
    except BrokenPipeError:
        # The reader has left. With stderr closed the interpreter does not complain.
        sys.stderr.close()
        return 0
    except (ValueError, RuntimeError, OSError, ArithmeticError) as error:
        # One line, also where a library has written several.
        print(f"hybrid-runtime: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
