"""Check mode of vLLM's layout: after each launch, every byte beside vLLM's own kernels.

Before our launch the cache and the counts are copied; vLLM's kernels then run on the copies, for
all rows. This waits for the device in every step and needs the cache's memory a second time. All
bytes are compared, with one exception: in a block that has just been moved to, the positions of
conv_state behind the convolution's inputs, which vLLM copies along and nothing reads.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from hybrid_runtime.integrations.vllm.mover import Mover, StagedStep
from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.vllm_decide import POSTCOPY, PRECOPY, VllmCounts

PER_STATE = (
    "state_base_addrs",
    "state_block_strides",
    "state_elem_sizes",
    "state_inner_sizes",
    "state_conv_widths",
    "state_group_indices",
    "state_dim_row_count",
    "state_dim_row_stride",
)
"""Tensors of vLLM's copy context with one entry per state tensor."""

LOGGED = 10
"""Most lines about differences that are logged."""


@dataclasses.dataclass(slots=True)
class Found:
    """Counts since the start.

    checked_steps: steps compared.
    different: launches after which a byte or a count differed.
    different_bytes: bytes that differed.
    out_of_bounds: rows whose exact count lay outside the host's bounds.
    vllm_races: conv_states that vLLM, shifting them in place, did not leave as it defines them.
    """

    checked_steps: int = 0
    different: int = 0
    different_bytes: int = 0
    out_of_bounds: int = 0
    vllm_races: int = 0


