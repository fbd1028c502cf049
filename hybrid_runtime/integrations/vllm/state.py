"""Our model state for vLLM's V2 runner: `MambaHybridModelState` with its two state copies replaced.

Only `preprocess_state` and `postprocess_state` do something else than vLLM's. vLLM's own
post-processing still runs, but without counts: it then stores the accepted tokens, which the next
forward pass reads, and copies nothing. All hooks have exactly vLLM's signatures; where a release
has others, this class is never chosen (`hooks`).
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybrid_runtime.integrations.vllm import versions
from hybrid_runtime.integrations.vllm.bounds import Bounds
from hybrid_runtime.integrations.vllm.config import Unhandled, checks, left_to_vllm, logger
from hybrid_runtime.integrations.vllm.mover import Mover, StagedStep, bind
from hybrid_runtime.kernels.step.vllm_decide import POSTCOPY, PRECOPY, VllmCounts

if TYPE_CHECKING:
    Base = Any
else:
    Base = object


@dataclass(slots=True)
class Counters:
    """What the adapter did since the start.

    steps: steps planned.
    skipped: steps without a candidate, in which nothing was launched.
    candidates: rows launched for, pre-copy and post-copy together.
    handed_back: steps, or ends of steps, left to vLLM's own kernels (replay: that took every row).
    """

    steps: int = 0
    skipped: int = 0
    candidates: int = 0
    handed_back: int = 0

    def add(self, precopy: int, postcopy: int) -> None:
        """Count a step by its candidates of each phase."""
        self.steps += 1
        self.skipped += not precopy + postcopy
        self.candidates += precopy + postcopy


@dataclass(slots=True)
class Reporter:
    """Logs the counters every so often.

    interval: seconds between two lines.
    log: called with a format string and its values.

    Copies are counted on the device. A line shows the count fetched at the line before, so that the
    host never waits for it.
    """

    interval: float
    log: Callable[..., None]
    _next: float = field(default_factory=time.monotonic)
    _host: Tensor | None = None
    _fetched: torch.cuda.Event | None = None
    _copied: int = 0

    def tick(self, counters: Counters, totals: Tensor) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.interval
        if counters.steps < 2:
            return
        self._fetch(totals)
        self.log(
            "hybrid-runtime: %d steps, %d skipped (%.1f %%), %d candidates, %d copied",
            counters.steps,
            counters.skipped,
            100 * counters.skipped / counters.steps,
            counters.candidates,
            self._copied,
        )

    def _fetch(self, totals: Tensor) -> None:
        if not totals.is_cuda:
            self._copied = int(totals.sum())
            return
        if self._host is None:
            self._host = torch.zeros(2, dtype=totals.dtype, pin_memory=True)
            self._fetched = torch.cuda.Event()
        elif self._fetched is not None and self._fetched.query():
            self._copied = int(self._host.sum())
        if self._fetched is not None:
            self._host.copy_(totals, non_blocking=True)
            self._fetched.record()


class AlignedStates(Base):
    """Mixed in before vLLM's class, whose attributes it reads: `vllm_config`, `cache_config`,
    `max_num_reqs`, `num_accepted_tokens_gpu`, `_mamba_state_idx_gpu`, `_mamba_ctx`.

    bounds: bounds on the requests' counts.
    counters: what was done since the start.
    mover: launches for the bound cache; None = its steps are left to vLLM.
    checker: of check mode, else None.
    """

    ours = True
    """False hands all steps from now on to vLLM, as a comparison inside one engine does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallel = self.vllm_config.parallel_config
        self._depth = parallel.pipeline_parallel_size + 2
        self.bounds = Bounds(
            self.max_num_reqs,
            1,
            self.vllm_config.scheduler_config.async_scheduling is not False
            or parallel.pipeline_parallel_size > 1,
        )
        self.counters = Counters()
        self.checker: Any = None
        self.mover: Mover | None = None
        self._slot_tables: Any = None
        self._bound_to: Any = None
        self._open: deque[StagedStep] = deque(maxlen=self._depth)
        self._no_drafts = np.zeros(self.max_num_reqs, np.int32)
        self._reporter = self._make_reporter(parallel)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        # vLLM settles the block size only after it has made this object.
        block = versions.seed_block_size(self.cache_config, self._slot_tables)
        if block != self.bounds.block_size:
            self.bounds.resize(block)
        self.bounds.admit(req_index, new_req_data.num_computed_tokens)

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        """Called from vLLM 0.32 on, and again when a cache made for profiling is replaced."""
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self._slot_tables = block_tables
        self._bound_to = None

    def preprocess_state(
        self,
        input_batch: Any,
        block_tables: tuple[Tensor, ...],
        kv_cache_config: Any,
        num_computed_tokens: Tensor,
    ) -> None:
        if self._bound_to is not kv_cache_config:
            self._bind(kv_cache_config, block_tables)
        mover = self.mover
        if mover is None or not self.ours or not input_batch.num_reqs:
            if input_batch.num_reqs:
                self.bounds.distrust(input_batch.idx_mapping_np)
                self.counters.handed_back += 1
            super().preprocess_state(
                input_batch, block_tables, kv_cache_config, num_computed_tokens
            )
            return
        draft = input_batch.num_draft_tokens_per_req
        if draft is None:
            draft = self._no_drafts[: input_batch.num_reqs]
        slot, scheduled = input_batch.idx_mapping_np, input_batch.num_scheduled_tokens
        candidates = self.bounds.candidates(
            slot, input_batch.num_computed_tokens_np, scheduled, draft, input_batch.prefill_len_np
        )
        step = mover.stage(input_batch.idx_mapping, candidates, slot, scheduled)
        self._open.append(step)
        counts = self._counts(num_computed_tokens)
        if self.checker is not None:
            self.checker.run_precopy(input_batch, step, counts, self.bounds)
        else:
            mover.run(step, counts, PRECOPY)
        self.counters.add(step.precopy, step.postcopy)
        if self._reporter is not None:
            self._reporter.tick(self.counters, mover.totals)

    def postprocess_state(
        self,
        idx_mapping: Tensor,
        num_sampled: Tensor | int,
        num_computed_tokens: Tensor | None = None,
    ) -> None:
        if self.mover is None or num_computed_tokens is None:
            super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)
            return
        step = self._close(idx_mapping)
        if step is None:
            # Not the rows that we began the step with: a pipeline rank has filtered them, or vLLM
            # began the step. vLLM's own kernel looks at every row.
            self.counters.handed_back += 1
            super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)
            return
        super().postprocess_state(idx_mapping, num_sampled, None)
        counts = self._counts(num_computed_tokens)
        if self.checker is not None:
            self.checker.run_postcopy(idx_mapping, step, counts)
        else:
            self.mover.run(step, counts, POSTCOPY)

    def statistics(self) -> dict[str, Any]:
        """The counters, copies and check mode's included. Waits for the device."""
        names = ("steps", "skipped", "candidates", "handed_back")
        found: dict[str, Any] = {name: int(getattr(self.counters, name)) for name in names}
        if self.mover is not None:
            moved = self.mover.totals.tolist()
            found |= {"precopied": moved[PRECOPY], "postcopied": moved[POSTCOPY]}
            found |= {"lost": int(self.bounds.lost.sum()), "waits": self.mover.waits.count}
        if self.checker is not None:
            found |= self.checker.statistics()
        return found

    def _counts(self, computed: Tensor) -> VllmCounts:
        return VllmCounts(self._mamba_state_idx_gpu, self.num_accepted_tokens_gpu, computed)

    def _close(self, idx_mapping: Tensor) -> StagedStep | None:
        """The open step that began with this very tensor, or None."""
        for step in self._open:
            if step.rows is idx_mapping:
                self._open.remove(step)
                return step
        return None

    def _bind(self, kv_cache_config: Any, block_tables: tuple[Tensor, ...]) -> None:
        """Make the mover of a new cache; if that cannot be done, vLLM's own path runs."""
        self._bound_to, self.mover = kv_cache_config, None
        self._open.clear()
        try:
            self.mover = self._make_mover(kv_cache_config, block_tables)
        except Unhandled as why:
            self._unbound(str(why))
        except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
            self._unbound(f"its caches are not as known ({error!r})")

    def _unbound(self, why: str) -> None:
        """A cache cannot be handled; no state of it has been moved yet."""
        left_to_vllm(why)

    def _make_mover(self, kv_cache_config: Any, block_tables: tuple[Tensor, ...]) -> Mover:
        from vllm.model_executor.layers.mamba.mamba_utils import (
            is_conv_state_dim_first,
        )

        groups, spec = self._get_mamba_group_info(kv_cache_config)
        if why := versions.pipeline_unhandled(self.vllm_config, self._slot_tables):
            raise Unhandled(why)
        self._check_blocks(spec.block_size, spec.num_speculative_blocks)
        tables = self._tables(groups, block_tables)
        context = self.vllm_config.compilation_config.static_forward_context
        states = bind(kv_cache_config, groups, context, tables, is_conv_state_dim_first())
        copies = versions.copy_context(self, kv_cache_config, groups, block_tables)
        # vLLM's kernels, which check mode compares with, know no retention.
        self.bounds.retain(None if checks() else versions.retained(kv_cache_config))
        mover = Mover(
            states, self.bounds, self.max_num_reqs, self._slot_tables is not None, self._depth + 1
        )
        mover.warm_up(self._counts(self.num_accepted_tokens_gpu))
        if checks():
            from hybrid_runtime.integrations.vllm.checker import Checker

            self.checker = Checker(mover, copies, logger())
        return mover

    def _check_blocks(self, block: int, drafts: int) -> None:
        if block != self.bounds.block_size:
            raise Unhandled(
                f"its Mamba blocks hold {block} tokens, other blocks {self.bounds.block_size}"
            )
        if block <= drafts:
            raise Unhandled(f"its Mamba blocks hold {block} tokens, no more than a step's drafts")

    def _tables(self, groups: list[int], block_tables: tuple[Tensor, ...]) -> list[Tensor]:
        """Block tables of the cache groups: by request slot where vLLM has those (0.32 on), else by
        row of the batch."""
        if self._slot_tables is None:
            return [block_tables[group] for group in groups]
        return [self._slot_tables.block_tables[group].gpu for group in groups]

    def _make_reporter(self, parallel: Any) -> Reporter | None:
        import vllm.envs as envs

        if parallel.rank:
            return None
        return Reporter(envs.VLLM_LOG_STATS_INTERVAL, logger().info)


@functools.cache
def model_state_class() -> type:
    """The class that vLLM instantiates: `AlignedStates` before its own."""
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import (
        MambaHybridModelState,
    )

    return type("HybridRuntimeModelState", (AlignedStates, MambaHybridModelState), {})
