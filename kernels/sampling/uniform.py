"""Random numbers that depend on their key alone: the same on every device and in every batch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton


def _signed(x: int) -> int:
    # torch refuses a Python integer that does not fit into int64; its own arithmetic wraps.
    return (x + 2**63) % 2**64 - 2**63


GAMMA = _signed(0x9E3779B97F4A7C15)
MIX_1 = _signed(0xBF58476D1CE4E5B9)
MIX_2 = _signed(0x94D049BB133111EB)


def uniform_reference(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """Output number `position` of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
    number generators", OOPSLA 2014; constants of the public-domain version by Vigna), whose start
    state is itself mixed from `seed` and `stream`; its 24 highest bits are the fraction.

    Args:
        seed: int64 `[rows]`.
        position: int64 `[rows, ...]`, which number of the row's sequence.
        stream: what the numbers are for; different streams of a seed are independent.

    Returns:
        float32 like `position`, multiples of 2**-24 in [0, 1).
    """
    start = _mix(_mix(seed + GAMMA) + stream_start(stream))
    start = start.reshape(-1, *[1] * (position.dim() - 1))
    return _shift_right(_mix(start + (position + 1) * GAMMA), 40).to(torch.float32) * 2.0**-24


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # int64 >> is arithmetic; the published function shifts zeros in.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


_GAMMA = tl.constexpr(GAMMA)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)


@triton.jit
def _mixed(x):
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def draw_uniform(seed, position, START: tl.constexpr):
    """One number per element of `seed` and `position`, int64 both; START as of `stream_start`."""
    b_key = _mixed(_mixed(seed + _GAMMA) + START)
    b_bits = _mixed(b_key + (position + 1) * _GAMMA)
    return ((b_bits >> 40) & 0xFFFFFF).to(tl.float32) * (2.0**-24)


def stream_start(stream: int) -> int:
    """Where the numbers of a stream start, as kernels take it."""
    return _signed(GAMMA * (stream + 1))


@triton.jit(do_not_specialize=["count", "width"])
def _uniform_kernel(
    seed,
    position,
    out,
    count,
    width,
    START: tl.constexpr,
    TILE: tl.constexpr,
):
    """`count` numbers, `width` per row, TILE per program."""
    o_i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_i = o_i < count
    b_seed = tl.load(seed + o_i // width, mask=m_i, other=0)
    b_position = tl.load(position + o_i, mask=m_i, other=0).to(tl.int64)
    tl.store(out + o_i, draw_uniform(b_seed, b_position, START), mask=m_i)


TILE = 128
"""Numbers per program."""


def uniform(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """`uniform_reference` by one launch where Triton runs."""
    if not runs_triton(seed) or not position.numel():
        return uniform_reference(seed, position, stream)
    out = torch.empty(position.shape, dtype=torch.float32, device=position.device)
    count = position.numel()
    _uniform_kernel[(triton.cdiv(count, TILE),)](
        seed=seed.contiguous(),
        position=position.contiguous(),
        out=out,
        count=count,
        width=count // position.shape[0],
        START=stream_start(stream),
        TILE=TILE,
        num_warps=4,
    )
    return out
