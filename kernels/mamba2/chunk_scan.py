"""Mamba-2 chunked scan of prefill rows by matrix products, for rows of any length.

Three launches (Dao and Gu 2024, section 6). The first sums up time steps and decays over each
chunk. The second walks every row from chunk to chunk with the state in registers, and stores the
state at the start of each chunk. The third computes all outputs at once from those states and, in
each chunk, a masked product. Which row a chunk belongs to is found on the device, so the grids
follow from the numbers of tokens and rows alone. A row with a cut has two parts, each with chunks
of its own, so that the state at the cut is one between chunks.

What moves is the least these three need: inputs twice, outputs once, and the states between chunks
once each way, in the type that they are multiplied in.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs, runs_triton
from hybrid_runtime.kernels.common.outputs import check_out
from hybrid_runtime.kernels.common.strides import ChannelStrides, HeadStrides, StateStrides
from hybrid_runtime.kernels.common.tiles import tile_bound
from hybrid_runtime.kernels.common.types import operand_type
from hybrid_runtime.kernels.common.varlen import Cuts, StateRows
from hybrid_runtime.kernels.mamba2.checks import check_ssm_shapes
from hybrid_runtime.kernels.mamba2.chunk_scan_kernels import (
    carry_kernel,
    outputs_kernel,
    steps_kernel,
)
from hybrid_runtime.kernels.mamba2.naive import chunk_scan_reference


class ScanTiling(NamedTuple):
    """Launch shapes.

    Attributes:
        chunk: tokens between two states that are stored.
        tile: columns of a head's state that one program carries.
        tokens: tokens of a chunk whose outputs one program computes; a part of `chunk`.
        each: heads that it does so for, at most; fewer where programs would not fill the GPU.
        piece: how much of a state's columns the outputs multiply at once, at most.
        carry_warps, carry_stages, output_warps, output_stages: of the two kernels.
    """

    chunk: int
    tile: int
    tokens: int
    each: int
    piece: int = 256
    carry_warps: int = 4
    carry_stages: int = 3
    output_warps: int = 4
    output_stages: int = 2


class ScanShape(NamedTuple):
    """What all three kernels are compiled for.

    Attributes:
        HEADS: of x and of the states.
        HEADS_PER_GROUP: heads that share B and C.
        DIM: rows of a head's state.
        STATE: columns of a head's state.
        CHUNK: tokens between two states that are stored.
        BLOCK_P: DIM rounded up to a power of two.
        EXACT: products are formed in fp32; sums of decays then have a second word.
    """

    HEADS: tl.constexpr
    HEADS_PER_GROUP: tl.constexpr
    DIM: tl.constexpr
    STATE: tl.constexpr
    CHUNK: tl.constexpr
    BLOCK_P: tl.constexpr
    EXACT: tl.constexpr


@functools.cache
def scan_shape(
    heads: int, heads_per_group: int, dim: int, state: int, chunk: int, product: torch.dtype
) -> ScanShape:
    """The constants of a launch. Kept, because Triton finds a compiled kernel by their hash."""
    return ScanShape(
        HEADS=tl.constexpr(heads),
        HEADS_PER_GROUP=tl.constexpr(heads_per_group),
        DIM=tl.constexpr(dim),
        STATE=tl.constexpr(state),
        CHUNK=tl.constexpr(chunk),
        BLOCK_P=tl.constexpr(max(triton.next_power_of_2(dim), 16)),
        EXACT=tl.constexpr(product == torch.float32),
    )


def scan_tiling(dim: int, state: int, dtype: torch.dtype) -> ScanTiling:
    """Launch shapes for heads of dim x state whose products are formed in `dtype`: the fastest ones
    on an H200 of those that keep their registers, as compiled for Hopper."""
    if dtype == torch.float32:  # products without matrix units: small tiles
        warps = 4 if dim <= 64 else 8
        return ScanTiling(64, 32, 32, 1, 16, warps, 1, warps, 1)
    if min(dim, state) < 64:
        # Triton 3.6 multiplies 64 x 16 outputs of matrix units wrongly: stay below their 64 rows.
        return ScanTiling(128, 64, 32, 8)
    if max(dim, state) > 128:
        return ScanTiling(64, 64, 64, 4 if dim <= 128 else 1, 256, 8, 2, 8, 1)
    return ScanTiling(64, 64, 64, 8)


def chunk_scan(
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
    chunk_size: int,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
    cuts: Cuts | None = None,
    tiling: ScanTiling | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`chunk_scan_reference` by three launches where Triton runs.

    The outputs go to `out` if it is given, contiguous and of x's shape and dtype.

    No row may read a block that another row of the same call writes; a row's own read column may be
    that of its cut, or its write column. bf16 and fp16 inputs are multiplied in their own type with
    fp32 sums (states between chunks are rounded to it as operands, not as they are carried), others
    in fp32. Scratch takes H * P * N elements of that type for every chunk of every row. fp64 goes
    to the reference.

    Args:
        chunk_size: checked only: the kernels have chunks of their own.
        tiling: launch shapes; None = `scan_tiling`. All other arguments as in the reference.

    Raises:
        ValueError: as the reference, or `out` does not fit.
    """
    check_out(out, x)
    if not runs_triton(x) or torch.float64 in (x.dtype, states.dtype):
        y = chunk_scan_reference(
            x, dt, A_log, B, C, D, dt_bias, states, rows, max_scheduled, chunk_size, dt_min, dt_max,
            cuts,
        )  # fmt: skip
        return y if out is None else out.copy_(y)
    tokens, heads, dim = x.shape
    heads_per_group = check_ssm_shapes(x, B, states)
    if chunk_size <= 0:
        raise ValueError(f"chunk_size is {chunk_size}, must be positive")
    num_rows = rows.slot.shape[0]
    if out is None:
        out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if num_rows == 0 or tokens == 0 or max_scheduled == 0:
        return out.zero_()
    product = torch.promote_types(x.dtype, torch.promote_types(B.dtype, C.dtype))
    tiling = tiling or scan_tiling(dim, B.shape[2], product)
    shape = scan_shape(heads, heads_per_group, dim, B.shape[2], tiling.chunk, product)
    parts = num_rows if cuts is None else 2 * num_rows
    num_chunks = tile_bound(tokens, parts, tiling.chunk)
    exact = product == torch.float32
    sums = torch.empty((3 if exact else 2, heads, num_chunks, tiling.chunk), device=x.device)
    carried = torch.empty((num_chunks, *states.shape[1:]), dtype=product, device=x.device)
    _sum_chunks(dt, A_log, dt_bias, dt_min, dt_max, rows, cuts, out, sums, shape)
    _carry_states(x, B, states, rows, max_scheduled, cuts, sums, carried, shape, tiling)
    _compute_outputs(x, B, C, D, rows, cuts, sums, carried, out, shape, tiling)
    return out


