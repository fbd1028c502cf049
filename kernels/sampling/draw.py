"""The draw from what top-k and top-p leave of a line of logits, by one random number.

Tokens are in the order of their ids, and the first whose cumulative share exceeds the number is
drawn. Weights are added up in float64, whose order of summation hardly ever shows in the token.
"""

import triton
import triton.language as tl

from hybrid_runtime.kernels.sampling.cut import PER_THREAD, reached, read, weight

HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def first_reached(b_cumulative, b_weight, o_token, target):
    """The first token whose cumulative weight exceeds `target`; the last with any if rounding
    leaves none."""
    first = tl.min(tl.where((b_cumulative > target) & (b_weight > 0), o_token, HIGHEST))
    last = tl.max(tl.where(b_weight > 0, o_token, 0))
    return tl.where(first == HIGHEST, last, first)


@triton.jit
def ties_left(above, enough, each):
    """How many tokens of weight `each` stay at the cut: those with less than enough before."""
    return tl.ceil((enough - above) / each)


@triton.jit
def write_out(p_line, p_few, least, V: tl.constexpr, TILE: tl.constexpr, FEW: tl.constexpr):
    """Write the tokens with logits of at least `least` to `p_few`, in order; how many."""
    count = 0
    o_v = tl.arange(0, TILE)
    for _ in range((V + TILE - 1) // TILE):
        b_left = (read(p_line, o_v, V, TILE) >= least).to(tl.int32)
        found = tl.sum(b_left)
        if found > 0:
            o_few = count + tl.cumsum(b_left, axis=0) - 1
            tl.store(p_few + o_few, o_v, mask=(b_left > 0) & (o_few < FEW))
        count += found
        o_v += TILE
    # Other threads of this program read what these have written.
    tl.debug_barrier()
    return tl.minimum(count, FEW)


@triton.jit
def draw_few(
    p_line, p_few, count, best, scale, top_k, top_p, enough, min_p, u,
    V: tl.constexpr, SHIFT: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """Top-k, top-p, min-p and the draw on the `count` tokens written out. enough: the weight that
    top-p is to reach, 0 = its share of what top-k leaves."""
    o_few = tl.arange(0, FEW)
    m_few = o_few < count
    b_token = tl.load(p_few + o_few, mask=m_few, other=0)
    b_x = tl.where(m_few, read(p_line, b_token, V, 1), float("-inf"))
    b_w = tl.where(m_few, weight(b_x, best, scale), 0.0)
    if (top_k > 0) & (top_k < count):
        cut, above = reached(b_x, m_few.to(tl.float32), top_k.to(tl.float32), SHIFT)
        b_ties = m_few & (b_x == cut)
        kept = tl.cumsum(b_ties.to(tl.int32), axis=0) <= top_k - above
        b_w = tl.where((b_x > cut) | (b_ties & kept), b_w, 0.0)
    if top_p < 1:
        enough = tl.where(enough > 0, enough, top_p * tl.sum(b_w))
        cut, above = reached(b_x, b_w, enough, SHIFT)
        b_ties = (b_x == cut) & (b_w > 0)
        ties = ties_left(above, enough, tl.max(tl.where(b_ties, b_w, 0.0)))
        kept = tl.cumsum(b_ties.to(tl.int32), axis=0) <= ties
        b_w = tl.where((b_x > cut) | (b_ties & kept), b_w, 0.0)
    b_w = tl.where(b_w >= min_p, b_w, 0.0)
    b_cumulative = tl.cumsum(b_w.to(tl.float64), axis=0)
    total = tl.max(b_cumulative)
    token = first_reached(b_cumulative, b_w, b_token, u * total)
    cut = tl.min(tl.where(b_w > 0, b_x, best))
    last = tl.max(tl.where((b_w > 0) & (b_x == cut), b_token, 0))
    return token, cut, last, total


@triton.jit
def draw_line(
    p_line, cut, ties, best, scale, min_p, u,
    V: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, KEEPS_CUT: tl.constexpr,
):  # fmt: skip
    """Min-p and the draw on the tokens above `cut` and the first `ties` at it."""
    o_each = tl.arange(0, TILE)
    o_tile = tl.arange(0, TILES)
    b_mass = tl.zeros((TILES,), tl.float64)
    b_ties = tl.zeros((TILES,), tl.float32)
    for i_tile in range((V + TILE - 1) // TILE):
        b_x = read(p_line, i_tile * TILE + o_each, V, TILE)
        b_w = weight(b_x, best, scale)
        b_w = tl.where((b_x > cut) & (b_w >= min_p), b_w, 0.0)
        b_w = tl.sum(tl.reshape(b_w, (TILE // PER_THREAD, PER_THREAD)), axis=1)
        b_mass = tl.where(o_tile == i_tile, tl.sum(b_w.to(tl.float64)), b_mass)
        b_ties = tl.where(o_tile == i_tile, tl.sum((b_x == cut).to(tl.float32)), b_ties)
    each = weight(cut, best, scale)
    each = tl.where(each >= min_p, each, 0.0)
    b_before = tl.cumsum(b_ties, axis=0) - b_ties
    b_kept = tl.minimum(tl.maximum(ties - b_before, 0.0), b_ties)
    b_mass += b_kept * each
    b_cumulative = tl.cumsum(b_mass, axis=0)
    total = tl.max(b_cumulative)

    i_tile = first_reached(b_cumulative, b_mass, o_tile, u * total)
    m_tile = o_tile == i_tile
    rest = u * total - tl.sum(tl.where(m_tile, b_cumulative - b_mass, 0.0))
    o_v = i_tile * TILE + o_each
    b_x = read(p_line, o_v, V, TILE)
    b_tied = b_x == cut
    m_kept = tl.cumsum(b_tied.to(tl.float32), axis=0) <= tl.sum(tl.where(m_tile, b_kept, 0.0))
    b_w = weight(b_x, best, scale)
    b_w = tl.where(((b_x > cut) | (b_tied & m_kept)) & (b_w >= min_p), b_w, 0.0)
    token = first_reached(tl.cumsum(b_w.to(tl.float64), axis=0), b_w, o_v, rest)

    last = 0
    if KEEPS_CUT:
        i_tile = tl.max(tl.where(b_kept > 0, o_tile, 0))
        o_v = i_tile * TILE + o_each
        b_tied = read(p_line, o_v, V, TILE) == cut
        kept = tl.sum(tl.where(o_tile == i_tile, b_kept, 0.0))
        m_kept = b_tied & (tl.cumsum(b_tied.to(tl.float32), axis=0) <= kept)
        last = tl.max(tl.where(m_kept, o_v, -1))
    return token, last, total
