"""What a request leaves when it ends or is preempted, in the replay layout: its last state, where
its text ended, or the boundary among the drafts that its last step accepted."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from helpers.hash_model import HashRunner
from helpers.marks import slow
from helpers.plain_manager import (
    BLOCK,
    COLUMNS,
    SLOTS,
    K,
    begin,
    counts,
    exact,
    manager,
    run,
    started,
    tables,
)
from helpers.replay_model import decode_row, two_running
from helpers.small_engine import (
    Script,
    engine,
    hf,
    hf_greedy,
    nothing_leaked,
    same_text,
    text,
    tokenizer,
)
from helpers.toy_recurrences import HASH
from tokenizers import Tokenizer
from torch import Tensor
from transformers import NemotronHForCausalLM

from hybrid_runtime.engine import Engine, SamplingParams
from hybrid_runtime.engine.request import Request
from hybrid_runtime.state import (
    Checkpoint,
    FlushInputs,
    HybridStateManager,
    StateLayout,
    StepRows,
)

__all__ = ["hf", "tokenizer"]  # fixtures


@cache
def _right_text(hf: NemotronHForCausalLM, prompt: tuple[int, ...]) -> list[int]:
    return hf_greedy(hf, list(prompt))


def right_text(hf: NemotronHForCausalLM, prompt: list[int]) -> list[int]:
    """What tests share is computed once."""
    return _right_text(hf, tuple(prompt))


def scripted(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, prompts: list[list[int]], right: list[int],
    **options: Any,
) -> Engine:  # fmt: skip
    """An engine whose rows have so many right drafts, one number after another, over and over."""
    options = {"block_size": BLOCK, "steps_ahead": 0} | options
    runs = engine(hf, tokenizer, drafter="ngram", num_speculative_tokens=K, **options)
    runs.runner.drafter = Script([p + right_text(hf, p) for p in prompts], K, right)
    return runs


def launches(runs: Engine) -> tuple[int, int]:
    stats = runs.stats().state
    return stats.flush_launches, stats.rows_flushed


def state_at(runs: Engine, request: Request, position: int) -> list[Tensor]:
    """Of all layers, the conv_state's inputs and the matrix that others find there."""
    cache = runs.prefix_cache
    block = cache.state.pool.find(cache._key(request, position))
    assert block is not None
    taps = runs.manager.layout.taps
    parts = runs.runner.caches.states.values()
    return [part for conv, matrix in parts for part in (conv[block, :taps], matrix[block])]


def finish(runs: Engine, prompts: list[list[int]], max_tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, seed=3)
    requests = [runs.submit(prompt, params) for prompt in prompts]
    while not runs.idle:
        runs.step()
    assert all(r.finish_reason == "length" for r in requests)
    return requests


def second_turns(
    hf: NemotronHForCausalLM, runs: Engine, requests: list[Request], tokens: int
) -> list[int]:
    """Tokens that each conversation finds when it goes on; its text, if any, must be right."""
    found = []
    for request in requests:
        prompt = [*request.tokens.tolist(), 1]
        want = right_text(hf, prompt) if tokens > 1 else []
        runs.runner.drafter = Script([prompt + want], K, [K])
        (turn,) = finish(runs, [prompt], tokens)
        if want:
            same_text(hf, prompt, turn.output, want[:tokens])
        found.append(turn.hit.tokens)
    return found


# With 21 prompt tokens and the token after them, the first step makes 22 certain.
ENDS = [
    {"steps_ahead": 0, "right": [3], "tokens": 5, "end": 25, "launches": 1},
    {"steps_ahead": 1, "right": [3], "tokens": 5, "end": 25, "launches": 1},  # a step is queued
    {"steps_ahead": 1, "right": [3], "tokens": 3, "end": 24, "launches": 1},  # accepted beyond it
    {"steps_ahead": 1, "right": [0, 3], "tokens": 3, "end": 24, "launches": 1},  # none is queued
    {"steps_ahead": 1, "right": [3], "tokens": 1, "end": 21, "launches": 0},  # nothing is pending
]


