"""vLLM's layout with our copies, on stand-ins for vLLM's classes: two engines run one random
history, one with our model state and one without, and hold the same bytes after each launch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.vllm_stand_in import (
    SLOTS,
    TAPS,
    B,
    Engine,
    K,
    OurOldState,
    OurState,
    Traffic,
    VllmState,
    cache_groups,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "slot_tables", "asynchronous"),
    [(OurState, True, True), (OurState, True, False), (OurOldState, False, True)],
)
@pytest.mark.parametrize("seed", range(2))
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
    for _ in range(80):
        traffic.step()
    copied = [e.state.statistics()["postcopied"] for e in (dense, sparse)]
    assert copied[1] < copied[0] * 0.7
    # The engine's forward pass has checked every state that was read.
    assert sparse.state.statistics()["precopied"] == dense.state.statistics()["precopied"]


def test_rows_that_are_not_recognised_are_left_to_vllms_kernel() -> None:
    theirs, ours = Engine(VllmState), Engine(OurState)
    traffic = Traffic(3, [theirs, ours])
    ours.end = lambda batch, accepted: Engine.end(  # type: ignore[method-assign, assignment]
        ours, batch, accepted, batch.idx_mapping.clone() if traffic.random.integers(2) else None
    )
    for _ in range(60):
        traffic.step()
        assert torch.equal(ours.memory(), theirs.memory())
    assert ours.state.statistics()["handed_back"] == ours.state.full_launches > 12


def test_a_step_may_end_after_later_ones_began() -> None:
    """As on the ranks of a pipeline: two halves of the requests, whose steps overlap."""
    theirs, ours = Engine(VllmState), Engine(OurState)
    halves = [
        Traffic(8 + i, [theirs, ours], slots=slots)
        for i, slots in enumerate((range(2), range(2, SLOTS)))
    ]
    finish = halves[0].start()
    for number in range(1, 120):
        following = halves[number % 2].start()
        finish()
        finish = following
        assert torch.equal(ours.memory(), theirs.memory())
    ours.state.postprocess_state(torch.zeros(1, dtype=torch.int32), 1)  # of a dummy: no counts
    found = ours.state.statistics()
    assert found["handed_back"] == found["lost"] == 0
    assert found["postcopied"] > 20


def test_steps_can_be_handed_over_and_back() -> None:
    theirs, ours = Engine(VllmState), Engine(OurState)
    traffic = Traffic(4, [theirs, ours])
    for number in range(80):
        ours.state.ours = number // 10 % 2 == 0
        traffic.step()
        assert torch.equal(ours.memory(), theirs.memory())
    assert ours.state.full_launches > 20
    assert ours.state.statistics()["postcopied"] > 10


@pytest.mark.parametrize(
    "groups",
    [
        cache_groups(block_size=2 * B),
        cache_groups(mamba_type=SimpleNamespace(name="LINEAR")),
        cache_groups(num_speculative_blocks=TAPS + K),
    ],
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