PROGRAMS = 2
"""Programs per multiprocessor that the outputs are spread over, if heads allow."""
STEP_HEADS = 16
"""Heads per program of the first launch."""


def _sum_chunks(
    dt: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float,
    rows: StateRows,
    cuts: Cuts | None,
    out: Tensor,
    sums: Tensor,
    shape: ScanShape,
) -> None:
    """Fill `sums`: steps, totals, and the totals' second words where products are exact. Zero the
    outputs of tokens that belong to no row."""
    steps, totals, rests = sums[0], sums[1], sums[-1]
    tokens, heads, _ = out.shape
    steps_kernel[(triton.cdiv(heads, STEP_HEADS), sums.shape[2])](
        dt=dt,
        A_log=A_log,
        dt_bias=dt_bias,
        slot=rows.slot,
        cu_seqlens=rows.cu_seqlens,
        write_column=rows.write_column,
        cut=None if cuts is None else cuts.after,
        out=out,
        steps=steps,
        totals=totals,
        rests=rests,
        tokens=tokens,
        rows=rows.slot.shape[0],
        dt_stride=ChannelStrides(*dt.stride()),
        dt_min=float(dt_min),
        dt_max=float(dt_max),
        shape=shape,
        TILE=STEP_HEADS,
        num_warps=4,
    )


