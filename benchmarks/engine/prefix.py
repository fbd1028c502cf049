"""What a prefix-cache hit saves: time to first token on a full hit against a miss, with drafts on.

    python benchmarks/engine/prefix.py
    python benchmarks/engine/prefix.py --shape tiny --isl 120 --alike 100
    python benchmarks/engine/prefix.py --trace chat --side-by-side 8,64
    python benchmarks/engine/prefix.py --trace chat --shape tiny --system 40 --message 9 --answer 9

Every repeat sends a fresh random prompt (the miss) and, once that has ended, the same again (the
hit); then a fresh prompt no longer than what a full hit leaves to run (*remainder*), which is the
least that a hit can take. With a host tier the device forgets the prompt in between, so that the
hit's blocks come from pinned host memory (*host hit*). Time to first token is the host's, from
`submit` until the token is there, on an idle engine with its graphs captured.

`--trace chat` plays conversations side by side instead: a system prompt that all of them share, and
turns of a message and an answer, whose length is drawn around `--answer`. Each turn's prompt is all
that was said before and the new message. It counts the tokens that run of each prompt behind the
first turn, and times its first token.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from record import arguments, environment, numbers, plain, save, show
from shapes import NAMES, measured

from hybrid_runtime.engine import Engine, EngineConfig, Request, SamplingParams
from hybrid_runtime.engine.config import RetentionPolicy
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.models.states import smallest_block
from hybrid_runtime.state.layout import LayoutKind

Row = dict[str, Any]
DRAFTS = 3
ACCEPTANCE = 3.0
"""Mean tokens per step that is pretended: drafts of random weights are never right."""
OUTPUT = 12
"""Tokens that every request decodes, so that drafts have been accepted and refused before a hit."""


class Bench:
    """One engine; random prompts, different in every call."""

    def __init__(
        self,
        model: HybridModel,
        head: Any,
        args: argparse.Namespace,
        kind: LayoutKind,
        block_size: int | None,
        retention: RetentionPolicy,
        host: bool,
    ) -> None:
        if block_size is None:
            state = model.groups[0].recurrence(model.dtype, torch.float32, "SD")
            block_size = smallest_block(state, DRAFTS, model.kv_shape, model.dtype)
        self.block = block_size
        longest = max(args.isl, args.alike) + OUTPUT
        columns = -(-longest // self.block) + 1
        kv_blocks = columns * (self.block // EngineConfig().kv_block(self.block))
        # Three prompts that fill the cache and the request that runs.
        checkpoints = columns if retention == "all" else 2
        blocks = 4 * kv_blocks, 3 * checkpoints + columns + 8
        options = EngineConfig(
            drafter="mtp",
            num_speculative_tokens=DRAFTS,
            adaptive=False,
            max_requests=1,
            max_model_len=longest + 1,
            max_tokens_per_step=args.max_tokens_per_step,
            block_size=self.block,
            num_blocks=blocks,
            synthetic_acceptance=ACCEPTANCE,
            state_layout=kind,
            retention=retention,
            host_blocks=(2 * kv_blocks, 2 * checkpoints) if host else None,
        )
        self.engine = Engine(model, options, head=head)
        self.engine.capture()
        self._rng = random.Random(args.seed)
        self._vocabulary = model.vocab_size
        self._params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)

    def prompt(self, tokens: int) -> list[int]:
        return [self._rng.randrange(self._vocabulary) for _ in range(tokens)]

    def serve(self, prompt: list[int]) -> tuple[Request, float]:
        """One request to its end, from an idle device to an idle device, and when `submit` was
        called for it, in seconds of `perf_counter`."""
        called = time.perf_counter()
        request = self.engine.submit(prompt, self._params)
        while not self.engine.idle:
            self.engine.step()
        if request.error is not None:
            raise request.error
        if self.engine.model.device.type == "cuda":
            torch.cuda.synchronize()
        return request, called

    def forget(self) -> None:
        """Let the device's pools lose all content; the host's copies stay."""
        for table in (self.engine.scheduler.kv, self.engine.scheduler.state):
            table.pool.clear()


def first_tokens(bench: Bench, args: argparse.Namespace, host: bool) -> Row:
    """Milliseconds to the first token by kind of request, `repeats` each."""
    times: dict[str, list[float]] = {}
    hits: dict[str, set[int]] = {}

    def note(kind: str, request: Request, called: float) -> None:
        times.setdefault(kind, []).append(1e3 * (request.times[0][0] - called))
        hits.setdefault(kind, set()).add(request.hit.tokens)

    most = (args.isl - 1) // bench.block * bench.block
    for repeat in range(-args.warmup, args.repeats):
        if repeat == 0:
            times, hits = {}, {}
        prompt = bench.prompt(args.isl)
        note("miss", *bench.serve(prompt))
        if host:
            before = bench.engine.stats().prefix.host_blocks
            bench.forget()
            note("host hit", *bench.serve(prompt))
            fetched = bench.engine.stats().prefix.host_blocks - before
        else:
            note("hit", *bench.serve(prompt))
            note("remainder", *bench.serve(bench.prompt(args.isl - most)))
    # A figure of something else than its name says is none.
    hit = "host hit" if host else "hit"
    if hits["miss"] != {0} or hits[hit] != {most}:
        raise RuntimeError(f"hit tokens were {hits}; a full hit has {most} and a miss none")
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    row: Row = {"prompt_tokens": args.isl, "hit_tokens": most, "run_tokens": args.isl - most}
    if host:
        row["fetched_blocks"] = fetched
    row |= {"ttft_ms": medians, "ratio": medians[hit] / medians["miss"], "repeats": times}
    return row


def alike(bench: Bench, tokens: int) -> Row:
    """Three identical prompts, one after the other, and what each found."""
    prompt = bench.prompt(tokens)
    requests = [bench.serve(prompt)[0] for _ in range(3)]
    stats = bench.engine.stats()
    return {
        "prompt_tokens": tokens,
        "most_blocks": (tokens - 1) // bench.block,
        "hit_tokens": [r.hit.tokens for r in requests],
        "hit_blocks": [r.hit.tokens // bench.block for r in requests],
        "short": [r.hit.short for r in requests],
        "output_tokens": [len(r.output) for r in requests],
        "mean_acceptance_length": stats.mean_acceptance_length,
    }


class Talk:
    """One conversation: all tokens of its turns so far, the requests of those that have ended."""

    def __init__(self, system: list[int]) -> None:
        self.tokens, self.turns = list(system), list[Request]()
        self.open: Request | None = None


def chat(model: HybridModel, head: Any, args: argparse.Namespace, many: int, caching: bool) -> Row:
    """`many` conversations side by side, each turn submitted when the last answer has ended."""
    longest = args.system + args.turns * (args.message + 2 * args.answer)
    options = EngineConfig(
        drafter="mtp",
        num_speculative_tokens=DRAFTS,
        max_requests=many,
        max_model_len=longest,
        synthetic_acceptance=ACCEPTANCE,
        prefix_caching=caching,
    )
    engine = Engine(model, options, head=head)
    engine.capture()
    draw, words = random.Random(args.seed), model.vocab_size
    system = [draw.randrange(words) for _ in range(args.system)]
    talks = [Talk(system) for _ in range(many)]
    called: dict[Request, float] = {}
    started, going = time.perf_counter(), True
    while going:
        going = False
        for talk in talks:
            if talk.open is not None and talk.open.finish_reason is not None:
                if talk.open.error is not None:
                    raise talk.open.error
                talk.turns.append(talk.open)
                talk.tokens, talk.open = talk.open.tokens.tolist(), None
            if talk.open is None and len(talk.turns) < args.turns:
                talk.tokens += [draw.randrange(words) for _ in range(args.message)]
                answer = draw.randint(args.answer // 2, args.answer * 3 // 2)
                now = time.perf_counter()
                talk.open = engine.submit(
                    talk.tokens, SamplingParams(max_tokens=answer, ignore_eos=True)
                )
                called[talk.open] = now
            going |= talk.open is not None
        engine.step()
    seconds = time.perf_counter() - started
    stats = engine.stats()
    engine.close()
    later = [turn for talk in talks for turn in talk.turns[1:]]
    times = sorted(1e3 * (turn.times[0][0] - called[turn]) for turn in later)
    run_tokens = [len(turn.prompt) - turn.hit.tokens for turn in later]
    return {
        "conversations": many,
        "prefix_caching": caching,
        "turns": len(later),
        "run_tokens": statistics.mean(run_tokens),
        "run_tokens_per_new": statistics.mean(run_tokens) / args.message,
        "ttft_ms": {
            "mean": statistics.mean(times),
            "p50": statistics.median(times),
            "p99": times[int(0.99 * (len(times) - 1))],
        },
        "seconds": seconds,
        "output_tokens": sum(len(turn.output) for talk in talks for turn in talk.turns),
        "turn_ends": stats.prefix.turn_ends,
        "lost_turn_ends": stats.prefix.lost_turn_ends,
        "turn_hits": stats.prefix.turn_hits,
        "short": dict(Counter(str(turn.hit.short) for turn in later)),
        "preemptions": stats.preemptions,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "block_size": engine.scheduler.block_size,
        "repeats": {"ttft_ms": times, "run_tokens": run_tokens},
    }


def run_chat(args: argparse.Namespace) -> tuple[Row, Path]:
    """The chat trace with the cache and without, for each number of conversations."""
    result, model, head = begun(args)
    result["trace"] = {n: getattr(args, n) for n in ("system", "turns", "message", "answer")}
    path = Path()
    for many in args.side_by_side:
        for caching in (True, False):
            result["rows"].append(chat(model, head, args, many, caching))
            gc.collect()
            path = save("prefix-chat", result, args.out)  # a time limit costs only the last
    return result, path


def begun(args: argparse.Namespace) -> tuple[Row, HybridModel, Any]:
    """What every result has, and the model."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, head = measured(args.shape).build(device, dtype, seed=args.seed)
    result: Row = {
        "environment": environment(),
        "shape": args.shape,
        "name": measured(args.shape).title,
        "dtype": str(dtype).removeprefix("torch."),
        "drafts": DRAFTS,
        "rows": [],
    }
    return result, model, head