@pytest.mark.parametrize("case", ENDS, ids=lambda c: "-".join(str(v) for v in c.values()))
@pytest.mark.parametrize("by_chance", [False, True], ids=["fp32", "fp16 by chance"])
def test_the_state_where_a_text_ends_is_that_of_its_tokens(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, case: dict[str, Any], by_chance: bool
) -> None:
    """Those of a prompt that has them all, and the next turn starts there."""
    prompt = text(21, 4)
    options: dict[str, Any] = {"steps_ahead": case["steps_ahead"]}
    if by_chance:
        options |= {"ssm_dtype": torch.float16, "stochastic_rounding": True}
    runs = scripted(hf, tokenizer, [prompt], case["right"], **options)
    (request,) = finish(runs, [prompt], case["tokens"])
    assert launches(runs) == (case["launches"],) * 2
    assert request.turn_end == case["end"]
    known = request.tokens[: case["end"]].tolist()
    anew = scripted(hf, tokenizer, [known], [3], **options)
    (other,) = finish(anew, [known], 1)
    wanted = state_at(anew, other, case["end"])
    for got, want in zip(state_at(runs, request, case["end"]), wanted, strict=True):
        error = (got.float() - want.float()).abs().max()
        assert error <= (2e-3 if by_chance else 1e-6) * want.abs().max()
    if not by_chance:
        assert second_turns(hf, runs, [request], 6) == [case["end"]]
    nothing_leaked(runs)


@pytest.mark.parametrize(
    ("steps_ahead", "strategy"), [(0, "auto"), (1, "auto"), (1, "defer"), (1, "blocking")]
)
def test_a_second_turn_computes_the_last_token_again_at_most(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, steps_ahead: int, strategy: str
) -> None:
    """At every offset to a block's end, and however many drafts were accepted last."""
    prompts = [text(17 + n, 80 + n) for n in range(BLOCK)]
    for tokens in (2, 5, 9):
        runs = scripted(
            hf, tokenizer, prompts, [3, 1, 2, 0, 3, 3, 2], steps_ahead=steps_ahead, max_requests=3,
            num_blocks=(99, 99), strategy=strategy,
        )  # fmt: skip
        requests = finish(runs, prompts, tokens)
        found = second_turns(hf, runs, requests, 1)
        for request, hit in zip(requests, found, strict=True):
            assert hit == request.turn_end >= request.length - 1
        nothing_leaked(runs)


def test_rows_that_end_together_take_one_launch(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer
) -> None:
    prompts = [text(n, 30 + n) for n in (21, 17, 22, 21)]
    runs = scripted(hf, tokenizer, prompts, [3])
    requests = finish(runs, prompts, 5)
    assert launches(runs) == (1, 4)
    assert second_turns(hf, runs, requests, 5) == [25, 21, 26, 25]


@pytest.mark.parametrize(
    ("length", "tokens", "options"),
    [
        (21, 1, {}),  # nothing is pending behind a prompt
        (21, 5, {"prefix_caching": False}),
        (21, 5, {"state_layout": "columns"}),
    ],
)
def test_nothing_is_launched_for_nothing(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, length: int, tokens: int, options: Any
) -> None:
    prompt = text(length, 4)
    runs = scripted(hf, tokenizer, [prompt], [3], **options)
    finish(runs, [prompt], tokens)
    assert launches(runs) == (0, 0)


def test_what_others_have_left_is_not_folded_again(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer
) -> None:
    """First where the text ends, then at the boundary among the last drafts."""
    prompt = text(21, 4)
    runs = scripted(hf, tokenizer, [prompt], [3])
    for done in (1, 2, 2, 2):
        finish(runs, [prompt], 5)
        assert launches(runs) == (done, done)


