"""Gated DeltaNet's chunked scan of prefill rows by matrix products, for rows of any length.

Two launches. The first prepares every chunk of every head: normalised keys and queries, and the
matrices of the WY form, which need no state. The second walks every row from chunk to chunk with
the state in registers, and computes the outputs on the way: no state between chunks goes to memory.
Which row a chunk belongs to is found on the device, so the grids follow from the numbers of tokens
and rows alone. A row with a cut has two parts, each with chunks of its own, so that the state at
the cut is one between chunks.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import num_programs, runs_triton
from hybrid_runtime.kernels.common.outputs import check_out
from hybrid_runtime.kernels.common.strides import ChannelStrides, HeadStrides, StateStrides
from hybrid_runtime.kernels.common.tiles import tile_bound
from hybrid_runtime.kernels.common.types import FLOAT_TYPES
from hybrid_runtime.kernels.common.varlen import Cuts, StateRows
from hybrid_runtime.kernels.gdn.checks import check_heads, check_inputs
from hybrid_runtime.kernels.gdn.chunk_scan_kernels import carry_kernel, prepare_kernel
from hybrid_runtime.kernels.gdn.naive import chunk_scan_reference


class ScanTiling(NamedTuple):
    """Launch shapes.

    Attributes:
        chunk: tokens that the state is multiplied with at once, a power of two.
        tile: rows of a head's state (of V) that one program carries.
        prepare_warps, carry_warps, carry_stages: of the two kernels.
    """

    chunk: int
    tile: int
    prepare_warps: int = 4
    carry_warps: int = 4
    carry_stages: int = 3


class ScanShape(NamedTuple):
    """What both kernels are compiled for.

    Attributes:
        HEADS: Hv.
        GROUP: value heads of a key head, Hv // Hk.
        KEY: K.
        VALUE: V.
        CHUNK: tokens that the state is multiplied with at once.
        LEVELS: log2 of CHUNK.
        BLOCK_K: KEY rounded up to a power of two.
        BLOCK_V: likewise VALUE.
        SCALE: of queries, K ** -0.5.
    """

    HEADS: tl.constexpr
    GROUP: tl.constexpr
    KEY: tl.constexpr
    VALUE: tl.constexpr
    CHUNK: tl.constexpr
    LEVELS: tl.constexpr
    BLOCK_K: tl.constexpr
    BLOCK_V: tl.constexpr
    SCALE: tl.constexpr


@functools.cache
def scan_shape(heads: int, key_heads: int, key: int, value: int, chunk: int) -> ScanShape:
    """The constants of a launch. Kept, because Triton finds a compiled kernel by their hash."""
    return ScanShape(
        HEADS=tl.constexpr(heads),
        GROUP=tl.constexpr(heads // key_heads),
        KEY=tl.constexpr(key),
        VALUE=tl.constexpr(value),
        CHUNK=tl.constexpr(chunk),
        LEVELS=tl.constexpr(chunk.bit_length() - 1),
        BLOCK_K=tl.constexpr(max(triton.next_power_of_2(key), 16)),
        BLOCK_V=tl.constexpr(max(triton.next_power_of_2(value), 16)),
        SCALE=tl.constexpr(key**-0.5),
    )


def scan_tiling(
    rows: int, heads: int, key: int, value: int, product: torch.dtype, multiprocessors: int
) -> ScanTiling:
    """Launch shapes of so many rows, for products that are formed in `product`: the wide tile reads
    keys and queries less often, but leaves multiprocessors idle where rows are few."""
    if product == torch.float32:  # products without matrix units: small tiles
        return ScanTiling(16, 16, 8, 8, 1)
    # Triton 3.6 multiplies 64 x 16 outputs of matrix units wrongly: no tile is below 32. Of the
    # second kernel's products some are 64 tokens by a tile: eight warps would find each twice.
    if key > 128:
        return ScanTiling(64, 32, 8, 4, 2)
    if value <= 32 or rows * heads * triton.cdiv(value, 32) <= multiprocessors:
        return ScanTiling(64, 32)
    return ScanTiling(64, 64)


class Factors(NamedTuple):
    """What the first launch leaves for the second, by chunks; see `chunk_scan_kernels`.

    Attributes:
        keys, queries: [chunks, Hk, CHUNK, BLOCK_K], normalised.
        to_change, to_output: [chunks, Hv, CHUNK, CHUNK].
        decays: fp32 [chunks, Hv, CHUNK], from the chunk's start to each token.
        largest: fp32 [Hv, chunks], of values; None where products are formed in fp32.
    """

    keys: Tensor
    queries: Tensor
    to_change: Tensor
    to_output: Tensor
    decays: Tensor
    largest: Tensor | None


def chunk_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    rows: StateRows,
    max_scheduled: int,
    cuts: Cuts | None = None,
    out: Tensor | None = None,
    tiling: ScanTiling | None = None,
) -> Tensor:
    """`chunk_scan_reference` by two launches where Triton runs.

    The outputs go to `out` if it is given, contiguous and of v's shape and dtype.

    No row may read a block that another row of the same call writes; a row's own read column may be
    that of its cut, or its write column. bf16 and fp16 inputs are multiplied in fp16 with fp32 sums
    (states between chunks are rounded to it as operands, not as they are carried), others in fp32.
    Scratch takes 2 (Hk * K + 64 Hv) elements of that type a token. fp64 goes to the reference.

    Args:
        tiling: launch shapes; None = `scan_tiling`. All other arguments as in the reference.

    Raises:
        ValueError: as the reference, or `out` does not fit, or there is a decay per channel, which
            the kernels have not.
    """
    check_out(out, v)
    if not runs_triton(v) or torch.float64 in (v.dtype, states.dtype):
        y = chunk_scan_reference(
            q, k, v, a, b, A_log, dt_bias, states, rows, max_scheduled, cuts
        )  # fmt: skip
        return y if out is None else out.copy_(y)
    check_inputs(q, k, v, a, b, A_log, dt_bias)
    check_heads(k, v, states)
    tokens, heads, value = v.shape
    if a.dim() == 3:
        raise ValueError(
            f"a is {tuple(a.shape)}; the kernels have no decay per channel, it must be "
            f"[{tokens}, {heads}]"
        )
    if out is None:
        out = torch.empty((tokens, heads, value), dtype=v.dtype, device=v.device)
    num_rows = rows.slot.shape[0]
    if num_rows == 0 or tokens == 0 or max_scheduled == 0:
        return out.zero_()
    exact = torch.float32 in (q.dtype, k.dtype, v.dtype)
    product = torch.float32 if exact else torch.float16
    tiling = tiling or scan_tiling(num_rows, heads, k.shape[2], value, product, num_programs(v, 1))
    shape = scan_shape(heads, k.shape[1], k.shape[2], value, tiling.chunk)
    parts = num_rows if cuts is None else 2 * num_rows
    factors = _allocate(tile_bound(tokens, parts, tiling.chunk), product, shape, v.device)
    _prepare(q, k, v, a, b, A_log, dt_bias, rows, cuts, out, factors, shape, tiling)
    _carry(v, states, rows, max_scheduled, cuts, out, factors, shape, tiling)
    return out


def _allocate(chunks: int, product: torch.dtype, shape: ScanShape, device: torch.device) -> Factors:
    heads, chunk = shape.HEADS.value, shape.CHUNK.value
    pair = (2, chunks, heads // shape.GROUP.value, chunk, shape.BLOCK_K.value)
    keys, queries = torch.empty(pair, dtype=product, device=device)
    to_change, to_output = torch.empty(
        (2, chunks, heads, chunk, chunk), dtype=product, device=device
    )
    return Factors(
        keys,
        queries,
        to_change,
        to_output,
        torch.empty((chunks, heads, chunk), device=device),
        None if product == torch.float32 else torch.empty((heads, chunks), device=device),
    )


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    rows: StateRows,
    cuts: Cuts | None,
    out: Tensor,
    factors: Factors,
    shape: ScanShape,
    tiling: ScanTiling,
) -> None:
    """Fill `factors`. Zero the outputs of padded rows, and of tokens that belong to no row."""
    tokens, heads, _ = v.shape
    prepare_kernel[(heads, factors.keys.shape[0])](
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        slot=rows.slot,
        cu_seqlens=rows.cu_seqlens,
        write_column=rows.write_column,
        cut=None if cuts is None else cuts.after,
        out=out,
        **factors._asdict(),
        tokens=tokens,
        rows=rows.slot.shape[0],
        q_stride=HeadStrides(*q.stride()),
        k_stride=HeadStrides(*k.stride()),
        v_stride=HeadStrides(*v.stride()),
        a_stride=ChannelStrides(*a.stride()),
        b_stride=ChannelStrides(*b.stride()),
        dot_type=FLOAT_TYPES[factors.keys.dtype],
        shape=shape,
        num_warps=tiling.prepare_warps,
    )


def _carry(
    v: Tensor,
    states: Tensor,
    rows: StateRows,
    max_scheduled: int,
    cuts: Cuts | None,
    out: Tensor,
    factors: Factors,
    shape: ScanShape,
    tiling: ScanTiling,
) -> None:
    """Fill `out` for all tokens of rows, and in `states` each row's last and that at its cut."""
    heads, value = v.shape[1:]
    carry_kernel[(heads * triton.cdiv(value, tiling.tile), rows.slot.shape[0])](
        v=v,
        out=out,
        **factors._asdict(),
        states=states,
        block_table=rows.block_table,
        slot=rows.slot,
        cu_seqlens=rows.cu_seqlens,
        read_column=rows.read_column,
        read_offset=rows.read_offset,
        write_column=rows.write_column,
        cut=None if cuts is None else cuts.after,
        cut_column=None if cuts is None else cuts.column,
        chunks=factors.keys.shape[0],
        v_stride=HeadStrides(*v.stride()),
        state_stride=StateStrides(*states.stride()),
        table_stride=rows.block_table.stride(0),
        dot_type=FLOAT_TYPES[factors.keys.dtype],
        shape=shape,
        TRIPS=0 if v.is_cuda else triton.cdiv(max_scheduled, tiling.chunk),
        TILE=tiling.tile,
        num_warps=tiling.carry_warps,
        num_stages=tiling.carry_stages,
    )
