"""Threshold search for top-k and top-p: where they cut a line of logits, without sorting it.

The lower a threshold, the more tokens have at least this logit, and the more weight; the cut is the
largest threshold that keeps enough of them. Each pass over the line tries three thresholds at once.
Logits are numbered in their order (`ordered`), so the search ends when none is left in between.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
"""Below the key of every logit."""

PER_THREAD = tl.constexpr(8)
"""Logits that lie side by side and are added up first."""

_NOTHING = tl.constexpr(28.0)
"""Logits this far below the largest, in units of the temperature, weigh less than 1e-12 of it."""

_BY_VALUE = tl.constexpr(6)
"""Passes that divide the range of values; later ones divide that of keys, which must end."""

_MOST_PASSES = tl.constexpr(64)
"""More than a range of keys can need."""


@triton.jit
def read(p_line, o_v, V: tl.constexpr, TILE: tl.constexpr):
    """Logits at `o_v`, float32; NaN, which no comparison is true of, where there is no token."""
    if V % TILE == 0:
        return tl.load(p_line + o_v).to(tl.float32)
    else:
        return tl.load(p_line + o_v, mask=o_v < V, other=float("nan")).to(tl.float32)


@triton.jit
def ordered(x, SHIFT: tl.constexpr):
    """The key of float32 x: int32 in the same order. SHIFT: low bits that the logits' dtype does
    not have."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value(key, SHIFT: tl.constexpr):
    """The float of a key, -inf if there is none."""
    sign = key >> 31
    bits = (key << SHIFT) | (sign & ((1 << SHIFT) - 1))
    x = (bits ^ (sign & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def weight(x, best, scale):
    """Probabilities over that of the largest logit, `best`; scale: log2(e) / temperature."""
    return tl.exp2((x - best) * scale)


@triton.jit
def bottom(best, scale, SHIFT: tl.constexpr):
    """The least key that can matter: what is below weighs nothing."""
    return ordered(best - _NOTHING * 1.4426950408889634 / scale, SHIFT)


@triton.jit
def _measure(
    p_line,
    best,
    scale,
    floor,
    low,
    a,
    b,
    c,
    BY_MASS: tl.constexpr,
    V: tl.constexpr,
    TILE: tl.constexpr,
):
    """One pass: how many tokens (or of which weight) have logits of at least a, b and c; by mass,
    how many have at least `low`, and the weight of those above `floor`."""
    o_lane = tl.arange(0, TILE // PER_THREAD)
    o_each = tl.arange(0, PER_THREAD)
    o_v = o_lane[:, None] * PER_THREAD + o_each[None, :]
    zeros = tl.zeros((TILE // PER_THREAD,), tl.float32)
    b_a, b_b, b_c, b_low, b_whole = zeros, zeros, zeros, zeros, zeros
    for _ in range((V + TILE - 1) // TILE):
        b_x = read(p_line, o_v, V, TILE)
        if BY_MASS:
            b_w = weight(b_x, best, scale)
            b_low += tl.sum(tl.where(b_x >= low, 1.0, 0.0), axis=1)
            b_whole += tl.sum(tl.where(b_x > floor, b_w, 0.0), axis=1)
        else:
            b_w = tl.full(b_x.shape, 1.0, tl.float32)
        b_a += tl.sum(tl.where(b_x >= a, b_w, 0.0), axis=1)
        b_b += tl.sum(tl.where(b_x >= b, b_w, 0.0), axis=1)
        b_c += tl.sum(tl.where(b_x >= c, b_w, 0.0), axis=1)
        o_v += TILE
    return tl.sum(b_a), tl.sum(b_b), tl.sum(b_c), tl.sum(b_low), tl.sum(b_whole)


@triton.jit
def _between(low, high, trip, PART: tl.constexpr, SHIFT: tl.constexpr):
    """A key PART quarters of the way from `low` to `high` (int64), neither of them if there is
    another."""
    v_low = value(low.to(tl.int32), SHIFT)
    v_high = value((high - 1).to(tl.int32), SHIFT)
    split = ordered(v_low * (1 - PART / 4) + v_high * (PART / 4), SHIFT).to(tl.int64)
    split = tl.where(trip < _BY_VALUE, split, low + (high - low) * PART // 4)
    return tl.minimum(tl.maximum(split, low + 1), tl.maximum(high - 1, low + 1))


@triton.jit
def search(
    p_line,
    best,
    scale,
    floor,
    extra,
    wanted,
    BY_MASS: tl.constexpr,
    V: tl.constexpr,
    TILE: tl.constexpr,
    SHIFT: tl.constexpr,
    FEW: tl.constexpr,
):
    """The largest key `low`, at least `floor`, that keeps enough: tokens whose keys are at least as
    large. The search ends before, at any key that keeps enough, once at most FEW tokens have it.

    Enough is `wanted` tokens, or by mass that share of the weight above `floor`, plus `extra`.

    Returns:
        low: int32.
        above: tokens or weight with larger keys.
        enough: in the same unit.
        few: at most FEW tokens have keys of at least `low`.
    """
    low = tl.maximum(floor, bottom(best, scale, SHIFT)).to(tl.int64)
    high = ordered(best, SHIFT).to(tl.int64) + 1
    above = 0.0
    enough = wanted
    few = False
    trip = 0
    searching = True
    while searching:
        a = _between(low, high, trip, 1, SHIFT)
        if not BY_MASS:
            # At low temperatures fewer tokens than wanted may matter at all.
            a = tl.where(trip == 0, low, a)
        b = _between(low, high, trip, 2, SHIFT)
        c = _between(low, high, trip, 3, SHIFT)
        n_a, n_b, n_c, n_low, whole = _measure(
            p_line, best, scale, value(floor, SHIFT), value(low.to(tl.int32), SHIFT),
            value(a.to(tl.int32), SHIFT), value(b.to(tl.int32), SHIFT),
            value(c.to(tl.int32), SHIFT), BY_MASS, V, TILE,
        )  # fmt: skip
        if BY_MASS:
            enough = wanted * (whole + extra)
        # The lowest key that fails is the new end, the highest that does not the new beginning.
        above = tl.where(n_c < enough, n_c, above)
        above = tl.where(n_b < enough, n_b, above)
        above = tl.where(n_a < enough, n_a, above)
        high = tl.where(n_a < enough, a, tl.where(n_b < enough, b, tl.where(n_c < enough, c, high)))
        low = tl.where(
            n_c >= enough, c, tl.where(n_b >= enough, b, tl.where(n_a >= enough, a, low))
        )
        if BY_MASS:
            few = n_low <= FEW
        else:
            n_low = tl.where(n_c >= enough, n_c, tl.where(n_b >= enough, n_b, n_a))
            few = (n_low <= FEW) & ((n_a >= enough) | (trip == 0))
        trip += 1
        searching = (high - low > 1) & (few == 0) & (trip < _MOST_PASSES)
    return low.to(tl.int32), above, enough, few


@triton.jit
def reached(b_x, b_w, enough, SHIFT: tl.constexpr):
    """The largest logit that keeps weight of at least `enough`, of tokens with logits `b_x` and
    weights `b_w`, and the weight above it."""
    key = tl.full((), LOWEST >> SHIFT, tl.int64)
    for i_bit in range(32 - SHIFT):
        higher = key + (tl.full((), 1, tl.int64) << (31 - SHIFT - i_bit))
        mass = tl.sum(tl.where(b_x >= value(higher.to(tl.int32), SHIFT), b_w, 0.0))
        key = tl.where(mass >= enough, higher, key)
    cut = value(key.to(tl.int32), SHIFT)
    return cut, tl.sum(tl.where(b_x > cut, b_w, 0.0))
