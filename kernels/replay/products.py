"""Matrix products of replaying state updates: operands, and how tiles become operands.

A program is one warp. The columns of a state's part are renamed such that a lane holds 16 bytes of
memory both as operand and as result: states pass from memory to the products and back without an
exchange between lanes.
"""

# mypy: disable-error-code="assignment,var-annotated"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rename(part):
    """Columns (t, j, e) of 4 x COLUMNS / 8 x 2 as (j, t, e)."""
    high: tl.constexpr = part.shape[0]
    wide: tl.constexpr = part.shape[1]
    return part.reshape(high, 4, wide // 8, 2).permute(0, 2, 1, 3).reshape(high, wide)


@triton.jit
def name_back(part):
    """Undo `rename`."""
    high: tl.constexpr = part.shape[0]
    wide: tl.constexpr = part.shape[1]
    return part.reshape(high, wide // 8, 4, 2).permute(0, 2, 1, 3).reshape(high, wide)


@triton.jit
def load_apart(address, mask):
    """A tile, loaded in a shape that no tile of states has: loads of one shape all get one
    layout, that of the narrowest element, by which fp32 states would come in half sectors."""
    high: tl.constexpr = address.shape[0]
    wide: tl.constexpr = address.shape[1]
    return tl.load(address[None], mask=mask[None], other=0.0).reshape(high, wide)


@triton.jit
def store_apart(address, tile, mask):
    """The counterpart of `load_apart`."""
    tl.store(address[None], tile[None], mask=mask[None])


@triton.jit
def product(a, b, c, dot_type: tl.constexpr):
    """a b + c in fp32: operands of 16 bits in matrix units, of fp32 by multiply-adds."""
    if dot_type == tl.float32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    else:
        return tl.dot(a, b, c)


@triton.jit
def split(a, COUNT: tl.constexpr, dot_type: tl.constexpr):
    """Operands that add up to `a` in fp32. Two bfloat16 leave 2**-17 of it, three nothing."""
    parts = ()
    if dot_type == tl.float32:
        parts += (a,)
    else:
        for _ in tl.static_range(COUNT - 1):
            bits = a.to(tl.int32, bitcast=True)
            parts += ((bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),)
            a -= (bits & -65536).to(tl.float32, bitcast=True)
        parts += (a.to(tl.bfloat16),)
    return parts


@triton.jit
def into_range(Cs, most):
    """C as fp16 by a power of two per token, which brings it where fp16 is exact, and what undoes
    it. Cs: parts `[PART, QUERIES]`; most: largest absolute values `[QUERIES]`."""
    power = most.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(power, 15 << 23)
    scale = (0x7F000000 - power + (14 << 23)).to(tl.float32, bitcast=True)
    unit = (power - (14 << 23)).to(tl.float32, bitcast=True)
    scaled = ()
    for s in tl.static_range(len(Cs)):
        scaled += ((Cs[s].to(tl.float32) * scale[None, :]).to(tl.float16),)
    return scaled, unit
