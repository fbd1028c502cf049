"""Mamba-2 chunked scan of prefill rows by matrix products, for rows of any length.

Three launches (Dao and Gu 2024, section 6). The first sums up time steps and decays over each
chunk. The second walks every row from chunk to chunk with the state in registers, and stores the
state at the start of each chunk. The third computes all outputs at once from those states and, in
each chunk, a masked product. Which row a chunk belongs to is found on the device, so the grids
follow from the numbers of tokens and rows alone.

What moves is the least these three need: inputs twice, outputs once, and the states between chunks
once each way, in the type that they are multiplied in.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.types import operand_type
from hybrid_runtime.kernels.common.varlen import StateRows
from hybrid_runtime.kernels.mamba.chunk_scan_kernels import (
    carry_kernel,
    outputs_kernel,
    steps_kernel,
)
from hybrid_runtime.kernels.mamba.conv1d_varlen import tile_bound
from hybrid_runtime.kernels.mamba.naive import check_ssm_shapes, chunk_scan_reference


class ScanTiling(NamedTuple):
    """Launch shapes.

    Attributes:
        chunk: tokens between two states that are stored.
        tile: columns of a head's state that one program carries.
        tokens: tokens of a chunk whose outputs one program computes; a part of `chunk`.
        each: heads that it does so for, at most.
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


def scan_tiling(dim: int, state: int, dtype: torch.dtype) -> ScanTiling:
    """Launch shapes for heads of dim x state whose products are formed in `dtype`: the largest that
    keep their registers, as compiled for Hopper."""
    if dtype == torch.float32:  # products without matrix units: small tiles
        warps = 4 if dim <= 64 else 8
        return ScanTiling(64, 32, 32, 1, 16, warps, 1, warps, 1)
    if min(dim, state) < 64:
        # Triton 3.6 multiplies 64 x 16 outputs of matrix units wrongly: stay below their 64 rows.
        return ScanTiling(128, 64, 32, 8)
    if state > 128:
        return ScanTiling(64, 64, 64, 4, 256, 8, 2, 8, 1)
    if dim > 64:
        return ScanTiling(128, 64, 64, 4, 256, 8, 2, 8, 2)
    return ScanTiling(128, 64, 64, 8)


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
    tiling: ScanTiling | None = None,
) -> Tensor:
    """`chunk_scan_reference` by three launches where Triton runs.

    No row may read a block that another row of the same call writes; a row's own read and write
    columns may be the same. bf16 and fp16 inputs are multiplied in their own type with fp32 sums
    (states between chunks are rounded to it as operands, not as they are carried), others in fp32.
    Scratch takes H * P * N elements of that type for every chunk of every row. fp64 goes to the
    reference.

    Args:
        chunk_size: checked only: the kernels have chunks of their own.
        tiling: launch shapes; None = `scan_tiling`. All other arguments as in the reference.

    Raises:
        ValueError: as the reference.
    """
    if not runs_triton(x) or torch.float64 in (x.dtype, states.dtype):
        return chunk_scan_reference(
            x,
            dt,
            A_log,
            B,
            C,
            D,
            dt_bias,
            states,
            rows,
            max_scheduled,
            chunk_size,
            dt_min,
            dt_max,
        )
    tokens, heads, dim = x.shape
    state = B.shape[2]
    heads_per_group = check_ssm_shapes(x, B, states)
    if chunk_size <= 0:
        raise ValueError(f"chunk_size is {chunk_size}, must be positive")
    num_rows = rows.slot.shape[0]
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if num_rows == 0 or tokens == 0 or max_scheduled == 0:
        return out.zero_()
    product = torch.promote_types(x.dtype, torch.promote_types(B.dtype, C.dtype))
    exact = product == torch.float32
    shape = tiling or scan_tiling(dim, state, product)
    chunks = tile_bound(tokens, num_rows, shape.chunk)
    block_p = max(triton.next_power_of_2(dim), 16)
    block_n = max(triton.next_power_of_2(state), 16)
    tile = min(shape.tile, block_n)
    each = math.gcd(shape.each, heads_per_group)
    sums = torch.empty((3 if exact else 2, heads, chunks, shape.chunk), device=x.device)
    steps, totals, rests = sums[0], sums[1], sums[-1]
    carried = torch.empty((chunks, heads, dim, state), dtype=product, device=x.device)
    steps_kernel[(triton.cdiv(heads, STEP_HEADS), chunks)](
        dt,
        A_log,
        dt_bias,
        rows.slot,
        rows.cu_seqlens,
        rows.write_column,
        out,
        steps,
        totals,
        rests,
        tokens,
        num_rows,
        *dt.stride(),
        float(dt_min),
        float(dt_max),
        HEADS=heads,
        DIM=dim,
        CHUNK=shape.chunk,
        TILE=STEP_HEADS,
        BLOCK_P=block_p,
        EXACT=exact,
        num_warps=4,
    )
    carry_kernel[(heads * triton.cdiv(state, tile), num_rows)](
        x,
        B,
        steps,
        totals,
        rests,
        states,
        carried,
        rows.block_table,
        rows.slot,
        rows.cu_seqlens,
        rows.read_column,
        rows.read_offset,
        rows.write_column,
        chunks,
        *x.stride(),
        *B.stride(),
        *states.stride(),
        rows.block_table.stride(0),
        dot_type=operand_type(product, x),
        HEADS=heads,
        HEADS_PER_GROUP=heads_per_group,
        DIM=dim,
        STATE=state,
        CHUNK=shape.chunk,
        TRIPS=0 if x.is_cuda else triton.cdiv(max_scheduled, shape.chunk),
        TILE=tile,
        BLOCK_P=block_p,
        EXACT=exact,
        num_warps=shape.carry_warps,
        num_stages=shape.carry_stages,
    )
    outputs_kernel[(heads // each * (shape.chunk // shape.tokens), chunks)](
        x,
        B,
        C,
        D,
        steps,
        totals,
        rests,
        carried,
        rows.slot,
        rows.cu_seqlens,
        rows.write_column,
        out,
        num_rows,
        *x.stride(),
        *B.stride(),
        *C.stride(),
        dot_type=operand_type(product, x),
        HEADS=heads,
        HEADS_PER_GROUP=heads_per_group,
        DIM=dim,
        STATE=state,
        CHUNK=shape.chunk,
        TOKENS=shape.tokens,
        EACH=each,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        PIECE=min(shape.piece, block_n),
        EXACT=exact,
        num_warps=shape.output_warps,
        num_stages=shape.output_stages,
    )
    return out


STEP_HEADS = 16
