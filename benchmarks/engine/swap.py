"""Moving cache blocks between device and host: one batch of copies against loops over them.

    python benchmarks/engine/swap.py
    python benchmarks/engine/swap.py --device cpu --shapes tiny --blocks 1,3 --repeats 2

Keys and values of all attention layers (draft head's too) and states of all Mamba layers, fp16 SSM
state, else bf16, in blocks of the size that both share; "80-layer" is a model with attention only,
8 KV heads x 128 and blocks of 16 tokens, or of 64. *submit*: host us of the whole call, queue
drained before. *queued*: GPU time of a batch submitted behind other work. *elapsed*: from call to
last byte on an idle device. *share*: of what one copy of 1 GiB from or to memory pinned by torch
reaches. Blocks are either scattered, no two of them neighbours, or in a row; loops, which see no
difference, are measured on scattered ones. *copy_*, *cuMemcpyAsync*: how often the batch's submit
goes into that of a loop over blocks and layers; *cuda-bindings*: the same batch given as lists.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from record import arguments, save, show
from swap_cases import DENSE, DIRECTIONS, Bench, Kind, kinds, limits

from hybrid_runtime.engine.offload.memcpy import driver_version

Row = dict[str, Any]


def case(bench: Bench, count: int, placement: str, direction: str, repeats: int) -> Row:
    """All ways to move `count` blocks in one direction."""
    blocks, stats = bench.places(placement, count), bench.tier.stats
    asked, submitted = stats.asked, stats.submitted
    submit: dict[str, list[float]] = {}
    elapsed: dict[str, list[float]] = {}
    prepare = bench.batched(blocks, direction)
    submit["batched"], elapsed["batched"] = bench.time(prepare, repeats)
    delay = 1.5 * statistics.median(submit["batched"]) + 300
    _, queued = bench.time(prepare, repeats, min(delay, 2e5))
    # A load is measured behind a store of the same blocks, which is as many copies.
    moves = (stats.asked - asked) // (count * bench.group.runs_per_block)
    if placement == "scattered":
        for name, loop in bench.loops(blocks, direction).items():
            submit[name], elapsed[name] = bench.time(lambda loop=loop: loop, repeats)
    moved = count * bench.group.bytes_per_block
    rate = moved / statistics.median(queued) * 1e3
    return {
        "model": bench.kind.model,
        "group": bench.kind.group,
        "blocks": count,
        "placement": placement,
        "direction": direction,
        "bytes": moved,
        "asked": (stats.asked - asked) // moves,
        "submitted": (stats.submitted - submitted) // moves,
        "submit_us": {name: statistics.median(times) for name, times in submit.items()},
        "elapsed_ms": {name: statistics.median(times) for name, times in elapsed.items()},
        "queued_ms": statistics.median(queued),
        "bytes_per_s": rate,
        "share": rate / bench.limit[direction],
        "repeats": {"submit_us": submit, "elapsed_ms": elapsed, "queued_ms": queued},
    }


def measure(
    kind: Kind, counts: list[int], args: argparse.Namespace, limit: dict[str, float], until: float
) -> tuple[list[Row], list[str], str]:
    """Cases of one kind of blocks, what was left out and why, and how copies are submitted."""
    meta = torch.device("meta")
    one = sum(t[0].numel() * t.element_size() for t in kind.make(1, meta)) / 2**30
    cases: list[Row] = []
    left_out = [f"{n * one:.1f} GiB of {n} blocks" for n in counts if n * one > args.gib]
    fits = [n for n in counts if n * one <= args.gib]
    path = ""
    if fits and time.monotonic() < until:
        bench = Bench(kind, max(fits), torch.device(args.device), limit)
        path = bench.tier.path
        bench.check(bench.places("scattered", min(fits)))
        while fits and time.monotonic() < until:
            n = fits.pop(0)
            for placement in ("scattered", "row"):
                cases += [case(bench, n, placement, d, args.repeats) for d in DIRECTIONS]
    left_out += [f"{n} blocks, time is up" for n in fits]
    return cases, [f"{kind.model} {kind.group}: {text}" for text in left_out], path


def line(row: Row) -> Row:
    """A case as the table shows it."""
    us = row["submit_us"]
    result = {"blocks of": f"{row['model'].removeprefix('Nemotron-')} {row['group']}"}
    result |= {k: row[k] for k in ("blocks", "placement", "direction")}
    result |= {"MB": row["bytes"] / 1e6, "asked": row["asked"], "submitted": row["submitted"]}
    result |= {"submit us": f"{us['batched']:.0f}"}
    for short in ("copy_", "cuMemcpyAsync", "cuda-bindings"):
        other = next((us[name] for name in us if name.endswith(short)), None)
        result[short] = "" if other is None else f"{other / us['batched']:.1f} x"
    result |= {"elapsed ms": row["elapsed_ms"]["batched"], "queued ms": row["queued_ms"]}
    return result | {"GB/s": row["bytes_per_s"] / 1e9, "share": row["share"]}


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default=",".join([*DENSE, "8b", "nano-30b", "super-120b"]))
    parser.add_argument("--blocks", default="1,4,16,64,256")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gib", type=float, default=7, help="most host memory of one kind")
    parser.add_argument("--seconds", type=float, default=120, help="no size starts after these")
    args = parser.parse_args(argv)
    until = time.monotonic() + args.seconds
    counts = [int(n) for n in args.blocks.split(",")]
    cuda = torch.device(args.device).type == "cuda"
    cases: list[Row] = []
    left_out: list[str] = []
    path = ""
    # Batches are refused on the default stream, and loops run on the current one.
    with torch.cuda.stream(torch.cuda.Stream()) if cuda else contextlib.nullcontext():
        limit = limits(torch.device(args.device))
        for kind in [kind for name in args.shapes.split(",") for kind in kinds(name)]:
            rows, missing, used = measure(kind, counts, args, limit, until)
            cases, left_out, path = cases + rows, left_out + missing, used or path
            if cuda:
                torch.cuda.empty_cache()
    show("moving blocks between device and host", [line(row) for row in cases])
    print(f"path: {path}; CUDA version of the driver: {driver_version()}")
    print(*(f"limit {name}: {rate / 1e9:.1f} GB/s" for name, rate in limit.items()), sep="; ")
    print(*(f"left out: {text}" for text in left_out), sep="\n")
    result = {"path": path, "driver_cuda": driver_version(), "limit_bytes_per_s": limit}
    print(save("swap", result | {"left_out": left_out, "cases": cases}, args.out))
    return 0


if __name__ == "__main__":
    main()
