"""The bytes of an engine are known before any are taken, and refused if there are too few."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.device.free_memory import DeviceMemory, host_memory
from hybrid_runtime.engine import Engine, EngineConfig, memory_plan
from hybrid_runtime.engine.memory_plan import STATES_SHARE, MemoryPlan, Planner
from hybrid_runtime.models.nemotron_h import MTPHead, NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig

GIB = 1 << 30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = NemotronHConfig(
    vocab_size=131072, hidden_size=4096, pattern="M-M-*-M-", mtp_pattern="*",
    num_nextn_predict_layers=1,
)  # fmt: skip


def planner(device: torch.device, weights: int = 0, **options: Any) -> Planner:
    config = EngineConfig(**{"drafter": "mtp"} | options)
    model = NemotronH(SHAPE, "meta", torch.bfloat16)
    layout = config.layout(model)
    return Planner(config, layout, model, MTPHead(model), device, weights)


def stored(tensors: Iterable[Tensor]) -> int:
    """Bytes behind tensors, each once."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("layout", ["replay", "columns"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_what_is_planned_is_what_is_taken(layout: Any, sampled: bool, kv_dtype: Any) -> None:
    runs = Engine.from_pretrained(
        SHIPPED, device="cpu", drafter="mtp", state_layout=layout, sampled_drafts=sampled,
        max_requests=40, max_model_len=1000, kv_cache_dtype=kv_dtype,
    )  # fmt: skip
    head = MTPHead(runs.model)
    plan = Planner(runs.config, runs.manager.layout, runs.model, head, CPU).plan()
    caches = runs.runner.caches
    assert stored(t for pair in caches.kv.values() for t in pair) == plan.kv
    assert stored(t for pair in caches.states.values() for t in pair) == plan.state
    records = runs.runner.caches.records
    parts = [part for rings in records.values() for part in rings]
    parts += [runs.scheduler.kv.device_table, runs.scheduler.state.device_table]
    parts += [t for t in vars(runs.sequences).values() if isinstance(t, Tensor)]
    # A line more of each for rows that emit nothing, and the fields of a line.
    assert 0.9 < plan.slots / stored(parts) < 1.3


def test_the_number_of_requests_that_is_said_to_fit_fits_and_no_more() -> None:
    for device in (CPU, CUDA):
        memory = DeviceMemory(free=10 * GIB, total=12 * GIB)
        with pytest.raises(ValueError, match=r"needs [\d.]+ GiB, \d\.\d GiB free") as refused:
            planner(device, max_requests=10**6).plan(memory)
        fits = int(str(refused.value).split("max_requests=")[1].split(" fits")[0])
        assert fits > 1
        assert planner(device, max_requests=fits).plan(memory).total <= 10 * GIB
        with pytest.raises(ValueError, match=f"max_requests={fits} fits"):
            planner(device, max_requests=fits + 1).plan(memory)


def test_keys_and_values_in_8_bits_take_half_the_bytes() -> None:
    sizes: dict[str, Any] = {"max_requests": 40, "block_size": 1056, "host_blocks": (8, 4)}
    plans = {
        dtype: planner(CPU, kv_cache_dtype=dtype, **sizes).plan()
        for dtype in ("auto", "float32", "bfloat16", "fp8")
    }
    assert plans["auto"] == plans["bfloat16"]
    assert plans["fp8"].num_blocks == plans["bfloat16"].num_blocks
    assert 4 * plans["fp8"].kv == 2 * plans["bfloat16"].kv == plans["float32"].kv
    assert plans["fp8"].total == plans["bfloat16"].total - plans["fp8"].kv
    # Blocks of states are as large as those of keys and values, which then hold more tokens.
    blocks = {
        dtype: EngineConfig(kv_cache_dtype=dtype)
        .layout(NemotronH(SHAPE, "meta", torch.bfloat16))
        .block_size
        for dtype in ("auto", "fp8")
    }
    assert 2 * blocks["auto"] - 16 <= blocks["fp8"] <= 2 * blocks["auto"]
    # On a GPU they fill the same room, with more tokens.
    memory = DeviceMemory(free=10 * GIB, total=12 * GIB)
    tokens = {
        dtype: planner(CUDA, kv_cache_dtype=dtype, max_requests=1, block_size=1056)
        .plan(memory)
        .num_blocks[0]
        for dtype in ("bfloat16", "fp8")
    }
    assert tokens["fp8"] > tokens["bfloat16"]


