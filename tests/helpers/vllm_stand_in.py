"""Stand-ins for vLLM's classes as far as the adapter uses them, and random traffic for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hybrid_runtime.integrations.vllm.state import AlignedStates

B, K, SLOTS, TAPS, COLUMNS = 8, 3, 5, 3, 24


@dataclass
class NewRequestData:
    num_computed_tokens: int


@dataclass
class InputBatch:
    num_reqs: int
    idx_mapping: torch.Tensor
    idx_mapping_np: Any
    num_scheduled_tokens: Any
    num_draft_tokens_per_req: Any
    num_computed_tokens_np: Any
    prefill_len_np: Any
    query_start_loc: Any
    requests: list[int]
    accepted: Any = ()


class VllmState:
    """What `MambaHybridModelState` does, for all rows in every step, in plain torch. Its hooks have
    vLLM's signatures."""

    def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
        self.vllm_config, self.cache_config = vllm_config, vllm_config.cache_config
        self.max_num_reqs, self.model = SLOTS, model
        self._align_mode = self.cache_config.mamba_cache_mode == "align"
        self.num_accepted_tokens_gpu = torch.ones(SLOTS, dtype=torch.int32)
        self._mamba_state_idx_gpu = torch.zeros(SLOTS, dtype=torch.int32)
        self._mamba_ctx: Any = None
        self.full_launches = 0

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        self.num_accepted_tokens_gpu[req_index] = 1
        self._mamba_state_idx_gpu[req_index] = (new_req_data.num_computed_tokens - 1) // B

    def _get_mamba_group_info(self, kv_cache_config: Any) -> Any:
        return [1, 2], kv_cache_config.kv_cache_groups[1].kv_cache_spec

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        self._mamba_ctx = "made"

    def preprocess_state(
        self, input_batch: Any, block_tables: Any, kv_cache_config: Any, num_computed_tokens: Any
    ) -> None:
        for row, slot in enumerate(input_batch.idx_mapping_np):
            held = int(self._mamba_state_idx_gpu[slot])
            end = int(num_computed_tokens[slot]) + int(input_batch.num_scheduled_tokens[row])
            column = self._mamba_state_idx_gpu[slot] = -(-end // B) - 1
            if held >= 0 and held != column:
                self._copy(slot, held, int(self.num_accepted_tokens_gpu[slot]) - 1, int(column))
                self.num_accepted_tokens_gpu[slot] = 1

    def postprocess_state(
        self, idx_mapping: Any, num_sampled: Any, num_computed_tokens: Any = None
    ) -> None:
        for row, slot in enumerate(idx_mapping.tolist()):
            sampled = num_sampled if isinstance(num_sampled, int) else int(num_sampled[row])
            if slot >= 0:
                self.num_accepted_tokens_gpu[slot] = max(sampled, 1)
        if num_computed_tokens is None or not self._align_mode:
            return
        self.full_launches += 1
        for slot in (s for s in idx_mapping.tolist() if s >= 0):
            new, held = int(num_computed_tokens[slot]), int(self._mamba_state_idx_gpu[slot])
            certain = new - int(self.num_accepted_tokens_gpu[slot]) + 1
            boundary = new // B * B
            if boundary >= certain:
                self._copy(slot, held, boundary - certain, boundary // B - 1)
                if held == boundary // B - 1:
                    self.num_accepted_tokens_gpu[slot] = 1

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: Any,
        attn_groups: Any,
        kv_cache_config: Any,
        for_capture: bool = False,
    ) -> dict[str, Any]:
        return {}

    def _copy(self, slot: int, source: int, offset: int, target: int) -> None:
        for layer in self.vllm_config.compilation_config.static_forward_context.values():
            window, ssm = layer.kv_cache
            blocks = layer.table[slot].tolist()
            window[blocks[target], :TAPS] = window[blocks[source], offset : offset + TAPS].clone()
            ssm[blocks[target]] = ssm[blocks[source + offset]]


class OurState(AlignedStates, VllmState):
    pass


class OurOldState(OurState):
    """As up to 0.31: the context is made on first use."""

    def _ensure_align_ctx(self, *_: Any) -> str:
        return "made"


def vllm_config(**changes: Any) -> Any:
    layers = {}
    for index in range(2):
        table = (torch.arange(SLOTS * COLUMNS).view(SLOTS, COLUMNS).int() + index) % (
            SLOTS * COLUMNS
        )
        shape = (SLOTS * COLUMNS, TAPS + K, 4)
        cache = [torch.zeros(shape), torch.zeros(shape[0], 2, 2, 4)]
        layers[f"layer{index}"] = SimpleNamespace(kv_cache=cache, table=table)
    made = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_cache_mode="align", mamba_block_size=B, block_size=B),
        parallel_config=SimpleNamespace(
            rank=0,
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(async_scheduling=True, max_num_seqs=SLOTS),
        model_config=SimpleNamespace(dtype=torch.float32),
        device_config=SimpleNamespace(device="cpu"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        speculative_config=SimpleNamespace(),
        kv_transfer_config=None,
        use_v2_model_runner=True,
        num_speculative_tokens=K,
    )
    for path, value in changes.items():
        place, _, name = path.rpartition("__")
        setattr(getattr(made, place) if place else made, name, value)
    return made


def cache_groups(retained: int | None = None, **spec: Any) -> Any:
    kind = {"mamba_type": SimpleNamespace(name="MAMBA2"), "block_size": B}
    mamba = SimpleNamespace(**{"num_speculative_blocks": K} | kind | spec)
    groups = [SimpleNamespace(kv_cache_spec=None, layer_names=["attention"])]
    groups += [SimpleNamespace(kv_cache_spec=mamba, layer_names=[f"layer{i}"]) for i in range(2)]
    return SimpleNamespace(kv_cache_groups=groups, prefix_cache_retention_interval=retained)


class Engine:
    """One runner around a model state: exact counts, block tables, and a forward pass whose state
    after m tokens of request r is r * 1000 + m, checked where it is read.

    call: how the release calls a hook of its model state, `call(state, name, *arguments)`.
    """

    def __init__(
        self,
        kind: type[Any],
        retained: int | None = None,
        slot_tables: bool = True,
        call: Callable[..., None] = lambda state, hook, *given: getattr(state, hook)(*given),
    ) -> None:
        self.call = call
        self.config, self.groups = vllm_config(), cache_groups(retained)
        self.layers = list(self.config.compilation_config.static_forward_context.values())
        sizes = self.config.cache_config
        sizes.block_size = sizes.mamba_block_size = 16
        self.state = kind(self.config, None, None, torch.device("cpu"))
        sizes.block_size = sizes.mamba_block_size = B
        self.computed = torch.zeros(SLOTS, dtype=torch.int32)
        self.inputs = (torch.empty(0), *(torch.zeros_like(x.table) for x in self.layers))
        if slot_tables:
            tables = [None, *(SimpleNamespace(gpu=x.table) for x in self.layers)]
            both = SimpleNamespace(block_tables=tables, input_block_tables=self.inputs)
            call(self.state, "initialize_kv_cache", self.groups, both)

    def admit(self, slot: int, request: int, computed: int) -> None:
        self.computed[slot] = computed
        for layer in self.layers if computed else ():
            self.write(layer, slot, computed // B - 1, request, computed, 0)
        self.call(self.state, "add_request", slot, NewRequestData(computed))

    def write(
        self, layer: Any, slot: int, column: int, request: int, certain: int, draft: int
    ) -> None:
        window, ssm = layer.kv_cache
        for j in range(draft + 1):
            ssm[layer.table[slot, column + j]] = request * 1000 + certain + j
        span = torch.arange(TAPS + draft) + certain - TAPS + 1
        window[layer.table[slot, column], : TAPS + draft] = (request * 1000.0 + span)[:, None]

    def begin(self, batch: Any) -> None:
        for target, layer in zip(self.inputs[1:], self.layers, strict=True):
            target[: batch.num_reqs] = layer.table[batch.idx_mapping_np]
        given = (batch, self.inputs, self.groups, self.computed)
        self.call(self.state, "preprocess_state", *given)

    def forward(self, batch: Any) -> None:
        rows = zip(batch.idx_mapping_np, batch.requests, strict=True)
        for (slot, request), s, d in zip(
            rows, batch.num_scheduled_tokens, batch.num_draft_tokens_per_req, strict=True
        ):
            n, offset = int(self.computed[slot]), int(self.state.num_accepted_tokens_gpu[slot]) - 1
            column = -(-(n + s) // B) - 1
            assert self.state._mamba_state_idx_gpu[slot] == column
            for layer in self.layers:
                window, ssm = layer.kv_cache
                if n:
                    assert (ssm[layer.table[slot, column + offset]] == request * 1000 + n).all()
                    taps = window[layer.table[slot, column], offset : offset + TAPS, 0]
                    assert taps.tolist() == [request * 1000 + n - i for i in (2, 1, 0)]
                self.write(layer, slot, column, request, n + s - d, d)

    def end(self, batch: Any, accepted: list[int], rows: torch.Tensor | None = None) -> None:
        rejected = batch.num_draft_tokens_per_req - np.maximum(accepted, 1) + 1
        self.computed[batch.idx_mapping_np] += torch.from_numpy(
            (batch.num_scheduled_tokens - rejected).astype(np.int32)
        )
        rows = batch.idx_mapping if rows is None else rows
        self.call(self.state, "postprocess_state", rows, torch.tensor(accepted), self.computed)

    def memory(self) -> torch.Tensor:
        return torch.cat([t.flatten() for layer in self.layers for t in layer.kv_cache])


class Traffic:
    """Random requests and steps; the scheduler counts on a step in flight being accepted."""

    def __init__(
        self,
        seed: int,
        engines: list[Any],
        asynchronous: bool = True,
        slots: range = range(SLOTS),
    ) -> None:
        self.slots = slots
        self.random = np.random.default_rng(seed)
        self.engines, self.asynchronous, self.requests = engines, asynchronous, 0
        self.live: dict[int, Any] = {}

    def step(self, after: Callable[[Any], None] = lambda batch: None) -> None:
        self.start(after)()

    def start(self, after: Callable[[Any], None] = lambda batch: None) -> Callable[[], None]:
        """Run a step up to its forward pass; what ends it."""
        pick = self.random.integers
        for slot in self.slots:
            over = slot in self.live and (
                pick(25) == 0 or self.engines[0].computed[slot] > (COLUMNS - 4) * B
            )
            if over:
                del self.live[slot]
            if slot not in self.live and pick(3) == 0:
                self.requests += 1
                hit = int(pick(3)) * B
                self.live[slot] = [self.requests, hit + int(pick(1, 30)), hit]
                for engine in self.engines:
                    engine.admit(slot, self.requests, hit)
        slots = [s for s in self.live if pick(4)] or list(self.live)
        if not slots:
            return lambda: None
        self.random.shuffle(slots)
        drafts, scheduled, counts, accepted = [], [], [], []
        for slot in slots:
            _, prompt, optimistic = self.live[slot]
            exact = int(self.engines[0].computed[slot])
            left = prompt - exact
            # A prompt's last token may run as a decode with placeholder drafts, all refused.
            tail = left == 1 and exact > 0 and pick(2) == 0
            d = K if tail else 0 if left > 0 else int(pick(K + 1))
            s = int(pick(1, left + 1)) if left > 0 and not tail else d + 1
            counts.append(optimistic if self.asynchronous and pick(3) else exact)
            self.live[slot][2] = exact + s
            drafts.append(d)
            scheduled.append(s)
            accepted.append(0 if left > s else 1 if left > 0 else int(pick(1, d + 2)))
        index = np.array(slots, np.int32)
        batch = InputBatch(
            num_reqs=len(slots),
            idx_mapping=torch.from_numpy(index),
            idx_mapping_np=index,
            requests=[self.live[s][0] for s in slots],
            num_scheduled_tokens=np.array(scheduled, np.int32),
            num_draft_tokens_per_req=np.array(drafts, np.int32),
            num_computed_tokens_np=np.array(counts, np.int32),
            prefill_len_np=np.array([self.live[s][1] for s in slots], np.int32),
            query_start_loc=torch.tensor([0, *scheduled]).cumsum(0).int(),
            accepted=accepted,
        )
        for engine in self.engines:
            engine.begin(batch)
        after(batch)
        for engine in self.engines:
            engine.forward(batch)

        def finish() -> None:
            for engine in self.engines:
                engine.end(batch, accepted)
            after(batch)

        return finish
