"""CUDA graphs of functions that read and write memory at addresses that never change."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Graphs:
    """Captured functions by key, sharing one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._captured: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def run(self, key: Hashable, act: Callable[[], None]) -> None:
        """Do what `act` does: by a replay where it has been captured; else by calling it, which
        also compiles what has to be compiled, and then capturing it for the next time.

        What `act` allocates and others read must stay referenced: the pool would give the memory
        to the next capture.
        """
        graph = self._captured.get(key)
        if graph is not None:
            graph.replay()
            return
        act()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            act()
        self._captured[key] = graph
