"""The most likely token of each line of hidden states, by an output head that is read in 8 bits.

A draft is the index of the largest logit, and finding it reads the whole output weight. A copy in 8
bits (e4m3, one scale per token) is half the bytes. The product with the copy only proposes a few
tokens; these are scored by the weight itself, so the draft is the same.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait

FORMAT = torch.float8_e4m3fn
LARGEST = 448.0
"""Of an e4m3 number."""
SMALLEST = 2.0**-100
"""Lines of numbers below are rounded as if this were among them: what they would have to be
multiplied by is infinite for the smallest, which tokens that training never met may have."""
PART = 128
"""Neighbouring tokens of which the two best are proposed. One is not enough: the best token of all
may have a neighbour that only looks better in 8 bits."""
CANDIDATES = 8
"""Proposed tokens that are scored in full."""
_FEWEST = CANDIDATES * PART
"""Tokens; with fewer there are too few parts to propose from."""
_ALIGNED = 16
"""Bytes that are moved at once. Lines of other lengths would be slower to read than the weight."""
_AT_ONCE = 1024
"""Tokens that are rounded at a time: no temporary of the weight's size."""

_LOWEST = tl.constexpr(-(2**31))
_HIGHEST = tl.constexpr(2**31 - 1)
_PART = tl.constexpr(PART)
_LARGEST = tl.constexpr(LARGEST)
_SMALLEST = tl.constexpr(SMALLEST)


class NarrowHead(NamedTuple):
    """An output weight, and its copy in 8 bits.

    weight: float16 or bfloat16 `[V, hidden_size]`, contiguous.
    values: e4m3 `[V, hidden_size]`.
    scale: float32 `[V]`; a token's weights are about its values times this.
    """

    weight: Tensor
    values: Tensor
    scale: Tensor


def can_narrow(weight: Tensor, device: torch.device) -> bool:
    """Whether there is a narrow head of `weight` once it is on that device."""
    if weight.dtype.itemsize != 2 or not weight.is_contiguous() or len(weight) < _FEWEST:
        return False
    if weight.shape[1] % _ALIGNED:
        return False
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    # Where there is no GPU, plans are made for one elsewhere.
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 9)


def narrow_bytes(weight: Tensor) -> int:
    """Of the copy."""
    return weight.numel() * FORMAT.itemsize + len(weight) * torch.float32.itemsize


