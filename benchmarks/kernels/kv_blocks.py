"""What does the size of KV blocks cost paged attention?

    python benchmarks/kernels/kv_blocks.py
    python benchmarks/kernels/kv_blocks.py --kv-cache-dtype fp8
    python benchmarks/kernels/kv_blocks.py --device cpu --shape tiny --contexts 40 --chunk 9

One attention layer of a model, bf16: rows that decode (1 token, or 1 and 3 drafts) behind contexts
of 8k and 64k tokens, and one chunk of a prompt of 2,048 tokens behind 6k. Blocks lie scattered, by
a random permutation, in a pool of at least 4 times the L2 cache, and launches rotate over it. The
largest size, 1,056, is the 8B's block of states. Results of all sizes are compared before anything
is timed. GPU microseconds of the attention alone, medians.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from record import arguments, graph_us, host_us, numbers, save, show
from shapes import SHAPES, config
from torch import Tensor

from hybrid_runtime.device.compile import compiling
from hybrid_runtime.kernels.attention.launch import AttentionRows, KVCache
from hybrid_runtime.kernels.attention.paged import paged_attention
from hybrid_runtime.kernels.linear.quantize import E4M3

Row = dict[str, Any]
POOL = 256 << 20
"""Bytes of keys and values that the launches of one case read by turns, at least."""
MANY = 1 << 19
"""Tokens of all rows of a case, at most: there are fewer rows otherwise."""
CHUNK, BEHIND = 2048, 6144


class Case(NamedTuple):
    """rows: each of `tokens` tokens behind `context` others."""

    rows: int
    tokens: int
    context: int


class Pool:
    """Keys and values of all rows of all launches of a case; what each position holds does not
    depend on the size of the blocks."""

    def __init__(self, case: Case, shape: Any, device: torch.device, narrow: bool) -> None:
        self.case, self.device, self.size = case, device, shape.head_dim
        self.length = case.context + case.tokens
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        kept = E4M3 if narrow else self.dtype
        each = 2 * self.length * kv_heads * self.size * kept.itemsize
        pool = 1
        if device.type == "cuda":
            pool = max(POOL, 4 * torch.cuda.get_device_properties(device).L2_cache_size)
        self.launches = max(1, math.ceil(pool / (each * case.rows)))
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int) -> Tensor:
            made = torch.empty(size, device=device, dtype=self.dtype)
            return made.normal_(generator=generator)

        lines = self.launches * case.rows, self.length, kv_heads, self.size
        self.kv = [normal(*lines).to(kept) for _ in range(2)]
        self.q = normal(case.rows * case.tokens, heads, self.size)
        slot = torch.arange(case.rows, dtype=torch.int32, device=device)
        starts = torch.arange(case.rows + 1, dtype=torch.int32, device=device) * case.tokens
        self.rows = AttentionRows(slot, starts, torch.full_like(slot, case.context))

    def blocks(self, size: int) -> list[KVCache]:
        """The same keys and values in scattered blocks, a cache per launch over the same memory."""
        slots, columns = len(self.kv[0]), -(-self.length // size)
        order = torch.randperm(slots * columns, generator=torch.Generator().manual_seed(1))
        table = order.view(slots, columns).to(self.device, torch.int32)
        caches = []
        for part in self.kv:
            cache = part.new_empty(slots * columns, size, *part.shape[2:])
            for slot, lines in enumerate(part):  # one at a time: no second copy of everything
                whole = cache.new_zeros(columns * size, *lines.shape[1:])
                whole[: self.length] = lines
                cache[table[slot].long()] = whole.view(columns, size, *lines.shape[1:])
            caches.append(cache)
        rows = self.case.rows
        return [KVCache(*caches, table[i * rows : (i + 1) * rows]) for i in range(self.launches)]

    def attend(self, cache: KVCache) -> Tensor:
        scale = self.size**-0.5
        return paged_attention(self.q, cache, self.rows, self.case.tokens, self.length, scale)


def cases(args: Any) -> list[Case]:
    decoding = [
        Case(rows, tokens, context)
        for context in args.contexts
        for rows in sorted({min(rows, max(MANY // context, 1)) for rows in args.rows})
        for tokens in args.tokens
    ]
    return [*decoding, Case(1, args.chunk, args.behind)]


def measure(case: Case, shape: Any, args: Any) -> Row:
    """Of one case, all sizes by turns, forwards and backwards."""
    pool = Pool(case, shape, torch.device(args.device), args.kv_cache_dtype == "fp8")
    caches = {size: pool.blocks(size) for size in args.blocks}
    if args.device == "cuda":
        with compiling():
            for every in caches.values():
                pool.attend(every[0])
    wanted = None
    for size, every in caches.items():
        found = pool.attend(every[-1]).float()
        wanted = found if wanted is None else wanted
        if not torch.allclose(found, wanted, atol=2e-2, rtol=2e-2):
            raise RuntimeError(f"{case}: blocks of {size} give other results than {args.blocks[0]}")
    times: dict[int, list[float]] = {size: [] for size in caches}
    for turn in range(args.repeats):
        for size in [*caches][:: 1 if turn % 2 else -1]:
            calls = [lambda cache=cache: pool.attend(cache) for cache in caches[size]]
            if args.device == "cuda":
                times[size] += graph_us(calls, repeats=1, number=args.number)
            else:
                times[size] += host_us(calls[0], repeats=1, number=1)  # only to run it
    repeats = {str(size): found for size, found in times.items()}
    us = {size: statistics.median(found) for size, found in repeats.items()}
    return case._asdict() | {"launches": pool.launches, "us": us, "repeats": repeats}


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--shape", default="8b", choices=SHAPES)
    add("--device", default="cuda")
    add("--blocks", type=numbers, default=[16, 32, 64, 1056])
    add("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    add("--rows", type=numbers, default=[1, 16, 64])
    add("--tokens", type=numbers, default=[1, 4])
    add("--contexts", type=numbers, default=[8192, 65536])
    add("--chunk", type=int, default=CHUNK, help="tokens of a prompt")
    add("--behind", type=int, default=BEHIND, help="tokens in front of them")
    add("--repeats", type=int, default=7)
    add("--number", type=int, default=3, help="replays of a graph that one repeat times")
    args = parser.parse_args(argv)
    shape = config(SHAPES[args.shape])
    rows = [measure(case, shape, args) for case in cases(args)]
    result = {"shape": args.shape, "unit": "us", "blocks": args.blocks, "rows": rows}
    result["kv_cache_dtype"] = args.kv_cache_dtype
    path = save("kv_blocks", result, args.out)
    last = str(args.blocks[-1])
    table = [
        {k: row[k] for k in Case._fields}
        | row["us"]
        | {f"{size} ÷ {last}": us / row["us"][last] for size, us in row["us"].items()}
        for row in rows
    ]
    show(f"paged attention by KV block size, {SHAPES[args.shape].name}, us", table)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
