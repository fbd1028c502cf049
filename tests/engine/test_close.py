"""`with Engine(...)`: what runs ends, and the memory of its blocks is given back."""

from __future__ import annotations

import logging
import threading

import pytest

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import Engine, EngineClosed, SamplingParams

PARAMS = SamplingParams(max_tokens=64, ignore_eos=True)


def block_bytes(engine: Engine) -> int:
    caches = engine.runner.caches
    pairs = (*caches.kv.values(), *caches.states.values())
    records = caches.records.values()
    parts = [part for both in (*pairs, *records) for part in both]
    return sum(part.untyped_storage().nbytes() for part in parts)


def test_the_end_of_a_with_block_ends_everything() -> None:
    with Engine.from_pretrained(SHIPPED, steps_ahead=1, max_requests=2) as engine:
        ended = engine.generate(["import "], SamplingParams(max_tokens=4))[0]
        requests = [engine.submit(prompt, PARAMS) for prompt in ("a", "b", "c")]
        for _ in range(4):
            engine.step()
        assert block_bytes(engine) > 0
    assert ended.finish_reason == "length"
    assert [r.finish_reason for r in requests] == ["abort"] * 3
    assert requests[0].output
    assert engine.idle
    assert block_bytes(engine) == 0
    engine.close()
    for use in (engine.step, engine.capture, lambda: engine.generate(["x"])):
        with pytest.raises(EngineClosed, match="the engine is closed"):
            use()


def test_an_error_in_the_block_comes_through() -> None:
    with pytest.raises(ZeroDivisionError), Engine.from_pretrained(SHIPPED) as engine:
        raise ZeroDivisionError
    assert block_bytes(engine) == 0


def test_another_thread_may_not_close_it() -> None:
    engine = Engine.from_pretrained(SHIPPED)
    engine.step()
    refused: list[str] = []

    def close() -> None:
        try:
            engine.close()
        except RuntimeError as error:
            refused.append(str(error))

    other = threading.Thread(target=close, name="other")
    other.start()
    other.join()
    assert "thread 'other' uses an engine that belongs to" in refused[0]
    assert block_bytes(engine) > 0


def test_capturing_is_timed_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hybrid_runtime")
    with Engine.from_pretrained(SHIPPED, graphs=True, max_requests=1, max_tokens_per_step=8) as e:
        e.capture(progress=True)
    assert "compiled and captured in " in caplog.text


def test_bars_change_nothing() -> None:
    with Engine.from_pretrained(SHIPPED) as engine:
        texts = [engine.generate(["x", "y"], SamplingParams(max_tokens=4), progress=shown)
                 for shown in (False, True)]  # fmt: skip
        assert [t.tokens for t in texts[0]] == [t.tokens for t in texts[1]]
        assert engine.embed(["x", "y"], progress=True).equal(engine.embed(["x", "y"]))
