"""What the replay layout's verify pass loads, by loads that suit a program of one warp.

A load of at least as many elements as there are threads gets the layout that suits memory, and
passes through shared memory to where it is used; so what is used in small pieces is loaded at once.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_scalars(inputs, past, i_heads, row, strides, shape):
    """Of the heads `i_heads`: time step of each guess that is folded, raw time step of each token,
    bias, A_log and D."""
    p_past = past.dt + i_heads
    p_dt = inputs.dt + i_heads * strides.dt_head
    p_bias = inputs.dt_bias + i_heads
    p_A = inputs.A_log + i_heads
    p_D = inputs.D + i_heads
    loaded = ()
    for j in tl.static_range(shape.DRAFTS):
        loaded += (tl.load(p_past + j * shape.HEADS, mask=j < row.fold, other=0.0),)
    for i in tl.static_range(shape.TOKENS):
        loaded += (tl.load(p_dt + i * strides.dt_token, mask=i < row.scheduled, other=0.0),)
    loaded += (tl.load(p_bias), tl.load(p_A), tl.load(p_D))
    return loaded


@triton.jit
def load_vectors(source, across: tl.constexpr, stride: tl.constexpr, live, COUNT: tl.constexpr,
    shape):  # fmt: skip
    """COUNT vectors `[STATE]`, of which `live` are loaded, as the first rows of a tensor
    `[1, 2, 4 or 8, PARTS * PART]`; 0 behind. across, stride: from vector to vector and within."""
    rows: tl.constexpr = 1 if COUNT == 1 else 2 if COUNT == 2 else 4 if COUNT <= 4 else 8
    o_row = tl.arange(0, rows)[:, None]
    o_n = tl.arange(0, shape.PARTS * shape.PART)[None, :]
    inside = (o_row < tl.minimum(live, COUNT)) & (o_n < shape.STATE)
    return tl.load(source + o_row * across + o_n * stride, mask=inside, other=0.0)


@triton.jit
def take_apart(vectors, COUNT: tl.constexpr, shape):
    """Each of the first COUNT rows as PARTS parts `[PART]` in fp32."""
    PART: tl.constexpr = shape.PART
    PARTS: tl.constexpr = shape.PARTS
    total: tl.constexpr = vectors.shape[0] * PARTS
    pieces = (vectors.reshape(total, PART).trans(),)
    for level in tl.static_range(10):
        if total > 1 << level:
            evens = ()
            odds = ()
            for k in tl.static_range(1 << level):
                pair = pieces[k].reshape(PART, total >> level + 1, 2).split()
                evens += (pair[0],)
                odds += (pair[1],)
            pieces = evens + odds
    taken = ()
    for i in tl.static_range(COUNT):
        vector = ()
        for s in tl.static_range(PARTS):
            vector += (pieces[i * PARTS + s].reshape(PART).to(tl.float32),)
        taken += (vector,)
    return taken


@triton.jit
def load_chunk(p_cells, o_p, o_n, reads, q: tl.constexpr, shape):
    """Parts `[CHUNK, PART]` of chunk q of a head's tile; p_cells: addresses of chunk 0's first."""
    STATE: tl.constexpr = shape.STATE
    PART: tl.constexpr = shape.PART
    first: tl.constexpr = q * shape.CHUNK
    parts = ()
    for s in tl.static_range(shape.PARTS):
        p_part = p_cells + (first * STATE + s * PART)
        if (shape.DIM % shape.TILE == 0) & (STATE == shape.PARTS * PART):
            parts += (tl.load(p_part, mask=reads, other=0.0),)
        else:
            inside = (o_p + first < shape.DIM)[:, None] & (o_n + s * PART < STATE)[None, :] & reads
            parts += (tl.load(p_part, mask=inside, other=0.0),)
    return parts


@triton.jit
def load_rows(inputs, past, i_head, o_p, row, strides, shape):
    """x `[TILE]` of a head's tokens and then of the guesses that are folded, in one flat tuple that
    a loop can carry."""
    p_x = inputs.x + i_head * strides.x_head
    p_past = past.x + i_head * shape.DIM
    in_dim = o_p < shape.DIM
    loaded = ()
    for i in tl.static_range(shape.TOKENS):
        at = p_x + o_p * strides.x_dim + i * strides.x_token
        loaded += (tl.load(at, mask=in_dim & (i < row.scheduled)),)
    for j in tl.static_range(shape.DRAFTS):
        at = p_past + o_p + j * (shape.HEADS * shape.DIM)
        loaded += (tl.load(at, mask=in_dim & (j < row.fold), other=0.0),)
    return loaded
