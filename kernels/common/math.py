"""Functions of fp32 tiles that several kernels compute."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(v):
    """log(1 + exp(v)) with fp32's relative precision everywhere, from exp and arithmetic alone."""
    e = tl.exp(-tl.abs(v))
    z = e / (2 + e)  # log1p(e) = 2 atanh(z), and z <= 1/3
    q = z * z
    series = 1 / 11 + q * (1 / 13)
    series = 1 / 9 + q * series
    series = 1 / 7 + q * series
    series = 1 / 5 + q * series
    series = 1 / 3 + q * series
    return tl.maximum(v, 0.0) + 2 * z * (1 + q * series)


@triton.jit
def silu(v):
    """v * sigmoid(v)."""
    return v / (1 + tl.exp(-v))
