"""Replay in a stand-in of vLLM's runner: every state that a step reads, and every boundary that a
prefix hit could find, is the sum of exactly its tokens."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.vllm_replay import ReplayEngine
from helpers.vllm_stand_in import SLOTS, B, InputBatch, Traffic


@pytest.mark.parametrize(("slot_tables", "asynchronous"), [(True, True), (False, False)])
def test_states_and_boundaries(slot_tables: bool, asynchronous: bool) -> None:
    engine = ReplayEngine(slot_tables=slot_tables)
    engine.state.bounds._asynchronous = asynchronous
    traffic = Traffic(11 + asynchronous, [engine], asynchronous)
    for _ in range(60):
        traffic.step()
    found = engine.state.statistics()
    assert found["steps"] > 45
    assert found["precopied"] > 20
    assert found["postcopied"] > 20
    assert engine.boundaries > 25
    assert found["handed_back"] == found["lost"] == engine.state.full_launches == 0


def test_without_prefix_caching() -> None:
    engine = ReplayEngine(mode="none")
    traffic = Traffic(3, [engine])
    for _ in range(25):
        traffic.step()
    assert engine.state.statistics()["steps"] == 0


@pytest.mark.parametrize("mode", ["align", "none"])
def test_rows_that_vllms_own_code_runs(mode: str) -> None:
    """Rows without drafts, of Gated DeltaNet up to 0.31: their state lacks no accepted draft."""
    engine = ReplayEngine(mode=mode, plain=True)
    traffic = Traffic(13, [engine])
    for _ in range(60 if engine.align else 25):
        traffic.step()
    assert engine.flushed > 2


def test_only_kept_boundaries_are_materialised() -> None:
    dense, sparse = ReplayEngine(), ReplayEngine(retained=2 * B)
    traffic = Traffic(7, [dense, sparse])
    for _ in range(35):
        traffic.step()
    copied = [e.state.statistics()["postcopied"] for e in (dense, sparse)]
    assert copied[1] < copied[0] * 0.7


@pytest.mark.parametrize("release", ["0.26.0", "0.27.1"])
def test_a_dummy_between_steps_changes_nothing(
    release: str, vllm: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dummy run and a graph's capture name slots of real requests. Up to 0.26 vLLM's tables name
    their blocks too; later ones it has cleared itself."""
    monkeypatch.setattr(vllm, "__version__", release)
    engine = ReplayEngine()
    traffic = Traffic(5, [engine])
    dummy = SimpleNamespace(idx_mapping=torch.arange(SLOTS), num_reqs=SLOTS)
    for _ in range(15):
        begun: list[InputBatch] = []
        finish = traffic.start(begun.append)
        for batch in begun:
            assert named(engine, batch)
        before, tables = engine.memory(), [table.clone() for table in engine.inputs]
        engine.prepare(dummy)
        assert engine.shared.rows.whole.slot.tolist() == [-1] * SLOTS
        assert torch.equal(engine.memory().nan_to_num(), before.nan_to_num())
        for table, own in zip(engine.inputs, tables, strict=True):
            assert torch.equal(table, own * (release == "0.27.1"))
        finish()


def named(engine: ReplayEngine, batch: InputBatch) -> bool:
    """Whether a step's rows name their requests' slots and blocks."""
    rows, slot = engine.shared.rows.whole, batch.idx_mapping
    pairs = [(rows.slot[: len(slot)], slot)]
    pairs += [
        (t[: len(slot)], x.table[slot])
        for t, x in zip(engine.inputs[1:], engine.layers, strict=True)
    ]
    return all(torch.equal(one, other) for one, other in pairs)


def test_a_step_that_is_not_recognised_looks_at_every_row() -> None:
    engine = ReplayEngine()
    traffic = Traffic(9, [engine])
    own = engine.state.postprocess_state
    engine.state.postprocess_state = lambda rows, *rest: own(  # type: ignore[method-assign]
        rows.clone(), *rest
    )
    for _ in range(25):
        traffic.step()
    assert engine.state.statistics()["handed_back"] > 15
    assert engine.boundaries > 5


def test_a_cache_that_is_not_as_known_is_an_error_that_names_the_switch() -> None:
    engine = ReplayEngine()
    engine.groups.kv_cache_groups[1].kv_cache_spec.block_size = 2 * B
    traffic = Traffic(1, [engine])

    def run() -> None:
        for _ in range(10):
            traffic.step()

    with pytest.raises(RuntimeError, match="HYBRID_RUNTIME_VLLM=columns"):
        run()
