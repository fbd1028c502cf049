"""vLLM's own `MambaMixer2`, its columns path beside the replaying one: the same weights, inputs and
accepted counts, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from helpers.interpreter import CUDA, elsewhere, kernels, run_in_interpreter
from helpers.vllm_layers import Layers

from hybrid_runtime.integrations.vllm import versions
from hybrid_runtime.kernels.mamba2.naive import fold_reference
from hybrid_runtime.kernels.mamba2.records import Records
from hybrid_runtime.kernels.step.vllm_rows import RUNNING, FlushRows

K, SLOTS = 3, 6


@elsewhere
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__, "-k", "decode or mixed or dummy")


@kernels
@pytest.mark.skipif(CUDA, reason="vLLM's files alone have no CUDA libraries")
@pytest.mark.parametrize(
    ("dtype", "tolerance", "channels_first"),
    [("float32", 2e-6, False), ("float32", 2e-6, True), ("bfloat16", 3e-2, False)],
)
def test_decode_rows(
    dtype: str, tolerance: float, channels_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random lengths, orders, padding and accepted counts: outputs, states and windows."""
    pair = Layers(K, SLOTS, dtype, channels_first, monkeypatch)
    generator = torch.Generator().manual_seed(0)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    accepted = [1] * SLOTS
    for _ in range(8):
        order = torch.randperm(SLOTS, generator=generator)[: pick(1, SLOTS + 1)].tolist()
        lengths = [pick(1, K + 2) for _ in order]
        theirs, ours = pair.step(order, lengths, accepted, padded=pick(0, 3))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * float(theirs.abs().max()))
        pair.compare(order, tolerance)
        for slot, length in zip(order, lengths, strict=True):
            accepted[slot] = pick(1, length + 1)
    assert pair.spare_blocks_written() == (True, False)
    assert pair.spare_blocks() == (K, 0)


@kernels
@pytest.mark.skipif(CUDA, reason="vLLM's files alone have no CUDA libraries")
def test_decode_rows_that_are_rounded_stochastically(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their states are a neighbour of those rounded to nearest, another one in each slot."""
    states = []
    for stochastic in (False, True):
        pair = Layers(K, SLOTS, "float16", False, monkeypatch, stochastic)
        pair.step([4, 1], [4, 4], [1] * SLOTS)
        blocks = [pair.first_block(slot) for slot in (4, 1)]
        states.append(pair.caches[1][1][blocks].float())
    nearest, rounded = states
    up = rounded != nearest
    assert 0.2 < float(up.float().mean()) < 0.5
    assert bool((up[0] != up[1]).any())
    torch.testing.assert_close(rounded, nearest, rtol=2**-9, atol=2**-23)


@kernels
@pytest.mark.skipif(CUDA, reason="vLLM's files alone have no CUDA libraries")
def test_check_mode_of_decode_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares the watched slots, finds nothing, and finds a state that is spoiled."""
    pair = Layers(K, SLOTS, "float32", False, monkeypatch)
    pair.shared.checker = checker = pair.checker
    accepted, order = [1] * SLOTS, [5, 1, 0]
    for counts in ([3, 2, 1], [1, 1, 4], [2, 1, 1]):
        checker.begin(torch.tensor(order))
        pair.step(order, [4, 3, 4], accepted, padded=1)
        for slot, count in zip(order, counts, strict=True):
            accepted[slot] = count
        checker.end(torch.tensor(order), torch.tensor(counts))
    found = checker.statistics()
    assert (found["checked_states"], found["checked_outputs"]) == (6, 21)
    assert (found["different_states"], found["different_outputs"]) == (0, 0)
    assert 0 < found["worst_states"] < 1e-5
    # A boundary after two accepted drafts of the last step, in a watched slot and in another one.
    flush = FlushRows.allocate(2, "cpu")
    flush.slot[:] = torch.tensor([0, 5])
    flush.positions.pending[:] = torch.tensor([2, 1])
    flush.positions.cursor[:] = pair.certain[[0, 5]] % pair.shared.ring_length
    flush.positions.write_column[:] = RUNNING
    fold_reference(
        pair.caches[1][1],
        Records(*pair.shared.records[0]),
        pair.shared.params[0][0],
        pair.shared.tables[0],
        *flush,
    )
    checker.compare_boundaries(flush, 2)
    found = checker.statistics()
    assert (found["checked_boundaries"], found["different_boundaries"]) == (1, 0)
    assert 0 < found["worst_boundaries"] < 1e-5
    pair.caches[1][1][pair.first_block(1)] += 1
    checker.begin(torch.tensor(order))
    pair.step(order, [4, 3, 4], accepted)
    found = checker.statistics()
    assert found["different_states"] >= 1
    assert found["different_outputs"] >= 3


@kernels
@pytest.mark.skipif(CUDA, reason="vLLM's files alone have no CUDA libraries")
def test_mixed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's code for prompts is handed the same in a batch with decode rows before them."""
    pair = Layers(K, SLOTS, "float32", False, monkeypatch)
    (theirs, out), (ours, same) = (pair.mixed(replays) for replays in (False, True))
    assert len(theirs) == len(ours) == 2
    for one, other in zip(theirs, ours, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other[name]), name
            else:
                assert value == other[name], name
    torch.testing.assert_close(same, out, rtol=0, atol=1e-5)


@kernels
@pytest.mark.skipif(CUDA, reason="vLLM's files alone have no CUDA libraries")
@pytest.mark.parametrize("named", [False, True])
def test_a_dummy_run_touches_no_record(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without a slot leave states and records as they are, byte for byte, and so windows if
    their tables name the null block, as `clear_dummy_tables` sees to. Else the convolution writes
    into the block that they name."""
    pair = Layers(K, SLOTS, "float32", False, monkeypatch)
    window, state = pair.caches[1]
    before = [part.clone() for part in (*pair.shared.rings, state, window)]
    pair.dummy([0, 2 * named, 0])
    after = (*pair.shared.rings, state)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=False))
    changed = (window != before[-1]).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [2] * named


def test_tables_of_a_dummy_run() -> None:
    """Whichever release: a dummy run's rows name the null block."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    tables = object.__new__(BlockTables)
    tables.input_block_tables = [torch.ones(4, 3, dtype=torch.int32) for _ in range(2)]
    tables._num_dirty_rows = 4  # from 0.33 on
    handed = tables.get_dummy_block_tables(2)
    versions.clear_dummy_tables(handed)
    assert [table.any().item() for table in handed] == [False, False]
