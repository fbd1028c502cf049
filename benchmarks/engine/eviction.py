"""What the prefix cache should keep: prompt tokens that hit under several rules, replayed on a CPU.

    python benchmarks/engine/eviction.py
    python benchmarks/engine/eviction.py --arrivals 300 --gib 3

No model runs. Requests of the traces of `traces.py` go one after the other through the engine's own
prefix cache and block pools, with the block sizes and bytes of Nemotron-H-8B, and take, file and
give back the blocks that a request of the engine does. The same memory is divided between states
and keys in several ways, the first of which is the engine's own. Compared are

- `lru`: the block goes whose last use is longest ago; superseded ends before it;
- `pins`: the same, but what prompts have named goes last: the engine's rule until now;
- `worth`: the engine's rule;
- `future`: what is used next goes last, the better one of two orders: by when that is, and by the
  tokens that a byte of it will save over how long that takes. It knows the whole trace. It is no
  upper bound: blocks of a request go one by one, and nothing looks at what fits together.

Hits of the first quarter are not counted.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from capacity import memory_table
from record import arguments, plain, save, show
from traces import Arrival, Mix, trace

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.engine.block_pool import BlockPool, BlockTable
from hybrid_runtime.engine.device_tables import DeviceTables
from hybrid_runtime.engine.memory_plan import STATES_SHARE
from hybrid_runtime.engine.prefix_cache import PrefixCache
from hybrid_runtime.engine.request import Request
from hybrid_runtime.engine.reuse import HALF_LIFE, WINDOW, Kind, Reuse
from hybrid_runtime.specdecode.sampling import SamplingParams
from hybrid_runtime.state.placement import BlockDemand
from hybrid_runtime.state.step import Checkpoint

Row = dict[str, Any]
BLOCK, KV_BLOCK, DRAFTS = 1024, 64, 3
LONGEST = 100_000
SHARES = (0.8, 0.4)
"""Of the memory, for states, beside the engine's own. With one state for each block of keys, which
is what boundaries leave, it is 0.83."""
ALL = 1 << 20
"""KV blocks with which nothing has to make room."""
MIXES = {
    "skewed": Mix(240, 54, 1.0, {"chat": 0.5, "agent": 0.2, "document": 0.2, "few-shot": 0.1}),
    "uniform": Mix(240, 54, 0.0, {"chat": 0.6, "agent": 0.25, "few-shot": 0.15}),
    "all fit": Mix(30, 7, 0.0, {"chat": 0.6, "agent": 0.25, "few-shot": 0.15}),
    "scan": Mix(240, 54, 0.0, {"chat": 0.7, "agent": 0.3}, in_turn=True),
}


class Sizes(NamedTuple):
    """Bytes of a state and of a token's keys and values."""

    state: int
    token: int

    def divided(self, memory: int, share: float) -> tuple[int, int]:
        """KV blocks and states."""
        kv = int(memory * (1 - share) / (self.token * KV_BLOCK))
        return kv, int(memory * share / self.state)


class Recency(Reuse):
    """All are worth the same, but what is pinned, if that goes last."""

    def __init__(self, pins: bool) -> None:
        super().__init__(1 << 20)
        self._pins = pins

    def worth(self, key: bytes, now: float, saved: int = 1) -> float:
        known = self._seen.get(key)
        return float(self._pins and known is not None and known.like[0] is Kind.NAMED)


class Future(Reuse):
    """Knows `uses`: when each key is used, and the tokens that a byte of it saves then."""

    def __init__(self, uses: dict[bytes, tuple[list[int], list[float]]], by_time: bool) -> None:
        super().__init__(1 << 20)
        self.time, self._uses, self._by_time = 0, uses, by_time
        self.used: dict[int, list[bytes]] = defaultdict(list)
        for key, (times, _) in uses.items():
            for time in times:
                self.used[time].append(key)

    def worth(self, key: bytes, now: float, saved: int = 1) -> float:
        times, saved_then = self._uses.get(key, ([], []))
        at = bisect_right(times, self.time)
        if at == len(times):
            return -1e9
        return -times[at] if self._by_time else log2(saved_then[at] / (times[at] - self.time))


class States:
    """State blocks of the request that is replayed."""

    anywhere = True

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.owned: dict[int, int] = {}

    def block(self, checkpoint: Checkpoint) -> int:
        return self.owned[checkpoint.position]

    def filed(self, checkpoint: Checkpoint) -> None:
        return None