class Checker:
    """Runs a mover's launches and vLLM's side by side.

    mover: makes our launches.
    context: vLLM's copy context, from which its kernels run.
    logger: takes the differences.
    """

    def __init__(self, mover: Mover, context: Any, logger: Any) -> None:
        self.found = Found()
        self._mover, self._logger = mover, logger
        states = mover.states
        parts = (*states.conv_states, *states.matrices)
        memory = {t.untyped_storage().data_ptr(): t for t in parts}
        self._live = [_bytes(t) for t in memory.values()]
        self._copy = [torch.empty_like(live) for live in self._live]
        self._windows = [_twin(t, self._live, self._copy) for t in states.conv_states]
        moved = [self._moved(address) for address in context.state_base_addrs.tolist()]
        bases = torch.tensor(moved, dtype=torch.int64, device=context.state_base_addrs.device)
        self._context = dataclasses.replace(context, state_base_addrs=bases)
        # One launch per state: vLLM 0.25 resets the accepted count in place while the programs of
        # other states read it, and a reference must not depend on who comes first.
        sizes = {"num_states": 1} if hasattr(context, "num_states") else {}
        if not sizes:
            sizes = {"num_layers": 1, "num_state_types": 1}
        self._single = [
            dataclasses.replace(
                self._context,
                **sizes,
                **{name: getattr(self._context, name)[i : i + 1].clone() for name in PER_STATE},
            )
            for i in range(len(moved))
        ]

    def statistics(self) -> dict[str, int]:
        return dataclasses.asdict(self.found)

    def run_precopy(self, batch: Any, step: StagedStep, counts: VllmCounts, bounds: Any) -> None:
        from vllm.v1.worker.mamba_utils import (
            preprocess_mamba_align_fused_kernel,
        )

        slot = batch.idx_mapping_np
        computed = counts.computed.cpu().numpy()[slot]
        end = computed + batch.num_scheduled_tokens
        drafts = batch.num_draft_tokens_per_req
        certain = end if drafts is None else end - drafts
        outside = (certain < bounds.low[slot]) | (end > bounds.high[slot])
        self.found.out_of_bounds += int((outside & ~bounds.lost[slot]).sum())

        column, accepted, source, offset = (value.clone() for value in (*counts[:2], *counts[:2]))
        self._copy_cache()
        self._mover.run(step, counts, PRECOPY)
        block, rows = 256, batch.num_reqs
        preprocess_mamba_align_fused_kernel[((rows + block - 1) // block,)](
            batch.idx_mapping,
            column,
            counts.computed,
            batch.query_start_loc,
            accepted,
            source,
            offset,
            rows,
            BLOCK_SIZE=block,
            MAMBA_BLOCK_SIZE=bounds.block_size,
        )
        self._context.run_fused_precopy(rows, column, source, offset, batch.idx_mapping)
        self._compare(step, PRECOPY, counts, (column, accepted))
        self.found.checked_steps += 1

    def run_postcopy(self, idx_mapping: Tensor, step: StagedStep, counts: VllmCounts) -> None:
        accepted = [counts.accepted.clone() for _ in self._single]
        self._copy_cache()
        self._mover.run(step, counts, POSTCOPY)
        shifted = self._shifted(step)
        for context, own in zip(self._single, accepted, strict=True):
            context.run_fused_postprocess_align(
                idx_mapping.shape[0], own, counts.column, counts.computed, idx_mapping
            )
        for window, blocks, inputs in shifted:
            taps = inputs.shape[1]
            wrong = (window[blocks, :taps] != inputs).flatten(1).any(1)
            self.found.vllm_races += int(wrong.sum())
            window[blocks, :taps] = inputs
        self._compare(step, POSTCOPY, counts, (counts.column, accepted[0]))

    def _copy_cache(self) -> None:
        for copy, live in zip(self._copy, self._live, strict=True):
            copy.copy_(live)

    def _targets(self, step: StagedStep, phase: int) -> tuple[Tensor, Tensor]:
        """Table rows that the launch just made has moved, and their moves, int64 `[3, rows]`."""
        count, lines = step.count(phase), step.lines(phase)
        if not count or lines is None:
            return torch.zeros(0, dtype=torch.long), torch.zeros((3, 0), dtype=torch.long)
        row = lines[:count, fields.SLOT].long()
        moves = self._mover.moves[:, :count].long()
        acts = moves[fields.TARGET] >= 0
        return row[acts], moves[:, acts]

    def _shifted(self, step: StagedStep) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Per layer: conv_states in the copy, blocks shifted in place, and the inputs due there."""
        row, moves = self._targets(step, POSTCOPY)
        inside = moves[fields.SOURCE] == moves[fields.TARGET]
        row, (source, offset, _) = row[inside], moves[:, inside]
        if not len(row):
            return []
        states, found = self._mover.states, []
        tap = torch.arange(states.taps, device=row.device)
        for window, table in zip(self._windows, states.tables, strict=True):
            blocks = table[row, source].long()
            found.append((window, blocks, window[blocks[:, None], offset[:, None] + tap].clone()))
        return found

    def _compare(
        self, step: StagedStep, phase: int, counts: VllmCounts, theirs: tuple[Tensor, ...]
    ) -> None:
        row, moves = self._targets(step, phase)
        states = self._mover.states
        if len(row):
            layers = zip(self._windows, states.conv_states, states.tables, strict=True)
            for copy, live, table in layers:
                blocks = table[row, moves[fields.TARGET]].long()
                copy[blocks, states.taps :] = live[blocks, states.taps :]
        wrong = sum(
            int((live != copy).sum()) if not torch.equal(live, copy) else 0
            for live, copy in zip(self._live, self._copy, strict=True)
        )
        same = all(torch.equal(a, b) for a, b in zip(counts[:2], theirs, strict=True))
        if wrong or not same:
            self.found.different += 1
            self.found.different_bytes += wrong
            if self.found.different <= LOGGED:
                self._logger.error(
                    "hybrid-runtime differs from vLLM's kernels %s step %d: %d bytes, counts %s.",
                    "before" if phase == PRECOPY else "after",
                    self.found.checked_steps,
                    wrong,
                    "equal" if same else "different",
                )

    def _moved(self, address: int) -> int:
        for live, copy in zip(self._live, self._copy, strict=True):
            if live.data_ptr() <= address < live.data_ptr() + live.numel():
                return address - live.data_ptr() + copy.data_ptr()
        raise ValueError(f"address is {address:#x}; it must lie in the memory of a bound state")


def _bytes(tensor: Tensor) -> Tensor:
    """All memory of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _twin(tensor: Tensor, live: list[Tensor], copies: list[Tensor]) -> Tensor:
    """The view of `tensor` in the copy of its storage."""
    start = tensor.untyped_storage().data_ptr()
    (copy,) = (c for a, c in zip(live, copies, strict=True) if a.data_ptr() == start)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
