"""The engine for asyncio: right texts for many at once, and whoever leaves takes nothing along."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from helpers.small_engine import NEW_TOKENS, Make, engine, fail_at
from tokenizers import Tokenizer
from transformers import NemotronHForCausalLM

from hybrid_runtime.engine import AsyncEngine, Engine, EngineClosed, QueueFull, SamplingParams
from hybrid_runtime.engine.client import Delta

N_GRAM = {"drafter": "ngram", "num_speculative_tokens": 3, "block_size": 8, "steps_ahead": 1}
LONG = SamplingParams(max_tokens=NEW_TOKENS)


@pytest.fixture
def runs(make: Make) -> Engine:
    return make(**N_GRAM)


def run(main: Coroutine[Any, Any, None]) -> None:
    """A test's coroutine; nothing may hang."""
    asyncio.run(asyncio.wait_for(main, 120))


async def ask(serving: AsyncEngine, prompts: list[list[int]]) -> list[Any]:
    """What each of them gets, perhaps an exception."""
    return await asyncio.gather(
        *(serving.generate(p, LONG) for p in prompts), return_exceptions=True
    )


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def test_many_at_once_get_the_text_that_each_gets_alone(
    runs: Engine, prompts: Any, wanted: Any
) -> None:
    async def main() -> None:
        async with AsyncEngine(runs) as serving:
            answers = await asyncio.gather(*(serving.generate(p, LONG) for p in prompts))
            assert [a.tokens for a in answers] == wanted
            assert serving.engine.stats().emitted == sum(map(len, wanted))

    run(main())
    # Its thread has ended: the engine is anybody's again.
    assert runs.generate(prompts[:1], LONG)[0].tokens == wanted[0]


def test_deltas_add_up_to_the_completion(runs: Engine, prompts: Any, wanted: Any) -> None:
    async def main() -> None:
        async with AsyncEngine(runs) as serving:
            deltas = [delta async for delta in serving.stream(prompts[3], LONG)]
        assert tokens_of(deltas) == wanted[3]
        last = deltas[-1]
        assert (last.finish_reason, [d.finish_reason for d in deltas[:-1]]) == (
            "length", [None] * (len(deltas) - 1),
        )  # fmt: skip
        assert last.completion is not None
        assert "".join(d.text for d in deltas) == last.completion.text
        assert last.completion.prompt_tokens == len(prompts[3])

    run(main())


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_whoever_leaves_ends_its_request_and_no_other(
    runs: Engine, prompts: Any, wanted: Any, how: str
) -> None:
    async def main() -> None:
        async with AsyncEngine(runs) as serving:
            other = asyncio.create_task(serving.generate(prompts[4], LONG))
            first = asyncio.Event()

            async def leave() -> None:
                stream = serving.stream(prompts[3], SamplingParams(max_tokens=60))
                async for _ in stream:
                    first.set()
                    if how == "close":
                        break
                await stream.aclose()

            leaver = asyncio.create_task(leave())
            await first.wait()
            leaver.cancel()
            await asyncio.gather(leaver, return_exceptions=True)
            assert (await other).tokens == wanted[4]

    run(main())
    assert runs.stats().emitted < NEW_TOKENS + 60


def test_a_full_queue_refuses_and_goes_on(make: Make, prompts: Any, wanted: Any) -> None:
    runs = make(**N_GRAM, max_waiting=2, max_requests=1)

    async def main() -> None:
        async with AsyncEngine(runs) as serving:
            answers = await ask(serving, prompts)
        refused = [a for a in answers if isinstance(a, BaseException)]
        assert refused
        assert all(isinstance(a, QueueFull) for a in refused)
        for answer, want in zip(answers, wanted, strict=True):
            assert isinstance(answer, BaseException) or answer.tokens == want
        assert len(refused) < len(prompts)

    run(main())


def test_more_prompts_than_may_wait_are_embedded(make: Make, prompts: Any) -> None:
    want = make().embed(prompts, "mean")
    runs = make(max_waiting=1, max_requests=2)

    async def main() -> None:
        async with AsyncEngine(runs) as serving:
            torch.testing.assert_close(await serving.embed(prompts, "mean"), want)

    run(main())


def test_closing_serves_those_who_are_there_and_refuses_others(
    runs: Engine, prompts: Any, wanted: Any
) -> None:
    async def main() -> None:
        async with AsyncEngine(runs) as serving:
            streams = [serving.stream(p, LONG) for p in prompts]
            firsts = await asyncio.gather(*(anext(s) for s in streams))
            closing = asyncio.create_task(serving.close())
            await asyncio.sleep(0)
            with pytest.raises(EngineClosed):
                await serving.generate(prompts[0], LONG)
            rest = [[d async for d in s] for s in streams]
            await closing
        for first, deltas, want in zip(firsts, rest, wanted, strict=True):
            assert tokens_of([first, *deltas]) == want

    run(main())


