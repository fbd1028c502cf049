"""A whole engine over `HashTarget`, with too little memory, and what must hold after every step."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np
from helpers.hash_target import (
    KV_LAYER,
    STATE_LAYERS,
    VOCABULARY,
    WINDOW,
    HashDrafter,
    HashTarget,
    true_states,
    true_text,
    true_window,
)
from helpers.pool_texts import common, kept_tokens, key_at, word
from helpers.toy_recurrences import HASH, Rule
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from hybrid_runtime.engine import Engine, EngineConfig, SamplingParams
from hybrid_runtime.engine.block_pool import REMEMBERED, BlockPool, BlockTable
from hybrid_runtime.engine.eviction import WORTHLESS
from hybrid_runtime.engine.offload.cache import HostCache
from hybrid_runtime.engine.offload.memcpy import CopyPath
from hybrid_runtime.engine.request import Hit, Request
from hybrid_runtime.engine.state_blocks import ColumnBlocks, RoleBlocks, StateBlocks

BLOCK = 4
POISON = -9999.0
Text = tuple[str, tuple[int, ...]]
"""A tenant, and tokens."""


class Before(NamedTuple):
    """A request as it was before a step."""

    tokens: list[int]
    restarts: int


def fails(*_: object) -> None:
    raise RuntimeError("no copies today")


class World:
    """options: of `EngineConfig`, all that is not set here. text: requests have text, so that stop
    strings can end it. events: what has happened, counted."""

    def __init__(
        self, num_draft: int, rule: Rule = HASH, text: bool = False, **options: Any
    ) -> None:
        self.now, self.rule, self.has_text = 0.0, rule, text
        self.target = HashTarget(rule)
        self.sound = True  # False from a check that fails on
        self.interrupted = False  # once; a step's tokens may then be missing from the statistics
        config = EngineConfig(
            drafter="ngram" if num_draft else None,
            num_speculative_tokens=num_draft,
            **{"block_size": BLOCK, "max_model_len": 48} | options,
        )
        self.block = config.block_size or BLOCK
        self.kv_block = config.kv_block(self.block)
        words = WordLevel({word(i): i for i in range(VOCABULARY)}, unk_token=word(0))
        tokenizer = Tokenizer(words) if text else None
        self.engine = engine = Engine(
            cast(Any, self.target), config, tokenizer=tokenizer, eos_token_ids=()
        )
        if num_draft:
            engine.runner.drafter = HashDrafter(num_draft, rule)
        engine.capture()  # with graphs=True
        for part in (*engine.runner.caches.kv.values(), *engine.runner.caches.states.values()):
            for tensor in part:
                tensor.fill_(POISON)
        self.pools = {"kv": engine.scheduler.kv.pool, "state": engine.scheduler.state.pool}
        host = engine.prefix_cache.host
        self.host = host
        if host is not None:
            self.copies = host.tier._copies.path
        self.requests: list[Request] = []
        self.open: dict[Request, Hit] = {}  # and what each had hit when it was looked at last
        self.text_of: dict[bytes, Text] = {}
        self.key_of: dict[Text, bytes] = {}
        self.ever: dict[str, set[bytes]] = {"kv": set(), "state": set()}
        self.events: Counter[str] = Counter()

    def clock(self) -> Any:
        """Lets the engine see a time that passes by steps."""
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        return patch("hybrid_runtime.engine.core.time", clock)

    # -- what can happen -------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        tenant: str = "",
        lasts: float | None = None,
        checkpoints_at: tuple[int, ...] = (),
        held: tuple[int, ...] = (),
        **params: Any,
    ) -> Request:
        """held: tokens that the device takes for the end of the text, and the host does not."""
        with self.clock():
            request = self.engine.prepare(
                prompt, SamplingParams(seed=1, **params), tenant=tenant, deadline=lasts,
                checkpoints_at=checkpoints_at,
            )  # fmt: skip
            request.stops += held
            self.engine.add(request)
        self.requests.append(request)
        self.open[request] = request.hit
        return request

    def stop(self, prompt: list[int], kind: str, at: int) -> dict[str, Any]:
        """Parameters that end the text behind a prompt with its token `at`, or where that, or with
        "two tokens" that and the one before it, come first."""
        tokens = true_text(prompt, at + 1, self.rule)
        if kind == "token":
            return {"stop_token_ids": (tokens[-1],)}
        return {"stop": (" ".join(map(word, tokens[-1 - (kind == "two tokens") :])),)}

    def abort(self, which: int) -> None:
        request = list(self.open)[which % len(self.open)]
        self.engine.abort(request)
        self._close()

    def fail_next_step(self) -> None:
        self.target.fails = True

    def forget(self) -> None:
        """The caches have been emptied: nothing was ever there."""
        self.ever = {"kv": set(), "state": set()}

    def break_copies(self, broken: bool) -> None:
        if self.host is not None:
            path = CopyPath("broken", cast(Any, fails)) if broken else self.copies
            self.host.tier._copies.path = path

    def step(self) -> None:
        before = {
            request: Before(request.tokens.tolist(), request.restarts) for request in self.requests
        }
        expected = self._expected()
        preempted, failing = self.engine.scheduler.preemptions, self.target.fails
        self.now, self.sound = self.now + 1.0, False
        with self.clock():
            self.engine.step()
        self.events["preemptions"] += self.engine.scheduler.preemptions - preempted
        for request in self.open:
            assert (request.error is not None) <= failing
            self._name(request)
            self._check_turn_end(request)
            if request.hit is not self.open[request]:
                self._check_hit(request, before, expected)
                self.open[request] = request.hit
        self._check_texts()
        self._check_accounts()
        self._check_content()
        self._close()
        self.sound = True

    def drain(self) -> None:
        """Serve whoever is left; nobody may stand still."""
        for _ in range(60 * (1 + len(self.open))):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle
        assert not self.open

    def finish(self) -> None:
        """Serve whoever is left; every block and slot must be back then."""
        self.target.fails = False
        self.drain()
        for group, pool in self.pools.items():
            assert pool.free == pool.size
            pool.clear()
            assert (pool.free, pool.cached) == (pool.size, 0)
            if self.host is not None:
                self.break_copies(False)
                self._check_host(self.host, group, pool)
        assert sorted(self.engine.scheduler._slots) == list(range(self.engine.manager.max_requests))

    # -- what must hold --------------------------------------------------------------------------

    def _close(self) -> None:
        for request in [r for r in self.open if r.finish_reason is not None]:
            self.events[f"ended by {request.finish_reason}"] += 1
            del self.open[request]

    def _name(self, request: Request) -> None:
        """No two beginnings, and no two tenants, have one key; one beginning has one."""
        tokens, size = request.tokens.tolist(), self.kv_block
        for number, key in enumerate(request.hashes, 1):
            text = request.tenant, tuple(tokens[: number * size])
            assert self.text_of.setdefault(key, text) == text
            assert self.key_of.setdefault(text, key) == key
        for end in (request.turn_end, *request.checkpoints_at):
            if end and end // self.kv_block <= len(request.hashes):
                text, key = (request.tenant, tuple(tokens[:end])), key_at(request, end, size)
                assert self.text_of.setdefault(key, text) == text
                assert self.key_of.setdefault(text, key) == key

    def _check_turn_end(self, request: Request) -> None:
        """A text that has ended can be gone on with where it ended; but for its last token, which
        need not have been run."""
        keeps = self.engine.scheduler.keeps_turn_ends
        if not keeps or request.finish_reason not in ("stop", "length"):
            assert not request.turn_end or request.restarts
            return
        kept = request.length
        if request.params.stop and request.finish_reason == "stop":
            kept = kept_tokens(request)
            if not request.turn_end:  # a step that was queued ahead has gone on
                assert self.engine.core.steps_ahead
                assert " " in request.params.stop[0]  # in no token whole
                self.events["lost turn ends"] += 1
                return
        assert kept - 1 <= request.turn_end <= kept
        # Where counts are read early, a step that went on behind a stop string is known as well.
        assert request.turn_end == min(kept, request.computed) or request.params.stop
        self.events["turn ends"] += 1

    def wanted_text(self, request: Request) -> tuple[list[int], str]:
        """The output, and why it ends there."""
        params, output = request.params, list[int]()
        for token in true_text(request.prompt.tolist(), params.max_tokens, self.rule):
            stops = token in params.stop_token_ids
            if stops and not params.include_stop_str_in_output:
                return output, "stop"
            output.append(token)
            if stops:
                return output, "stop"
            shown = " ".join(map(word, output))
            if any(stop in shown for stop in params.stop):
                return output, "stop"
        return output, "length"

    def _check_texts(self) -> None:
        for request in self.open:
            text, reason = self.wanted_text(request)
            assert request.output == text[: len(request.output)]
            if request.finish_reason in ("stop", "length"):
                assert (request.finish_reason, len(request.output)) == (reason, len(text))
            if request.output == text and reason == "length":
                assert request.finish_reason == "length"
            assert sum(count for _, count in request.times) == len(request.output)
        emitted = sum(len(r.output) for r in self.requests)
        assert self.interrupted or self.engine.stats().emitted == emitted

    def _check_accounts(self) -> None:
        scheduler = self.engine.scheduler
        for name, table in (("kv", scheduler.kv), ("state", scheduler.state)):
            owned = [owned_blocks(table, slot) for slot in range(self.engine.manager.max_requests)]
            self._check_pool(table.pool, owned)
            if name == "state":
                assert max(map(len, owned)) <= scheduler.footprint(1, 1)[1]
            for slot in scheduler._slots:
                assert not owned[slot]
            if self.host is not None:
                found = self.host._blocks[name]
                usage = self.host.tier.usage(name)
                assert len(set(found.values())) == len(found) == usage.used
                assert usage.in_flight == 0

    def _check_pool(self, pool: BlockPool, by_slot: list[list[int]]) -> None:
        """Every block is free, kept for its content, or owned as often as slots own it."""
        owned = Counter(block for blocks in by_slot for block in blocks)
        assert pool._owners == [owned[block] for block in range(pool.size)]
        idle = [b for b in range(pool.size) if not owned[b] and pool._keys[b]]
        assert sorted(pool._idle) == idle
        assert all(w == WORTHLESS or pool._keys[b] or owned[b] for b, w in enumerate(pool._worth))
        assert sorted([*pool._free, *idle, *owned]) == list(range(pool.size))
        keyed = {key: block for block, keys in enumerate(pool._keys) for key in keys}
        assert keyed == pool._block

    def _check_content(self) -> None:
        """What can be found is what its key says, and states lie where the retention wants them."""
        caches = self.engine.runner.caches
        keys, values = (part.flatten(1).int().tolist() for part in caches.kv[KV_LAYER])
        states = {
            layer: (conv_states[:, :WINDOW, 0].int().tolist(), matrices)
            for layer, (conv_states, matrices) in caches.states.items()
        }
        for key, block in self.pools["kv"]._block.items():
            _, tokens = self.text_of[key]
            first = (len(tokens) - 1) // self.kv_block * self.kv_block
            here = len(tokens) - first
            assert keys[block][:here] == list(tokens[first:])
            assert values[block][:here] == list(range(first, len(tokens)))
        for key, block in self.pools["state"]._block.items():
            tenant, tokens = self.text_of[key]
            wanted = true_states(tokens, self.rule)
            for layer, want in zip(STATE_LAYERS, wanted, strict=True):
                conv_states, matrices = states[layer]
                np.testing.assert_allclose(self.rule.load(matrices[block]), want, atol=1e-9)
                assert conv_states[block] == true_window(tokens)
            if key not in self.ever["state"]:
                assert self._wanted(tenant, tokens)
        for name, pool in self.pools.items():
            self.ever[name] |= pool._block.keys()

    def _check_host(self, host: HostCache, group: str, pool: BlockPool) -> None:
        """All that the host kept comes back as its key says."""
        keys = list(host._blocks[group])
        for start in range(0, len(keys), pool.size):
            part = keys[start : start + pool.size]
            blocks = pool.take(len(part))
            assert host.load(group, part, blocks)
            for key, block in zip(part, blocks, strict=True):
                assert pool.file(key, block)
            pool.put(blocks)
            self._check_content()
            pool.clear()
        host.tier.free(group, [host._blocks[group].pop(key) for key in keys])
        usage = host.tier.usage(group)
        assert (usage.used, usage.in_flight) == (0, 0)

    def _wanted(self, tenant: str, tokens: tuple[int, ...]) -> bool:
        retention, depth = self.engine.prefix_cache.retention, len(tokens)
        here = tenant, tokens
        if any(
            (r.tenant, r.turn_end, tuple(r.tokens[:depth].tolist())) == (tenant, depth, tokens)
            for r in self.requests
        ):
            return True
        if any(
            depth in r.checkpoints_at and (r.tenant, tuple(r.prompt[:depth].tolist())) == here
            for r in self.requests
        ):
            return True
        every = self.block if retention == "all" else retention
        if every != "prompt" and depth % int(every) == 0:
            return True
        return any(
            depth in ((request.prefill - 1) // self.block * self.block, request.hit.known)
            for request in self.open
            if (request.tenant, tuple(request.tokens[:depth].tolist())) == here
        )

    # -- hits ------------------------------------------------------------------------------------

    def _expected(self) -> tuple[Request | None, int]:
        """Who is first in the queue, and how many tokens it must hit if it is admitted."""
        if not self.engine.scheduler.waiting:
            return None, 0
        request = self.engine.scheduler.waiting[0]
        tokens, hit = tuple(request.tokens.tolist()), 0
        for end in range(1, len(tokens)):
            key = self.key_of.get((request.tenant, tokens[:end]), b"")
            has_keys = key in self.pools["kv"]._block
            if has_keys and key in self.pools["state"]._block:
                hit = end
            if not (has_keys or end % self.kv_block):
                break
        return request, hit

    def _check_hit(
        self,
        request: Request,
        before: dict[Request, Before],
        expected: tuple[Request | None, int],
    ) -> None:
        hit, (tokens, epoch) = request.hit, before[request]
        most = len(tokens) - 1
        others = [
            common(tokens, past.tokens)
            for other, past in before.items()
            if other.tenant == request.tenant and (other is not request or epoch)
        ]
        assert 0 <= hit.tokens <= hit.known <= min(max(others, default=0), most)
        assert hit.tokens % self.block == 0 or hit.turn is not None
        assert hit.known % self.block == 0 or hit.known == hit.tokens
        if hit.turn is not None:
            kind = "messages" if hit.turn in self.engine.prefix_cache._pins else "turn ends"
            self.events[f"hits of {kind}"] += 1
        first, at_least = expected
        if request is first:
            assert hit.tokens == at_least or (self.host is not None and hit.tokens > at_least)
        self._check_reason(request, hit, tokens, most)
        self.events["hits"] += hit.tokens > 0
        self.events["misses"] += hit.tokens == 0
        self.events["resumes"] += epoch > 0
        self.events["resumes from a checkpoint"] += epoch > 0 and hit.tokens > 0
        self.events[f"short: {hit.short}"] += 1

    def _check_reason(self, request: Request, hit: Hit, tokens: list[int], most: int) -> None:
        def was_there(group: str, end: int) -> bool:
            key = self.key_of.get((request.tenant, tuple(tokens[:end])))
            return key in self.ever[group]

        deeper = range(hit.tokens + 1, most + 1)
        ends = [end for end in deeper if end % self.block]
        if hit.short in ("evicted_checkpoint", "evicted_keys") and any(
            was_there(group, end) for end in ends for group in ("state", "kv")
        ):
            return  # the end of a turn or a message
        most = most // self.block * self.block
        assert (hit.short == "short_prompt") == (most == hit.tokens == 0)
        if not most:
            return
        if hit.tokens < hit.known:
            gone, group, end = "evicted_checkpoint", "state", hit.known
            absent: str | None = "no_checkpoint"
        else:
            gone, group, end = "evicted_keys", "kv", (hit.known // self.block + 1) * self.block
            absent = None
        there = was_there(group, end) and end <= most
        pool = self.pools[group]
        if pool.evictions <= REMEMBERED * pool.size:
            assert hit.short == (gone if there else absent)
        else:  # it may have been forgotten
            assert hit.short in (gone if there else absent, absent)


def owned_blocks(blocks: BlockTable | StateBlocks, slot: int) -> list[int]:
    """The blocks that a slot owns, as often as it does."""
    if isinstance(blocks, RoleBlocks):
        owned = blocks._owned[slot]
        return [] if owned is None else owned.blocks()
    table = blocks._table if isinstance(blocks, ColumnBlocks) else blocks
    assert isinstance(table, BlockTable)
    return [int(block) for block in table._view[slot] if block >= 0]
