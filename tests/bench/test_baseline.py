"""The plain state update that verify.py measures against computes what ours does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.interpreter import CUDA, elsewhere, kernels, run_in_interpreter

from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.mamba2.naive import selective_state_update_reference


@pytest.mark.slow
@elsewhere
def test_kernel_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@kernels
@pytest.mark.parametrize("tokens", [1, 4, 6])
@pytest.mark.parametrize("launch", [(4, 4), (16, 2)], ids=str)
def test_baseline(tokens: int, launch: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "kernels"))
    from baseline import baseline  # type: ignore[import-not-found]

    device = "cuda" if CUDA else "cpu"
    generator = torch.Generator().manual_seed(tokens)
    rows, heads, groups, dim, state = 3, 4, 2, 16, 16
    inner, outer = heads * dim, groups * state
    scheduled = torch.tensor([tokens, max(tokens - 1, 1), tokens], dtype=torch.int32)
    start = torch.cat([torch.zeros(1), scheduled.cumsum(0)]).int()
    count = int(start[-1])
    mixed = torch.randn(count, inner + 2 * outer + heads, generator=generator).bfloat16()
    x, B, C, dt = mixed.to(device).split([inner, outer, outer, heads], dim=1)
    A_log, D, bias = torch.randn(3, heads, generator=generator).to(device)
    blocks = rows * (tokens + 1)
    states = torch.randn(blocks, heads, dim, state, generator=generator).to(device)
    table = torch.randperm(blocks, generator=generator).int().view(rows, -1).to(device)
    where = StateRows(
        block_table=table,
        slot=torch.tensor([2, 0, 1], dtype=torch.int32, device=device),
        cu_seqlens=start.to(device),
        draft=(scheduled - 1).to(device),
        read_column=torch.tensor([0, 0, 1], dtype=torch.int32, device=device),
        read_offset=torch.tensor([0, min(1, tokens - 1), 0], dtype=torch.int32, device=device),
        write_column=torch.tensor([0, 0, 1], dtype=torch.int32, device=device),
    )
    inputs = (
        x.unflatten(1, (heads, dim)), dt, A_log, B.unflatten(1, (groups, state)),
        C.unflatten(1, (groups, state)), D, bias,
    )  # fmt: skip
    expected = states.clone()
    known = selective_state_update_reference(*inputs, expected, where, tokens)
    out = baseline(*inputs, states, launch, where, tokens)
    torch.testing.assert_close(out, known, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
