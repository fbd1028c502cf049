"""Which implementation of an operation runs: the Triton kernel or its torch reference."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor


def runs_triton(tensor: Tensor) -> bool:
    """True on a GPU, and on CPU tensors while Triton's interpreter is on (TRITON_INTERPRET=1)."""
    return tensor.is_cuda or bool(triton.knobs.runtime.interpret)


def num_programs(tensor: Tensor, per_multiprocessor: int) -> int:
    """Grid of a persistent kernel: so many programs per multiprocessor, two in the interpreter."""
    return per_multiprocessor * _multiprocessors(tensor.device) if tensor.is_cuda else 2


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
