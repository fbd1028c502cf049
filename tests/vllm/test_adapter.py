"""The vLLM adapter on stand-ins for vLLM's classes: two engines of the stand-in run one random
history, one with our model state and one without, and must hold the same bytes after each launch.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.interpreter import CUDA, elsewhere, kernels, run_in_interpreter
from helpers.vllm_stand_in import (
    SLOTS,
    B,
    Engine,
    K,
    OurOldState,
    OurState,
    Traffic,
    VllmState,
    cache_groups,
    vllm_config,
)

from hybrid_runtime.integrations.vllm import config, models, versions
from hybrid_runtime.integrations.vllm.bounds import Bounds
from hybrid_runtime.integrations.vllm.state import AlignedStates
from hybrid_runtime.kernels.step.entry import ENTRY_FIELDS, SCHEDULED, SLOT
from hybrid_runtime.kernels.step.move_rows import move_reference
from hybrid_runtime.kernels.step.state_table import StateTable
from hybrid_runtime.kernels.step.vllm_decide import (
    POSTCOPY,
    PRECOPY,
    REQUEST,
    VllmCounts,
    decide_and_move,
    decide_reference,
)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("kind", "slot_tables"), [(OurState, True), (OurOldState, False)])
@pytest.mark.parametrize("seed", range(4))
def test_same_bytes_and_counts_as_vllm(
    kind: type[Any], slot_tables: bool, asynchronous: bool, seed: int
) -> None:
    theirs, ours = Engine(VllmState), Engine(kind, slot_tables=slot_tables)
    ours.state.bounds._asynchronous = asynchronous

    def compare(batch: Any) -> None:
        assert torch.equal(ours.memory(), theirs.memory())
        for name in ("_mamba_state_idx_gpu", "num_accepted_tokens_gpu"):
            assert torch.equal(getattr(ours.state, name), getattr(theirs.state, name))

    traffic = Traffic(seed, [theirs, ours], asynchronous)
    for _ in range(150):
        traffic.step(compare)
    found = ours.state.statistics()
    assert found["steps"] > 100
    assert found["skipped"] > 5
    assert found["precopied"] > 20
    assert found["postcopied"] > 20
    assert found["handed_back"] == found["lost"] == ours.state.full_launches == 0


@pytest.mark.parametrize("interval", [0, 2 * B])
def test_what_nobody_keeps_is_not_copied(interval: int) -> None:
    dense, sparse = Engine(OurState), Engine(OurState, interval)
    traffic = Traffic(7, [dense, sparse])
    for _ in range(150):
        traffic.step()
    copied = [e.state.statistics()["postcopied"] for e in (dense, sparse)]
    assert copied[1] < copied[0] * 0.7
    # The engine's forward pass has checked every state that was read.
    assert sparse.state.statistics()["precopied"] == dense.state.statistics()["precopied"]


@pytest.mark.parametrize("seed", range(20))
def test_candidates_against_every_possible_history(seed: int) -> None:
    """One row with unknown counts: whatever some count within reach would move is listed, and a
    boundary that none can reach is not."""
    random = np.random.default_rng(seed)
    bounds = Bounds(1, B, asynchronous=True)
    start = int(random.integers(3)) * B
    bounds.admit(0, start)
    # Every pair (tokens computed, running column) that the accepted counts so far allow.
    possible, optimistic = {(start, (start - 1) // B)}, start
    for _ in range(60):
        d = int(random.integers(K + 1)) if optimistic else 0
        s = d + 1 if optimistic else int(random.integers(1, 2 * B))
        found = bounds.candidates(*(np.array([v]) for v in (0, optimistic, s, d, 0)))
        columns = {(n, held): -(-(n + s) // B) - 1 for n, held in possible}
        assert len(found.precopy) or all(c == held for (_, held), c in columns.items())
        acts = {
            n + s - d + a - 1
            for n, _ in possible
            for a in range(1, d + 2)
            if d and (n + s - d + a - 1) // B * B >= n + s - d
        }
        assert bool(len(found.postcopy)) == bool(acts)
        assert bounds.low[0] == min(n + s - d for n, _ in possible)
        # The step's result is known one step later.
        true_n = sorted(n for n, _ in possible)[int(random.integers(len(possible)))]
        possible = {
            (true_n + s - d + a - 1, columns[n, held])
            for (n, held) in possible
            if n == true_n
            for a in range(1, d + 2)
        }
        optimistic = true_n + s
        assert not bounds.lost[0]


@pytest.mark.parametrize("interval", [0, 4 * B])
def test_a_prompts_end_is_kept_beside_rows_that_are_past_theirs(interval: int) -> None:
    bounds = Bounds(2, B, asynchronous=False)
    bounds.retain(interval)
    bounds.admit(0, 3 * B + 1)
    bounds.admit(1, 2 * B - 1)
    slot, computed, prompt = (
        np.array([0, 1]),
        np.array([3 * B + 1, 2 * B - 1]),
        np.array([B, 2 * B]),
    )
    found = bounds.candidates(slot, computed, np.array([2, 2]), np.array([1, 1]), prompt)
    assert found.postcopy.tolist() == [1]
    assert found.first[1] == 2 * B


def test_a_count_out_of_bounds_makes_the_row_a_candidate_until_it_is_readmitted() -> None:
    bounds = Bounds(2, 64, asynchronous=True)

    def listed(computed: int) -> int:
        row = (np.array([v]) for v in (1, computed, 2, 1, 0))
        return len(bounds.candidates(*row).postcopy)

    bounds.admit(1, 8)
    assert not listed(8)
    assert listed(15)
    assert listed(17)
    bounds.admit(1, 8)
    assert not listed(8)


def test_rows_that_are_not_recognised_are_left_to_vllms_kernel() -> None:
    theirs, ours = Engine(VllmState), Engine(OurState)
    traffic = Traffic(3, [theirs, ours])
    ours.end = lambda batch, accepted: Engine.end(  # type: ignore[method-assign, assignment]
        ours, batch, accepted, batch.idx_mapping.clone() if traffic.random.integers(2) else None
    )
    for _ in range(100):
        traffic.step(lambda batch: None)
        assert torch.equal(ours.memory(), theirs.memory())
    assert ours.state.statistics()["handed_back"] == ours.state.full_launches > 20


def test_a_step_may_end_after_later_ones_began() -> None:
    """As on the ranks of a pipeline: two halves of the requests, whose steps overlap."""
    theirs, ours = Engine(VllmState), Engine(OurState)
    halves = [
        Traffic(8 + i, [theirs, ours], slots=slots)
        for i, slots in enumerate((range(2), range(2, SLOTS)))
    ]
    finish = halves[0].start()
    for number in range(1, 200):
        following = halves[number % 2].start()
        finish()
        finish = following
        assert torch.equal(ours.memory(), theirs.memory())
    found = ours.state.statistics()
    assert found["handed_back"] == found["lost"] == 0
    assert found["postcopied"] > 20


def test_steps_can_be_handed_over_and_back() -> None:
    theirs, ours = Engine(VllmState), Engine(OurState)
    traffic = Traffic(4, [theirs, ours])
    for number in range(120):
        ours.state.ours = number // 10 % 2 == 0
        traffic.step()
        assert torch.equal(ours.memory(), theirs.memory())
    assert ours.state.full_launches > 20
    assert ours.state.statistics()["postcopied"] > 10


@pytest.mark.parametrize(
    "groups",
    [cache_groups(block_size=2 * B), cache_groups(mamba_type=SimpleNamespace(name="LINEAR"))],
)
def test_a_cache_that_is_not_ours_is_left_to_vllm(
    groups: Any, caplog: pytest.LogCaptureFixture
) -> None:
    theirs, ours = Engine(VllmState), Engine(OurState)
    ours.groups = groups
    traffic = Traffic(5, [theirs, ours])
    for _ in range(40):
        traffic.step()
        assert torch.equal(ours.memory(), theirs.memory())
    assert ours.state.full_launches
    assert len([r for r in caplog.records if "leaves Mamba states to vLLM" in r.message]) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"use_v2_model_runner": False},
        {"cache_config__mamba_cache_mode": "all"},
        {"kv_transfer_config": "connector"},
        {"parallel_config__decode_context_parallel_size": 2},
        {"speculative_config__enable_adaptive_verification": True},
        {"cache_config__use_kda_recoverssm": True},
        {},
    ],
)
def test_model_class_and_its_state(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    name = models.lazy_name("NemotronHForCausalLM", "0.25.1+cu129")
    kind = getattr(models, name)
    assert kind is getattr(models, name)
    assert kind.__name__ == "NemotronHForCausalLM"
    for _ in range(2):
        model = kind(vllm_config=vllm_config(**change), prefix="model")
        # Without it vLLM chooses as if the plug-in were not there.
        assert hasattr(model, "get_model_state_cls") != bool(change)
        if not change:
            assert issubclass(model.get_model_state_cls(), AlignedStates)
            assert issubclass(model.get_model_state_cls(), VllmState)
    assert len(caplog.records) == bool(change)


def test_registration_is_idempotent_and_lazy(vllm: ModuleType) -> None:
    registry = sys.modules["vllm.model_executor.models.registry"].ModelRegistry.models
    registry["Zamba2ForCausalLM"] = SimpleNamespace(module_name="another.plugin")
    for _ in range(2):
        models.register()
    ours = f"{models.__name__}:v0_25_1_NemotronHForCausalLM"
    assert registry["NemotronHForCausalLM"].path == ours
    assert registry["Zamba2ForCausalLM"].module_name == "another.plugin"
    assert registry["LlamaForCausalLM"].module_name.startswith("vllm.")
    assert set(registry) == {"NemotronHForCausalLM", "Zamba2ForCausalLM", "LlamaForCausalLM"}
    with pytest.raises(AttributeError, match="v0_25_1_LlamaForCausalLM"):
        _ = models.v0_25_1_LlamaForCausalLM


@pytest.mark.parametrize(
    ("version", "switch", "warnings"),
    [("0.25.0", "", 1), ("0.34.0", "", 1), ("0.33.1rc1", "", 1), ("0.25.1", "0", 0)],
)
def test_left_alone(
    vllm: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    switch: str,
    warnings: int,
) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setenv(config.SWITCH, switch)
    for _ in range(2):
        models.register()
    registry = sys.modules["vllm.model_executor.models.registry"].ModelRegistry.models
    assert all(known.module_name.startswith("vllm.") for known in registry.values())
    assert len(caplog.records) == warnings


@pytest.mark.parametrize("version", ["0.25.1", "0.27.1", "0.29.0", "0.31.0", "0.33.0", "0.33.0+x"])
def test_supported_versions(version: str) -> None:
    assert versions.supported(version)


@pytest.mark.slow
@elsewhere
def test_kernel_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "-k", "decide_kernel")


@kernels
@pytest.mark.parametrize("phase", [PRECOPY, POSTCOPY])
@pytest.mark.parametrize("count", [1, 130])
def test_decide_kernel(phase: int, count: int) -> None:
    """VllmCounts, moves and every byte as by the references, launch after launch."""
    device, generator = "cuda" if CUDA else "cpu", torch.Generator().manual_seed(count)

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    slots, columns, taps, layers = 140, 12, 3, 2
    blocks = slots * columns
    table = torch.randperm(blocks, generator=generator).int().view(slots, columns).to(device)
    content = [
        (
            torch.randn(blocks, taps + K, 10, generator=generator).bfloat16().to(device),
            torch.randn(blocks, 2, 4, 8, generator=generator).to(device),
        )
        for _ in range(layers)
    ]
    given = VllmCounts(ints(phase - 1, 4, slots), ints(1, K + 2, slots), ints(K + 2, 4 * B, slots))
    sides: list[tuple[Any, ...]] = []
    for _ in range(2):
        windows, ssm = ([value.clone() for value in part] for part in zip(*content, strict=True))
        states = StateTable.build(windows, ssm, [table] * layers, taps)
        counts = VllmCounts(*(value.clone().to(device) for value in given))
        moves = torch.full((3, slots), -7, dtype=torch.int32, device=device)
        sides.append((states, counts, moves, torch.zeros(2, dtype=torch.int64, device=device)))
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    for _ in range(3):
        entries = ints(0, 3, count, ENTRY_FIELDS) * B
        entries[:, SLOT] = torch.randperm(slots, generator=generator)[:count].int()
        entries[:, SCHEDULED] = ints(1, 2 * B, count)
        entries[:, REQUEST] = torch.randperm(slots, generator=generator)[:count].int()
        entries = entries.to(device)
        decide_and_move(sides[0][0], entries, count, *sides[0][1:], arrived, B, phase)
        states, *rest = sides[1]
        decide_reference(entries, count, *rest, B, phase)
        move_reference(states, entries[:count, SLOT], *rest[1][:, :count])
        (ours, *one), (theirs, *other) = sides
        pairs = [(ours.windows, theirs.windows), (ours.ssm, theirs.ssm), (one[0], other[0])]
        for mine, known in [*pairs, (one[1:], other[1:])]:
            assert all(torch.equal(a, b) for a, b in zip(mine, known, strict=True))
    assert count == 1 or sides[1][3][phase] > 0
    assert arrived.item() == 0
