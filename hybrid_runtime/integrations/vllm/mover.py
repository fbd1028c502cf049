"""vLLM's states as one `StateTable`, and the launches that move them.

A step with candidates makes one copy to the device and launches one kernel per phase; a step
without any does neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Staging
from hybrid_runtime.integrations.vllm.bounds import Bounds, Candidates
from hybrid_runtime.integrations.vllm.config import Unhandled
from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.kernels.step.vllm_decide import (
    POSTCOPY,
    PRECOPY,
    REQUEST,
    VllmCounts,
    decide_and_move,
)


def bind(
    kv_cache_config: Any,
    groups: Sequence[int],
    forward_context: Mapping[str, Any],
    tables: Sequence[Tensor],
    channels_first: bool,
    drafts: int | None = None,
) -> StateTable:
    """conv_state and matrix of every Mamba layer, with the block table of its cache group.

    kv_cache_config: vLLM's.
    groups: indices of the Mamba cache groups.
    forward_context: vLLM's layers by name.
    tables: int32 block tables, one for each of `groups`.
    channels_first: conv_state is `[channels, positions]` (vLLM's DS layout).
    drafts: drafts that a conv_state has room for; None = as many as there are blocks for drafts.

    `Unhandled` if the layers hold other states, or differ in shape or dtype.
    """
    windows, states, chosen = [], [], []
    room = drafts or 0
    for group, table in zip(groups, tables, strict=True):
        spec = kv_cache_config.kv_cache_groups[group].kv_cache_spec
        spare = _speculative_blocks(spec)
        room = spare if drafts is None else drafts
        for name in kv_cache_config.kv_cache_groups[group].layer_names:
            parts = list(forward_context[name].kv_cache)
            if len(parts) != 2 or parts[0].dim() != 3 or not parts[1][0].is_contiguous():
                shapes = [tuple(part.shape) for part in parts]
                raise Unhandled(f"layer {name} keeps {shapes}, not one window and one state")
            windows.append(parts[0].transpose(1, 2) if channels_first else parts[0])
            states.append(parts[1])
            chosen.append(table)
    for kind, tensors in (("windows", windows), ("states", states)):
        if len({(t.dtype, t.shape[1:], t.stride()[1:]) for t in tensors}) != 1:
            raise Unhandled(f"the {kind} of its Mamba layers differ in shape or type")
    taps = windows[0].shape[1] - room
    if taps < 1:
        raise Unhandled(f"its windows of {windows[0].shape[1]} inputs hold none besides the drafts")
    return StateTable.build(windows, states, chosen, taps)


def _speculative_blocks(spec: Any) -> int:
    """Blocks for drafts that a request has in a cache group; `Unhandled` unless its states roll
    back as ours do, conv_state by an offset and the matrix by a column."""
    kind = getattr(getattr(spec, "mamba_type", None), "name", "?")
    drafts = int(getattr(spec, "num_speculative_blocks", 0))
    if kind in ("MAMBA2", "GDN_ATTN") or (kind == "MAMBA1" and not drafts):
        return drafts
    raise Unhandled(f"a cache group of type {kind} with {drafts} drafts")


@dataclass(slots=True, eq=False)
class StagedStep:
    """Candidates of one step on the device.

    rows: vLLM's tensor of the step's slots; its identity marks the end of the same step.
    entries: int32 `[lines, ENTRY_FIELDS]`, pre-copy candidates, then post-copy; None = none at all.
    precopy: pre-copy candidates.
    postcopy: post-copy candidates.
    """

    rows: Tensor
    entries: Tensor | None
    precopy: int
    postcopy: int

    def count(self, phase: int) -> int:
        """How many candidates a phase has."""
        return self.precopy if phase == PRECOPY else self.postcopy

    def lines(self, phase: int) -> Tensor | None:
        """Entries from the phase's first candidate on; those behind its `count` are not its own."""
        if self.entries is None or phase == PRECOPY:
            return self.entries
        return self.entries[self.precopy :]


class Mover:
    """Moves states for the candidates of each step.

    states: vLLM's states and block tables.
    bounds: gives block size and retention interval.
    max_requests: most rows of a step.
    by_slot: the rows of the block tables are request slots, not rows of the batch.
    depth: steps whose entries must stay on the device at a time.

    moves: int32 `[3, max_requests]`, source, offset and target of each candidate; -1 = no move.
    totals: int64 `[2]`, rows moved since the start, by phase.
    waits: counts how often the host waited for an upload.
    """

    replays = False
    """Whether accepted drafts are left out of the states, in records."""

    def __init__(
        self, states: StateTable, bounds: Bounds, max_requests: int, by_slot: bool, depth: int
    ) -> None:
        device = states.addresses.device
        self.states = states
        self.by_slot = by_slot
        self.waits = Waits()
        self.moves = torch.full((3, max_requests), -1, dtype=torch.int32, device=device)
        self.totals = torch.zeros(2, dtype=torch.int64, device=device)
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self._bounds = bounds
        self._staging = Staging(2 * max_requests, fields.ENTRY_FIELDS, depth, device, self.waits)

    def stage(
        self, rows: Tensor, candidates: Candidates, slot: NDArray[Any], scheduled: NDArray[Any]
    ) -> StagedStep:
        """Upload a step's candidates.

        rows: vLLM's tensor of the step's slots.
        candidates: of `Bounds.candidates`.
        slot, scheduled: `[rows]`, request slot and tokens of each row of the step.
        """
        precopy, postcopy = len(candidates.precopy), len(candidates.postcopy)
        stop = precopy + postcopy
        if not stop:
            return StagedStep(rows, None, 0, 0)
        index, packed = self._staging.take()
        listed = np.concatenate((candidates.precopy, candidates.postcopy))
        lines = packed[:stop]
        lines[:, REQUEST] = slot[listed]
        lines[:, fields.SLOT] = lines[:, REQUEST] if self.by_slot else listed
        lines[:, fields.SCHEDULED] = scheduled[listed]
        lines[:, fields.EVERY] = self._bounds.every
        lines[:, fields.FIRST] = candidates.first[listed] if len(candidates.first) else 0
        lines[:, fields.SECOND] = 0
        return StagedStep(rows, self._staging.upload(index, stop), precopy, postcopy)

    def run(self, step: StagedStep, counts: VllmCounts, phase: int) -> None:
        """Decide on a phase's candidates, and move the states of those that act."""
        count, lines = step.count(phase), step.lines(phase)
        if count and lines is not None:
            self._launch(lines, count, counts, phase)

    def warm_up(self, counts: VllmCounts) -> None:
        """Compile for every number of candidates, with entries that move nothing."""
        one = torch.ones_like(counts.computed)
        scratch = VllmCounts(torch.zeros_like(one), one.clone(), one)
        totals, most = self.totals.clone(), self.moves.shape[1]
        entries = torch.zeros((most, fields.ENTRY_FIELDS), dtype=torch.int32, device=totals.device)
        for power in range(4, max(most - 1, 15).bit_length() + 1):
            for phase in (PRECOPY, POSTCOPY):
                self._launch(entries, min(1 << power, most), scratch, phase)
        self.totals.copy_(totals)

    def _launch(self, entries: Tensor, count: int, counts: VllmCounts, phase: int) -> None:
        decide_and_move(
            self.states,
            entries,
            count,
            counts,
            self.moves,
            self.totals,
            self._arrived,
            self._bounds.block_size,
            phase,
            self.replays,
        )
