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

    overlaps: C_i B_j of tokens i and positions j `[positions, QUERIES]`.
    diagonal: 1 where position j is token i, else 0.
    unit: what undoes the scaling of C `[QUERIES]`.
    """

    overlaps: Any
    diagonal: Any
    unit: Any


@triton.jit
def load_steps(inputs, records, head, lane, ring, base, row, strides, shape):
    """`RawSteps` of a head. lane: positions `[32]`, the row's own from `base` on; ring: where they
    lie in the ring."""
    own = lane - base
    p_own = inputs.dt + head * strides.dt_head + own * strides.dt_token
    p_pending = records.dt + head * shape.RING + ring
    return RawSteps(
        pending=tl.load(p_pending, mask=own < 0, other=0.0),
        own=tl.load(p_own, mask=(own >= 0) & (own < row.scheduled), other=0.0),
        bias=tl.load(inputs.dt_bias + head),
        A_log=tl.load(inputs.A_log + head),
        D=tl.load(inputs.D + head),
    )


@triton.jit
def time_steps(raw, lane, base, row, clamp):
    """Time steps at all positions `[32]`, 0 where there is no token."""
    own = lane - base
    steps = softplus(raw.own.to(tl.float32) + raw.bias.to(tl.float32))
    steps = tl.minimum(tl.maximum(steps, clamp.low), clamp.high)
    return tl.where(own < 0, raw.pending, tl.where(own < row.scheduled, steps, 0.0))


@triton.jit
def logarithms(raw, steps):
    """Of the decay of a state over each step."""
    # Below exp(-110) all is 0; larger numbers would cost the sums' precision.
    return tl.maximum(steps * -tl.exp(raw.A_log.to(tl.float32)), -110.0)


@triton.jit
def first(vector, COUNT: tl.constexpr):
    """The first COUNT elements of a vector whose others are 0."""
    many: tl.constexpr = vector.shape[0] // COUNT
    if many > 1:
        vector = tl.sum(vector.reshape(many, COUNT), axis=0)
    return vector


@triton.jit
def output_factors(raw, steps, group, lane, j, i, base, dot_type: tl.constexpr):
    """Weights of x in the outputs of a head `[positions, QUERIES]`, as operands, and the decay of
    the state in them `[QUERIES]`.

    steps: as `time_steps`; 0 at tokens that the state has. lane, j, i: positions `[32]`, the
    first of them again, tokens `[QUERIES]`. base: position of token 0.
    """
    COUNT: tl.constexpr = j.shape[0]
    passed = logarithms(raw, steps)
    # Sums from the row's own first token on and back, so that none is a difference of large ones.
    before = tl.where(lane < base, passed, 0.0)
    sums = tl.cumsum(passed - before, axis=0)
    sums += before - tl.cumsum(before, axis=0, reverse=True)
    sums = first(tl.where(lane < COUNT, sums, 0.0), COUNT)
    passed = first(passed, COUNT)
    steps = first(steps, COUNT)
    until = j[:, None] <= i[None, :] + base
    in_own = until & (j >= base)[:, None]
    reached = tl.sum(tl.where(in_own, passed[:, None], 0.0), axis=0)
    decay = tl.exp(tl.minimum(reached[None, :] - sums[:, None], 0.0))
    mix = tl.where(until, group.overlaps * decay * steps[:, None], 0.0)
    mix += group.diagonal * raw.D.to(tl.float32)
    carries = tl.exp(reached + tl.sum(before, axis=0)) * group.unit
    return split(mix, 2, dot_type), carries


@triton.jit
def state_factors(raw, steps, COUNT: tl.constexpr):
    """Weights of x in the state that is written `[COUNT]`, and the decay of the one that is read.
    steps: as `time_steps`, 0 at positions that are not folded."""
    passed = logarithms(raw, steps)
    behind = tl.cumsum(passed, axis=0, reverse=True) - passed
    return first(steps * tl.exp(behind), COUNT), tl.exp(tl.sum(passed, axis=0))
