"""Options that `hybrid-runtime bench` and `benchmarks/engine/itl.py` share; the loop over loads."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import get_args

import torch

from hybrid_runtime.bench.floor import Head
from hybrid_runtime.bench.load import SSM_DTYPES, Lengths, Load, sweep
from hybrid_runtime.bench.measure import Row, measure
from hybrid_runtime.bench.progress import RunProgress
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.state.checks import Strategy
from hybrid_runtime.state.layout import LayoutKind


def add_options(parser: argparse.ArgumentParser, repeats: int) -> None:
    """What is measured; lists are separated by commas, and every combination is run."""
    add = parser.add_argument
    add("--batches", type=_ints, default=[1, 8, 16, 32, 64], help="requests at once")
    add("--drafts", type=_ints, default=[3], help="drafts per step, 0 to 15")
    add("--isl", type=_ints, default=[1024], help="prompt tokens")
    add("--osl", type=_ints, default=[256], help="output tokens")
    add("--lengths", type=_words(Lengths), default=("equal",), help="equal, staggered")
    add("--strategies", type=_words(Strategy), default=("auto",), help="or all, interleaved")
    add("--layouts", type=_words(LayoutKind), default=("replay",), help="columns, replay")
    add(
        "--window",
        type=int,
        help="replay: tokens kept before a write, 0: none; default: by the number of drafts",
    )
    add("--ssm-dtype", type=_ssm_dtypes, default=["float32"], help=", ".join(SSM_DTYPES))
    add(
        "--acceptance",
        type=_acceptance,
        help="mean tokens per step to pretend; real = what the drafts deserve",
    )
    add("--repeats", type=int, default=repeats, help="timed runs of each combination")
    add("--warmup-osl", type=int, default=48, help="output tokens of the run before the timed ones")
    add("--profile-steps", type=int, default=20, help="steady steps to trace on a GPU; 0 = none")
    add(
        "--profile-strategies",
        type=_words(Strategy),
        default=("auto", "blocking"),
        help="those of --strategies whose steps are traced, or all",
    )
    add("--block-size", type=int, help="tokens per block; default: derived from the layout")
    add("--max-model-len", type=int, default=8192, help="tokens that the engine is made for")
    add("--max-tokens-per-step", type=int, default=8192, help="bounds prefill")
    add("--nvtx", action="store_true", help="NVTX ranges around the timed steps, for nsys")
    add("--no-graphs", action="store_true", help="launch every kernel by itself")
    add("--seed", type=int, default=0, help="of the lengths of staggered prompts")


def loads(args: argparse.Namespace) -> list[Load]:
    """The combinations asked for; where there are fewer drafts than the acceptance asked for needs,
    all of them are accepted."""
    most = max(args.drafts) + 1
    if args.acceptance is not None and not 1 <= args.acceptance <= most:
        raise ValueError(
            f"acceptance is {args.acceptance:g}; with at most {most - 1} drafts per step it must "
            f"be in 1..{most}, or real"
        )
    base = Load(
        acceptance=args.acceptance,
        lengths=args.lengths,
        strategies=args.strategies,
        repeats=args.repeats,
        warmup_osl=args.warmup_osl,
        profile_steps=args.profile_steps,
        profiled=args.profile_strategies,
        block_size=args.block_size,
        max_model_len=args.max_model_len,
        max_tokens_per_step=args.max_tokens_per_step,
        graphs=False if args.no_graphs else None,
        window=args.window,
        nvtx=args.nvtx,
        seed=args.seed,
    )
    return sweep(base, args.batches, args.drafts, args.isl, args.osl, args.ssm_dtype, args.layouts)


def run(
    model: HybridModel,
    head: Head | None,
    wanted: list[Load],
    bandwidth: float | None,
    save: Callable[[list[Row]], object] | None = None,
) -> list[Row]:
    """Measure all loads; those that do not fit are told on standard error and left out.

    save: called with all rows so far after each load, so that whatever ends this early costs only
        the load that runs.
    """
    rows: list[Row] = []
    runs = [len(load.turns()) + len(load.profile_turns()) for load in wanted]
    with RunProgress(sum(runs)) as progress:
        for load, count in zip(wanted, runs, strict=True):
            progress.begin(_name(load, wanted), count)
            try:
                rows += measure(model, head, load, bandwidth, progress.ran)
            except (ValueError, torch.OutOfMemoryError) as error:
                if len(wanted) == 1:
                    raise
                progress.end(f"left out: {error}")
                continue
            progress.end("measured")
            if save is not None:
                save(rows)
    if not rows:
        raise ValueError("none of the loads could be run")
    return rows


def _name(load: Load, among: list[Load]) -> str:
    """What tells a load apart."""
    keys = [other.key for other in among]
    apart = [name for name in load.key if len({str(key[name]) for key in keys}) > 1]
    return " ".join(f"{name}={load.key[name]}" for name in apart or ["batch"])


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


def _ssm_dtypes(text: str) -> list[str]:
    chosen = text.split(",")
    if not set(chosen) <= set(SSM_DTYPES):
        raise _wrong(text, f"of {', '.join(SSM_DTYPES)}, separated by commas")
    return chosen


def _wrong(text: str, must: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"is {text!r}; it must be {must}")


def _words(literal: object) -> Callable[[str], tuple[str, ...]]:
    known = get_args(literal)

    def words(text: str) -> tuple[str, ...]:
        chosen = known if text == "all" else tuple(text.split(","))
        if not set(chosen) <= set(known):
            raise _wrong(text, f"of {', '.join(known)}, separated by commas, or all")
        return chosen

    return words
