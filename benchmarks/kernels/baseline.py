"""The plain way to update states in a verify step: a program per row, head and a few rows of its
state, token after token, and the state after every guess written out. Nothing is shared between
heads and nothing is in flight ahead of its use; what engines commonly ship is of this form. Written
for `verify.py`, so that our kernels are not only measured against each other.
"""

# mypy: disable-error-code="assignment,misc,var-annotated"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import StateRows

LAUNCHES = ((4, 4), (8, 4), (8, 2), (16, 4), (16, 2), (32, 4), (32, 8), (64, 8))
"""Rows of a head's state per program, warps: what `verify.py` takes the best of."""


@triton.jit
def _baseline_kernel(
    x,
    dt,
    A_log,
    B,
    C,
    D,
    dt_bias,
    states,
    out,
    block_table,
    slot,
    cu_seqlens,
    draft,
    read_column,
    read_offset,
    write_column,
    x_token,
    dt_token,
    B_token,
    C_token,
    table_stride,
    state_stride,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    p = tl.program_id(2) * TILE + tl.arange(0, TILE)
    n = tl.arange(0, STATE)
    start = tl.load(cu_seqlens + row).to(tl.int64)
    scheduled = tl.load(cu_seqlens + row + 1) - start
    certain = scheduled - tl.load(draft + row)
    table = block_table + tl.load(slot + row).to(tl.int64) * table_stride
    target = tl.load(write_column + row)
    block = tl.load(table + tl.load(read_column + row) + tl.load(read_offset + row)).to(tl.int64)
    inside = head * DIM * STATE + p[:, None] * STATE + n[None, :]
    h = tl.load(states + block * state_stride + inside).to(tl.float32)
    rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    skip = tl.load(D + head).to(tl.float32)
    x += start * x_token + head * DIM + p
    dt += start * dt_token + head
    B += start * B_token + head // HEADS_PER_GROUP * STATE + n
    C += start * C_token + head // HEADS_PER_GROUP * STATE + n
    out += start * HEADS * DIM + head * DIM + p
    for i in tl.static_range(TOKENS):
        if i < scheduled:
            raw = tl.load(dt + i * dt_token).to(tl.float32) + bias
            step = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(raw)))
            xi = tl.load(x + i * x_token).to(tl.float32)
            Bi = tl.load(B + i * B_token).to(tl.float32)
            Ci = tl.load(C + i * C_token).to(tl.float32)
            h = h * tl.exp(step * rate) + (step * xi)[:, None] * Bi[None, :]
            y = tl.sum(h * Ci[None, :], axis=1) + skip * xi
            tl.store(out + i * HEADS * DIM, y.to(out.dtype.element_ty))
            column = target + i - (certain - 1)
            if column >= target:
                to = tl.load(table + column).to(tl.int64)
                tl.store(states + to * state_stride + inside, h.to(states.dtype.element_ty))


def baseline(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    launch: tuple[int, int],
    rows: StateRows,
    max_scheduled: int,
) -> Tensor:
    """Arguments and result of `selective_state_update`, by the launch of `LAUNCHES` given; inputs
    contiguous within a token, state sizes powers of two, rows live and with a state."""
    tokens, heads, dim = x.shape
    groups, state = B.shape[1:]
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    tile, warps = launch
    tile = min(tile, dim)
    where: Any = rows
    _baseline_kernel[(rows.slot.shape[0], heads, dim // tile)](
        x, dt, A_log, B, C, D, dt_bias, states, out, *where,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), rows.block_table.stride(0),
        states.stride(0), HEADS=heads, HEADS_PER_GROUP=heads // groups, DIM=dim, STATE=state,
        TOKENS=max_scheduled, TILE=tile, num_warps=warps,
    )  # fmt: skip
    return out
