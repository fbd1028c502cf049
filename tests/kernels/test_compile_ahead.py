"""Kernels are compiled side by side and not launched, on a stand-in of Triton's driver."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from helpers.hopper import HOPPER
from helpers.interpreter import plain
from triton.runtime.jit import JITFunction

from hybrid_runtime.device.compile import compiling
from hybrid_runtime.kernels.mamba2 import chunk_scan_kernels

pytestmark = plain


@triton.jit
def _double(x, n, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def _wrong(x, n, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, TILE), tl.load(n))


class _Finalised:
    """Collected as a cycle only, and its finaliser lets other threads go on."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        time.sleep(0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    alone = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: HOPPER,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", alone)


def ready(kernel: JITFunction[Any]) -> int:
    return len(kernel.device_caches[0][0])


def test_launches_only_compile(driver: None) -> None:
    run, x = JITFunction.run, torch.ones(64)
    with compiling():
        for _ in range(2):
            for tile in (16, 32):
                _double[(4,)](x, 64, TILE=tile, num_warps=1)
        assert JITFunction.run is not run
        assert ready(_double) == 2  # or will be: nothing is looked for twice
    assert JITFunction.run is run
    assert ready(_double) == 2
    assert all(hasattr(kernel, "asm") for kernel in _double.device_caches[0][0].values())
    assert x.tolist() == [1.0] * 64


def test_what_does_not_compile_is_told_and_launches_work_again(driver: None) -> None:
    run = JITFunction.run
    with pytest.raises(triton.CompilationError), compiling():
        _wrong[(1,)](torch.ones(64), 3.5, TILE=16)
    assert JITFunction.run is run
    with compiling():
        _double[(1,)](torch.ones(64), 64, TILE=64)


@pytest.mark.slow
def test_threads_parse_while_finalisers_run(driver: None) -> None:
    """CPython 3.11 raises SystemError where two threads parse at once; 3.12 and later do not."""
    every = vars(chunk_scan_kernels).values()
    kernels = [kernel for kernel in every if isinstance(kernel, JITFunction)]

    def parse(_: int) -> None:
        for _ in range(40):
            _Finalised()
            for kernel in kernels:
                kernel.parse()

    threshold = gc.get_threshold()
    gc.set_threshold(50)
    try:
        with compiling(), ThreadPoolExecutor(4) as threads:
            assert len(list(threads.map(parse, range(8)))) == 8
    finally:
        gc.set_threshold(*threshold)
