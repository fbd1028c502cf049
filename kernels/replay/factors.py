"""What the scalars of a row in steady decode come to: factors of its states, inputs and outputs."""

# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from hybrid_runtime.kernels.replay.tile import load_parts


class Factors(NamedTuple):
    """Tuples of factors, `[RUN]` each, of one head a scalar.

    skip: D.
    decay: of the state.
    inflows: of what is folded, from the certain token back: time step times decay.
    carries: decay of the state up to each guess.
    weights: of x in the guesses' outputs.
    snapshot_decay, snapshot_inflows: the second and the third up to the snapshot's boundary.
    """

    skip: Any
    decay: Any
    inflows: Any
    carries: Any
    weights: Any
    snapshot_decay: Any
    snapshot_inflows: Any


@triton.jit
def query_overlaps(inputs, news, Cs, o_n, row, strides, shape):
    """C_i B_j of guesses j <= i, by j. What guesses add to each other's outputs needs no state, and
    is common to heads but for its decay."""
    overlaps = ()
    for j in tl.static_range(1, shape.TOKENS):
        if not shape.HOLD:
            p_B = inputs.B + j * strides.B_token
            Bj = load_parts(p_B, o_n, strides.B_state, j < row.scheduled, shape, 0.0)
        for i in tl.static_range(j, shape.TOKENS):
            overlap = tl.zeros((shape.PART,), tl.float32)
            if shape.HOLD:
                for s in tl.static_range(shape.PARTS):
                    overlap += Cs[i][s] * news[j][s]
            else:
                p_C = inputs.C + i * strides.C_token
                Ci = load_parts(p_C, o_n, strides.C_state, i < row.scheduled, shape, 0.0)
                for s in tl.static_range(shape.PARTS):
                    overlap += Ci[s].to(tl.float32) * Bj[s].to(tl.float32)
            overlaps += (tl.sum(overlap, axis=0),)
    return overlaps


@triton.jit
def head_factors(raws, steps, overlaps, row, shape, SNAPSHOT: tl.constexpr):
    """`Factors` of all heads. raws: as `load_scalars` gives them; steps: time steps of the tokens;
    overlaps: as `query_overlaps` gives them."""
    TOKENS: tl.constexpr = shape.TOKENS
    DRAFTS: tl.constexpr = shape.DRAFTS
    rate = -tl.exp(raws[DRAFTS + TOKENS + 1].to(tl.float32))
    skip = raws[DRAFTS + TOKENS + 2].to(tl.float32)
    inflows = (steps[0],)
    later = steps[0]
    for j in tl.static_range(DRAFTS):
        inflows += (raws[DRAFTS - 1 - j] * tl.exp(later * rate),)
        later += raws[DRAFTS - 1 - j]
    decays = ()
    carries = ()
    for i in tl.static_range(1, TOKENS):
        decays += (tl.exp(steps[i] * rate),)
        if i == 1:
            carries += (decays[0],)
        else:
            carries += (carries[i - 2] * decays[i - 1],)
    weights = ()
    for i in tl.static_range(1, TOKENS):
        decay = rate * 0 + 1.0
        for back in tl.static_range(i):
            # From guess i back to 1. Of guess j in the outputs of tokens j .. there are
            # TOKENS - j overlaps, behind those of the guesses before it.
            weight = steps[i - back] * decay
            weight *= overlaps[(i - back - 1) * (2 * TOKENS - i + back) // 2 + back]
            if back == 0:
                weight += skip
            weights += (weight,)
            decay *= decays[i - back - 1]
    decay = tl.exp(later * rate)
    until = ()
    shares = ()
    if SNAPSHOT:
        later = tl.where(row.snapshot_after > row.fold, steps[0], 0.0)
        shares = (later,)
        for j in tl.static_range(DRAFTS):
            step = tl.where(row.snapshot_after > DRAFTS - 1 - j, raws[DRAFTS - 1 - j], 0.0)
            shares += (step * tl.exp(later * rate),)
            later += step
        until = (tl.exp(later * rate),)
    return Factors((skip,), (decay,), inflows, carries, weights, until, shares)


@triton.jit
def pick_head(factors, r):
    """`Factors` of head r of the program."""
    here = tl.full((1,), r, tl.int32)
    return Factors(
        skip=_pick(factors.skip, here),
        decay=_pick(factors.decay, here),
        inflows=_pick(factors.inflows, here),
        carries=_pick(factors.carries, here),
        weights=_pick(factors.weights, here),
        snapshot_decay=_pick(factors.snapshot_decay, here),
        snapshot_inflows=_pick(factors.snapshot_inflows, here),
    )


@triton.jit
def _pick(values, here):
    picked = ()
    for k in tl.static_range(len(values)):
        picked += (tl.sum(tl.gather(values[k], here, 0), 0),)
    return picked
