"""Mamba-2 state update of decode and verify rows: one read of the state, one write per draft.

Memory bound: a row reads one state and writes `draft + 1`. Each program owns one tile of one head
in every column of its row, so the column that is read may be one of those that are written.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.math import softplus
from hybrid_runtime.kernels.common.outputs import check_out
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.common.strides import ChannelStrides, HeadStrides
from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.common.zero_fill import zero_unowned
from hybrid_runtime.kernels.mamba2.checks import check_ssm_shapes
from hybrid_runtime.kernels.mamba2.naive import selective_state_update_reference

MAX_TOKENS = 16
"""Tokens per row that the kernel unrolls; longer rows go to the reference."""


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=[
        "dt", "A_log", "D", "dt_bias", "block_table", "slot", "cu_seqlens", "draft",
        "read_column", "read_offset", "write_column",
    ],
)  # fmt: skip
def _selective_state_update_kernel(
    x,
    dt,
    A_log,
    B,
    C,
    D,
    dt_bias,
    states,
    block_table,
    slot,
    cu_seqlens,
    draft,
    read_column,
    read_offset,
    write_column,
    out,
    tokens,
    x_stride,
    dt_stride,
    B_stride,
    C_stride,
    table_stride,
    state_stride,
    dt_min,
    dt_max,
    HEADS: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait(PDL, False)
    tiles: tl.constexpr = (DIM + TILE - 1) // TILE
    item = tl.program_id(0)
    row = tl.program_id(1)
    head = item // tiles
    group = head // HEADS_PER_GROUP
    p = item % tiles * TILE + tl.arange(0, TILE)
    n = tl.arange(0, WIDTH)
    in_dim = p < DIM
    in_state = n < STATE
    out_type = out.dtype.element_ty
    given = out + head * DIM + p

    row_slot = tl.load(slot + row)
    start = tl.load(cu_seqlens + row)
    end = tl.load(cu_seqlens + row + 1)
    drafts = tl.load(draft + row)
    source = tl.load(read_column + row)
    further = tl.load(read_offset + row)
    target = tl.load(write_column + row)
    active = (row_slot >= 0) & (target >= 0)

    zero_unowned(given, in_dim, row, start, end, active, tokens, HEADS * DIM)
    if active & (end > start):
        table = block_table + row_slot.to(tl.int64) * table_stride
        first = end - start - 1 - drafts  # the first token after which the state is stored
        if (DIM % TILE == 0) & (STATE == WIDTH):  # a constant: these masks cost nothing
            whole = tl.full((TILE, WIDTH), True, tl.int1)
        else:
            whole = in_dim[:, None] & in_state[None, :]
        element = (head * DIM + p)[:, None] * STATE + n[None, :]
        reads = source >= 0
        block = tl.load(table + source + further, mask=reads, other=0).to(tl.int64)
        # Everything is loaded before the first store, which a load could not pass, and the state
        # before anything waits. Loads and stores of the state lie the same way over the threads,
        # so each thread overwrites only what it has read itself.
        xs = ()
        Bs = ()
        Cs = ()
        raws = ()
        blocks = ()
        for i in tl.static_range(TOKENS):
            live = start + i < end
            at = (start + i).to(tl.int64)
            raws += (
                tl.load(dt + at * dt_stride.token + head * dt_stride.channel, mask=live, other=0.0),
            )
            column = target + i - first
            stored = live & (i >= first)
            blocks += (tl.load(table + column, mask=stored, other=0),)
            taken = x + at * x_stride.token + head * x_stride.head + p * x_stride.dim
            xs += (tl.load(taken, mask=in_dim & live, other=0.0),)
            taken = B + at * B_stride.token + group * B_stride.head + n * B_stride.dim
            Bs += (tl.load(taken, mask=in_state & live, other=0.0),)
            taken = C + at * C_stride.token + group * C_stride.head + n * C_stride.dim
            Cs += (tl.load(taken, mask=in_state & live, other=0.0),)
        h = tl.load(states + block * state_stride + element, mask=whole & reads, other=0.0)
        bias = tl.load(dt_bias + head).to(tl.float32)
        rate = -tl.exp(tl.load(A_log + head).to(tl.float32))
        skip = tl.load(D + head).to(tl.float32)
        h = h.to(tl.float32)
        for i in tl.static_range(TOKENS):
            live = start + i < end
            stored = live & (i >= first)
            step = softplus(raws[i].to(tl.float32) + bias)
            # Beyond the row's end the step is 0: decay 1 and no input, so the state stays.
            step = tl.where(live, tl.minimum(tl.maximum(step, dt_min), dt_max), 0.0)
            xi = xs[i].to(tl.float32)
            Bi = Bs[i].to(tl.float32)[None, :]
            Ci = Cs[i].to(tl.float32)[None, :]
            h = h * tl.exp(step * rate) + (step * xi)[:, None] * Bi
            y = tl.sum(h * Ci, axis=1) + skip * xi
            written = given + (start + i).to(tl.int64) * (HEADS * DIM)
            tl.store(written, y.to(out_type), mask=in_dim & live)
            written = states + blocks[i].to(tl.int64) * state_stride + element
            kept = h.to(states.dtype.element_ty)
            # Not read before the next step: evict it first.
            tl.store(written, kept, mask=whole & stored, cache_modifier=".cs")


def selective_state_update(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    rows: StateRows,
    max_scheduled: int,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    out: Tensor | None = None,
) -> Tensor:
    """`selective_state_update_reference` by one launch where Triton runs.

    The outputs go to `out` if it is given, contiguous and of x's shape and dtype.

    Each block of `states` must be contiguous, and no row may read a block that another row of the
    same call writes. Rows of more than `MAX_TOKENS` tokens and fp64 go to the reference.

    Raises:
        ValueError: as the reference, `out` does not fit, or blocks are not contiguous.
    """
    check_out(out, x)
    if not runs_triton(x) or max_scheduled > MAX_TOKENS or torch.float64 in (x.dtype, states.dtype):
        y = selective_state_update_reference(
            x, dt, A_log, B, C, D, dt_bias, states, rows, max_scheduled, dt_min, dt_max
        )
        return y if out is None else out.copy_(y)
    tokens, heads, dim = x.shape
    state = B.shape[2]
    heads_per_group = check_ssm_shapes(x, B, states)
    if states.stride()[1:] != (dim * state, state, 1):
        raise ValueError(
            f"states has strides {states.stride()}, must be [any, {dim * state}, {state}, 1]"
        )
    num_rows = rows.slot.shape[0]
    if out is None:
        out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if num_rows == 0 or max_scheduled == 0:
        return out.zero_()
    tile, warps = SHAPES[states.element_size()]
    tile = min(tile, triton.next_power_of_2(dim))
    _selective_state_update_kernel[(heads * triton.cdiv(dim, tile), num_rows)](
        x=x,
        dt=dt,
        A_log=A_log,
        B=B,
        C=C,
        D=D,
        dt_bias=dt_bias,
        states=states,
        **rows._asdict(),
        out=out,
        tokens=tokens,
        x_stride=HeadStrides(*x.stride()),
        dt_stride=ChannelStrides(*dt.stride()),
        B_stride=HeadStrides(*B.stride()),
        C_stride=HeadStrides(*C.stride()),
        table_stride=rows.block_table.stride(0),
        state_stride=states.stride(0),
        dt_min=float(dt_min),
        dt_max=float(dt_max),
        HEADS=heads,
        HEADS_PER_GROUP=heads_per_group,
        DIM=dim,
        STATE=state,
        TOKENS=max_scheduled,
        TILE=tile,
        WIDTH=triton.next_power_of_2(state),
        num_warps=warps,
        **pdl(x),
    )
    return out


# Rows of a head's state per program and its warps, by the bytes of a state's element: 64 bytes of
# state per thread. Swept on an H200 over 1 to 128 rows.
SHAPES = {4: (8, 2), 2: (16, 2)}