def _carry_states(
    x: Tensor,
    B: Tensor,
    states: Tensor,
    rows: StateRows,
    max_scheduled: int,
    cuts: Cuts | None,
    sums: Tensor,
    carried: Tensor,
    shape: ScanShape,
    tiling: ScanTiling,
) -> None:
    """Store the state at the start of every chunk in `carried`, and in `states` each row's last and
    that at its cut."""
    steps, totals, rests = sums[0], sums[1], sums[-1]
    heads, state = carried.shape[1], carried.shape[3]
    tile = min(tiling.tile, max(triton.next_power_of_2(state), 16))
    carry_kernel[(heads * triton.cdiv(state, tile), rows.slot.shape[0])](
        x=x,
        B=B,
        steps=steps,
        totals=totals,
        rests=rests,
        states=states,
        carried=carried,
        block_table=rows.block_table,
        slot=rows.slot,
        cu_seqlens=rows.cu_seqlens,
        read_column=rows.read_column,
        read_offset=rows.read_offset,
        write_column=rows.write_column,
        cut=None if cuts is None else cuts.after,
        cut_column=None if cuts is None else cuts.column,
        chunks=sums.shape[2],
        x_stride=HeadStrides(*x.stride()),
        B_stride=HeadStrides(*B.stride()),
        state_stride=StateStrides(*states.stride()),
        table_stride=rows.block_table.stride(0),
        dot_type=operand_type(carried.dtype, x),
        shape=shape,
        TRIPS=0 if x.is_cuda else triton.cdiv(max_scheduled, tiling.chunk),
        TILE=tile,
        num_warps=tiling.carry_warps,
        num_stages=tiling.carry_stages,
    )


def _heads_each(x: Tensor, tiling: ScanTiling) -> int:
    """Heads of a program of the last launch: as many as leave enough programs, but at least a
    quarter of `tiling.each`, so that it is compiled in few forms."""
    each, heads_chunks = tiling.each, x.shape[1] * triton.cdiv(x.shape[0], tiling.tokens)
    while each > max(tiling.each // 4, 1) and heads_chunks // each < num_programs(x, PROGRAMS):
        each //= 2
    return each


def _compute_outputs(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    rows: StateRows,
    cuts: Cuts | None,
    sums: Tensor,
    carried: Tensor,
    out: Tensor,
    shape: ScanShape,
    tiling: ScanTiling,
) -> None:
    """Fill `out` for all tokens of rows."""
    steps, totals, rests = sums[0], sums[1], sums[-1]
    heads, groups = x.shape[1], B.shape[1]
    each = math.gcd(_heads_each(x, tiling), heads // groups)
    block_n = max(triton.next_power_of_2(B.shape[2]), 16)
    outputs_kernel[(heads // each * (tiling.chunk // tiling.tokens), sums.shape[2])](
        x=x,
        B=B,
        C=C,
        D=D,
        steps=steps,
        totals=totals,
        rests=rests,
        carried=carried,
        slot=rows.slot,
        cu_seqlens=rows.cu_seqlens,
        write_column=rows.write_column,
        cut=None if cuts is None else cuts.after,
        out=out,
        rows=rows.slot.shape[0],
        x_stride=HeadStrides(*x.stride()),
        B_stride=HeadStrides(*B.stride()),
        C_stride=HeadStrides(*C.stride()),
        dot_type=operand_type(carried.dtype, x),
        shape=shape,
        TOKENS=tiling.tokens,
        EACH=each,
        BLOCK_N=block_n,
        PIECE=min(tiling.piece, block_n),
        num_warps=tiling.output_warps,
        num_stages=tiling.output_stages,
    )
