"""Programmatic dependent launch: a kernel is set up while the one ahead of it on the stream ends.

A kernel launched with `pdl` starts once every program of the launch ahead has ended or let it
start, and calls `pdl_wait` before it loads or stores anything. All its programs do, so when it ends
the launch ahead has ended too, and order on the stream holds for every launch behind it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

CACHE_LINE = 128
"""Bytes."""


def pdl(tensor: Tensor) -> dict[str, bool]:
    """The constexpr PDL of a kernel that calls `pdl_wait`, and the launch attribute; off where
    the hardware (before Hopper) or the interpreter has no such thing."""
    if not tensor.is_cuda or not _dependent_launches(tensor.device):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@functools.cache
def _dependent_launches(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def pdl_wait(PDL: tl.constexpr, RELEASE: tl.constexpr = True):
    """Wait until the launch ahead has ended, then perhaps let the next one start.

    A kernel that fills the GPU for long does not: programs that wait would only take room, and
    behind the state update they were measured to cost more than starting early gains.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        if RELEASE:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(lines, PDL: tl.constexpr):
    """Have the cache lines of the pointers `lines` brought to L2. Only a hint: what is written
    there meanwhile is still seen."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], tl.int32, False, 1
        )
