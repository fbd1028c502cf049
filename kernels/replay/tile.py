"""What the kernels of the replay layout do to one tile of a head's state.

A tile is a tuple of PARTS parts `[rows, PART]` that stand side by side. With few columns a part's
row lies in few lanes, so sums along it take few shuffles, and vectors of PART elements are small
enough for the compiler to load them where they are used instead of passing them on through shared
memory.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl

from hybrid_runtime.kernels.common.math import softplus
from hybrid_runtime.kernels.replay.program import Guesses
from hybrid_runtime.kernels.replay.rounding import round_state


@triton.jit
def time_step(raw, clamp):
    return tl.minimum(tl.maximum(softplus(raw), clamp.low), clamp.high)


@triton.jit
def load_parts(source, o_n, stride: tl.constexpr, live, shape, other: tl.constexpr = None):
    """A vector `[STATE]` as PARTS parts `[PART]`, 0 beyond it; `other` unless `live`."""
    parts = ()
    for s in tl.static_range(shape.PARTS):
        part = o_n + s * shape.PART
        if shape.STATE == shape.PARTS * shape.PART:
            parts += (tl.load(source + part * stride, mask=live, other=other),)
        else:
            inside = (part < shape.STATE) & live
            parts += (tl.load(source + part * stride, mask=inside, other=0.0),)
    return parts


@triton.jit
def guesses_of(x_cache, B_cache, dt_cache, turn, slots, slot, i_group, shape):
    """One half of a slot's window cache."""
    DRAFTS: tl.constexpr = shape.DRAFTS
    groups: tl.constexpr = shape.HEADS // shape.HEADS_PER_GROUP
    index = turn.to(tl.int64) * slots + slot
    return Guesses(
        x=x_cache + index * (DRAFTS * shape.HEADS * shape.DIM),
        B=B_cache + index * (DRAFTS * groups * shape.STATE) + i_group * shape.STATE,
        dt=dt_cache + index * (DRAFTS * shape.HEADS),
    )


@triton.jit
def load_guesses(past, count, o_n, in_dim, shape):
    """x `[TILE]`, parts of B `[PART]` and time step of the first `count` guesses; 0 behind."""
    groups: tl.constexpr = shape.HEADS // shape.HEADS_PER_GROUP
    xs = ()
    Bs = ()
    steps = ()
    for j in tl.static_range(shape.DRAFTS):
        live = j < count
        steps += (tl.load(past.dt + j * shape.HEADS, mask=live, other=0.0),)
        p_x = past.x + j * (shape.HEADS * shape.DIM)
        xs += (tl.load(p_x, mask=in_dim & live, other=0.0),)
        parts = ()
        for s in tl.static_range(shape.PARTS):
            part = o_n + s * shape.PART
            inside = (part < shape.STATE) & live
            p_B = past.B + j * (groups * shape.STATE) + part
            parts += (tl.load(p_B, mask=inside, other=0.0),)
        Bs += (parts,)
    return xs, Bs, steps


@triton.jit
def fold_part(h, xs, Bs, steps, rate, s: tl.constexpr):
    """Part s of a tile after all tokens; one with step 0 changes nothing."""
    COUNT: tl.constexpr = len(steps)
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
def step_parts(parts, x, B, step, rate):
    """All parts of a tile after one token."""
    stepped = ()
    for s in tl.static_range(len(parts)):
        inflow = (step * x.to(tl.float32))[:, None] * B[s].to(tl.float32)[None, :]
        stepped += (parts[s] * tl.exp(step * rate) + inflow,)
    return stepped


@triton.jit
def store_at(address, h, element, inside, key, place):
    """A part of a tile to its addresses; `element`: indices in the row's state, rounded by."""
    if place is not None:
        h = round_state(h, element, key, place)
    # Nobody reads it before the next step: evict it first.
    tl.store(address, h.to(address.dtype.element_ty), mask=inside, cache_modifier=".cs")


@triton.jit
def store_part(target, h, element, inside, key, place):
    """A part of a tile to the elements of the block at `target`."""
    store_at(target + element, h, element, inside, key, place)


@triton.jit
def store_parts(target, parts, elements, insides, key, place):
    for s in tl.static_range(len(parts)):
        store_part(target, parts[s], elements[s], insides[s], key, place)
