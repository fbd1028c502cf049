"""What the time steps of one head come to: factors of its state, inputs and outputs."""

# mypy: disable-error-code="assignment,var-annotated"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hybrid_runtime.kernels.common.math import softplus
from hybrid_runtime.kernels.replay.products import split


class RawSteps(NamedTuple):
    """Of one head, as memory has it.

    pending: time steps of the pending tokens `[32]`.
    own: raw time steps of the row's tokens `[32]`.
    bias, A_log, D: scalars.
    """

    pending: Any
    own: Any
    bias: Any
    A_log: Any
    D: Any


class Group(NamedTuple):
    """What the heads of a group have in common.

    overlaps: C_i B_j of tokens i and positions j `[POSITIONS, QUERIES]`, 0 where j comes later.
    diagonal: 1 where position j is token i, else 0.
    unit: what undoes the scaling of C `[QUERIES]`.
    folds: positions that are in the state that is written `[POSITIONS]`.
    """

    overlaps: Any
    diagonal: Any
    unit: Any
    folds: Any


class Factors(NamedTuple):
    """Of one head.

    mixes: weights of x in the outputs `[POSITIONS, QUERIES]`, as operands.
    carries: decay of the state in the outputs `[QUERIES]`.
    decay: decay of the state in the one that is written.
    weights: of x in the state that is written `[POSITIONS]`.
    """

    mixes: Any
    carries: Any
    decay: Any
    weights: Any


@triton.jit
def load_steps(inputs, cache, head, lane, ring, row, strides, shape):
    """`RawSteps` of a head. lane: positions `[32]`; ring: where they lie in the window cache."""
    own = lane - row.base
    p_own = inputs.dt + head * strides.dt_head + own * strides.dt_token
    p_pending = cache.dt + head * shape.RING + ring
    return RawSteps(
        pending=tl.load(p_pending, mask=lane < row.pending, other=0.0),
        own=tl.load(p_own, mask=(own >= 0) & (own < row.scheduled), other=0.0),
        bias=tl.load(inputs.dt_bias + head),
        A_log=tl.load(inputs.A_log + head),
        D=tl.load(inputs.D + head),
    )


@triton.jit
def time_steps(raw, lane, row, clamp):
    """Time steps at all positions `[32]`, 0 where there is no token."""
    own = lane - row.base
    steps = softplus(raw.own.to(tl.float32) + raw.bias.to(tl.float32))
    steps = tl.minimum(tl.maximum(steps, clamp.low), clamp.high)
    return tl.where(own < 0, raw.pending, tl.where(own < row.scheduled, steps, 0.0))


@triton.jit
def first(vector, COUNT: tl.constexpr):
    """The first COUNT elements of a vector whose others are 0."""
    many: tl.constexpr = vector.shape[0] // COUNT
    if many > 1:
        vector = tl.sum(vector.reshape(many, COUNT), axis=0)
    return vector


@triton.jit
def head_factors(raw, steps, group, lane, j, i, row, WRITES: tl.constexpr, dot_type: tl.constexpr):
    """`Factors` of a head. steps: as `time_steps`; lane, j, i: positions `[32]` and
    `[POSITIONS]`, tokens `[QUERIES]`."""
    POSITIONS: tl.constexpr = j.shape[0]
    # Below exp(-110) all is 0; larger numbers would cost the sums' precision.
    passed = tl.maximum(steps * -tl.exp(raw.A_log.to(tl.float32)), -110.0)
    # Sums from the row's own first token on and back, so that none is a difference of large ones.
    before = tl.where(lane < row.base, passed, 0.0)
    sums = tl.cumsum(passed - before, axis=0)
    sums += before - tl.cumsum(before, axis=0, reverse=True)
    sums = first(tl.where(lane < POSITIONS, sums, 0.0), POSITIONS)
    passed = first(passed, POSITIONS)
    steps = first(steps, POSITIONS)
    until = j[:, None] <= i[None, :] + row.base
    in_own = until & (j >= row.base)[:, None]
    reached = tl.sum(tl.where(in_own, passed[:, None], 0.0), axis=0)
    decay = tl.exp(tl.minimum(reached[None, :] - sums[:, None], 0.0))
    mix = tl.where(until, group.overlaps * decay * steps[:, None], 0.0)
    mix += group.diagonal * raw.D.to(tl.float32)
    total = 0.0
    if WRITES:
        certain = tl.where(group.folds, passed, 0.0)
        behind = tl.cumsum(certain, axis=0, reverse=True) - certain
        steps = tl.where(group.folds, steps * tl.exp(behind), 0.0)
        total = tl.exp(tl.sum(certain, axis=0))
    reached += tl.sum(before, axis=0)
    carries = tl.exp(reached) * group.unit
    return Factors(mixes=split(mix, 2, dot_type), carries=carries, decay=total, weights=steps)
