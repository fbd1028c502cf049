"""Prefix hits, eviction, swap and resume through the real engine, scheduler, pools and host tier,
under any order of events: the text is that of the tokens alone, and no block is lost or mixed up.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.pool_world import BLOCK, World
from helpers.toy_recurrences import DELTA, HASH
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

LONGEST_PROMPT, MOST_OUTPUT = 30, 12
# Few symbols: beginnings are shared by chance too.
DOCUMENTS = [random.Random(seed).choices(range(3), k=28) for seed in range(3)]
HOSTS = [(40, 30), (24, 16), (7, 3), None]

options = st.fixed_dictionaries(
    {
        "state_layout": st.sampled_from(["replay", "columns"]),
        "steps_ahead": st.integers(0, 1),
        "retention": st.sampled_from(["all", "prompt", 2 * BLOCK]),
        "host_blocks": st.sampled_from(HOSTS),
        "kv_block_size": st.sampled_from([BLOCK, 2, 1]),
        "num_blocks": st.tuples(st.integers(13, 18), st.integers(8, 14)),
        "max_requests": st.integers(1, 4),
        "max_tokens_per_step": st.sampled_from([4, 8, 17, 64]),
        "max_prompt_tokens": st.sampled_from([3, 8, 2048]),
        "graphs": st.sampled_from([None, True]),
        "ring_tokens": st.sampled_from([15, 15, 0, 4, 31]),
        "num_draft": st.sampled_from([3, 3, 1, 0]),
        "conv_layout": st.sampled_from(["SD", "DS"]),
        "strategy": st.sampled_from(["auto", "auto", "blocking", "defer", "always"]),
        "rule": st.sampled_from([HASH, HASH, HASH, DELTA]),
        "text": st.booleans(),
    }
)
prompts = st.builds(
    lambda document, shared, tail: document[:shared] + tail,
    st.sampled_from(DOCUMENTS),
    st.integers(1, 26),
    st.lists(st.integers(0, 2), max_size=4),
)
arrivals = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "tenant": st.sampled_from(["", "", "", "other"]),
        "lasts": st.sampled_from([None, None, None, None, 3.0, 9.0]),
        "max_tokens": st.integers(1, MOST_OUTPUT),
        "temperature": st.sampled_from([0.0, 0.0, 0.9]),
        "stops": st.sampled_from([None, None, "token", "string", "two tokens"]),
        "at": st.integers(0, MOST_OUTPUT),
        "include": st.booleans(),
        "ends": st.lists(st.integers(1, LONGEST_PROMPT), max_size=3),
    }
)


class Life(RuleBasedStateMachine):
    """Requests come, go on, give way and end, while copies and steps fail."""

    world: World

    @initialize(options=options)
    def begin(self, options: dict[str, Any]) -> None:
        kv, states = options["num_blocks"]
        more = BLOCK // options["kv_block_size"]
        self.world = World(**options | {"num_blocks": (kv * more, states)})

    @rule(arrivals=st.lists(arrivals, min_size=1, max_size=4))
    def submit(self, arrivals: list[dict[str, Any]]) -> None:
        for arrival in arrivals:
            self.submit_one(**arrival)

    def submit_one(self, prompt: list[int], stops: str | None, at: int, **options: Any) -> None:
        """stops: what ends the text, at that token or before."""
        include, kind = options.pop("include"), stops if self.world.has_text else "token"
        ends = [at for at in options.pop("ends") if at <= len(prompt)]
        if stops is not None:
            options |= self.world.stop(prompt, kind or "token", at)
            options["include_stop_str_in_output"] = include
        self.world.submit(prompt, **options, checkpoints_at=tuple(ends))

    @precondition(lambda self: any(r.output for r in self.world.requests))
    @rule(which=st.integers(0, 99), more=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def next_turn(self, which: int, more: list[int]) -> None:
        """A prompt that goes on where another request's output ends."""
        device_tokens = [r for r in self.world.requests if r.output]
        last = device_tokens[which % len(device_tokens)]
        prompt = [*last.tokens.tolist(), *more][:LONGEST_PROMPT]
        ends = (len(prompt) - which % 2,) if which % 3 and len(prompt) > 1 else ()
        self.world.submit(prompt, last.tenant, None, ends, max_tokens=1 + which % MOST_OUTPUT)

    @precondition(lambda self: any(r.checkpoints_at for r in self.world.requests))
    @rule(which=st.integers(0, 99), more=st.lists(st.integers(0, 2), min_size=2, max_size=5))
    def answer_is_dropped(self, which: int, more: list[int]) -> None:
        """A prompt that goes on at the end of a message, as if nothing had been answered."""
        named = [r for r in self.world.requests if r.checkpoints_at]
        last = named[which % len(named)]
        prompt = [*last.prompt[: last.checkpoints_at[-1]].tolist(), *more][:LONGEST_PROMPT]
        self.world.submit(prompt, last.tenant, None, (len(prompt) - 1,), max_tokens=3)

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @precondition(lambda self: self.world.open)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        self.world.abort(which)

    @rule(what=st.sampled_from(["copies work", "copies fail", "a pass fails"]))
    def disturb(self, what: str) -> None:
        if what == "a pass fails":
            self.world.fail_next_step()
        else:
            self.world.break_copies(what == "copies fail")

    def teardown(self) -> None:
        if "world" in vars(self) and self.world.sound:
            self.world.finish()


