"""The kernel that decides on vLLM's counts and moves states, in Triton's interpreter."""

from typing import Any

import pytest
import torch
from helpers.interpreter import CUDA, elsewhere, kernels, run_in_interpreter
from helpers.vllm_stand_in import B, K

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
        pairs = [
            (ours.conv_states, theirs.conv_states),
            (ours.matrices, theirs.matrices),
            (one[0], other[0]),
        ]
        for mine, known in [*pairs, (one[1:], other[1:])]:
            assert all(torch.equal(a, b) for a, b in zip(mine, known, strict=True))
    assert count == 1 or sides[1][3][phase] > 0
    assert arrived.item() == 0