def narrow(weight: Tensor) -> NarrowHead:
    """`weight` with its copy in 8 bits."""
    values = torch.empty(weight.shape, dtype=FORMAT, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        values[rows], scale[rows] = _rounded(weight[rows])
    return NarrowHead(weight, values, scale)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each line of x in e4m3, and its scale float32 `[lines]`."""
    x = x.float()
    factor = LARGEST / x.abs().amax(-1).clamp(min=SMALLEST)
    return (x * factor[:, None]).to(FORMAT), 1 / factor


def narrow_argmax_reference(hidden: Tensor, head: NarrowHead, out: Tensor) -> Tensor:
    """Index of the largest logit of each line, as far as 8 bits propose it; the lowest at ties.

    Args:
        hidden: `[lines, hidden_size]` in the weight's dtype, to which logits are rounded too.
        head: the output weight.
        out: int32 `[lines]`, any stride; written and returned. A line of NaN gets any token.
    """
    weight, values, scale = head
    lines, vocabulary = hidden.shape[0], weight.shape[0]
    logits = _rounded(hidden)[0].float() @ values.float().T * scale
    logits = logits.nan_to_num(nan=float("-inf"))
    parts = -(-vocabulary // PART)
    padded = logits.new_full((lines, parts * PART), float("-inf"))
    padded[:, :vocabulary] = logits
    best = padded.view(lines, parts, PART).topk(2)
    token = best.indices + torch.arange(parts, device=hidden.device)[:, None] * PART
    place = best.values.flatten(1).topk(min(CANDIDATES, 2 * parts)).indices
    token = token.flatten(1).gather(1, place).clamp(max=vocabulary - 1)
    score = torch.einsum("lh,lch->lc", hidden.float(), weight[token].float()).to(weight.dtype)
    score = score.nan_to_num(nan=float("-inf"))
    best_of = score == score.amax(-1, keepdim=True)
    out.copy_(torch.where(best_of, token, vocabulary).amin(-1))
    return out


@triton.jit
def _round_kernel(hidden, values, stride, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Hidden states in e4m3, one program per line. Its scale is not needed: it is the same for all
    tokens."""
    pdl_wait(PDL)
    i_line = tl.program_id(0)
    o_h = tl.arange(0, BLOCK)
    b_x = tl.load(hidden + i_line.to(tl.int64) * stride + o_h, mask=o_h < H, other=0.0)
    b_x = b_x.to(tl.float32)
    b_x *= _LARGEST / tl.maximum(tl.max(tl.abs(b_x), axis=0), _SMALLEST)
    tl.store(values + i_line * H + o_h, b_x.to(values.dtype.element_ty), mask=o_h < H)


@triton.jit
def _ordered(x):
    """int32 in the order of float32 x."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["lines"])
def _propose_kernel(
    hidden,
    values,
    scale,
    keys,
    lines,
    V: tl.constexpr,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """The two best tokens of a part, by 8 bits; one program per BLOCK_M lines and part. Programs of
    the same part are neighbours, so that its tokens are read once.

    A key orders tokens by their logit; its low bits say which one of its part it is.
    """
    pdl_wait(PDL, RELEASE=False)
    i_part = tl.program_id(1)
    o_v = tl.arange(0, _PART)
    m_v = o_v < V - i_part * _PART
    o_row = tl.where(m_v, o_v, 0)
    o_line = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_line = o_line < lines
    o_k = tl.arange(0, BLOCK_K)
    p_w = values + i_part.to(tl.int64) * _PART * H + o_row[:, None] * H + o_k[None, :]
    p_x = hidden + o_line[None, :] * H + o_k[:, None]
    b_sum = tl.zeros((_PART, BLOCK_M), tl.float32)
    for i_k in range((H + BLOCK_K - 1) // BLOCK_K):
        if H % BLOCK_K == 0:
            b_w = tl.load(p_w)
            b_x = tl.load(p_x, mask=m_line[None, :], other=0.0)
        else:
            m_k = o_k < H - i_k * BLOCK_K
            b_w = tl.load(p_w, mask=m_k[None, :], other=0.0)
            b_x = tl.load(p_x, mask=m_line[None, :] & m_k[:, None], other=0.0)
        # The tensor cores' sums have fewer bits than float32, but enough to propose by.
        b_sum = tl.dot(b_w, b_x, b_sum)
        p_w += BLOCK_K
        p_x += BLOCK_K
    b_sum *= tl.load(scale + i_part * _PART + o_row)[:, None]

    b_key = (_ordered(b_sum) & ~(_PART - 1)) | (~o_v & (_PART - 1))[:, None]
    b_key = tl.where(m_v[:, None], b_key, _LOWEST)
    b_first = tl.max(b_key, axis=0)
    b_second = tl.max(tl.where(b_key == b_first[None, :], _LOWEST, b_key), axis=0)
    p_key = keys + o_line * (2 * PARTS) + i_part
    tl.store(p_key, b_first, mask=m_line)
    tl.store(p_key + PARTS, b_second, mask=m_line)


@triton.jit(do_not_specialize_on_alignment=["out"])
def _best_kernel(
    hidden,
    weight,
    keys,
    out,
    stride,
    out_stride,
    V: tl.constexpr,
    H: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best of the tokens with the largest keys, by full logits; one program per line.

    Whatever a key says, a valid token is scored: with few parts, some of them twice.
    """
    pdl_wait(PDL)
    i_line = tl.program_id(0)
    o_key = tl.arange(0, WIDTH)
    b_key = tl.load(keys + i_line * (2 * PARTS) + o_key, mask=o_key < 2 * PARTS, other=_LOWEST)
    b_key = (b_key.to(tl.int64) << 32) | (~o_key & _HIGHEST)
    o_c = tl.arange(0, CANDIDATES)
    b_token = tl.zeros((CANDIDATES,), tl.int32)
    for i_c in tl.static_range(CANDIDATES):
        top = tl.max(b_key, axis=0)
        part = (~top & _HIGHEST).to(tl.int32) % PARTS
        token = part * _PART + (~(top >> 32) & (_PART - 1)).to(tl.int32)
        b_token = tl.where(o_c == i_c, tl.minimum(token, V - 1), b_token)
        b_key = tl.where(b_key == top, -(2**63), b_key)

    o_k = tl.arange(0, BLOCK_K)
    p_x = hidden + i_line.to(tl.int64) * stride
    p_w = weight + b_token.to(tl.int64)[:, None] * H
    b_sum = tl.zeros((CANDIDATES, BLOCK_K), tl.float32)
    for i_k in tl.static_range((H + BLOCK_K - 1) // BLOCK_K):
        o_h = i_k * BLOCK_K + o_k
        b_x = tl.load(p_x + o_h, mask=o_h < H, other=0.0).to(tl.float32)
        b_w = tl.load(p_w + o_h[None, :], mask=o_h[None, :] < H, other=0.0).to(tl.float32)
        b_sum += b_w * b_x[None, :]
    b_score = tl.sum(b_sum, axis=1).to(weight.dtype.element_ty).to(tl.float32)
    # NaN is neither the largest nor equal to it.
    best = tl.max(b_score, axis=0)
    tl.store(out + i_line * out_stride, tl.min(tl.where(b_score == best, b_token, V - 1), axis=0))


class HeadTiling(NamedTuple):
    """Launch shape of the product: lines and hidden channels of a tile, warps, pipeline stages."""

    block_m: int
    block_k: int = 128
    warps: int = 4
    stages: int = 3


def head_tiling(lines: int) -> HeadTiling:
    """The launch shape for so many lines."""
    return HeadTiling(min(max(triton.next_power_of_2(lines), 16), 128))


def proposals(hidden: Tensor, head: NarrowHead, tiling: HeadTiling | None = None) -> Tensor:
    """Keys of the two best tokens of each part, int32 `[lines, 2 * parts]`, by two launches."""
    lines, size = hidden.shape
    vocabulary, tiling = head.values.shape[0], tiling or head_tiling(lines)
    parts = triton.cdiv(vocabulary, PART)
    rounded = torch.empty((lines, size), dtype=FORMAT, device=hidden.device)
    keys = torch.empty((lines, 2 * parts), dtype=torch.int32, device=hidden.device)
    _round_kernel[(lines,)](
        hidden=hidden,
        values=rounded,
        stride=hidden.stride(0),
        H=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8,
        **pdl(hidden),
    )
    _propose_kernel[(triton.cdiv(lines, tiling.block_m), parts)](
        hidden=rounded,
        values=head.values,
        scale=head.scale,
        keys=keys,
        lines=lines,
        V=vocabulary,
        H=size,
        PARTS=parts,
        BLOCK_M=tiling.block_m,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **pdl(hidden),
    )
    return keys


def narrow_argmax(hidden: Tensor, head: NarrowHead, out: Tensor) -> Tensor:
    """`narrow_argmax_reference` by three launches where Triton runs."""
    if not runs_triton(hidden):
        return narrow_argmax_reference(hidden, head, out)
    lines, size = hidden.shape
    if not lines:
        return out
    keys = proposals(hidden, head)
    _best_kernel[(lines,)](
        hidden=hidden,
        weight=head.weight,
        keys=keys,
        out=out,
        stride=hidden.stride(0),
        out_stride=out.stride(0),
        V=head.weight.shape[0],
        H=size,
        PARTS=keys.shape[1] // 2,
        WIDTH=triton.next_power_of_2(keys.shape[1]),
        CANDIDATES=CANDIDATES,
        BLOCK_K=1024,
        num_warps=8,
        **pdl(hidden),
    )
    return out
