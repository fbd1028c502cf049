"""Options that `hybrid-runtime bench` and `benchmarks/engine/itl.py` share."""

import argparse
from collections.abc import Callable
from itertools import product
from typing import get_args

from hybrid_runtime.bench.load import SSM_DTYPES, Lengths, Load
from hybrid_runtime.engine.checks import KVDTypeName
from hybrid_runtime.state.checks import Strategy
from hybrid_runtime.state.layout import LayoutKind


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is measured; lists are separated by commas, and every combination is run."""
    add = parser.add_argument
    add("--batches", type=_ints, default=[1, 8, 16, 32, 64], help="requests at once")
    add("--drafts", type=_ints, default=[3], help="drafts per step, 0 to 15")
    add("--isl", type=_ints, default=[1024], help="prompt tokens")
    add("--osl", type=_ints, default=[256], help="output tokens")
    add("--lengths", type=_words(get_args(Lengths)), default=["equal"], help="equal, staggered")
    add("--strategies", type=_words(get_args(Strategy)), default=["auto"], help="or all")
    add("--layouts", type=_words(get_args(LayoutKind)), default=["replay"], help="columns, replay")
    add(
        "--ring-tokens",
        type=int,
        help="replay: tokens kept before a write, 0: none; default: by the number of drafts",
    )
    known = ", ".join(SSM_DTYPES)
    add("--ssm-dtype", type=_words(SSM_DTYPES), default=["float32"], help=known)
    dtypes = get_args(KVDTypeName)
    add("--kv-cache-dtype", choices=dtypes, default="auto", help="of keys and values")
    add(
        "--acceptance",
        type=_acceptance,
        help="mean tokens per step to pretend; real = what the drafts deserve",
    )
    add("--repeats", type=int, default=5, help="timed runs of each combination")
    add("--block-size", type=int, help="tokens per block; default: derived from the layout")
    add("--max-model-len", type=int, default=8192, help="tokens that the engine is made for")
    add("--max-tokens-per-step", type=int, default=8192, help="bounds prefill")
    add("--memory-fraction", type=float, default=0.9, help="share of a GPU's memory in use")
    add("--no-graphs", action="store_true", help="launch every kernel by itself")


def loads(args: argparse.Namespace) -> list[Load]:
    """The combinations asked for; where there are fewer drafts than the acceptance asked for needs,
    all of them are accepted."""
    most = max(args.drafts) + 1
    if args.acceptance is not None and not 1 <= args.acceptance <= most:
        raise ValueError(
            f"acceptance is {args.acceptance:g}; with at most {most - 1} drafts per step it must "
            f"be in 1..{most}, or real"
        )
    return [
        Load(
            batch=batch,
            drafts=drafts,
            isl=isl,
            osl=osl,
            ssm_dtype=ssm_dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            acceptance=args.acceptance,
            lengths=lengths,
            strategy=strategy,
            state_layout=layout,
            ring_tokens=args.ring_tokens,
            repeats=args.repeats,
            block_size=args.block_size,
            max_model_len=args.max_model_len,
            max_tokens_per_step=args.max_tokens_per_step,
            memory_fraction=args.memory_fraction,
            graphs=False if args.no_graphs else None,
        )
        for drafts, ssm_dtype, isl, osl, layout, lengths, batch, strategy in product(
            args.drafts, args.ssm_dtype, args.isl, args.osl, args.layouts, args.lengths,
            args.batches, args.strategies,
        )
    ]  # fmt: skip


def _ints(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise _wrong(text, "integers, separated by commas") from None


def _acceptance(text: str) -> float | None:
    try:
        return None if text == "real" else float(text)
    except ValueError:
        raise _wrong(text, "a number, or real") from None


def _words(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def words(text: str) -> list[str]:
        chosen = list(known) if text == "all" else text.split(",")
        if not set(chosen) <= set(known):
            raise _wrong(text, f"of {', '.join(known)}, separated by commas, or all")
        return chosen

    return words


def _wrong(text: str, must: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"is {text!r}; it must be {must}")
