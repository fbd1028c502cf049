"""Triton kernels compiled side by side before anything is launched."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton.runtime._async_compile import AsyncCompileMode, FutureKernel, active_mode
from triton.runtime.jit import JITFunction

MOST_WORKERS = 16


@contextmanager
def compiling() -> Iterator[None]:
    """Within it a launch of a Triton kernel only has it compiled, beside others and in the
    background: its outputs stay as they are. Behind it, all these kernels are ready.

    Triton's compiler and ptxas run without Python's lock, so threads are enough. They also look for
    the kernel on the disk first. One at a time parses a kernel: `ast.parse` of CPython 3.11 counts
    its depth for all threads together, and fails when a finaliser that a garbage collection calls
    in the middle of it lets another thread parse.
    """
    launch, parse = JITFunction.run, JITFunction.parse
    parsing = threading.RLock()  # a finaliser may launch a kernel, in the thread that parses

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(kernel, *args, grid=grid, warmup=True, **options)
        if isinstance(compiled, FutureKernel) and compiled.kernel is None:
            # Triton 3.6 looks for it in vain until it is ready, and takes its source apart again.
            compiled.finalize_compile(compiled)
        return compiled

    def parse_alone(kernel: Any) -> Any:
        with parsing:
            return parse(kernel)

    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    JITFunction.parse = parse_alone
    try:
        with ThreadPoolExecutor(workers, "compile") as threads, AsyncCompileMode(threads):
            JITFunction.run = compile_only
            try:
                yield
            finally:
                JITFunction.run = launch
    finally:
        JITFunction.parse = parse
        active_mode.set(None)  # which an error in the background would leave behind
