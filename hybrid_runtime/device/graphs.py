"""CUDA graphs of functions that read and write memory at addresses that never change."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Graphs:
    """Captured functions by key, sharing one memory pool. On a CPU they are kept and called, so
    that everything else about a captured step is the same there."""

    def __init__(self, device: torch.device) -> None:
        self._captured: dict[Hashable, Callable[[], None]] = {}
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def capture(self, key: Hashable, act: Callable[[], None], warm_up: Callable[[], None]) -> None:
        """Capture `act`, after `warm_up` has launched each kernel that it launches: nothing can be
        compiled or loaded while capturing.

        Neither may do harm: results of the two lie at different addresses, and only a replay fills
        those of `act`. They must stay referenced: the pool would give their memory to the next
        capture.
        """
        warm_up()
        if self._stream is None:
            self._captured[key] = act
            return
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would empty the allocator's cache each time, for the next call to fill.
        torch.cuda.synchronize(self._stream.device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool)
            try:
                act()
            finally:
                graph.capture_end()
        self._captured[key] = graph.replay

    def replay(self, key: Hashable) -> None:
        """Do what was captured."""
        self._captured[key]()
