"""Named numbers that host code and kernels share, such as the fields of a packed line."""

from __future__ import annotations

import triton.language as tl


class Constant(int, tl.constexpr):
    """An int to the host, a constexpr to a kernel.

    A plain `tl.constexpr` doesn't index tensors, and Triton compares each one that a kernel uses
    with its old value in every launch, which an int does in a tenth of the time.
    """

    def __init__(self, value: int) -> None:
        tl.constexpr.__init__(self, int(value))
