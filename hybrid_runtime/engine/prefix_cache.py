"""Prefix cache: blocks of keys and values, and the states at their ends, found by their content.

A hit needs both kinds, at one boundary: the keys and values of every block below it, and the state
checkpoint at it. The key of block `i` is a hash of all tokens up to its end, begun with the
tenant's name, so that no tenant finds what another one has computed.

What a drafter needs of the prefix: its keys and values lie in the same blocks as the target's. They
were written with the true next token at every position but the block's last, whose next token is
the next block's first and may be another one here: that one entry only makes a draft worse, it
cannot change what is accepted. The hidden state that it starts from is that of the last token run,
and a hit always leaves at least one token to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from hybrid_runtime.engine.block_pool import BlockPool, BlockTable
from hybrid_runtime.engine.config import RetentionPolicy
from hybrid_runtime.engine.offload.cache import HostCache
from hybrid_runtime.engine.request import Hit, Request, ShortHit
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
    """Files blocks of two pools and finds them again. block: tokens of one. retention: which
    boundaries have their state saved, see `EngineConfig`."""

    def __init__(
        self,
        keys: BlockTable,
        state: BlockTable,
        block: int,
        retention: RetentionPolicy,
        host: HostCache | None = None,
    ) -> None:
        self.keys, self.state, self.block, self.retention = keys, state, block, retention
        self.host = host
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
        keys: list[int] = []
        for key in request.hashes[:most]:
            block = self.keys.pool.find(key)
            if block is None:
                break
            keys.append(block)
        known = len(keys)
        short: ShortHit | None = None
        if known < most and self.keys.pool.evicted(request.hashes[known]):
            short = "evicted_keys"
        usable = count = min(known, request.most_hit // self.block)
        if usable < known:
            short = "prompt_logprobs" if request.pooled_from is None else "pooled"
        while count and self.state.pool.find(request.hashes[count - 1]) is None:
            count -= 1
        if count < usable:
            gone = self.state.pool.evicted(request.hashes[usable - 1])
            short = "evicted_checkpoint" if gone else "no_checkpoint"
        state = self.state.pool.find(request.hashes[count - 1]) if count else None
        return Hit(count * self.block, tuple(keys[:count]), state, known * self.block, short)

    def promote(self, request: Request, hit: Hit) -> Hit:
        """The hit after blocks that only the host has were copied to the device, if that makes it
        longer. There must be room on the device for all of the request."""
        if self.host is None:
            return hit
        pools = {KEYS: self.keys.pool, STATE: self.state.pool}
        most = request.most_hit // self.block
        count = min(hit.known // self.block, most)
        while count < most and self.host.has(KEYS, request.hashes[count]):
            count += 1
        first = hit.tokens // self.block
        while count > first and not self._anywhere(STATE, pools[STATE], request.hashes[count - 1]):
            count -= 1
        if count == first:
            return hit
        wanted = {KEYS: request.hashes[:count], STATE: request.hashes[count - 1 : count]}
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

    def _anywhere(self, group: str, pool: BlockPool, key: bytes) -> bool:
        return pool.find(key) is not None or (self.host is not None and self.host.has(group, key))

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
            self.state.adopt(request.slot, hit.tokens // self.block - 1, [hit.state])

    def rule(self, request: Request) -> tuple[int, tuple[int, ...]] | None:
        """What `manager.retain` takes for this request; None: every boundary."""
        if self.retention == "all":
            return None
        last = (request.length - 1) // self.block * self.block
        places = {at for at in (last, request.hit.known) if at > request.hit.tokens}
        every = 0 if self.retention == "prompt" else self.retention
        return int(every), tuple(sorted(places))

    def next_cut(self, request: Request, start: int) -> int:
        """The first position behind `start` at which a prompt must leave a checkpoint; its length
        if there is none."""
        rule = self.rule(request)
        if rule is None:
            return (start // self.block + 1) * self.block
        every, places = rule
        cuts = [at for at in places if at > start]
        if every:
            cuts.append((start // every + 1) * every)
        return min(cuts, default=request.length)

    def is_unfiled(self, request: Request, checkpoint: Checkpoint) -> bool:
        """Whether this checkpoint, in a block that the request owns, can be filed and is not."""
        self._hash(request)
        index = checkpoint.boundary // self.block
        if index > len(request.hashes) or self.state.block(request.slot, checkpoint.column) < 0:
            return False
        return self.state.pool.find(request.hashes[index - 1]) is None

    def file(self, request: Request, checkpoints: Iterable[Checkpoint]) -> None:
        """Let others find what a request has left: checkpoints that a step whose results were read
        published, or that `Scheduler.close` had stored, and keys and values of full blocks. All
        launches that wrote them come before any that a later hit leads to, on the same stream."""
        self._hash(request)
        # What was accepted beyond the request's own end has no place in its text.
        hashes = request.hashes
        states = [
            (hashes[boundary // self.block - 1], self.state.block(slot, column))
            for slot, _, boundary, column in checkpoints
            if boundary // self.block <= len(hashes)
        ]
        full = min(request.computed // self.block, len(hashes))
        keys = [
            (hashes[index], self.keys.block(request.slot, index))
            for index in range(request.filed, full)
        ]
        request.filed = max(request.filed, full)
        for group, pool, blocks in (
            (STATE, self.state.pool, states),
            (KEYS, self.keys.pool, keys),
        ):
            new = [(key, block) for key, block in blocks if pool.file(key, block)]
            if new and self.host is not None:
                self.host.store(group, [key for key, _ in new], [block for _, block in new])

    def forget(self, request: Request) -> None:
        """Drop the blocks that a request has computed or found; who owns them keeps them."""
        for pool in (self.keys.pool, self.state.pool):
            for key in request.hashes:
                pool.forget(key)
        if self.host is not None:
            self.host.forget(request.hashes)

    def _hash(self, request: Request) -> None:
        """Hash the full blocks of all tokens known."""
        done, total = len(request.hashes), request.length // self.block
        if done == total:
            return
        parent = request.hashes[-1] if done else sha256(request.tenant.encode()).digest()
        tokens = request.span(done * self.block, total * self.block)
        for block in tokens.reshape(-1, self.block):
            parent = sha256(parent + block.tobytes()).digest()
            request.hashes.append(parent)
