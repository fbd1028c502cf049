"""Prefix cache: blocks of keys and values, and the states at their ends, found by their content.

A hit needs both kinds, at one boundary, a multiple of a state's block: all keys and values below
it, whose blocks may be smaller, and the checkpoint at it. The key of KV block `i` is a hash of all
tokens up to its end, begun with the tenant's name, so that no tenant finds what another one has
computed; the key of a checkpoint is that of the KV block that ends there. Keys and values are filed
from boundary to boundary, since between two nobody can hit.

What a drafter needs of the prefix: its keys and values lie in the same blocks as the target's. They
were written with the true next token at every position but the block's last, whose next token is
the next block's first and may be another one here: that one entry only makes a draft worse, it
cannot change what is accepted. The hidden state that it starts from is that of the last token run,
and a hit always leaves at least one token to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from hybrid_runtime.engine.block_pool import BlockPool, BlockTable
from hybrid_runtime.engine.config import RetentionPolicy
from hybrid_runtime.engine.offload.cache import HostCache
from hybrid_runtime.engine.request import Hit, Request, ShortHit
from hybrid_runtime.engine.state_blocks import StateBlocks, Wanted
from hybrid_runtime.state.step import Checkpoint

KEYS, STATE = "kv", "state"
"""The groups of a host tier."""


@dataclass(slots=True)
class PrefixStats:
    """What was found, since construction.

    queried_tokens, hit_tokens: of requests when they were admitted, after a preemption again.
    evictions: blocks that made room for others.
    host_blocks: blocks that came from the host tier.
    short: admissions by why their hit was not longer, see `Hit`; None is not counted.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    host_blocks: int = 0
    short: Counter[str] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


