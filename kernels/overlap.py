"""Programmatic dependent launch: a kernel is set up while the one ahead of it on the stream ends.

A kernel launched with `overlap` starts once every program of the launch ahead has ended or called
`follow`. It calls `follow` itself before it touches what that launch reads or writes. All its
programs do, so when it ends the launch ahead has ended too, and order on the stream holds for
everybody behind it. By the same reasoning whatever was written two launches ago is there from the
first instruction on.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

CACHE_LINE = 128
"""Bytes."""


def overlap(tensor: Tensor) -> dict[str, bool]:
    """The constexpr OVERLAP of a kernel that calls `follow`, and the launch attribute; off where
    the hardware (before Hopper) or the interpreter has no such thing."""
    if not tensor.is_cuda or not _dependent_launches(tensor.device):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@functools.cache
def _dependent_launches(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Wait until the launch ahead has ended, then let the next one start."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(lines, OVERLAP: tl.constexpr):
    """Have the cache lines of the pointers `lines` brought to L2. Only a hint: what is written there
    meanwhile is still seen."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], tl.int32, False, 1
        )