def test_closing_without_draining_ends_all_at_once(runs: Engine, prompts: Any) -> None:
    async def main() -> None:
        ends: list[Delta] = []
        async with AsyncEngine(runs) as serving:

            async def read(prompt: list[int]) -> None:
                async for delta in serving.stream(prompt, SamplingParams(max_tokens=60)):
                    ends.append(delta)

            readers = [asyncio.create_task(read(p)) for p in prompts]
            while not ends:
                await asyncio.sleep(0)
            await serving.close(drain=False)
            await asyncio.gather(*readers)
        assert [d.finish_reason for d in ends].count("abort") == len(prompts)

    run(main())


def test_what_a_step_raises_is_raised_to_its_callers_and_no_others(
    runs: Engine, prompts: Any, wanted: Any
) -> None:
    runs.model.register_forward_pre_hook(fail_at(4, RuntimeError("no text today")))

    async def main() -> None:
        async with AsyncEngine(runs) as serving:
            answers = await ask(serving, prompts[:3])
            assert any(isinstance(a, RuntimeError) for a in answers)
            assert (await serving.generate(prompts[5], LONG)).tokens == wanted[5]
            with pytest.raises(ValueError, match="prompt is empty"):
                await serving.generate([], LONG)

    run(main())


def test_a_scheduler_that_fails_ends_all_and_the_next_are_served(
    runs: Engine, prompts: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, calls = runs.scheduler.schedule, iter(range(1000))

    def fail_once() -> Any:
        if next(calls) == 4:
            raise ZeroDivisionError
        return schedule()

    monkeypatch.setattr(runs.scheduler, "schedule", fail_once)

    async def main() -> None:
        async with AsyncEngine(runs) as serving:
            answers = await ask(serving, prompts[:3])
            assert [type(a) for a in answers] == [ZeroDivisionError] * 3
            assert (await serving.generate(prompts[5], LONG)).tokens == wanted[5]

    run(main())


def test_an_engine_that_always_fails_tells_everybody(
    runs: Engine, prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with AsyncEngine(runs) as serving:
            monkeypatch.setattr(runs.core, "step", lambda: 1 / 0)
            answers = await ask(serving, prompts[:3])
            assert {type(a) for a in answers} <= {ZeroDivisionError, EngineClosed}
            with pytest.raises((ZeroDivisionError, EngineClosed)):
                await serving.generate(prompts[5], LONG)

    run(main())


def test_an_engine_whose_thread_dies_leaves_nobody_waiting(
    hf: NemotronHForCausalLM, tokenizer: Tokenizer, prompts: Any
) -> None:
    runs = engine(hf, tokenizer, **N_GRAM)
    runs.model.register_forward_pre_hook(fail_at(4, SystemExit()))

    async def main() -> None:
        async with AsyncEngine(runs) as serving:
            answers = await ask(serving, prompts[:3])
            assert [type(a) for a in answers] == [EngineClosed] * 3
            with pytest.raises(EngineClosed, match="the engine has failed: SystemExit"):
                await serving.generate(prompts[5], LONG)

    run(main())


def test_a_second_thread_is_refused_by_name(runs: Engine, prompts: Any, wanted: Any) -> None:
    errors: list[BaseException] = []

    def use() -> None:
        try:
            runs.generate(prompts[:1], LONG)
        except BaseException as error:
            errors.append(error)

    def in_thread(name: str) -> None:
        thread = threading.Thread(target=use, name=name)
        thread.start()
        thread.join()

    runs.generate(prompts[:1], LONG)
    in_thread("second")
    assert "thread 'second' uses an engine that belongs to thread 'MainThread'" in str(errors)
    assert runs.generate(prompts[:1], LONG)[0].tokens == wanted[0]
    runs.hand_over()
    in_thread("third")
    assert len(errors) == 1
    # The third thread has ended, so its engine is anybody's.
    assert runs.generate(prompts[:1], LONG)[0].tokens == wanted[0]


def test_an_engine_that_is_served_is_refused_to_others(runs: Engine, prompts: Any) -> None:
    async def main() -> None:
        async with AsyncEngine(runs) as serving:
            await serving.generate(prompts[0], LONG)
            with pytest.raises(RuntimeError, match="belongs to thread 'AsyncEngine'"):
                runs.step()
            with pytest.raises(RuntimeError, match="belongs to thread 'AsyncEngine'"):
                async with AsyncEngine(runs):
                    pass
        with pytest.raises(EngineClosed):
            await serving.generate(prompts[0], LONG)
        with pytest.raises(RuntimeError, match="entered once"):
            async with serving:
                pass

    run(main())