TestLife = pytest.mark.slow(Life.TestCase)
EXAMPLES = 50 if settings.get_current_profile_name() == "ci" else 1000
TestLife.settings = settings(max_examples=EXAMPLES, stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state_layout", "steps_ahead", "kv_block", "num_blocks", "folded"),
    [
        ("replay", 1, 4, (16, 14), 5),
        ("replay", 1, 2, (32, 14), 5),
        ("replay", 0, 4, (14, 11), 20),
        ("columns", 1, 4, (16, 14), 0),
    ],
)
def test_all_of_it_happens(
    state_layout: str, steps_ahead: int, kv_block: int, num_blocks: tuple[int, int], folded: int
) -> None:
    """A long fixed run, of which every kind of event is part."""
    draw = random.Random(7)
    world = World(
        3, state_layout=state_layout, steps_ahead=steps_ahead, max_requests=4,
        kv_block_size=kv_block, num_blocks=num_blocks, host_blocks=(96 // kv_block, 16),
        max_tokens_per_step=17,
    )  # fmt: skip
    for turn in range(200):
        prompt = draw.choice(DOCUMENTS)[: draw.randint(1, 26)] + draw.choices(range(3), k=2)
        device_tokens = [
            r.tokens.tolist() for r in world.requests if len(r.tokens) < LONGEST_PROMPT and r.output
        ]
        if device_tokens and not turn % 5:
            prompt = [*draw.choice(device_tokens), 1]
        lasts = 4.0 if not turn % 9 else None
        world.submit(prompt, draw.choice(["", "", "other"]), lasts, max_tokens=draw.randint(1, 12))
        if not turn % 11:
            world.abort(draw.randint(0, 9))
        if turn == 60:
            world.fail_next_step()
        world.break_copies(turn in (80, 81))
        for _ in range(draw.randint(0, 7)):
            world.step()
    stats, host = world.engine.stats(), world.host
    assert host is not None
    moved = host.tier.stats
    world.finish()
    counts = world.events | {
        "evictions": stats.prefix.evictions,
        "blocks to the host": moved.stored_blocks,
        "blocks from the host": stats.prefix.host_blocks,
        "failed copies": host.failed,
        "drafts accepted": int(stats.mean_acceptance_length > 1),
        "last checkpoints folded": stats.state.rows_flushed,
    }
    for name, least in {
        "hits": 50, "misses": 10, "preemptions": 10, "resumes": 10, "resumes from a checkpoint": 5,
        "evictions": 100, "blocks to the host": 100, "blocks from the host": 15,
        "failed copies": 1, "drafts accepted": 1, "ended by length": 50, "ended by abort": 5,
        "ended by deadline": 3, "ended by error": 1, "last checkpoints folded": folded,
    }.items():  # fmt: skip
        assert counts[name] >= least, (name, counts)
