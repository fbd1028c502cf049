"""How many requests fit in a given amount of cache, and the tokens per second of that many.

    python benchmarks/engine/capacity.py
    python benchmarks/engine/capacity.py --shape tiny --gib 0.001 --isl 24 --osl 16

*Computed*: each request holds its running state and what its drafts need (a state each, or
records), one checkpoint, and the keys and values of prompt and output (target and draft head); a
layout fits as many of them as the bytes allow. *Run*: an engine whose pools are exactly those
blocks runs that many at once, with prompt lengths spread over one block so that boundaries are
crossed evenly, and must not preempt any. Tokens per second: in steady decode, while all of them
run; and served, `--served` requests from submission to the last token, through the same pools.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from record import arguments, environment, save, show
from shapes import SHAPES, build, config

from hybrid_runtime.bench.drive import drive, summarize
from hybrid_runtime.bench.load import Load
from hybrid_runtime.bench.measure import give_back
from hybrid_runtime.engine import Engine
from hybrid_runtime.models.nemotron_h import MTPHead, NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig
from hybrid_runtime.models.states import nemotron_h_states
from hybrid_runtime.state.layout import LayoutKind, StateLayout

Row = dict[str, Any]
KINDS: tuple[LayoutKind, LayoutKind] = ("columns", "replay")
DRAFTS = 3
ACCEPTANCE = 3.0
CHECKPOINTS = 1


def request_bytes(
    shape: NemotronHConfig, kind: LayoutKind, ssm_dtype: torch.dtype, kv_dtype: torch.dtype
) -> Row:
    """Bytes that a request holds, by what they are for; `kv_per_token` counts the draft head's."""
    recurrence, block_size = nemotron_h_states(shape, DRAFTS, ssm_dtype, dtype=kv_dtype)
    layout = StateLayout(recurrence, DRAFTS, block_size, kind)
    mamba = shape.pattern.count("M")
    attention = shape.pattern.count("*") + shape.mtp_pattern.count("*")
    per_token = 2 * shape.num_key_value_heads * shape.head_dim * kv_dtype.itemsize
    page = mamba * layout.page_bytes
    drafts = layout.bytes_per_request(mamba) - page
    return {
        "block_size": layout.block_size,
        "live": page,
        "guesses": drafts,
        "snapshot": page,
        "state": page + drafts + CHECKPOINTS * page,
        "kv_per_token": attention * per_token,
    }


def memory_table() -> list[Row]:
    """Every shape at its whole depth, bf16 keys and values, fp32 and fp16 states."""
    rows = []
    for name, shape in SHAPES.items():
        if name in ("tiny", "narrow"):
            continue
        sizes = config(shape, len(shape.pattern))
        for dtype in ("float32", "float16"):
            by = {k: request_bytes(sizes, k, getattr(torch, dtype), torch.bfloat16) for k in KINDS}
            ratio = by["replay"]["state"] / by["columns"]["state"]
            rows.append({"shape": name, "name": shape.name, "ssm_dtype": dtype} | by)
            rows[-1]["state_ratio"] = ratio
    return rows