def run(args: argparse.Namespace) -> tuple[Row, Path]:
    result, model, head = begun(args)
    result["identical_prompts"] = []
    device = model.device
    path = Path()
    ways: list[tuple[int | None, RetentionPolicy]] = [(None, "all"), (None, "prompt")]
    both: tuple[LayoutKind, LayoutKind] = ("replay", "columns")
    kinds = [kind for kind in both if kind in model.groups[0].layouts]
    for block_size, retention in [*ways, (args.small_block, "prompt")]:
        for kind in kinds:
            for host in (False, True):
                started = time.perf_counter()
                bench = Bench(model, head, args, kind, block_size, retention, host)
                key = {
                    "state_layout": kind,
                    "block_size": bench.block,
                    "retention": retention,
                    "host_tier": host,
                }
                result["rows"].append(key | first_tokens(bench, args, host))
                if not host:
                    result["identical_prompts"].append(key | alike(bench, args.alike))
                del bench  # its memory belongs to the next
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                print(f"{key}: {time.perf_counter() - started:.1f} s", flush=True)
                path = save("prefix", result, args.out)  # a time limit costs only the last
    return result, path


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=NAMES, default="8b")
    parser.add_argument("--isl", type=int, default=8000, help="tokens of a prompt")
    parser.add_argument("--alike", type=int, default=3000, help="tokens of three identical prompts")
    parser.add_argument("--small-block", type=int, default=256, help="tokens; besides the derived")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--max-tokens-per-step", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", choices=["chat"], help="conversations instead of single prompts")
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--turns", type=int, default=8, help="of each conversation")
    parser.add_argument("--message", type=int, default=200, help="tokens that are new in a turn")
    parser.add_argument("--answer", type=int, default=300, help="mean tokens of an answer")
    parser.add_argument(
        "--side-by-side", type=numbers, default=[8, 64], help="conversations, by commas"
    )
    args = parser.parse_args(argv)
    if args.trace == "chat":
        result, path = run_chat(args)
        rows = [
            {k: v for k, v in row.items() if k != "ttft_ms"}
            | {f"{k} ms": v for k, v in row["ttft_ms"].items()}
            for row in result["rows"]
        ]
        show(f"chat, {result['name']}", plain(rows, "repeats"))
        print(path)
        return 0
    result, path = run(args)
    names = ("state_layout", "block_size", "retention", "host_tier", "run_tokens")
    show(
        f"time to first token, {args.isl} tokens, {result['name']}",
        [
            {n: row[n] for n in names}
            | {f"{k} ms": row["ttft_ms"].get(k, "") for k in ("miss", "hit", "host hit")}
            | {"remainder ms": row["ttft_ms"].get("remainder", ""), "ratio": row["ratio"]}
            for row in result["rows"]
        ],
    )
    show("three identical prompts", result["identical_prompts"])
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
