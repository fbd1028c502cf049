"""One tile of a row's keys and values: where it lies, and what it adds to the softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_positions(p_table, low, bound, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks of BLOCK_N positions from `low` on, and the positions within them, both int64; one
    block for all where no tile crosses the end of one. Behind `bound` they are any."""
    o_n = tl.arange(0, BLOCK_N)
    within = low % BLOCK_SIZE
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(p_table + low // BLOCK_SIZE, mask=low < bound, other=0)
        position = within + o_n
    elif BLOCK_SIZE > BLOCK_N:  # a tile lies in two blocks at most
        last = tl.minimum(low + BLOCK_N, bound) - 1
        here = tl.load(p_table + low // BLOCK_SIZE, mask=low < bound, other=0)
        there = tl.load(p_table + last // BLOCK_SIZE, mask=low < bound, other=0)
        behind = within + o_n >= BLOCK_SIZE
        block = tl.where(behind, there, here)
        position = within + o_n - tl.where(behind, BLOCK_SIZE, 0)
    else:
        o_pos = low + o_n
        block = tl.load(p_table + o_pos // BLOCK_SIZE, mask=o_pos < bound, other=0)
        position = o_pos % BLOCK_SIZE
    return block.to(tl.int64), position.to(tl.int64)


@triton.jit
def attend(
    b_q,
    b_max,
    b_sum,
    b_acc,
    low,
    bound,
    o_seen,
    scale,
    p_table,
    p_k,
    p_v,
    k_stride,
    v_stride,
    dot_type: tl.constexpr,
    shape,
    MASKED: tl.constexpr,
):
    """Softmax and its sums with BLOCK_N positions from `low` on, of those below `bound`.

    b_max, b_sum, b_acc: each query's highest score, sum of weights, and weighted values so far.
    o_seen: the last position that each query sees. Without MASKED all queries see the whole tile.
    """
    D: tl.constexpr = shape.D
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    o_d = tl.arange(0, BLOCK_D)
    o_pos = low + tl.arange(0, shape.BLOCK_N)
    o_block, o_within = tile_positions(p_table, low, bound, shape.BLOCK_SIZE, shape.BLOCK_N)
    o_k = o_block * k_stride.block + o_within * k_stride.position
    o_v = o_block * v_stride.block + o_within * v_stride.position
    p_keys = p_k + o_k[:, None] + o_d[None, :] * k_stride.dim
    p_values = p_v + o_v[:, None] + o_d[None, :] * v_stride.dim
    if MASKED or D < BLOCK_D:
        m_kv = (o_pos < bound)[:, None] & (o_d < D)[None, :]
        b_k = tl.load(p_keys, mask=m_kv, other=0.0)
        b_v = tl.load(p_values, mask=m_kv, other=0.0)
    else:
        b_k = tl.load(p_keys)
        b_v = tl.load(p_values)
    b_s = tl.dot(b_q, tl.trans(b_k.to(dot_type)), input_precision="ieee") * scale
    if MASKED:
        visible = (o_pos[None, :] <= o_seen[:, None]) & (o_pos < bound)[None, :]
        b_s = tl.where(visible, b_s, float("-inf"))
    b_higher = tl.maximum(b_max, tl.max(b_s, axis=1))
    # While no position is visible to a token its maximum is -inf and its sums stay 0.
    b_finite = tl.where(b_higher == float("-inf"), 0.0, b_higher)
    b_weight = tl.exp2(b_s - b_finite[:, None])
    b_decay = tl.exp2(b_max - b_finite)
    b_sum = b_sum * b_decay + tl.sum(b_weight, axis=1)
    b_acc = b_acc * b_decay[:, None]
    b_acc = tl.dot(b_weight.to(dot_type), b_v.to(dot_type), b_acc, input_precision="ieee")
    return b_higher, b_sum, b_acc
