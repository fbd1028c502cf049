"""Launches that overlap keep the order of the stream; only a GPU has such launches."""

import pytest
import torch

from hybrid_runtime.kernels.common.pdl import pdl
from hybrid_runtime.kernels.layers.activation import relu2
from hybrid_runtime.kernels.layers.norm import add_rms_norm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("tokens", [1, 300, 20000])  # one program, several, and waves of them
def test_each_launch_sees_what_the_one_ahead_wrote(tokens: int, captured: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    first = torch.randn(tokens, 1024, generator=generator, device="cuda").bfloat16()
    weight = torch.ones(1024, device="cuda", dtype=torch.bfloat16)

    def chain(waits: bool) -> list[torch.Tensor]:
        x, residual, seen = first, first, []
        for _ in range(20):
            x, residual = add_rms_norm(x, residual, weight, 1e-5)
            if waits:
                torch.cuda.synchronize()
            x = relu2(x)
            if waits:
                torch.cuda.synchronize()
            seen += [x, residual]
            residual = residual * 0.5  # a launch of torch's in between
        return seen

    want = chain(True)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(False)
        for part in got:
            part.fill_(float("nan"))
        graph.replay()
    else:
        got = chain(False)
    assert pdl(first) == {"PDL": True, "launch_pdl": True}
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