class PrefixCache:
    """Files blocks of two pools and finds them again. block: tokens between two boundaries.
    kv_block: tokens of a KV block, a divisor of it. retention: which boundaries have their state
    saved, see `EngineConfig`."""

    def __init__(
        self,
        keys: BlockTable,
        state: StateBlocks,
        block: int,
        kv_block: int,
        retention: RetentionPolicy,
        host: HostCache | None = None,
    ) -> None:
        self.keys, self.state, self.block, self.retention = keys, state, block, retention
        self.host = host
        # KV blocks from one boundary to the next.
        self._each = block // kv_block
        self._stats = PrefixStats()

    @property
    def min_cacheable_tokens(self) -> int:
        """Prompts shorter than this can never hit."""
        return self.block + 1

    def clear(self) -> None:
        """Forget all content, the host's too; blocks that requests own stay theirs."""
        self.keys.pool.clear()
        self.state.pool.clear()
        if self.host is not None:
            self.host.clear()

    def reset(self) -> None:
        """Forget what the host has, after an exception anywhere; the tables have been reset."""
        if self.host is not None:
            self.host.reset()

    def stats(self) -> PrefixStats:
        self._stats.evictions = self.keys.pool.evictions + self.state.pool.evictions
        return self._stats

    def find(self, request: Request) -> Hit:
        """The longest hit for what is known of a request's text, `most_hit` at the most."""
        self._hash(request)
        most = (request.length - 1) // self.block
        if not most:
            return Hit(short="short_prompt")
        hashes, each = request.hashes, self._each
        keys = self.keys.pool.find_leading(hashes[: most * each])
        known = len(keys) // each
        short: ShortHit | None = None
        if known < most:
            last = self._keys(request, known)[-1]  # filed with those before it
            if self.keys.pool.find(last) is not None or self.keys.pool.evicted(last):
                short = "evicted_keys"
        usable = count = min(known, request.most_hit // self.block)
        if usable < known:
            short = "prompt_logprobs" if request.pooled_from is None else "pooled"
        while count and self.state.pool.find(hashes[count * each - 1]) is None:
            count -= 1
        if count < usable:
            gone = self.state.pool.evicted(hashes[usable * each - 1])
            short = "evicted_checkpoint" if gone else "no_checkpoint"
        state = self.state.pool.find(hashes[count * each - 1]) if count else None
        return Hit(
            count * self.block, tuple(keys[: count * each]), state, known * self.block, short
        )

    def promote(self, request: Request, hit: Hit) -> Hit:
        """The hit after blocks that only the host has were copied to the device, if that makes it
        longer. There must be room on the device for all of the request."""
        if self.host is None:
            return hit
        pools = {KEYS: self.keys.pool, STATE: self.state.pool}
        hashes, each = request.hashes, self._each
        most = request.most_hit // self.block
        count = min(hit.known // self.block, most)
        while count < most and self._anywhere(KEYS, pools[KEYS], self._keys(request, count)):
            count += 1
        first = hit.tokens // self.block
        while count > first and not self._anywhere(STATE, pools[STATE], [hashes[count * each - 1]]):
            count -= 1
        if count == first:
            return hit
        wanted = {KEYS: hashes[: count * each], STATE: [hashes[count * each - 1]]}
        for group, hashes in wanted.items():
            pool = pools[group]
            # Those that are here must not make room for the others.
            here = [block for key in hashes if (block := pool.find(key)) is not None]
            if group == STATE and hit.state is not None:
                here.append(hit.state)  # all there is, if a copy fails
            pool.share(here)
            absent = [key for key in hashes if pool.find(key) is None]
            if absent and len(absent) <= pool.free:
                taken = pool.take(len(absent))
                # Behind copies to the host that still read these blocks, see `CopyStream`.
                if self.host.load(group, absent, taken):
                    for key, block in zip(absent, taken, strict=True):
                        pool.file(key, block)
                    self._stats.host_blocks += len(taken)
                here += taken
            pool.put(here)
        return self.find(request)

    def _keys(self, request: Request, index: int) -> list[bytes]:
        """Of the KV blocks between boundary number `index` and the next."""
        return request.hashes[index * self._each : (index + 1) * self._each]

    def _anywhere(self, group: str, pool: BlockPool, keys: Iterable[bytes]) -> bool:
        """Whether each of these is on the device or on the host."""
        return all(
            pool.find(key) is not None or (self.host is not None and self.host.has(group, key))
            for key in keys
        )

    def order_reuse(self, keys: list[int], state: list[int]) -> None:
        """These blocks were just handed out: let the launches that write them run behind copies
        that still read them."""
        if self.host is not None:
            self.host.order_reuse(KEYS, keys)
            self.host.order_reuse(STATE, state)

    def adopt(self, request: Request) -> None:
        """Let an admitted request own its hit."""
        hit = request.hit
        self._stats.queried_tokens += request.length
        self._stats.hit_tokens += hit.tokens
        if hit.short is not None:
            self._stats.short[hit.short] += 1
        if hit.state is not None:
            self.keys.adopt(request.slot, 0, hit.keys)

    def wanted(self, request: Request) -> Wanted:
        """Where checkpoints of this request are worth a block."""
        if self.retention == "all":
            return self.block, ()
        last = (request.length - 1) // self.block * self.block
        places = {at for at in (last, request.hit.known) if at > request.hit.tokens}
        every = 0 if self.retention == "prompt" else self.retention
        return int(every), tuple(sorted(places))

    def next_cut(self, request: Request, start: int) -> int:
        """The first position behind `start` at which a prompt must leave a checkpoint; its length
        if there is none."""
        every, places = self.wanted(request)
        cuts = [at for at in places if at > start]
        if every:
            cuts.append((start // every + 1) * every)
        return min(cuts, default=request.length)

    def is_unfiled(self, request: Request, checkpoint: Checkpoint) -> bool:
        """Whether this checkpoint, in a block that the request owns, can be filed and is not."""
        self._hash(request)
        index = checkpoint.position // self.block * self._each
        if index > len(request.hashes) or self.state.block(checkpoint) < 0:
            return False
        return self.state.pool.find(request.hashes[index - 1]) is None

    def file(self, request: Request, checkpoints: Sequence[Checkpoint]) -> None:
        """Let others find what a request has left: checkpoints that a step whose results were read
        published, or that `Scheduler.close` had stored, and keys and values of full blocks. All
        launches that wrote them come before any that a later hit leads to, on the same stream."""
        self._hash(request)
        # What was accepted beyond the request's own end has no place in its text.
        hashes, each = request.hashes, self._each
        states = [
            (hashes[checkpoint.position // self.block * each - 1], self.state.block(checkpoint))
            for checkpoint in checkpoints
            if checkpoint.position // self.block * each <= len(hashes)
        ]
        full = min(request.computed // self.block, len(hashes) // each)
        span = slice(request.filed * each, max(request.filed, full) * each)
        keys = [*zip(hashes[span], self.keys.blocks(request.slot, span), strict=True)]
        request.filed = max(request.filed, full)
        for group, pool, blocks in (
            (STATE, self.state.pool, states),
            (KEYS, self.keys.pool, keys),
        ):
            new = [(key, block) for key, block in blocks if pool.file(key, block)]
            if new and self.host is not None:
                self.host.store(group, [key for key, _ in new], [block for _, block in new])
        for checkpoint in checkpoints:
            self.state.filed(checkpoint)

    def forget(self, request: Request) -> None:
        """Drop the blocks that a request has computed or found; who owns them keeps them."""
        for pool in (self.keys.pool, self.state.pool):
            for key in request.hashes:
                pool.forget(key)
        if self.host is not None:
            self.host.forget(request.hashes)

    def _hash(self, request: Request) -> None:
        """Hash the KV blocks of all tokens known, up to the last boundary."""
        hashes, size = request.hashes, self.block // self._each
        first, last = len(hashes) * size, request.length // self.block * self.block
        if first == last:
            return
        parent = hashes[-1] if hashes else sha256(request.tenant.encode()).digest()
        tokens = request.span(first, last)
        data, step = tokens.tobytes(), size * tokens.itemsize
        for start in range(0, len(data), step):
            parent = sha256(parent + data[start : start + step]).digest()
            hashes.append(parent)
