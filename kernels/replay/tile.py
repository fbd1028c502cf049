"""What the kernels of the replay layout do to one tile of a head's state.

A tile is a tuple of parts `[TILE, LOW]` that stand side by side, its SPLIT * LOW columns. With few
columns a part's row lies in few lanes, so sums along it take few shuffles, and vectors of LOW
elements are small enough for the compiler to load them where they are used instead of passing them
on through shared memory.
"""

# mypy: disable-error-code="assignment,var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from hybrid_runtime.kernels.common.math import softplus
from hybrid_runtime.kernels.replay.rounding import round_state


@triton.jit
def time_step(raw, dt_min, dt_max):
    return tl.minimum(tl.maximum(softplus(raw), dt_min), dt_max)


@triton.jit
def load_parts(
    source, n, stride: tl.constexpr, live, STATE: tl.constexpr, SPLIT: tl.constexpr,
    LOW: tl.constexpr, other: tl.constexpr = None,
):  # fmt: skip
    """A vector `[STATE]` as SPLIT parts `[LOW]`, 0 beyond it; `other` unless `live`."""
    parts = ()
    for s in tl.static_range(SPLIT):
        part = n + s * LOW
        if STATE == SPLIT * LOW:
            parts += (tl.load(source + part * stride, mask=live, other=other),)
        else:
            inside = (part < STATE) & live
            parts += (tl.load(source + part * stride, mask=inside, other=0.0),)
    return parts


@triton.jit
def load_window_cache(
    x, B, dt, count, n, in_dim,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    RECORDS: tl.constexpr, SPLIT: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """x `[TILE]`, parts of B `[LOW]` and time step of the first `count` records; 0 behind."""
    xs = ()
    Bs = ()
    steps = ()
    for j in tl.static_range(RECORDS):
        live = j < count
        steps += (tl.load(dt + j * HEADS, mask=live, other=0.0),)
        xs += (tl.load(x + j * (HEADS * DIM), mask=in_dim & live, other=0.0),)
        parts = ()
        for s in tl.static_range(SPLIT):
            part = n + s * LOW
            inside = (part < STATE) & live
            parts += (tl.load(B + j * (GROUPS * STATE) + part, mask=inside, other=0.0),)
        Bs += (parts,)
    return xs, Bs, steps


@triton.jit
def fold_part(h, xs, Bs, steps, rate, s: tl.constexpr, COUNT: tl.constexpr):
    """Part s of a tile `[TILE, LOW]` after COUNT tokens; one with step 0 changes nothing."""
    total = rate * 0
    for j in tl.static_range(COUNT):
        total += steps[j]
    h = h.to(tl.float32) * tl.exp(total * rate)
    later = rate * 0
    for j in tl.static_range(COUNT):
        u = (steps[COUNT - 1 - j] * tl.exp(later * rate)) * xs[COUNT - 1 - j].to(tl.float32)
        h += u[:, None] * Bs[COUNT - 1 - j][s].to(tl.float32)[None, :]
        later += steps[COUNT - 1 - j]
    return h


@triton.jit
def step_parts(h, x, B, step, rate, SPLIT: tl.constexpr):
    """All parts of a tile after one token."""
    stepped = ()
    for s in tl.static_range(SPLIT):
        inflow = (step * x.to(tl.float32))[:, None] * B[s].to(tl.float32)[None, :]
        stepped += (h[s] * tl.exp(step * rate) + inflow,)
    return stepped


@triton.jit
def store_at(
    address, h, element, inside, key, ROUND: tl.constexpr, DIGITS: tl.constexpr, LEAST: tl.constexpr
):
    """A part of a tile to its addresses; `element` of the state is what is rounded by."""
    if ROUND:
        h = round_state(h, element, key, DIGITS, LEAST)
    # Nobody reads it before the next step: evict it first.
    tl.store(address, h.to(address.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def store_part(
    target, h, element, inside, key, ROUND: tl.constexpr, DIGITS: tl.constexpr, LEAST: tl.constexpr
):
    """A part of a tile to the elements of the block at `target`."""
    store_at(target + element, h, element, inside, key, ROUND, DIGITS, LEAST)
