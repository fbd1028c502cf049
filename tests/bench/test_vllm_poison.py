"""The benchmark of free memory that holds no number and of dummy runs, on a stand-in of vLLM: what
it spoils, and what it notices."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
NULL, HELD, CACHED, FREE, OTHER = range(5)
"""Blocks: vLLM's own, a request's, one that a prefix hit may find, a free one, attention's."""


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Any:
    for folder in ("common", "vllm"):
        monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / folder))
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.kv_cache_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.delitem(sys.modules, "serve", raising=False)  # that of benchmarks/engine
    utils: Any = sys.modules["vllm.v1.core.kv_cache_utils"]
    utils.get_group_id = lambda key: key[-1]
    import poison

    return poison


class Engine:
    """One Mamba layer, in cache group 1; requests in slots 0 and 1 of three."""

    def __init__(self) -> None:
        self.drafts = torch.zeros(1, 3, 4)
        self.layer = SimpleNamespace(kv_cache=[torch.zeros(5, 2), torch.zeros(5, 3)])
        layers = {"a": SimpleNamespace(kv_cache=torch.zeros(5, 4)), "m": self.layer}
        compiled = SimpleNamespace(static_forward_context=layers)
        self.tables = [torch.tensor([[OTHER], [OTHER]]), torch.tensor([[HELD], [CACHED]])]
        self.seen: list[list[int]] = []
        self.spoils = -1
        hashes: dict[int, bytes] = {CACHED: b"x\1", OTHER: b"x\0"}
        blocks = [
            SimpleNamespace(block_id=b, block_hash=hashes.get(b), is_null=b == NULL)
            for b in range(5)
        ]
        managers = [
            SimpleNamespace(req_to_blocks={"r": [blocks[OTHER]]}),
            SimpleNamespace(req_to_blocks={"r": [blocks[NULL], blocks[HELD]]}),
        ]
        free = SimpleNamespace(get_all_free_blocks=lambda: [blocks[CACHED], blocks[FREE]])
        cache = SimpleNamespace(
            block_pool=SimpleNamespace(blocks=blocks, free_block_queue=free),
            coordinator=SimpleNamespace(single_type_managers=managers),
        )
        core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=cache))
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
        groups = [SimpleNamespace(layer_names=[name]) for name in ("a", "m")]
        replay = SimpleNamespace(rings=[self.drafts])
        tables = [SimpleNamespace(gpu=table) for table in self.tables]
        self.model_runner = SimpleNamespace(
            vllm_config=SimpleNamespace(compilation_config=compiled),
            model_state=SimpleNamespace(layers=replay),
            kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
            req_states=SimpleNamespace(free_indices=[2]),
            block_tables=SimpleNamespace(block_tables=tables),
        )

    def collective_rpc(self, call: Any) -> None:
        call(self)

    def execute_dummy_batch(self) -> None:
        self.seen += [table[0].tolist() for table in self.tables]
        if self.spoils >= 0:
            self.layer.kv_cache[0][self.spoils] = 1.0


def test_what_is_free_becomes_nan(poison: Any) -> None:
    engine = Engine()
    spoil = poison.Poison(poison.Memory(engine))
    assert engine.drafts.isnan().all()
    engine.drafts.zero_()
    spoil()
    assert engine.drafts[0].isnan().all(1).tolist() == [False, False, True]
    for part in engine.layer.kv_cache:
        assert part.isnan().all(1).nonzero().flatten().tolist() == [FREE]
    assert spoil.found == {"steps": 1, "blocks": 1, "slots": 1}


@pytest.mark.parametrize(("block", "changed"), [(HELD, True), (CACHED, True), (FREE, False)])
def test_what_a_dummy_run_changes_is_noticed(poison: Any, block: int, changed: bool) -> None:
    """Only where somebody may read it; the dummy's own slot names the null block meanwhile."""
    engine = Engine()
    engine.spoils = block
    between = poison.Interruptions(poison.Memory(engine), captures=False)
    for _ in range(2 * poison.EVERY - 1):
        between()
    assert engine.seen == [[NULL], [NULL]]
    assert [table[0].tolist() for table in engine.tables] == [[OTHER], [HELD]]
    assert (between.found["dummy_runs"], between.found["blocks"]) == (1, 2)
    assert (between.found["state_bytes"] > 0, between.found["guess_bytes"]) == (changed, 0)


def test_prompts_come_last_however_few_their_tokens(poison: Any) -> None:
    """The order is vLLM's, by tokens, among the rows that decode and among the prompts."""
    import numpy as np
    import shipped

    tokens = {"long prompt": 9, "decodes": 6, "short prompt": 2, "one token": 1, "resumed": 6}
    prompts = ["short prompt", "resumed", "long prompt"]
    index = {request: i for i, request in enumerate(tokens)}
    seen: list[tuple[str, int]] = []

    def prepare(step: Any, description: str) -> str:
        given = step.num_scheduled_tokens
        order = sorted(given, key=given.get)
        counts = np.fromiter(map(given.get, order), np.int32)
        seen.extend(zip(order, counts.tolist(), strict=True))
        return description

    states = SimpleNamespace(
        req_id_to_index=index,
        num_computed_prefill_tokens=np.array([4 if r in prompts else 5 for r in tokens]),
        prefill_len=SimpleNamespace(np=np.full(len(tokens), 5)),
    )
    runner = SimpleNamespace(req_states=states, prepare_inputs=prepare)
    shipped.sort_prompts_last(SimpleNamespace(model_runner=runner))
    step = SimpleNamespace(num_scheduled_tokens=tokens)
    assert runner.prepare_inputs(step, "mixed") == "mixed"
    assert seen == [(r, tokens[r]) for r in ("one token", "decodes", *prompts)]
    assert step.num_scheduled_tokens is tokens