def test_the_output_weight_in_8_bits_is_counted() -> None:
    alone = planner(CUDA, max_requests=1)
    least = alone.needed(1)
    assert least.draft_copy == SHAPE.vocab_size * (SHAPE.hidden_size + 4)
    assert "output weight in 8 bits 0.5 GiB" in str(least)
    assert least.total == sum(v for k, v in asdict(least).items() if k != "num_blocks")
    for other in (planner(CPU), planner(CUDA, sampled_drafts=True)):
        assert other.needed(1).draft_copy == 0
    enough, little = (
        int(room / alone.config.memory_fraction) + 1
        for room in (least.total, least.total - least.draft_copy)
    )
    alone.plan(DeviceMemory(enough, enough))
    with pytest.raises(ValueError, match="max_requests is 1: needs"):
        alone.plan(DeviceMemory(little, little))


def test_a_step_is_planned_for_all_requests_to_decode() -> None:
    """Rows are padded up to all of them, however few tokens a step may have."""
    rows, few = 64, 8
    width = planner(CPU).config.num_draft + 1
    small, whole = (
        planner(CPU, max_requests=rows, max_tokens_per_step=n).needed(rows)
        for n in (few, rows * width)
    )
    assert small.step == whole.step
    assert small.step > rows * width * SHAPE.hidden_size * torch.bfloat16.itemsize
    logits = rows * width * SHAPE.vocab_size * (torch.bfloat16.itemsize + 2 * 4)
    for graphs in (False, True):  # which have memory of their own
        planned = planner(CUDA, max_tokens_per_step=few, max_prompt_tokens=few, graphs=graphs)
        assert 1 <= planned.needed(rows).step / logits - graphs < 1.5


def test_what_can_never_fit_is_told_apart() -> None:
    memory = DeviceMemory(free=2 * GIB, total=2 * GIB)
    with pytest.raises(ValueError, match=r"the weights need 16.0 GiB, 1\.\d GiB free"):
        planner(CPU, weights=16 * GIB).plan(memory)
    with pytest.raises(ValueError, match="not even max_requests=1 fits: max_model_len must be"):
        planner(CPU, max_model_len=10**7).plan(memory)
    with pytest.raises(ValueError, match="max_requests=1 fits: max_prompt_tokens must be"):
        planner(CPU, max_tokens_per_step=10**7, max_prompt_tokens=10**7).plan(memory)


def test_who_holds_the_memory_is_told() -> None:
    """A second engine on a GPU that the first one has filled: its dtype is not what is wrong."""
    memory = DeviceMemory(free=7 * GIB, total=80 * GIB)
    beside = r"0.0 MiB free within memory_fraction=0.9 \(73.0 GiB of 80.0 GiB are in use already\)"
    with pytest.raises(ValueError, match=f"weights need 1.0 GiB, {beside}; .* close other engines"):
        planner(CUDA, weights=GIB).plan(memory)
    with pytest.raises(ValueError, match=f"weights need 79.0 GiB, {beside}; .* narrower dtype"):
        planner(CUDA, weights=79 * GIB).plan(memory)
    with pytest.raises(ValueError, match=f"max_requests is 8: needs .* GiB, {beside}"):
        planner(CUDA).plan(memory)


def in_use(plan: MemoryPlan, memory: DeviceMemory) -> float:
    return (memory.total - memory.free + plan.total) / memory.total