@pytest.mark.parametrize("case", [(2, 0), (3, 1), *slow((2, 1), (3, 0), (4, 0), (4, 1))], ids=str)
def test_a_preempted_request_recomputes_less_than_a_block(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, case: tuple[int, int]
) -> None:
    """Also of its prompt, if it has only begun."""
    steps, steps_ahead = case
    for length in range(17, 17 + BLOCK):
        prompt = text(length, 90 + length)
        runs = scripted(hf, tokenizer, [prompt], [3, 2, 3], steps_ahead=steps_ahead)
        request = runs.submit(prompt, SamplingParams(max_tokens=20))
        for _ in range(steps):
            runs.step()
        known = min(request.computed_min, request.length - 1)
        runs.scheduler.preempt(request)
        while not runs.idle:
            runs.step()
        assert request.hit.tokens == known // BLOCK * BLOCK
        same_text(hf, prompt, request.output, right_text(hf, prompt)[:20])
        nothing_leaked(runs)


# -- the manager's side ------------------------------------------------------------


def with_last_checkpoint() -> tuple[HashRunner, Checkpoint]:
    """A replayed request whose last step accepted the drafts around a boundary."""
    runs = two_running("replay")
    runs.step([(0, 1, [1, 2, 3], 4)])
    checkpoint = runs.manager.last_checkpoint(0)
    assert checkpoint == (0, 0, 8, 15)
    return runs, checkpoint


def test_a_stale_checkpoint_is_refused() -> None:
    runs, checkpoint = with_last_checkpoint()
    made = runs.manager
    runs.release(0)
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is .*left the slot"):
        made.flush([checkpoint])
    runs.admit(0, list(range(5)))
    runs.step([(0, 5, [], 1)])
    runs.step([(0, 1, [1, 2, 3], 4)])
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is .*left the slot"):
        made.flush([checkpoint])
    assert made.stats().flush_launches == 1  # before the release
    runs.step([decode_row(random.Random(4), 0)])  # checks the state


def test_a_checkpoint_is_flushed_at_once_and_once() -> None:
    runs, checkpoint = with_last_checkpoint()
    made = runs.manager
    bad: Any
    for bad in (
        [checkpoint, checkpoint],
        [checkpoint._replace(position=5)],  # not in the conv_state any more
        [checkpoint._replace(position=10)],  # not computed
        [checkpoint._replace(position=16)],
        [checkpoint._replace(column=0)],  # it would not be stored at all
        [checkpoint._replace(slot=9)],
        [tuple(checkpoint)],
        checkpoint,
        None,
    ):
        with pytest.raises(ValueError, match=r"checkpoints\[\d\] is|slot is 9|checkpoints is None"):
            made.flush(bad)
    opened = runs.begin([decode_row(random.Random(4), 0)])
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is .*must be what last_checkpoint"):
        made.flush([checkpoint])
    runs.forward(opened)
    runs.end(opened)
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is .*must be what last_checkpoint"):
        made.flush([checkpoint])
    runs.read_oldest()
    assert made.stats().flush_launches == 0


def test_no_step_follows_a_flush() -> None:
    runs, checkpoint = with_last_checkpoint()
    made = runs.manager
    made.flush([checkpoint])
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is .*must be what last_checkpoint"):
        made.flush([checkpoint])
    with pytest.raises(ValueError, match=r"rows.slot\[0\] is 0; .* not flushed; release it"):
        made.begin_step(StepRows.exact([0], [9], [4], [3]))
    runs.manager.release(0)
    made.admit(0)
    runs.step([decode_row(random.Random(4), 1)])


def test_no_step_follows_a_flush_even_if_it_would_repeat_the_last_one() -> None:
    layout = StateLayout(HASH.recurrence, K, BLOCK, kind="replay")
    made = HybridStateManager(layout, SLOTS, K, "cpu")
    inputs = FlushInputs(layout.allocate_records(1, SLOTS, "cpu"), HASH.params(1))
    made.bind({0: layout.allocate(SLOTS * COLUMNS, "cpu")}, tables(), flush_inputs=inputs)
    made.admit(0)
    run(made, exact([0], [4], [0]), 1)
    run(made, exact([4], [4], [3]), 1)
    made.accepted(run(made, exact([5], [4], [3]), 4))
    checkpoint = made.last_checkpoint(0)
    assert checkpoint is not None
    assert (checkpoint.position, checkpoint.column) == (BLOCK, COLUMNS - 1)
    made.flush([checkpoint])
    with pytest.raises(ValueError, match="flush"):
        made.begin_step(exact([9], [4], [3]))


