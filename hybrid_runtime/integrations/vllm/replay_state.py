"""The model state of a model whose layers replay.

Before a step it writes slots, positions and blocks of the rows for the layers to read. In align
mode it moves states for the same candidates as `AlignedStates`. No step can be handed back to vLLM,
whose kernels need blocks for drafts; of rows that its code runs all the same, the accepted drafts
are folded before.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.integrations.vllm import replay_layers, versions
from hybrid_runtime.integrations.vllm.bounds import Candidates
from hybrid_runtime.integrations.vllm.config import SWITCH
from hybrid_runtime.integrations.vllm.mover import Mover, StagedStep, bind
from hybrid_runtime.integrations.vllm.state import AlignedStates
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.kernels.step.vllm_decide import PRECOPY, VllmCounts
from hybrid_runtime.kernels.step.vllm_rows import BlockTables, FlushRows, decide_flush, place_rows

ONE_BLOCK = 1 << 30
"""Block size (tokens) without prefix caching: a request stays in its first block."""


class ReplayMover(Mover):
    """Moves states of the replay layout: whole blocks before a step, folded states after it.

    A new running column gets a copy of the whole state, conv_state with all drafts. A boundary is
    written after the sampler of the same step that passes it: when the next step is scheduled, vLLM
    has freed its block and published it to other requests.

    states: whole conv_states, on vLLM's block tables.
    flushed: the same, but of conv_state only the convolution's inputs, on the tables of `StepRows`.
    layers: what the layers share.
    """

    replays = True

    def __init__(
        self,
        states: StateTable,
        flushed: StateTable,
        layers: replay_layers.ReplayLayers,
        *args: Any,
    ) -> None:
        super().__init__(states, *args)
        device = states.addresses.device
        most = self.moves.shape[1]
        self._layers, self._flushed = layers, flushed
        self._flush = FlushRows.allocate(most, device)
        self._listed = torch.arange(most, dtype=torch.int32, device=device)

    def _launch(self, entries: Tensor, count: int, counts: VllmCounts, phase: int) -> None:
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
            layers.ring_length,
        )
        layers.recurrence.flush(
            self._flushed,
            layers.rings,
            layers.params,
            self._listed[:count],
            flush.slot,
            flush.positions,
            layers.rounding(0),
        )
        if layers.checker is not None:
            layers.checker.compare_boundaries(flush, count)


class ReplayStates(AlignedStates):
    """Mixed in before vLLM's class, of which it also reads `model` and `_align_mode`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layers: replay_layers.ReplayLayers = self.model.replay_layers
        self._assigned: Any = None
        self._placed: Any = None
        self._flushed: StateTable | None = None
        self._block_tables: BlockTables | None = None
        self._groups: list[int] = []

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        if not self._align_mode:
            self.num_accepted_tokens_gpu[req_index : req_index + 1] = 1
        if self.layers.checker is not None:
            self.layers.checker.admit(req_index)

    def preprocess_state(
        self,
        input_batch: Any,
        block_tables: tuple[Tensor, ...],
        kv_cache_config: Any,
        num_computed_tokens: Tensor,
    ) -> None:
        self._assign(kv_cache_config)
        if self._block_tables is None:
            tables = self._tables(self._groups, block_tables)
            self._block_tables = BlockTables.build(tables, self._slot_tables is not None)
        if not input_batch.num_reqs:
            return
        if self._align_mode:
            super().preprocess_state(
                input_batch, block_tables, kv_cache_config, num_computed_tokens
            )
        place_rows(
            self.layers.rows.whole,
            self._block_tables,
            input_batch.idx_mapping,
            input_batch.query_start_loc,
            VllmCounts(
                self.num_accepted_tokens_gpu, self.num_accepted_tokens_gpu, num_computed_tokens
            ),
            self.bounds.block_size if self._align_mode else ONE_BLOCK,
            self.layers.ring_length,
        )
        self._placed = input_batch
        if self.layers.kind.flushes_plain_rows() and _any_plain(input_batch):
            self._flush_plain(input_batch.idx_mapping, kv_cache_config)
        if self.layers.checker is not None:
            self.layers.checker.begin(input_batch.idx_mapping)

    def postprocess_state(
        self,
        idx_mapping: Tensor,
        num_sampled: Tensor | int,
        num_computed_tokens: Tensor | None = None,
    ) -> None:
        if self.layers.checker is not None:
            self.layers.checker.end(idx_mapping, num_sampled)
        super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)

    def statistics(self) -> dict[str, Any]:
        checker = self.layers.checker
        return super().statistics() | (checker.statistics() if checker else {})

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Any,
        kv_cache_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._assign(kv_cache_config)
        self.layers.rows.begin()
        if input_batch is not self._placed:
            # A dummy run or a graph's capture names slots of real requests. It must touch neither
            # their records nor their states.
            self.layers.rows.whole.slot.fill_(-1)
            versions.clear_dummy_tables(block_tables)
            self._placed = None
        return super().prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            kv_cache_config,
            *args,
            **kwargs,
        )

    def _assign(self, kv_cache_config: Any) -> None:
        """Assign a new cache's block tables to the layers, before anything of it is captured."""
        if self._assigned is kv_cache_config:
            return
        self._groups = [
            index
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            if hasattr(group.kv_cache_spec, "num_speculative_blocks")
        ]
        self.layers.assign(replay_layers.layer_groups(kv_cache_config, self._groups))
        self._assigned, self._block_tables, self._flushed = kv_cache_config, None, None

    def _flush_plain(self, idx_mapping: Tensor, kv_cache_config: Any) -> None:
        """Fold the accepted drafts of the placed rows without drafts: vLLM's own code runs them."""
        layers, slot = self.layers, idx_mapping.long()
        step = layers.rows.first(len(slot))
        plain = step.draft == 0
        row = torch.arange(len(slot), dtype=torch.int32, device=slot.device)
        layers.recurrence.flush(
            self._flush_table(kv_cache_config),
            layers.rings,
            layers.params,
            torch.where(plain, row, -1),
            step.slot,
            step.positions,
            layers.rounding(0),
        )
        accepted = self.num_accepted_tokens_gpu
        accepted[slot] = torch.where(plain, 1, accepted[slot])

    def _flush_table(self, kv_cache_config: Any) -> StateTable:
        """States, of conv_state only the convolution's inputs, on the tables of `StepRows`, in the
        order of the layers of the model."""
        if self._flushed is None:
            from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

            layers = self.layers
            bound = bind(
                kv_cache_config,
                self._groups,
                self.vllm_config.compilation_config.static_forward_context,
                [layers.rows.whole.tables[index] for index in range(len(self._groups))],
                is_conv_state_dim_first(),
                layers.drafts,
            )
            # The flush takes records and parameters in the order of the layers of the model.
            groups = replay_layers.layer_groups(kv_cache_config, self._groups)
            names = [name for group in groups for name in group]
            order = [names.index(layer.prefix) for layer in layers.layers]
            self._flushed = StateTable.build(
                [bound.conv_states[index] for index in order],
                [bound.matrices[index] for index in order],
                layers.tables,
                bound.taps,
            )
        return self._flushed

    def _close(self, idx_mapping: Tensor) -> StagedStep | None:
        step = super()._close(idx_mapping)
        if step is not None or self.mover is None:
            return step
        # Not the rows that this step began with: every one is a candidate.
        slot = idx_mapping.cpu().numpy()
        rows = (slot >= 0).nonzero()[0]
        none = np.zeros(0, np.int32)
        self.counters.handed_back += 1
        return self.mover.stage(
            idx_mapping, Candidates(none.astype(np.intp), rows, none), slot, np.zeros_like(slot)
        )

    def _unbound(self, why: str) -> None:
        raise RuntimeError(
            f"hybrid-runtime cannot replay with vLLM's caches: {why}. {SWITCH}=columns starts "
            "without replay"
        )

    def _make_mover(self, kv_cache_config: Any, block_tables: tuple[Tensor, ...]) -> Mover:
        layers = self.layers
        _, spec = self._get_mamba_group_info(kv_cache_config)
        self._check_blocks(spec.block_size, layers.drafts)
        flushed = self._flush_table(kv_cache_config)
        groups = replay_layers.layer_groups(kv_cache_config, self._groups)
        tables = {
            name: table
            for names, table in zip(groups, self._tables(self._groups, block_tables), strict=True)
            for name in names
        }
        whole = StateTable.build(
            flushed.conv_states,
            flushed.matrices,
            [tables[layer.prefix] for layer in layers.layers],
            flushed.taps + layers.drafts,
        )
        self.bounds.retain(versions.retained(kv_cache_config))
        by_slot, depth = self._slot_tables is not None, self._depth + 1
        mover = ReplayMover(whole, flushed, layers, self.bounds, self.max_num_reqs, by_slot, depth)
        mover.warm_up(self._counts(self.num_accepted_tokens_gpu))
        return mover


def _any_plain(batch: Any) -> bool:
    """Whether a row of the batch, past its prompt, runs without drafts."""
    plain = batch.num_scheduled_tokens == 1
    if batch.num_draft_tokens_per_req is not None:
        plain = plain & (batch.num_draft_tokens_per_req == 0)
    return bool((plain & (batch.num_computed_tokens_np >= batch.prefill_len_np)).any())


@functools.cache
def model_state_class() -> type:
    """The class that vLLM instantiates for models that replay."""
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    return type("HybridRuntimeReplayState", (ReplayStates, MambaHybridModelState), {})
