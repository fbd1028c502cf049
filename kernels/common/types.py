"""Triton's names of torch's dtypes."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

FLOAT_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
WORD_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32}
"""By bytes: words that are copied whatever they mean."""


def operand_type(dtype: torch.dtype, x: Tensor) -> tl.dtype:
    """The type of operands whose products are formed in `dtype` on x's device. The interpreter
    multiplies bf16 as if its bits were integers, so there it is fp32."""
    return FLOAT_TYPES[dtype] if x.is_cuda else tl.float32