@pytest.mark.parametrize("queued", [0, 1, 2])
def test_a_last_state_is_that_of_its_tokens_or_there_is_none(queued: int) -> None:
    """None if a queued step has gone on behind it, as a second one may have."""
    found = 0
    for seed in range(40):
        rng = random.Random(seed)
        runs = two_running("replay", depth=2)
        for _ in range(rng.randint(1, 8)):
            runs.step([decode_row(rng, 0)])
        while runs.outstanding:
            runs.read_oldest()
        request = runs.requests[0]
        known, least = request.computed, request.computed + 1 if queued else request.certain
        for _ in range(queued):
            runs.step([decode_row(rng, 0)])
        most = known + rng.randint(-3, 4)
        state = runs.manager.last_state(0, most)
        assert (state is not None) == (queued < 2 and most >= least)
        if state is not None:
            assert state.position == min(most, known + queued)
            runs.manager.flush([state])
            blocks = [group[state.column] for group in request.blocks]
            runs.check(blocks, blocks, 0, request.tokens[: state.position])
            found += 1
    assert 10 < found < 40 or queued == 2


@pytest.mark.parametrize("stored", [False, True])
def test_a_queued_step_keeps_the_rule_that_it_began_with(stored: bool) -> None:
    runs = two_running("replay", depth=1)
    runs.step([(0, 1, [1, 2, 3], 4)])
    runs.read_oldest()
    runs.retain(0, BLOCK if stored else 0)
    opened = runs.begin([(0, 1, [1, 2, 3], 1)])  # folds the drafts and stores their boundary
    runs.forward(opened)
    runs.end(opened)
    runs.retain(0, 0 if stored else BLOCK)
    assert runs.manager.last_checkpoint(0) == ((0, 0, 8, 0) if stored else None)


def test_a_checkpoint_of_a_layout_that_flushes_none_is_refused() -> None:
    made = started(0)
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is .*must be what last_checkpoint"):
        made.flush([Checkpoint(0, 0, 8, 0)])


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("read", [False, True])
def test_a_last_checkpoint_is_never_the_former_tenants(read: bool, more: int) -> None:
    """Whose step ends on a boundary, or passes it, and writes it into blocks that are its own."""
    made = manager(0, kind="replay", prompt_cuts=True)
    step = run(made, exact([0], [BLOCK + more], [0]), 1)
    if read:
        made.accepted(step)
    made.release(0)
    made.admit(0)
    assert made.last_checkpoint(0) is None
    made.accepted(step)
    assert made.last_checkpoint(0) is None


def test_there_is_no_last_checkpoint_that_cannot_be_flushed() -> None:
    made = manager(0, kind="replay")  # without flush_inputs
    run(made, exact([0], [5], [0]), 1)
    made.accepted(run(made, exact([5], [4], [3]), 4))
    assert made.last_checkpoint(0) is None


def test_a_last_checkpoint_is_not_expected_of_a_step_that_may_never_run() -> None:
    made = manager(0, kind="replay")
    step = begin(made, exact([0], [BLOCK], [0]))
    assert made.last_checkpoint(0) is None
    made.end_step(step, counts(1))
    assert made.last_checkpoint(0) == Checkpoint(slot=0, generation=0, position=BLOCK, column=0)


def test_a_last_checkpoint_outlives_steps_that_store_none() -> None:
    made = manager(0, kind="replay")
    run(made, exact([0], [BLOCK], [0]), 1)
    made.accepted(run(made, exact([BLOCK], [1], [0]), 1))
    assert made.last_checkpoint(0) == Checkpoint(slot=0, generation=0, position=BLOCK, column=0)
