"""What the replay layout's verify pass loads, by loads that suit a program of one warp.

A load of at least as many elements as there are threads gets the layout that suits memory, and
passes through shared memory to where it is used; so what is used in small pieces is loaded at once.
"""

# mypy: disable-error-code="assignment,var-annotated"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_scalars(
    past_dt, dt, dt_bias, A_log, D, count, scheduled,
    HEADS: tl.constexpr, RECORDS: tl.constexpr, TOKENS: tl.constexpr, dt_token: tl.constexpr,
):  # fmt: skip
    """Scalars of the heads that are pointed to: time step of each record, raw time step of each
    token, bias, A_log and D."""
    loaded = ()
    for j in tl.static_range(RECORDS):
        loaded += (tl.load(past_dt + j * HEADS, mask=j < count, other=0.0),)
    for i in tl.static_range(TOKENS):
        loaded += (tl.load(dt + i * dt_token, mask=i < scheduled, other=0.0),)
    loaded += (tl.load(dt_bias), tl.load(A_log), tl.load(D))
    return loaded


@triton.jit
def load_vectors(
    source, across: tl.constexpr, stride: tl.constexpr, live, COUNT: tl.constexpr,
    STATE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """COUNT vectors `[STATE]` as the first rows of a tensor `[1, 2, 4 or 8, WIDTH]`; 0 behind."""
    rows: tl.constexpr = 1 if COUNT == 1 else 2 if COUNT == 2 else 4 if COUNT <= 4 else 8
    row = tl.arange(0, rows)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < tl.minimum(live, COUNT)) & (column < STATE)
    return tl.load(source + row * across + column * stride, mask=inside, other=0.0)


@triton.jit
def take_apart(vectors, COUNT: tl.constexpr, SPLIT: tl.constexpr, LOW: tl.constexpr):
    """Each of the first COUNT rows as SPLIT parts `[LOW]` in fp32."""
    parts: tl.constexpr = vectors.shape[0] * SPLIT
    pieces = (vectors.reshape(parts, LOW).trans(),)
    for level in tl.static_range(10):
        if parts > 1 << level:
            evens = ()
            odds = ()
            for k in tl.static_range(1 << level):
                pair = pieces[k].reshape(LOW, parts >> level + 1, 2).split()
                evens += (pair[0],)
                odds += (pair[1],)
            pieces = evens + odds
    taken = ()
    for i in tl.static_range(COUNT):
        vector = ()
        for s in tl.static_range(SPLIT):
            vector += (pieces[i * SPLIT + s].reshape(LOW).to(tl.float32),)
        taken += (vector,)
    return taken


@triton.jit
def load_chunk(
    cells, p, n, reads, q: tl.constexpr, DIM: tl.constexpr, STATE: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Parts `[HIGH, LOW]` of chunk q of a head's tile; `cells`: addresses of the tile's first."""
    held = ()
    for s in tl.static_range(SPLIT):
        spot = cells + (q * HIGH * STATE + s * LOW)
        if (DIM % TILE == 0) & (STATE == SPLIT * LOW):
            held += (tl.load(spot, mask=reads, other=0.0),)
        else:
            inside = (p + q * HIGH < DIM)[:, None] & (n + s * LOW < STATE)[None, :] & reads
            held += (tl.load(spot, mask=inside, other=0.0),)
    return held


@triton.jit
def load_rows(
    x, past_x, p, valid, count, scheduled, x_token: tl.constexpr, x_dim: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """x `[TILE]` of a head's tokens and then of its records in one flat tuple that a loop can
    carry."""
    loaded = ()
    for i in tl.static_range(TOKENS):
        loaded += (tl.load(x + p * x_dim + i * x_token, mask=valid & (i < scheduled)),)
    for j in tl.static_range(RECORDS):
        live = valid & (j < count)
        loaded += (tl.load(past_x + p + j * (HEADS * DIM), mask=live, other=0.0),)
    return loaded
