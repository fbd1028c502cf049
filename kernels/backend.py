"""Which implementation of an operation runs: the Triton kernel or its torch reference."""

from __future__ import annotations

import torch
import triton
from torch import Tensor


def runs_triton(tensor: Tensor) -> bool:
    """True on a GPU, and on CPU tensors while Triton's interpreter is on (TRITON_INTERPRET=1)."""
    return tensor.is_cuda or bool(triton.knobs.runtime.interpret)


def num_programs(tensor: Tensor, per_multiprocessor: int) -> int:
    """Grid of a persistent kernel: so many programs per multiprocessor, two in the interpreter."""
    if not tensor.is_cuda:
        return 2
    return (
        per_multiprocessor * torch.cuda.get_device_properties(tensor.device).multi_processor_count
    )
