"""Whether a launch waits for nothing, and does in a CUDA graph what it does outside of one."""

from collections.abc import Callable, Sequence

import torch
from helpers.tensors import same_bytes
from torch import Tensor


def check_replay(run: Callable[[], Sequence[Tensor]], kept: Sequence[Tensor]) -> None:
    """kept: the tensors that `run` changes; they and its outputs must be the same to the bit."""
    held = [tensor.clone() for tensor in kept]

    def reset() -> None:
        for tensor, value in zip(kept, held, strict=True):
            tensor.copy_(value)

    run()  # compiles
    reset()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        want = [tensor.clone() for tensor in (*run(), *kept)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    reset()
    graph.replay()
    for got, expected in zip((*outputs, *kept), want, strict=True):
        assert same_bytes(got, expected)
