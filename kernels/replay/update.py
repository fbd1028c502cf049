"""Mamba-2 state update of the replay layout. The kernel is on its way: everything runs through the
reference."""

from __future__ import annotations

import math

from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.replay.naive import replay_update_reference
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.replay.rows import ReplayRows
from hybrid_runtime.kernels.replay.window_cache import (
    WindowCache,
    check_contiguous,
    check_window_cache,
)


def replay_update(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    window_cache: WindowCache,
    rows: ReplayRows,
    max_scheduled: int,
    rounding: Rounding | None = None,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    out: Tensor | None = None,
) -> Tensor:
    """`replay_update_reference` by one launch where Triton runs.

    The outputs go to `out` if it is given, contiguous and of x's shape and dtype.

    Each block of `states` and the window cache must be contiguous, the cache's x and B of x's
    dtype, and no row may read or write a block that another row of the same call writes. fp64 goes
    to the reference.

    Raises:
        ValueError: as the reference, or a tensor is not contiguous or has another dtype.
    """
    if runs_triton(x):
        check_window_cache(x, B, states, window_cache)
        check_contiguous(states, window_cache, x.dtype)
        for name, part in (("B", B), ("C", C)):
            if part.dtype != x.dtype:
                raise ValueError(f"{name} is {part.dtype}, must be x's {x.dtype}")
    y = replay_update_reference(
        x, dt, A_log, B, C, D, dt_bias, states, window_cache, rows, max_scheduled, rounding,
        dt_min, dt_max,
    )  # fmt: skip
    return y if out is None else out.copy_(y)