@pytest.mark.parametrize("fraction", [0.5, 0.9])
@pytest.mark.parametrize("retention", ["all", "prompt", 4224])
def test_on_a_gpu_the_blocks_fill_the_fraction(
    fraction: float, retention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "MOST_BLOCKS", 1 << 20)  # conftest.py has none on a GPU
    memory = DeviceMemory(free=70 * GIB, total=80 * GIB)
    options = {"memory_fraction": fraction, "retention": retention, "max_requests": 16}
    plan = planner(CUDA, block_size=1056, **options).plan(memory)
    assert fraction - 0.01 < in_use(plan, memory) <= fraction
    least = planner(CPU, block_size=1056, **options).plan(memory)
    assert all(a > b for a, b in zip(plan.num_blocks, least.num_blocks, strict=True))


@pytest.mark.parametrize("retention", ["all", 4224])
def test_small_kv_blocks_keep_as_many_tokens_and_their_states(
    retention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "MOST_BLOCKS", 1 << 20)  # conftest.py has none on a GPU
    memory = DeviceMemory(free=70 * GIB, total=80 * GIB)
    sizes = (32, 1056)
    small, large = (
        planner(CUDA, block_size=1056, kv_block_size=size, retention=retention).plan(memory)
        for size in sizes
    )
    assert small.num_blocks[0] * 32 == pytest.approx(large.num_blocks[0] * 1056, rel=0.01)
    assert small.num_blocks[1] == pytest.approx(large.num_blocks[1], rel=0.01)
    assert small.kv == pytest.approx(large.kv, rel=0.01)


@pytest.mark.parametrize("retention", ["all", 10 * 1056])
def test_states_take_what_pays_of_the_memory_of_cached_prefixes(
    retention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "MOST_BLOCKS", 1 << 20)  # conftest.py has none on a GPU
    memory = DeviceMemory(free=70 * GIB, total=80 * GIB)
    least, most = (
        planner(device, block_size=1056, retention=retention, max_requests=4).plan(memory)
        for device in (CPU, CUDA)
    )
    states, keys = most.state - least.state, most.kv - least.kv
    if retention == "all":
        assert states / (states + keys) == pytest.approx(STATES_SHARE, abs=0.01)
        return
    kv_blocks, state_blocks = np.subtract(most.num_blocks, least.num_blocks)
    assert kv_blocks * 32 == pytest.approx(state_blocks * retention, rel=0.01)
    assert states / (states + keys) < STATES_SHARE


def test_without_a_prefix_cache_blocks_that_nobody_could_use_are_not_taken() -> None:
    memory = DeviceMemory(free=80 * GIB, total=80 * GIB)
    plan = planner(CUDA, prefix_caching=False).plan(memory)
    assert plan.num_blocks == planner(CPU, steps_ahead=1).plan(memory).num_blocks


def test_where_memory_is_short_all_requests_run_but_not_all_at_full_length() -> None:
    memory = DeviceMemory(free=20 * GIB, total=20 * GIB)
    options: dict[str, Any] = {"max_requests": 32, "max_model_len": 1 << 20}
    plan = planner(CUDA, **options).plan(memory)
    full = planner(CPU, steps_ahead=1, **options).needed(32)
    assert plan.num_blocks[1] == full.num_blocks[1]
    assert full.num_blocks[0] / 32 <= plan.num_blocks[0] < full.num_blocks[0]
    assert 0.89 < in_use(plan, memory) <= 0.9


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n")
    none = tmp_path / "none"
    assert host_memory(meminfo, none) == DeviceMemory(600 << 10, 1000 << 10)
    for folder, names in (
        ("v2", ("memory.max", "memory.current", "memory.stat")),
        ("v1", ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")),
    ):
        root = tmp_path / folder
        group = root / "memory" if folder == "v1" else root
        group.mkdir(parents=True)
        texts = ("102400", "81920", "anon 1\ninactive_file 1024\n")
        for name, text in zip(names, texts, strict=True):
            (group / name).write_text(text)
        assert host_memory(meminfo, root) == DeviceMemory(102400 - 81920 + 1024, 102400)
    (tmp_path / "v2" / "memory.max").write_text("max\n")
    assert host_memory(meminfo, tmp_path / "v2").free == 600 << 10
