"""An engine belongs to one process: not copied, not pickled, not used in a forked child."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler

import pytest
from helpers.plain_manager import counts, started

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import AsyncEngine, Engine, SamplingParams
from hybrid_runtime.state import StepRows

PARAMS = SamplingParams(max_tokens=16)
COPIES: list[Callable[[object], object]] = [copy.copy, copy.deepcopy, pickle.dumps]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained(SHIPPED, max_requests=2) as engine:
        yield engine


def test_no_argument_of_a_process(engine: Engine) -> None:
    before = engine.generate(["import "], PARAMS)[0].tokens
    start = multiprocessing.get_context("spawn").Process
    for kept in (engine, AsyncEngine(engine), engine.manager):
        with pytest.raises(TypeError, match=f"{type(kept).__name__} cannot be pickled or copied"):
            start(target=print, args=({"deep": [kept]},)).start()
        for duplicate in COPIES:
            with pytest.raises(TypeError, match="make it in the process that uses it"):
                duplicate(kept)
    assert not any(tensor.is_shared() for tensor in engine.model.state_dict().values())
    assert engine.generate(["import "], PARAMS)[0].tokens == before


def test_a_manager_that_was_to_be_pickled_goes_on() -> None:
    manager = started(0)
    with pytest.raises(TypeError, match="HybridStateManager cannot be pickled"):
        ForkingPickler.dumps([manager])
    for n in range(5, 9):
        step = manager.begin_step(StepRows.exact([0], [n], [4], [3]))
        manager.end_step(step, counts(1))
        assert manager.accepted(step).tolist() == [1]
        assert manager.computed[0] == n


@pytest.mark.parametrize("make", [False, True], ids=["uses it", "makes another"])
def test_a_forked_child_is_told_instead_of_hanging(engine: Engine, make: bool) -> None:
    engine.generate(["import "], PARAMS)  # PyTorch's threads exist now, here
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            Engine.from_pretrained(SHIPPED) if make else engine.generate(["import "], PARAMS)
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as said:
        message = said.read()
    assert message.startswith(
        f"RuntimeError: process {child} was forked from process {os.getpid()}"
    )
    assert "get_context('spawn')" in message
    assert engine.generate(["import "], PARAMS)[0].tokens
