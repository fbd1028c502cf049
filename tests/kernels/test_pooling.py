"""Mean pooling of prompts that take several steps."""

import pytest
import torch
from helpers.interpreter import kernels
from helpers.tensors import DEVICE, ints
from torch import Tensor

from hybrid_runtime.kernels.layers import pooling


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 200])
def test_pool(size: int, dtype: torch.dtype) -> None:
    """Three prompts over two steps, in rows between others', whose hidden states are NaN."""
    generator = torch.Generator().manual_seed(size)
    lengths, instruction = (70, 5, 1), 3
    states = [torch.randn(n + instruction, size, generator=generator) for n in lengths]
    states = [s.to(DEVICE, dtype) for s in states]
    wanted = torch.stack([s[instruction:].float().mean(0) for s in states])
    found = []
    for run in (pooling.pooling, pooling.pooling_reference):
        sums, out = (torch.full((n, size), float("nan"), device=DEVICE) for n in (4, 3))
        # The first prompt takes both steps, 40 of its tokens and 30; the others one each.
        steps: list[tuple[list[Tensor], Tensor]] = [
            ([states[0][:43], states[2]], ints(1, 3, 43, 2, 0, -1, 2, 3, 4, 0, 0, 0)),
            ([states[1], states[0][43:]], ints(1, 3, 8, 0, 0, 2, 2, 0, 30, 2, 40, 1)),
        ]
        for rows, entries in steps:
            other = torch.full((9, size), float("nan"), dtype=dtype, device=DEVICE)
            hidden = torch.cat([other, *rows, other])
            start = ints(0, 9, 9 + len(rows[0]), len(hidden) - 9, len(hidden))
            run(hidden, start, entries.view(2, pooling.ENTRY_FIELDS), sums, out, 43)
        torch.testing.assert_close(out, wanted[[2, 0, 1]], rtol=1e-6, atol=1e-6)
        assert sums[[0, 1, 3]].isnan().all()
        found.append(out)
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
