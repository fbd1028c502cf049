"""Moves states of the replay layout: whole blocks before a step, folded states after it."""

from __future__ import annotations

from typing import Any

import torch

from hybrid_runtime.integrations.vllm.mover import Mover
from hybrid_runtime.integrations.vllm.replay_layers import ReplayLayers
from hybrid_runtime.kernels.mamba2.flush import replay_flush
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.kernels.step.vllm_decide import PRECOPY, VllmCounts
from hybrid_runtime.kernels.step.vllm_rows import FlushRows, decide_flush


class ReplayMover(Mover):
    """The same candidates as of vLLM's layout; what is done for them differs.

    A running column that changes is copied as it is, its window with all guesses. A boundary is
    materialised after the sampler of the very step that passes it: the next step's scheduler has
    already freed its block, and shown it to others.

    states: whole windows, on vLLM's block tables. flushed: the same states, of the window what the
    convolution needs, on the tables of `StepRows`.
    """

    replays = True

    def __init__(
        self, states: StateTable, flushed: StateTable, layers: ReplayLayers, *args: Any
    ) -> None:
        super().__init__(states, *args)
        device = states.addresses.device
        most = self.moves.shape[1]
        self._layers, self._flushed = layers, flushed
        self._flush = FlushRows.allocate(most, device)
        self._listed = torch.arange(most, dtype=torch.int32, device=device)

    def _launch(self, entries: torch.Tensor, count: int, counts: VllmCounts, phase: int) -> None:
        if phase == PRECOPY:
            super()._launch(entries, count, counts, phase)
            return
        layers, flush = self._layers, self._flush
        decide_flush(
            entries,
            count,
            counts,
            flush,
            self.totals,
            self._bounds.block_size,
            layers.cache.length,
        )
        replay_flush(
            self._flushed,
            layers.cache,
            layers.A_log,
            self._listed[:count],
            flush.slot,
            flush.positions,
        )
        if layers.checker is not None:
            layers.checker.compare_boundaries(flush, count)
