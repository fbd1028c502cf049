"""What the time steps of a program's heads come to: factors of their states, inputs and outputs.

They are found for all heads at once, before the first of them: a sum over positions is a chain of
few operations, which takes one head as long as eight.
"""

# mypy: disable-error-code="assignment,var-annotated"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hybrid_runtime.kernels.common.math import softplus
from hybrid_runtime.kernels.replay.products import split


class RawSteps(NamedTuple):
    """Of the program's heads, as memory has it.

    pending: time steps of the pending tokens `[POSITIONS, RUN]`.
    own: raw time steps of the row's tokens at their positions `[POSITIONS, RUN]`.
    queries: the same by token `[QUERIES, RUN]`.
    bias, A_log: `[RUN]`.
    D: `[RUN]`.
    """

    pending: Any
    own: Any
    queries: Any
    bias: Any
    A_log: Any
    D: Any


class Group(NamedTuple):
    """What the heads of a group have in common.

    overlaps: C_i B_j of tokens i and positions j `[POSITIONS, QUERIES]`.
    diagonal: 1 where position j is token i, else 0.
    unit: what undoes the scaling of C `[QUERIES]`.
    """

    overlaps: Any
    diagonal: Any
    unit: Any


class OutputFactors(NamedTuple):
    """Of the program's heads.

    steps: time steps `[POSITIONS, RUN]`, 0 where there is no token or the state has it.
    sums: logarithms of the decay from the row's first token to each position `[POSITIONS, RUN]`.
    reached: the same to each of the row's tokens `[QUERIES, RUN]`.
    carries: decay of the state in outputs, times `Group.unit` `[QUERIES, RUN]`.
    D: `[RUN]`.
    """

    steps: Any
    sums: Any
    reached: Any
    carries: Any
    D: Any


@triton.jit
def load_steps(inputs, cache, heads, j, i, ring, base, row, strides, shape):
    """`RawSteps` of heads `[RUN]`. j: positions, the row's own from `base` on; ring: where they lie
    in the window cache; i: the row's tokens."""
    own = (j - base)[:, None]
    token = i[:, None]
    p_head = inputs.dt + (heads * strides.dt_head)[None, :]
    p_pending = cache.dt + heads[None, :] * shape.RING + ring[:, None]
    is_own = (own >= 0) & (own < row.scheduled)
    return RawSteps(
        pending=tl.load(p_pending, mask=own < 0, other=0.0),
        own=tl.load(p_head + own * strides.dt_token, mask=is_own, other=0.0),
        queries=tl.load(p_head + token * strides.dt_token, mask=token < row.scheduled, other=0.0),
        bias=tl.load(inputs.dt_bias + heads),
        A_log=tl.load(inputs.A_log + heads),
        D=tl.load(inputs.D + heads),
    )


@triton.jit
def own_steps(own, raw, clamp):
    """Time steps of raw ones."""
    steps = softplus(own.to(tl.float32) + raw.bias.to(tl.float32)[None, :])
    return tl.minimum(tl.maximum(steps, clamp.low), clamp.high)


@triton.jit
def time_steps(raw, j, base, row, clamp):
    """Time steps at all positions `[POSITIONS, RUN]`, 0 where there is no token."""
    own = (j - base)[:, None]
    steps = own_steps(raw.own, raw, clamp)
    return tl.where(own < 0, raw.pending, tl.where(own < row.scheduled, steps, 0.0))


@triton.jit
def logarithms(raw, steps):
    """Of the decay of a state over each step."""
    # Below exp(-110) all is 0; larger numbers would cost the sums' precision.
    return tl.maximum(steps * -tl.exp(raw.A_log.to(tl.float32))[None, :], -110.0)


@triton.jit
def output_factors(raw, steps, group, j, i, base, row, clamp):
    """`OutputFactors`. raw, steps: as of `load_steps` and `time_steps`. j: positions; i: the row's
    tokens, the first of them at position `base`."""
    steps = tl.where(((j >= base) & (j - base < row.taken))[:, None], 0.0, steps)
    passed = logarithms(raw, steps)
    # Sums from the row's own first token on and back, so that none is a difference of large ones.
    before = tl.where((j < base)[:, None], passed, 0.0)
    sums = tl.cumsum(passed - before, axis=0)
    sums += before - tl.cumsum(before, axis=0, reverse=True)
    counts = ((i >= row.taken) & (i < row.scheduled))[:, None]
    own = tl.where(counts, own_steps(raw.queries, raw, clamp), 0.0)
    reached = tl.cumsum(logarithms(raw, own), axis=0)
    carries = tl.exp(reached + tl.sum(before, axis=0)[None, :]) * group.unit[:, None]
    return OutputFactors(steps, sums, reached, carries, raw.D.to(tl.float32))


@triton.jit
def state_factors(raw, steps):
    """Weights of x in the state that is written `[POSITIONS, RUN]`, and the decay of the one that
    is read `[RUN]`. steps: as of `time_steps`, 0 at positions that are not folded."""
    passed = logarithms(raw, steps)
    behind = tl.cumsum(passed, axis=0, reverse=True) - passed
    return steps * tl.exp(behind), tl.exp(tl.sum(passed, axis=0))


@triton.jit
def of_head(values, r):
    """What belongs to head r of the program: values[..., r]."""
    heads = tl.arange(0, values.shape[len(values.shape) - 1])
    if len(values.shape) == 2:
        heads = heads[None, :]
    return tl.sum(tl.where(heads == r, values, 0.0), axis=len(values.shape) - 1)


@triton.jit
def output_weights(factors, r, group, j, i, base, dot_type: tl.constexpr):
    """Weights of x in the outputs of head r `[POSITIONS, QUERIES]`, as operands."""
    steps, sums = of_head(factors.steps, r), of_head(factors.sums, r)
    reached = of_head(factors.reached, r)
    decay = tl.exp(tl.minimum(reached[None, :] - sums[:, None], 0.0))
    until = j[:, None] <= i[None, :] + base
    mix = tl.where(until, group.overlaps * decay * steps[:, None], 0.0)
    mix += group.diagonal * of_head(factors.D, r)
    return split(mix, 2, dot_type)
