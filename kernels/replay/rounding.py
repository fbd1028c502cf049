"""Stochastic rounding of states narrower than fp32: the rule in torch, and the same in Triton.

A number goes up or down to a neighbour such that its expected value is the number itself. Which way
is a hash of the request's seed, the layer, the position and the element of the state: equal keys
give equal bytes, whatever slot, row or batch the request is in.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Rounding(NamedTuple):
    """By what states are rounded stochastically, besides the position (`ReplayPositions.certain`).

    seed: int32 `[slots]`, of the request in each slot.
    layer: index among the layers with states.
    """

    seed: Tensor
    layer: int


class LastPlace(NamedTuple):
    """Turns the power of two of an fp32 number into its last place in a narrower dtype.

    digits: how much lower it is, in bits of fp32's exponent.
    least: the lowest that it may be, as bits of fp32.
    """

    digits: int
    least: int


LAST_PLACE = {
    torch.float16: LastPlace(10 << 23, 103 << 23),  # least: 2**-24
    torch.bfloat16: LastPlace(7 << 23, 1 << 23),  # least: fp32's normal numbers
}
"""The dtypes that are rounded stochastically; wider ones are always rounded to nearest."""


@functools.cache
def last_place(dtype: torch.dtype) -> LastPlace:
    """`LAST_PLACE[dtype]` as constexprs for a kernel."""
    return LastPlace(*(tl.constexpr(bits) for bits in LAST_PLACE[dtype]))


def rounding_key_reference(seed: Tensor, layer: int, position: Tensor) -> Tensor:
    """int64 `[rows]` in 0 .. 2**32 - 1.

    seed: int32 `[rows]`. position: int32 `[rows]`, tokens in the state.
    """
    seed, position = seed.long() & _BITS_32, position.long() & _BITS_32
    return _hash_reference(_hash_reference(_hash_reference(seed) ^ layer) ^ position)


def round_state_reference(state: Tensor, dtype: torch.dtype, key: Tensor | None) -> Tensor:
    """States `[rows, H, P, N]` in `dtype`; without a key, or in 32 bits and more, to nearest."""
    if key is None or dtype not in LAST_PLACE:
        return state.to(dtype)
    element = torch.arange(math.prod(state.shape[1:]), device=state.device).view(state.shape[1:])
    chance = (_hash_reference(element ^ key[:, None, None, None]) >> 8).float() * 2.0**-24
    place = LAST_PLACE[dtype]
    power = state.float().view(torch.int32) & 0x7F800000
    unit = (power - place.digits).clamp(min=place.least)
    inverse = (254 << 23) - unit
    count = torch.floor(state.float().abs() * inverse.view(torch.float32) + chance)
    rounded = count * unit.view(torch.float32)
    return torch.where(state < 0, -rounded, rounded).to(dtype)


def _hash_reference(bits: Tensor) -> Tensor:
    """A hash of 32 bits (Wellons, "lowbias32"), in int64."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D & _BITS_32
    bits = (bits ^ (bits >> 15)) * 0x846CA68B & _BITS_32
    return bits ^ (bits >> 16)


_BITS_32 = 0xFFFFFFFF


@triton.jit
def _hash(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def rounding_key(seed, layer, position):
    """`rounding_key_reference` of one row, uint32."""
    bits = _hash(seed.to(tl.uint32, bitcast=True)) ^ layer.to(tl.uint32)
    return _hash(_hash(bits) ^ position.to(tl.uint32, bitcast=True))


@triton.jit
def round_state(h, element, key, place):
    """fp32 numbers that the narrower dtype has, exactly.

    element: their indices in the row's state. place: `LastPlace` of the dtype, as constexprs.
    """
    chance = (_hash(element.to(tl.uint32) ^ key) >> 8).to(tl.float32) * (1 / (1 << 24))
    power = h.to(tl.int32, bitcast=True) & 0x7F800000
    unit = tl.maximum(power - place.digits, place.least)
    inverse = (0x7F000000 - unit).to(tl.float32, bitcast=True)
    rounded = tl.floor(tl.abs(h) * inverse + chance) * unit.to(tl.float32, bitcast=True)
    return tl.where(h < 0, -rounded, rounded)