class Replay:
    """A prefix cache of so many KV blocks and states, and what was found in it."""

    def __init__(self, blocks: tuple[int, int], reuse: Reuse | None) -> None:
        tables = DeviceTables(1, (LONGEST // KV_BLOCK,), torch.device("cpu"), 2, Waits())
        self.keys, self.states = BlockTable(BlockPool(blocks[0]), tables, 0), BlockPool(blocks[1])
        self._own = States(self.states)
        state: Any = self._own  # what of it the cache looks at
        self.cache = PrefixCache(
            self.keys, state, BLOCK, KV_BLOCK, "all", DRAFTS, lambda source, target: None
        )
        if reuse is not None:
            self.cache.reuse = reuse
        self._count = 0

    def serve(self, arrival: Arrival) -> Request:
        """One request from its admission to its end."""
        cache, prompt, answer = self.cache, arrival.prompt, arrival.answer
        if isinstance(cache.reuse, Future):
            cache.reuse.time = self._count
        params = SamplingParams(max_tokens=len(answer))
        request = Request(self._count, prompt, params, 0, checkpoints_at=arrival.ends)
        hit = request.hit = cache.find(request)
        request.slot, request.filed = 0, hit.tokens // BLOCK
        cache.adopt(request)
        self._own.owned = {}
        if hit.state is not None:
            self.states.share([hit.state])
        (live,) = self.states.take(1)
        end = len(prompt) + len(answer) - 1  # the last token of a text does not run
        last, zero = np.array([end // KV_BLOCK]), np.zeros(1, int)
        self.keys.allocate(self.keys.changes(zero, BlockDemand(zero, zero, last, last)))
        wanted = cache.wanted(request)
        at = wanted.next(hit.tokens)
        while at <= end:
            if at > len(prompt) and not request.output:
                request.output = answer.tolist()
            (self._own.owned[at],) = self.states.take(1)
            request.computed = at
            cache.file(request, [Checkpoint(0, 0, at, 0)])
            self.states.put([self._own.owned.pop(at)])
            at = wanted.next(at)
        request.output, request.computed = answer.tolist(), end
        cache.file(request, [])
        self._own.owned[end] = live
        cache.file_turn_end(request, Checkpoint(0, 0, end, 0))
        cache.leaving(request)
        self.keys.free(0)
        self.states.put([live] if hit.state is None else [live, hit.state])
        request.slot = -1
        cache.retired(request)
        if isinstance(cache.reuse, Future):
            self._look_ahead(request, cache.reuse)
        self._count += 1
        return request

    def _look_ahead(self, request: Request, future: Future) -> None:
        """Value anew what this request has left or used, and what it should have used."""
        left = (key for _, key in request.left)
        for key in dict.fromkeys((*request.hashes, *future.used[self._count], *left)):
            for pool in (self.keys.pool, self.states):
                block = pool.find(key)
                if block is not None:
                    keys = pool.keys_of(block)
                    pool.value(block, max(future.worth(each, 0.0) for each in keys))


def replay(blocks: tuple[int, int], arrivals: Iterable[Arrival], skip: int, reuse: Any) -> Row:
    """Tokens of prompts, and of those the ones that were hit, by what sent them."""
    here, hits, prompts = Replay(blocks, reuse), Counter[str](), 0
    for number, arrival in enumerate(arrivals):
        request = here.serve(arrival)
        if number >= skip:
            hits[arrival.kind] += request.hit.tokens
            prompts += len(arrival.prompt)
    return {"hit_tokens": hits.total(), "prompt_tokens": prompts, "by_kind": dict(hits)}


def uses(sizes: Sizes, arrivals: Iterable[Arrival]) -> dict[bytes, tuple[list[int], list[float]]]:
    """When each key is used where nothing has to make room, and the tokens that a byte saves."""
    here = Replay((ALL, ALL), Recency(False))
    found: dict[bytes, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
    for time, arrival in enumerate(arrivals):
        request = here.serve(arrival)
        hit = request.hit
        if not hit.tokens:
            continue
        worth = hit.tokens / (sizes.state + hit.tokens * sizes.token)
        for key in dict.fromkeys((*request.hashes[: len(hit.keys)], request.left[0][1])):
            found[key][0].append(time)
            found[key][1].append(worth)
    return dict(found)


def compare(name: str, mix: Mix, sizes: Sizes, args: argparse.Namespace) -> list[Row]:
    def arrivals() -> Iterable[Arrival]:
        return islice(trace(mix, args.seed), args.arrivals)

    skip, memory = args.arrivals // 4, int(args.gib * 2**30)
    future = uses(sizes, arrivals())
    known = replay((ALL, ALL), arrivals(), skip, Recency(False))
    splits = {"engine": sizes.divided(memory, STATES_SHARE)}
    if name == "skewed":
        splits |= {f"{share:.0%}": sizes.divided(memory, share) for share in SHARES}
    rows = []
    for split, blocks in splits.items():
        rules = {"lru": Recency(False), "pins": Recency(True), "worth": None}
        found = {rule: replay(blocks, arrivals(), skip, reuse) for rule, reuse in rules.items()}
        orders = [replay(blocks, arrivals(), skip, Future(future, by)) for by in (True, False)]
        found["future"] = max(orders, key=lambda row: row["hit_tokens"])
        hits = {rule: row["hit_tokens"] for rule, row in found.items()}
        row = {
            "trace": name,
            "split": split,
            "blocks": blocks,
            "state_share": blocks[1] * sizes.state / memory,
            "possible": known["hit_tokens"] / known["prompt_tokens"],
            "hit": {rule: count / known["prompt_tokens"] for rule, count in hits.items()},
            "worth_per_lru": hits["worth"] / hits["lru"],
            "worth_per_pins": hits["worth"] / hits["pins"],
            "worth_per_future": hits["worth"] / hits["future"],
            "by_kind": {rule: row["by_kind"] for rule, row in found.items()},
        }
        print(plain([row], "by_kind"), flush=True)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--arrivals", type=int, default=2000)
    parser.add_argument("--gib", type=float, default=20, help="of cached prefixes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", default=",".join(MIXES))
    args = parser.parse_args(argv)
    shape = next(r for r in memory_table() if r["shape"] == "8b" and r["ssm_dtype"] == "float32")
    sizes = Sizes(shape["replay"]["live"], shape["replay"]["kv_per_token"])
    rows = [r for n in args.traces.split(",") for r in compare(n, MIXES[n], sizes, args)]
    show("prefix cache, hit ÷ prompt tokens", plain(rows, "by_kind"))
    result = {
        "name": shape["name"],
        "sizes": sizes._asdict(),
        "gib": args.gib,
        "arrivals": args.arrivals,
        "seed": args.seed,
        "half_life": HALF_LIFE,
        "window": WINDOW,
        "rows": rows,
    }
    print(save("eviction", result, args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
