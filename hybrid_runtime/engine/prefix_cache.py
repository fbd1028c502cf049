"""Prefix cache: blocks of keys and values, and states, found by the tokens that they are of.

A hit needs both kinds, at one position: all keys and values below it, and the checkpoint at it.
Checkpoints lie at boundaries, multiples of a state's block, and, at any position, where a prompt
names one, such as the end of a message, and where a request has ended: the end of a turn, behind
which the next one goes on. The key of KV block `i` is a hash of all tokens up to its end, begun
with the tenant's name, so that no tenant finds what another one has computed; the key of a
checkpoint is that of the KV block that ends there. Behind the last full block the tokens of the
partial one are hashed to a key of both this block and the state. While a request runs, keys and
values are filed from boundary to boundary and up to what it names, and at its end up to there.

A partial block is never written below the position that it was filed for. Who hits there gets a
copy, to write on behind that position; full blocks and states are shared. The request that has
computed it writes on in the block itself, which gets another key with each end in it.

What a drafter needs of the prefix: its keys and values lie in the same blocks as the target's. They
were written with the true next token at every position but the block's last, whose next token is
the next block's first and may be another one here: that one entry only makes a draft worse, it
cannot change what is accepted. The hidden state that it starts from is that of the last token run,
and a hit always leaves at least one token to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from hybrid_runtime.engine.block_pool import REMEMBERED, BlockTable
from hybrid_runtime.engine.config import RetentionPolicy
from hybrid_runtime.engine.offload.cache import HostCache
from hybrid_runtime.engine.pins import Pins
from hybrid_runtime.engine.request import Hit, Request, ShortHit
from hybrid_runtime.engine.reuse import Kind, Reuse
from hybrid_runtime.engine.state_blocks import StateBlocks
from hybrid_runtime.engine.stats import PrefixStats
from hybrid_runtime.engine.turn_ends import TurnEnds, tail_key
from hybrid_runtime.engine.wanted import Wanted, where
from hybrid_runtime.state.step import Checkpoint

KEYS, STATE = "kv", "state"
"""The groups of a host tier."""
ENDS = 16
"""Ends of turns and messages that can be found, per checkpoint whose reuse is remembered: what is
worth keeping may be older than many that are not."""


class Place(NamedTuple):
    """Where a prefix can be hit.

    full: KV blocks in front of it. tail: tokens behind them.
    key: of the state, and of the partial block that has these tokens.
    turn: it is the end of a turn or a message.
    """

    full: int = 0
    tail: int = 0
    key: bytes = b""
    turn: bool = False


Has = Callable[[str, bytes], bool]
"""Whether the block of a group with a key is there."""


class PrefixCache:
    """Files blocks of two pools and finds them again. block: tokens between two boundaries.
    kv_block: tokens of a KV block, a divisor of it. retention: which boundaries have their state
    saved, see `EngineConfig`. most_drafts: of a row in a step. copy_keys: launches a copy of one KV
    block to another."""

    def __init__(
        self,
        keys: BlockTable,
        state: StateBlocks,
        block: int,
        kv_block: int,
        retention: RetentionPolicy,
        most_drafts: int,
        copy_keys: Callable[[int, int], None],
        host: HostCache | None = None,
    ) -> None:
        self.keys, self.state, self.block, self.retention = keys, state, block, retention
        self.host, self.kv_block, self._copy_keys = host, kv_block, copy_keys
        most = REMEMBERED * state.pool.size
        if host is not None:
            most += host.tier.groups[STATE].size
        self._ends = TurnEnds(ENDS * most)
        self._pins = Pins(state.pool, keys.pool, ENDS * most)
        self.reuse = Reuse(most)
        self._most_drafts = most_drafts
        self._pools = {KEYS: keys.pool, STATE: state.pool}
        # KV blocks from one boundary to the next.
        self._each = block // kv_block
        self._stats = PrefixStats()

    @property
    def min_cacheable_tokens(self) -> int:
        """Prompts shorter than this can hit the end of a turn or a message, and nothing else."""
        return self.block + 1

    def clear(self) -> None:
        """Forget all content, the host's too; blocks that requests own stay theirs."""
        self.keys.pool.clear()
        self.state.pool.clear()
        self._forget_ends()
        if self.host is not None:
            self.host.clear()

    def reset(self) -> None:
        """Forget what the host has, after an exception anywhere; the tables have been reset."""
        self._forget_ends()
        if self.host is not None:
            self.host.reset()

    def _forget_ends(self) -> None:
        self._ends.clear()
        self._pins.clear()
        self.reuse.clear()

    def stats(self) -> PrefixStats:
        self._stats.evictions = self.keys.pool.evictions + self.state.pool.evictions
        return self._stats

    def find(self, request: Request) -> Hit:
        """The longest hit for what is known of a request's text, `most_hit` at the most."""
        self._hash(request)
        block, each, hashes = self.block, self._each, request.hashes
        most = (request.length - 1) // block
        keys = self.keys.pool.find_leading(hashes[: (request.length - 1) // self.kv_block])
        known = len(keys) // each
        short: ShortHit | None = None
        if known < most:
            last = hashes[(known + 1) * each - 1]  # filed with those before it
            if self.keys.pool.find(last) is not None or self.keys.pool.evicted(last):
                short = "evicted_keys"
        usable = min(known, request.most_hit // block)
        if usable < known:
            short = "prompt_logprobs" if request.pooled_from is None else "pooled"
        place, gone = self._deepest(request, len(keys), self._here)
        tokens = place.full * self.kv_block + place.tail
        if gone is not None:
            short = gone
        elif tokens < usable * block:
            evicted = self.state.pool.evicted(hashes[usable * each - 1])
            short = "evicted_checkpoint" if evicted else "no_checkpoint"
        elif not tokens and not most:
            short = "short_prompt"
        if not tokens:
            return Hit(known=known * block, short=short)
        return Hit(
            tokens,
            tuple(keys[: place.full]),
            self.state.pool.find(place.key),
            max(known * block, tokens),
            short,
            self.keys.pool.find(place.key) if place.tail else None,
            place.key if place.turn else None,
        )

    def _deepest(self, request: Request, full: int, has: Has) -> tuple[Place, ShortHit | None]:
        """The deepest place of a request whose first `full` KV blocks, and those in front of them,
        are there, and why an end of a turn or message that is deeper cannot be gone on from, if
        there is one."""
        size, most, gone = self.kv_block, request.most_hit, None
        for count in range(min(full, most // size), -1, -1):
            parent, first = self._parent(request, count), count * size
            if self._ends.any_behind(parent):
                tail = request.span(first, min(first + size - 1, most))
                for key, tokens in self._ends.matching(parent, tail):
                    if has(STATE, key) and (not tokens or has(KEYS, key)):
                        return Place(count, tokens, key, turn=True), gone
                    gone = gone or self._gone(key)
            if count and has(STATE, parent):
                return Place(count, 0, parent), gone
        return Place(), gone

    def _gone(self, key: bytes) -> ShortHit | None:
        """What of an end had to make room."""
        if self.state.pool.evicted(key):
            return "evicted_checkpoint"
        return "evicted_keys" if self.keys.pool.evicted(key) else None

    def promote(self, request: Request, hit: Hit) -> Hit:
        """The hit after blocks that only the host has were copied to the device, if that makes it
        longer. There must be room on the device for all of the request."""
        if self.host is None:
            return hit
        hashes, most = request.hashes, request.most_hit // self.kv_block
        full = min(hit.known // self.kv_block, most)
        while full < most and self._anywhere(KEYS, hashes[full]):
            full += 1
        place, _ = self._deepest(request, full, self._anywhere)
        if place.full * self.kv_block + place.tail <= hit.tokens:
            return hit
        wanted = {KEYS: hashes[: place.full] + [place.key] * (place.tail > 0), STATE: [place.key]}
        for group, keys in wanted.items():
            pool = self._pools[group]
            # Those that are here must not make room for the others.
            here = [block for key in keys if (block := pool.find(key)) is not None]
            if group == STATE and hit.state is not None:
                here.append(hit.state)  # all there is, if a copy fails
            pool.share(here)
            absent = [key for key in keys if pool.find(key) is None]
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

    def _here(self, group: str, key: bytes) -> bool:
        """Whether a block is on the device."""
        return self._pools[group].find(key) is not None

    def _anywhere(self, group: str, key: bytes) -> bool:
        """Whether it is on the device or on the host."""
        return self._here(group, key) or (self.host is not None and self.host.has(group, key))

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
        request.pinned, request.left = 0, []
        key = self._key(request, hit.tokens)
        if not request.restarts:
            place, _ = self._deepest(request, request.most_hit // self.kv_block, self._remembered)
            request.goes_on = place.full * self.kv_block + place.tail, place.key
            for each in dict.fromkeys((place.key, key)):
                self.reuse.go_on(each, self._now)
        if hit.state is None:
            return
        self._value(request, hit.tokens, key)
        if hit.partial is not None:
            self.keys.pool.value(hit.partial, self.reuse.worth(key, self._now))
        self.keys.adopt(request.slot, 0, hit.keys)
        if key in self._pins:
            self._stats.message_hits += 1
            self._pins.hit(key, again=request.restarts > 0)
        elif hit.turn is not None:
            self._stats.turn_hits += 1
        if hit.turn is not None:
            tail = hit.tokens - len(hit.keys) * self.kv_block
            self._ends.add(self._parent(request, len(hit.keys)), hit.turn, tail)
        if hit.partial is not None:
            self._copy_partial(request.slot, len(hit.keys), hit.partial, key)
        for at in request.checkpoints_at:
            if at <= hit.tokens and self.has_state(request, at):
                self._pin(request, at)

    def _copy_partial(self, slot: int, column: int, source: int, key: bytes) -> None:
        """Give a slot its own copy of a partial block, behind the launches that wrote that one."""
        pool = self.keys.pool
        pool.share([source])  # or it would be what makes room
        if not pool.free:  # it is all that there is: nobody else owns it
            pool.put([source])
            pool.forget(key)
        (block,) = pool.take(1)
        if block != source:
            self.order_reuse([block], [])
            self._copy_keys(source, block)
            pool.put([source])
        self.keys.give(slot, column, block)

    def wanted(self, request: Request) -> Wanted:
        """Where checkpoints of this request are worth a block."""
        apart = self._most_drafts if self.state.anywhere else 0
        named = request.checkpoints_at if self.state.anywhere else ()
        hit, length = request.hit, request.length
        return where(self.retention, self.block, hit.tokens, hit.known, length, named, apart)

    def is_unfiled(self, request: Request, checkpoint: Checkpoint) -> bool:
        """Whether this checkpoint, in a block that the request owns, can be filed and is not."""
        position = checkpoint.position
        if position > request.length or self.state.block(checkpoint) < 0:
            return False
        return not self.has_state(request, position)

    def file(self, request: Request, checkpoints: Sequence[Checkpoint]) -> None:
        """Let others find what a request has left: checkpoints that a step whose results were read
        published, or that `Scheduler.close` had stored, and keys and values of full blocks. All
        launches that wrote them come before any that a later hit leads to, on the same stream."""
        self._hash(request)
        hashes, each = request.hashes, self._each
        full = min(request.computed // self.block, len(hashes) // each)
        span = slice(request.filed * each, max(request.filed, full) * each)
        keys = [*zip(hashes[span], self.keys.blocks(request.slot, span), strict=True)]
        request.filed = max(request.filed, full)
        self._file(KEYS, keys)
        for checkpoint in checkpoints:
            # What was accepted beyond the request's own end has no place in its text.
            if checkpoint.position <= request.length:
                kind = self._kind(request, checkpoint.position)
                self._file_checkpoint(request, checkpoint, kind)
            if checkpoint.position in request.checkpoints_at:
                self._stats.message_ends += 1
                self._pin(request, checkpoint.position)
            self.state.filed(checkpoint)

    def _kind(self, request: Request, position: int) -> Kind:
        """Of a checkpoint that a request leaves on its way."""
        if position in request.checkpoints_at:
            return Kind.NAMED
        if position > len(request.prompt):
            return Kind.ANSWER
        return Kind.JUNCTION if position == request.hit.known else Kind.PROMPT

    def _file_checkpoint(self, request: Request, checkpoint: Checkpoint, kind: Kind) -> bytes:
        """File a state, unless there is one, and if it lies at no boundary all keys and values in
        front of it; under which key."""
        slot, position = request.slot, checkpoint.position
        key, (full, tail) = self._key(request, position), divmod(position, self.kv_block)
        if position % self.block:
            blocks = self.keys.blocks(slot, slice(0, full))
            keys = [*zip(request.hashes[:full], blocks, strict=True)]
            self._file(KEYS, [*keys, (key, self.keys.block(slot, full))] if tail else keys)
        self._file(STATE, [(key, self.state.block(checkpoint))])
        before, older = request.goes_on
        inherits = kind in (Kind.TURN, Kind.NAMED) and before < position
        self.reuse.leave(key, kind, position, self._now, older if inherits else None)
        self._value(request, position, key)
        return key

    @property
    def _now(self) -> float:
        """How often the content of the pools has made room, turnovers of both."""
        return sum(pool.evictions / pool.size for pool in self._pools.values())

    def _remembered(self, group: str, key: bytes) -> bool:
        """Whether a checkpoint was there once, as far back as its use is remembered."""
        return group == KEYS or key in self.reuse

    def _value(self, request: Request, position: int, key: bytes) -> None:
        """Say what a checkpoint is worth that a request has found or left: what it saves more than
        the named one in front of it, which goes later."""
        request.left.append((position, key))
        block = self.state.pool.find(key)
        if block is not None:
            named = max((at for at in request.checkpoints_at if at < position), default=0)
            self.state.pool.value(block, self.reuse.worth(key, self._now, position - named))

    def leaving(self, request: Request) -> None:
        """A request is about to give its blocks back: say what its keys and values are worth."""
        columns = slice(0, -(-request.length // self.kv_block))
        blocks = [block for block in self.keys.blocks(request.slot, columns) if block >= 0]
        worth = self.reuse.along(request.left, len(blocks), self.kv_block, self._now)
        self.keys.pool.raise_worth(blocks, worth)

    def _pin(self, request: Request, position: int) -> None:
        """A checkpoint that a request names can be found: its conversation keeps it."""
        full, tail = divmod(position, self.kv_block)
        parent, key = self._parent(request, full), self._key(request, position)
        if position % self.block:
            self._ends.add(parent, key, tail)
        self._pins.add(parent, key, tail)
        request.pinned = max(request.pinned, position)

    def _file(self, group: str, blocks: Iterable[tuple[bytes, int]]) -> None:
        """File blocks that a request owns, each under its key, where no other is."""
        pool = self._pools[group]
        new = [(key, block) for key, block in blocks if pool.file(key, block)]
        if new and self.host is not None:
            self.host.store(group, [key for key, _ in new], [block for _, block in new])

    def has_state(self, request: Request, position: int) -> bool:
        """Whether the state of so many of its tokens can be found."""
        return self.state.pool.find(self._key(request, position)) is not None

    def file_turn_end(self, request: Request, end: Checkpoint) -> None:
        """Let the next turn find where a request has ended, before the request is retired."""
        key, position = self._file_checkpoint(request, end, Kind.TURN), end.position
        if position % self.block:
            full, tail = divmod(position, self.kv_block)
            self._ends.add(self._parent(request, full), key, tail)
        self._stats.turn_ends += 1
        request.turn_end = position

    def note_lost_turn_end(self) -> None:
        """The state where a text ended is not there any more."""
        self._stats.lost_turn_ends += 1

    def retired(self, request: Request) -> None:
        """What a request owned is free: if it has left the end of a turn, the one that it went on
        from is not what the next turn looks for, and makes room first; if it has left a pin, so do
        those that it has passed."""
        hit, size = request.hit, self.kv_block
        if request.turn_end and hit.turn is not None and hit.turn not in self._pins:
            self.state.pool.demote(hit.turn)
            if hit.partial is not None:  # or it is a full block, in front of the new end
                self.keys.pool.demote(hit.turn)
        if request.pinned and self.has_state(request, request.pinned):
            last = request.pinned - 1
            parents = ((self._parent(request, n), n * size) for n in range(last // size + 1))
            passed = [
                (parent, request.span(first, min(first + size - 1, last)))
                for parent, first in parents
                if self._pins.any_behind(parent)
            ]
            named = [self._key(request, at) for at in request.checkpoints_at]
            self._pins.supersede(passed, named, self._key(request, hit.tokens))

    def forget(self, request: Request) -> None:
        """Drop the blocks that a request has computed or found; who owns them keeps them."""
        ends = [*request.checkpoints_at, request.hit.tokens]
        keys = request.hashes + [self._key(request, at) for at in ends]
        for key in keys:
            self._pins.forget(key)
            self.reuse.forget(key)
            for pool in self._pools.values():
                pool.forget(key)
        if self.host is not None:
            self.host.forget(keys)

    def _parent(self, request: Request, full: int) -> bytes:
        """Key of the last of so many KV blocks of a request; of none, its tenant's."""
        return request.hashes[full - 1] if full else sha256(request.tenant.encode()).digest()

    def _key(self, request: Request, position: int) -> bytes:
        """Key of the state of a request after so many tokens."""
        self._hash(request)
        full, tail = divmod(position, self.kv_block)
        return tail_key(self._parent(request, full), request.span(position - tail, position))

    def _hash(self, request: Request) -> None:
        """Hash the full KV blocks of all tokens known."""
        hashes, size = request.hashes, self.kv_block
        first, last = len(hashes) * size, request.length // size * size
        if first == last:
            return
        parent = self._parent(request, len(hashes))
        tokens = request.span(first, last)
        data, step = tokens.tobytes(), size * tokens.itemsize
        for start in range(0, len(data), step):
            parent = sha256(parent + data[start : start + step]).digest()
            hashes.append(parent)
