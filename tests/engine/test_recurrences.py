"""The engine, the state manager, replay, flush, prefix cache and host tier hold states of any
recurrence: of two that only tests know, and of Gated DeltaNet, no byte is wrong."""

from __future__ import annotations

import random

import pytest
from helpers.gdn_rule import GDN, TRANSPOSED_GDN
from helpers.pool_world import World
from helpers.toy_recurrences import DELTA, HASH, Rule

DOCUMENTS = [random.Random(seed).choices(range(3), k=28) for seed in range(2)]


@pytest.mark.parametrize(
    "rule", [HASH, DELTA, GDN, TRANSPOSED_GDN], ids=["hash", "delta", "gdn", "gdn, [K, V]"]
)
@pytest.mark.parametrize(
    ("state_layout", "ring_tokens", "steps_ahead"),
    [("replay", 15, 0), ("replay", 4, 1), ("columns", None, 1)],
)
def test_texts_and_states_are_those_of_the_tokens_alone(
    rule: Rule, state_layout: str, ring_tokens: int | None, steps_ahead: int
) -> None:
    """After every step each text, and each state that can be found, is compared with one that is
    computed from its tokens."""
    draw = random.Random(3)
    world = World(
        3, rule, state_layout=state_layout, ring_tokens=ring_tokens, steps_ahead=steps_ahead,
        max_requests=3, num_blocks=(14, 13), host_blocks=(24, 16), max_tokens_per_step=17,
    )  # fmt: skip
    for turn in range(40):
        prompt = draw.choice(DOCUMENTS)[: draw.randint(1, 26)] + draw.choices(range(3), k=2)
        done = [r.tokens.tolist() for r in world.requests if r.output and len(r.tokens) < 30]
        if done and not turn % 4:
            prompt = [*draw.choice(done), 1]
        world.submit(prompt, max_tokens=draw.randint(1, 12))
        for _ in range(draw.randint(0, 7)):
            world.step()
    world.finish()
    stats, host = world.engine.stats(), world.host
    assert host is not None
    assert world.events["hits"] > 5
    assert world.events["preemptions"] > 0
    assert stats.prefix.host_blocks > 0
    assert host.tier.stats.stored_blocks > 0
    assert stats.mean_acceptance_length > 1
    if state_layout == "replay" and not steps_ahead:  # else a queued step stores most of them
        assert stats.state.rows_flushed > 0