class Room:
    """What a layout makes of the cache: how many requests, and the pools for them."""

    def __init__(self, shape: NemotronHConfig, load: Load, dtype: torch.dtype, budget: int) -> None:
        ssm = getattr(torch, load.ssm_dtype)
        self.bytes = request_bytes(shape, load.state_layout, ssm, dtype)
        kv_block = load.config.kv_block(self.bytes["block_size"])
        kv_blocks = -(-(load.isl + load.osl) // kv_block) + 1  # and one for drafts
        self.kv_bytes = kv_blocks * kv_block * self.bytes["kv_per_token"]
        self.requests = budget // (self.bytes["state"] + self.kv_bytes)
        states = 1 + CHECKPOINTS + (DRAFTS if load.state_layout == "columns" else 0)
        self.blocks = self.requests * kv_blocks, self.requests * states


class Peak:
    """The most that was owned and running at once."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine.scheduler
        self.running = self.kv = self.state = 0

    def __call__(self) -> None:
        kv, state = self._scheduler.kv.pool, self._scheduler.state.pool
        self.running = max(self.running, len(self._scheduler.running))
        self.kv = max(self.kv, kv.size - kv.free)
        self.state = max(self.state, state.size - state.free)


def measure(model: NemotronH, head: MTPHead, load: Load, room: Room, args: Any) -> Row:
    """Run as many requests as fit, `repeats` times, then a longer queue through the same pools."""
    block = room.bytes["block_size"]
    queue = replace(load, batch=args.served)
    started = time.perf_counter()
    longest = load.osl + max(load.prompt_lengths(block) + queue.prompt_lengths(block))
    options = replace(load.config, max_model_len=longest, num_blocks=room.blocks)
    engine = Engine(model, options, head=head)
    engine.capture()
    vocabulary = model.config.vocab_size
    drive(engine, [p[:64] for p in load.prompts(block, vocabulary, 10**6)], 16)
    print(f"{load.key}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    before, peak = engine.stats(), Peak(engine)
    repeats = [
        summarize(drive(engine, load.prompts(block, vocabulary, seed), load.osl, peak))
        for seed in range(args.repeats)
    ]
    after = engine.stats()
    served = summarize(drive(engine, queue.prompts(block, vocabulary, 99), load.osl))
    scheduler = engine.scheduler
    row: Row = {
        "state_layout": load.state_layout,
        "ssm_dtype": load.ssm_dtype,
        "requests": room.requests,
        "bytes_per_request": room.bytes | {"kv": room.kv_bytes},
        "blocks": room.blocks,
        "most_running": peak.running,
        "most_blocks_owned": (peak.kv, peak.state),
        "snapshots_kept": scheduler.state.pool.cached,
        "preemptions": after.preemptions - before.preemptions,
        "decode_tok_s": _mean([r["decode_tok_s"] for r in repeats]),
        "step_ms": _mean([r["step_ms_mean"] for r in repeats]),
        "output_tok_s": _mean([r["output_tok_s"] for r in repeats]),
        "served_requests": args.served,
        "served_tok_s": served["output_tok_s"],
        "served_preemptions": engine.stats().preemptions - after.preemptions,
    }
    if model.device.type == "cuda":
        row["device_bytes"] = torch.cuda.max_memory_allocated()
    print(f"{load.key}: done after {time.perf_counter() - started:.1f} s", flush=True)
    return row | {"repeats": repeats, "served": served}


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def run(args: argparse.Namespace) -> Row:
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = config(SHAPES[args.shape])
    model, head = build(sizes, device, dtype, args.seed)
    result: Row = {
        "environment": environment(),
        "shape": args.shape,
        "name": SHAPES[args.shape].name,
        "dtype": str(dtype).removeprefix("torch."),
        "options": {k: str(v) for k, v in vars(args).items() if k != "out"},
        "cache_bytes": int(args.gib * 2**30),
        "drafts": DRAFTS,
        "acceptance": ACCEPTANCE,
        "memory": memory_table(),
        "rows": [],
        "ratios": {},
    }
    for ssm_dtype in args.ssm_dtype.split(","):
        by: dict[str, Row] = {}
        for kind in KINDS:
            load = Load(
                drafts=DRAFTS,
                isl=args.isl,
                osl=args.osl,
                ssm_dtype=ssm_dtype,
                acceptance=ACCEPTANCE,
                lengths="staggered",
                state_layout=kind,
            )
            room = Room(sizes, load, dtype, result["cache_bytes"])
            most = max(args.max_tokens_per_step, (DRAFTS + 1) * room.requests)
            load = replace(load, batch=room.requests, max_tokens_per_step=most)
            by[kind] = measure(model, head, load, room, args)
            result["rows"].append(by[kind])
            give_back()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            if len(by) == len(KINDS):
                result["ratios"][ssm_dtype] = {
                    name: by["replay"][name] / by["columns"][name]
                    for name in ("requests", "decode_tok_s", "output_tok_s", "served_tok_s")
                    if by["columns"][name]
                }
            save("capacity", result, args.out)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--gib", type=float, default=60, help="cache: keys, values and states")
    parser.add_argument("--isl", type=int, default=1024, help="mean tokens of a prompt")
    parser.add_argument("--osl", type=int, default=256)
    parser.add_argument("--ssm-dtype", default="float32", help="several: with commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--served", type=int, default=512, help="requests of the longer queue")
    parser.add_argument("--max-tokens-per-step", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    result = run(args)
    show(
        "state of one request, MB (10^6 bytes), one checkpoint",
        [
            {"shape": r["shape"], "ssm": r["ssm_dtype"]}
            | {f"{k} {n}": r[k][n] / 1e6 for k in KINDS for n in ("live", "guesses", "state")}
            | {"ratio": r["state_ratio"], "KV B/token": r["replay"]["kv_per_token"]}
            for r in result["memory"]
        ],
    )
    names = (
        "state_layout", "ssm_dtype", "requests", "most_running", "blocks", "most_blocks_owned",
        "preemptions", "step_ms", "decode_tok_s", "output_tok_s", "served_tok_s",
        "served_preemptions",
    )  # fmt: skip
    show(f"{args.gib} GiB, {result['name']}", [{n: r[n] for n in names} for r in result["rows"]])
    print(result["ratios"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
