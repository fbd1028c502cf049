"""In what order prompts run: short ones may overtake long ones, and nobody waits for ever."""

from __future__ import annotations

from helpers.pool_world import World
from helpers.small_engine import engine, hf, text, tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import NemotronHForCausalLM

from hybrid_runtime.engine import Request, SamplingParams

__all__ = ["hf", "tokenizer"]  # fixtures

LONGEST, PLACES = 60, 4
# No chunk ends at a block's boundary, so that a step's tokens are one request's as far as it goes.
SIZES = {
    "max_requests": PLACES, "block_size": 128, "max_tokens_per_step": 12, "max_prompt_tokens": 7,
    "prefix_caching": False,
}  # fmt: skip


def ran(requests: list[Request]) -> int:
    """Prompt tokens run so far."""
    return sum(min(r.computed, len(r.prompt)) for r in requests)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, LONGEST), st.integers(1, 6)),
        min_size=2, max_size=12,
    )
)  # fmt: skip
def test_a_prompt_overtakes_until_as_many_tokens_have_run_as_the_longer_one_has(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, arrivals: list[tuple[int, int, int]]
) -> None:
    """arrivals: steps since the one before, tokens of prompt and of output."""
    runs = engine(hf, tokenizer, **SIZES)
    waiting = list(arrivals)
    requests: list[Request] = []
    admitted: dict[int, int] = {}  # prompt tokens that had run by then
    done: dict[int, int] = {}  # step of the first token
    step, pause = 0, waiting[0][0]
    while waiting or not runs.idle:
        while waiting and pause == 0:
            _, length, output = waiting.pop(0)
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            requests.append(runs.submit(text(length, seed=len(requests)), params))
            pause = waiting[0][0] if waiting else -1
        pause -= 1
        before = ran(requests)
        runs.step()
        step += 1
        for number, request in enumerate(requests):
            if request.slot >= 0 or request.output:
                admitted.setdefault(number, before)
            if request.output:
                done.setdefault(number, step)
    for a, earlier in enumerate(requests):
        for b in range(a + 1, len(requests)):
            if done[b] < done[a]:
                room = len(earlier.prompt) - (admitted[b] - admitted[a])
                assert len(requests[b].prompt) < room


def test_what_a_prompt_has_hit_does_not_count_for_its_turn() -> None:
    world = World(0, num_blocks=(40, 40), max_requests=2, max_tokens_per_step=4, steps_ahead=0)
    known = [1] * 21
    world.submit(known, max_tokens=1)
    world.drain()
    longer, known_before = world.submit([2] * 12, max_tokens=2), world.submit(known, max_tokens=2)
    world.step()
    assert known_before.hit.tokens == 20
    assert (len(known_before.output), longer.computed) == (1, 3)
    world.finish()


def test_a_short_prompt_does_not_wait_for_a_long_one(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer
) -> None:
    runs = engine(hf, tokenizer, **SIZES)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    runs.submit(text(4, seed=1), params)  # decodes, so that prompts are bounded
    runs.step()
    long = runs.submit(text(60, seed=2), params)
    runs.step()
    short = runs.submit(text(5, seed=3), params)
    runs.step()
    assert short.output
    assert not long.output
