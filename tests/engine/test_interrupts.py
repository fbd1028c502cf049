"""Ctrl-C at any line of a step: nobody is lost, every text stays right, and no block is lost."""

import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from helpers.marks import slow
from helpers.pool_world import World
from helpers.small_engine import NEW_TOKENS, Make, at_call, nothing_leaked

import hybrid_runtime.specdecode
from hybrid_runtime.engine import Request, SamplingParams

PACKAGE = Path(hybrid_runtime.__file__).parent
ROOMS = (
    *(str(PACKAGE / room) for room in ("engine", "state", "device")),
    str(Path(hybrid_runtime.specdecode.__file__).parent),
)
SHARED = random.Random(5).choices(range(3), k=26)


class Interrupt:
    """Raises KeyboardInterrupt at the `at`-th line that the engine runs."""

    def __init__(self, at: int) -> None:
        self.left = at

    def call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(ROOMS) else None

    def line(self, _: FrameType, event: str, __: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.line


@contextmanager
def interrupted(at: int) -> Iterator[Interrupt]:
    """The block gets a KeyboardInterrupt at its `at`-th line, and no further than here."""
    interrupt, before = Interrupt(at), sys.gettrace()
    sys.settrace(interrupt.call)
    try:
        yield interrupt
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def interrupted_step(world: World, at: int) -> bool:
    """A step interrupted at its `at`-th line, if it has so many; whether it was."""
    world.now += 1.0
    with world.clock(), interrupted(at) as interrupt:
        world.engine.step()
    return interrupt.left <= 0


def recover(world: World) -> None:
    """The first step after an interruption, in which all that could be found is forgotten."""
    before = {request: list(request.output) for request in world.open}
    if world.engine.core._inconsistent:
        world.ever, world.interrupted = {"kv": set(), "state": set()}, True
    assert not interrupted_step(world, sys.maxsize)
    for request, output in before.items():
        assert request.output[: len(output)] == output
        world.open[request] = request.hit
        world._name(request)
    world._check_texts()
    world._check_accounts()
    world._check_content()
    world._close()


def arrive(world: World, draw: random.Random) -> None:
    """Somebody new, whose prompt others have in part."""
    prompt = SHARED[: draw.randint(1, 26)] + draw.choices(range(3), k=2)
    tenant = draw.choice(["", "", "other"])
    world.submit(prompt, tenant, draw.choice([None, 200.0]), max_tokens=draw.randint(1, 12))


OPTIONS: list[dict[str, Any]] = [
    {"state_layout": "replay", "steps_ahead": 1},
    {"state_layout": "columns", "steps_ahead": 0, "strategy": "blocking"},
]


@pytest.mark.parametrize("stride", [53, *slow(7)])
@pytest.mark.parametrize("options", OPTIONS, ids=["replay", "columns"])
def test_a_step_interrupted_at_any_line_loses_nothing(options: dict[str, Any], stride: int) -> None:
    draw = random.Random(3)
    world = World(
        3, max_requests=3, num_blocks=(16, 14), host_blocks=(24, 16), max_tokens_per_step=17,
        **options,
    )  # fmt: skip
    count = 0
    for start in range(1, stride + 1, stride // 2 + 1):
        at, whole = start, False
        while not whole:
            while len(world.open) < 4:
                arrive(world, draw)
            for _ in range(draw.randint(0, 4)):
                world.step()
            whole = not interrupted_step(world, at) and at > 1500
            recover(world)
            world.step()  # with all its checks
            at, count = at + stride, count + 1
    assert count > 1000 // stride
    world.finish()
    for request in world.requests:
        assert request.finish_reason in ("length", "deadline")


N_GRAM = {"drafter": "ngram", "num_speculative_tokens": 3, "block_size": 8, "steps_ahead": 1}
LONG = SamplingParams(max_tokens=NEW_TOKENS)


@pytest.mark.parametrize("stream", [False, True])
def test_ctrl_c_ends_what_it_hits_and_nothing_else(
    make: Make, prompts: Any, wanted: Any, stream: bool
) -> None:
    runs = make(**N_GRAM)
    other = runs.submit(prompts[5], LONG)
    ctrl_c = at_call(4, lambda: signal.raise_signal(signal.SIGINT))
    runs.model.register_forward_pre_hook(ctrl_c)
    hit: Any = (
        (lambda: list(runs.stream(prompts[3], LONG)))
        if stream
        else (lambda: runs.generate(prompts[:4], LONG))
    )
    with pytest.raises(KeyboardInterrupt):
        hit()
    assert [a.tokens for a in runs.generate(prompts[:4], LONG)] == wanted[:4]
    while not runs.idle:
        runs.step()
    assert (other.finish_reason, other.output) == ("length", wanted[5])


def test_what_the_device_counts_is_counted_again(make: Make, prompts: Any) -> None:
    """Penalties look at the tokens so far, and log-probabilities come with them."""
    runs, draw = make(**N_GRAM), random.Random(2)
    params = SamplingParams(max_tokens=20, presence_penalty=1.0, frequency_penalty=1.5, logprobs=1)
    alone = [runs.generate([prompt], params)[0] for prompt in prompts[2:5]]
    requests = [runs.submit(prompt, params) for prompt in prompts[2:5]]
    hits = 0
    while not runs.idle:
        with interrupted(draw.randint(1, 4000)) as interrupt:
            runs.step()
        hits += interrupt.left <= 0
        for _ in range(3):
            runs.step()
    assert hits >= 2
    for request, want in zip(requests, alone, strict=True):
        assert request.output == want.tokens
        assert request.output_logprobs is not None
        assert want.logprobs is not None
        for got, told in zip(request.output_logprobs, want.logprobs, strict=True):
            assert got.logprob == pytest.approx(told.logprob, abs=1e-4)


@pytest.mark.parametrize("act", ["submit", "abort", "reset_prefix_cache"])
def test_calls_interrupted_at_any_line_lose_nothing(
    make: Make, prompts: Any, wanted: Any, act: str
) -> None:
    runs, short = make(**N_GRAM), SamplingParams(max_tokens=4)
    calls: dict[str, Callable[[Request], object]] = {
        "submit": lambda _: runs.submit(prompts[2], short, deadline=1000),
        "abort": runs.abort,
        "reset_prefix_cache": lambda _: runs.reset_prefix_cache(),
    }
    at, whole = 1, False
    while not whole:
        other, hit = (runs.submit(prompts[i], short) for i in (4, 3))
        for _ in range(at % 3):
            runs.step()
        with interrupted(at) as interrupt:
            calls[act](hit)
        whole = interrupt.left > 0
        while not runs.idle:
            runs.step()
        assert other.output == wanted[4][:4]
        assert hit.finish_reason in ("length", *["abort"] * (act == "abort"))
        nothing_leaked(runs)
        at += 5
    assert at > 10


def test_who_is_aborted_in_the_middle_of_a_step_leaves_at_its_end(
    make: Make, prompts: Any, wanted: Any
) -> None:
    """As a stream is that the garbage collector finds there."""
    runs = make(**N_GRAM)
    requests = [runs.submit(prompt, LONG) for prompt in prompts[:4]]
    runs.model.register_forward_pre_hook(at_call(4, lambda: runs.abort(requests[1])))
    while not runs.idle:
        runs.step()
    assert [r.finish_reason for r in requests] == ["length", "abort", "length", "length"]
    for request, want in zip(requests, wanted, strict=False):
        assert request.output == want[: len(request.output)]
