"""Routed experts: down(relu2(up(x))) or down(silu(gate(x)) * up(x)) of each token's experts,
weighted and summed.

Decode and verify are bound by reading the weights of the experts that some token has: each is read
once, by programs that take all of an expert's tokens as one block. In prefill an expert has several
blocks, one after another, which find its weights in the L2 cache.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from einops import rearrange, repeat
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait
from hybrid_runtime.kernels.common.types import operand_type
from hybrid_runtime.kernels.linear.quantize import E4M3, Quantizer, cut_off, quantize
from hybrid_runtime.kernels.moe.align_block_size import ExpertBlocks, align_block_size
from hybrid_runtime.kernels.moe.scaled_experts import ScaledExperts, between, scaled_moe_reference


def fused_moe_reference(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    up: Tensor | ScaledExperts,
    down: Tensor | ScaledExperts,
    gated: bool = False,
) -> Tensor:
    """Weighted sum over each token's experts of ``down[e] @ relu2(up[e] @ x)``, or if they are
    `gated` of ``down[e] @ (silu(gate[e] @ x) * (up[e] @ x))``.

    Args:
        x: [T, size].
        topk_weights: [T, top_k], usually fp32.
        topk_ids: integer [T, top_k], each 0 to num_experts - 1.
        up: [num_experts, intermediate, size] in x's dtype or, as down, in 8 bits; of gated experts
            [num_experts, 2 * intermediate, size], gate first.
        down: [num_experts, size, intermediate] in x's dtype or, as up, in 8 bits.

    Returns:
        [T, size] in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not go together.
    """
    _check(x, topk_weights, topk_ids, up, down, gated)
    if isinstance(up, ScaledExperts) and isinstance(down, ScaledExperts):
        return scaled_moe_reference(x, topk_weights, topk_ids, up, down, gated)
    assert isinstance(up, Tensor)
    assert isinstance(down, Tensor)
    num_experts, top_k = up.shape[0], topk_ids.shape[1]
    flat = topk_ids.flatten()
    if len(flat) <= num_experts:
        # So few that gathering their weights is cheaper than visiting every expert.
        lines = repeat(x, "token size -> (token top_k) size 1", top_k=top_k)
        inner = between(up.index_select(0, flat) @ lines, gated, 1)
        outputs = (down.index_select(0, flat) @ inner).squeeze(-1)
    else:
        sorted_token_ids = flat.argsort(stable=True)
        tokens = flat.bincount(minlength=num_experts).tolist()
        lines_of = x.index_select(0, sorted_token_ids // top_k).split(tokens)
        parts = [
            F.linear(between(F.linear(lines, up[expert]), gated), down[expert])
            for expert, lines in enumerate(lines_of)
            if lines.shape[0]
        ]
        outputs = x.new_empty((len(flat), x.shape[1]))
        outputs.index_copy_(0, sorted_token_ids, torch.cat(parts))
    outputs = rearrange(outputs, "(token top_k) size -> token top_k size", top_k=top_k)
    return (outputs * topk_weights[..., None]).sum(1).to(x.dtype)


def _check(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    up: Tensor | ScaledExperts,
    down: Tensor | ScaledExperts,
    gated: bool,
) -> None:
    (num_experts, outputs, size), dtype = _values(up).shape, x.dtype
    intermediate = outputs // 2 if gated else outputs
    if gated and outputs % 2:
        raise ValueError(f"up has {outputs} outputs, must be gate and up, as many of each")
    if x.dim() != 2 or x.shape[1] != size:
        raise ValueError(
            f"x is {tuple(x.shape)}, must be [T, {size}] for up {(num_experts, outputs, size)}"
        )
    if tuple(_values(down).shape) != (num_experts, size, intermediate):
        raise ValueError(
            f"down is {tuple(_values(down).shape)}, must be {(num_experts, size, intermediate)}"
        )
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(f"topk_ids is {tuple(topk_ids.shape)}, must be [{x.shape[0]}, top_k]")
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights is {tuple(topk_weights.shape)}, must have topk_ids' shape "
            f"{tuple(topk_ids.shape)}"
        )
    if isinstance(up, ScaledExperts) and isinstance(down, ScaledExperts):
        up.check("up", ())
        down.check("down", (num_experts,))
        dtype = E4M3
    if not dtype == _values(up).dtype == _values(down).dtype:
        raise ValueError(
            f"up is {_values(up).dtype} and down {_values(down).dtype}, must be x's {x.dtype}, or "
            f"both {E4M3} with scales"
        )


def _values(experts: Tensor | ScaledExperts) -> Tensor:
    return experts.values if isinstance(experts, ScaledExperts) else experts


class LineStrides(NamedTuple):
    """Strides of [tokens, dim]."""

    token: int
    dim: int


class WeightStrides(NamedTuple):
    """Strides of [num_experts, outputs, dim]."""

    expert: int
    output: int
    dim: int


class ScaleStrides(NamedTuple):
    """Strides of scales, [num_experts, lines], of which 0 stands for all alike."""

    expert: int
    line: int


@triton.jit(
    do_not_specialize=["num_blocks"],
    do_not_specialize_on_alignment=["sorted_token_ids", "blocks"],
)
def _fused_moe_kernel(
    x,
    weight,
    x_scale,
    weight_scale,
    out_scale,
    sorted_token_ids,
    blocks,
    out,
    num_blocks,
    x_stride,
    weight_stride,
    x_scale_stride,
    weight_scale_stride,
    dot_type: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    RELU2: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[id] = weight[expert of id] @ x[id // TOP_K] for each token id, then perhaps relu2; one
    program per BLOCK_N of the N outputs and block of token ids. GATED: of the N outputs the first
    half are gates of the others, which makes N / 2 of them; a tile has of both, in turns. With
    scales x and weight are in 8 bits, and with `out_scale`, of each expert's results, out is
    too."""
    pdl_wait(PDL, False)
    i_block = tl.program_id(1)
    i_expert = tl.load(blocks + i_block)
    if i_expert < 0:
        return
    o_m = tl.load(blocks + num_blocks + i_block) + tl.arange(0, BLOCK_M)
    m_m = o_m < tl.load(blocks + 2 * num_blocks + i_block)
    b_id = tl.load(sorted_token_ids + o_m, mask=m_m, other=0)
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_line = o_n
    if GATED:
        o_line = o_n // 2 + o_n % 2 * (N // 2)
    o_x = (b_id // TOP_K).to(tl.int64) * x_stride.token
    o_w = i_expert.to(tl.int64) * weight_stride.expert
    o_w += o_line.to(tl.int64) * weight_stride.output
    if weight_scale is None:
        b_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        b_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for i_k in range((K + BLOCK_K - 1) // BLOCK_K):
        o_k = i_k * BLOCK_K + tl.arange(0, BLOCK_K)
        m_x = m_m[:, None]
        if K % BLOCK_K != 0:
            m_x = m_x & (o_k < K)[None, :]
        b_x = tl.load(x + o_x[:, None] + o_k[None, :] * x_stride.dim, mask=m_x, other=0.0)
        # A constant where it is always true, so that it costs nothing.
        if (K % BLOCK_K == 0) & (N % BLOCK_N == 0):
            m_w = tl.full((BLOCK_N, BLOCK_K), True, tl.int1)
        elif K % BLOCK_K == 0:
            m_w = tl.broadcast_to((o_n < N)[:, None], (BLOCK_N, BLOCK_K))
        else:
            m_w = (o_n < N)[:, None] & (o_k < K)[None, :]
        p_w = weight + o_w[:, None] + o_k[None, :] * weight_stride.dim
        b_w = tl.load(p_w, mask=m_w, other=0.0)
        if weight_scale is None:
            b_x, b_w = b_x.to(dot_type), tl.trans(b_w.to(dot_type))
            b_acc = tl.dot(b_x, b_w, b_acc, input_precision="ieee")
        else:
            # Hopper's units take 64 lines of the first operand or more, and 8 of the second. Their
            # own sums have 14 bits: no more than a tile's are left to them.
            b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, max_num_imprecise_acc=BLOCK_K)
    if weight_scale is not None:
        o_scale = b_id // TOP_K * x_scale_stride.line + i_expert * x_scale_stride.expert
        b_x_scale = tl.load(x_scale + o_scale, mask=m_m, other=0.0)
        o_scale = o_line * weight_scale_stride.line + i_expert * weight_scale_stride.expert
        b_w_scale = tl.load(weight_scale + o_scale, mask=o_n < N, other=0.0)
        b_acc = tl.trans(b_acc) * b_x_scale[:, None] * b_w_scale[None, :]
    if RELU2:
        b_acc = tl.where(b_acc < 0, 0.0, b_acc)  # unlike a maximum, keeps NaN
        b_acc = b_acc * b_acc
    WIDTH: tl.constexpr = N // 2 if GATED else N
    if GATED:
        b_gate, b_acc = tl.split(tl.reshape(b_acc, (BLOCK_M, BLOCK_N // 2, 2)))
        b_acc = b_gate / (1 + tl.exp(-b_gate)) * b_acc
        o_n = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    if out_scale is not None:
        b_acc = cut_off(b_acc * tl.div_rn(1.0, tl.load(out_scale + i_expert)))
    p_out = out + b_id.to(tl.int64)[:, None] * WIDTH + o_n[None, :]
    tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=m_m[:, None] & (o_n < WIDTH)[None, :])


@triton.jit
def _moe_sum_kernel(
    outputs,
    topk_weights,
    out,
    weights_stride,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token] = sum over its experts of weight * output, always in the same order."""
    pdl_wait(PDL)
    i_token = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOP_K):
        p_weight = topk_weights + i_token * weights_stride.token + i * weights_stride.dim
        b_weight = tl.load(p_weight).to(tl.float32)
        p_output = outputs + (i_token * TOP_K + i) * SIZE + o_d
        b_sum += b_weight * tl.load(p_output, mask=o_d < SIZE, other=0.0)
    tl.store(out + i_token * SIZE + o_d, b_sum.to(out.dtype.element_ty), mask=o_d < SIZE)


class MoETiling(NamedTuple):
    """Launch shape of the two products.

    Attributes:
        block_m: token ids per program.
        block_n: outputs per program.
        block_k: inputs per trip of its loop.
        warps: per program.
        stages: tiles on their way from memory.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def moe_tiling(num_token_ids: int, num_experts: int, dtype: torch.dtype) -> MoETiling:
    """Launch shape by the token ids that an expert has on average. dtype: of the products'
    operands."""
    mean = num_token_ids / num_experts
    if dtype == E4M3:  # not measured yet: tiles of as many bytes as those of 16 bits
        if mean <= 8:
            return MoETiling(16, 64, 256, 4, 4)
        if mean <= 24:
            return MoETiling(32, 64, 256, 4, 4)
        if mean <= 80:
            return MoETiling(64, 128, 128, 4, 4)
        return MoETiling(128, 128, 128, 8, 3)
    if dtype == torch.float32:  # products without matrix units
        return MoETiling(16, 64, 32, 4, 3) if mean <= 12 else MoETiling(64, 64, 32, 4, 3)
    if mean <= 8:
        return MoETiling(16, 64, 128, 4, 4)
    if mean <= 24:
        return MoETiling(32, 64, 128, 4, 4)
    if mean <= 80:
        return MoETiling(64, 128, 64, 4, 4)
    return MoETiling(128, 128, 64, 8, 3)


def fused_moe(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    up: Tensor | ScaledExperts,
    down: Tensor | ScaledExperts,
    tiling: MoETiling | None = None,
    gated: bool = False,
) -> Tensor:
    """`fused_moe_reference` where Triton runs (and not in fp64) by four launches, none of which
    the host waits for: token ids into blocks, the two products, the sum. In 8 bits one more
    quantises x, and another the values between the products unless their scale is known.

    Values between the products have x's dtype, or 8 bits; the experts' outputs are summed in fp32.
    The same token gives the same bytes whatever the order of the token ids in a block.

    Args:
        tiling: launch shape; None = `moe_tiling`.

    Raises:
        ValueError: as the reference.
    """
    if not runs_triton(x) or x.dtype == torch.float64:
        return fused_moe_reference(x, topk_weights, topk_ids, up, down, gated)
    _check(x, topk_weights, topk_ids, up, down, gated)
    (tokens, size), (num_experts, _, intermediate) = x.shape, _values(down).shape
    top_k = topk_ids.shape[1]
    num_token_ids = tokens * top_k
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    if num_token_ids == 0:
        return out.zero_()
    if tiling is None:
        tiling = moe_tiling(num_token_ids, num_experts, _values(up).dtype)
    aligned = align_block_size(topk_ids, num_experts, tiling.block_m)
    x_scale = inner_scale = None
    if isinstance(up, ScaledExperts):
        x, x_scale = quantize(x, Quantizer(up.input_scale))
    if isinstance(down, ScaledExperts):
        inner_scale = down.input_scale
    inner_type = out.dtype if inner_scale is None else E4M3
    inner = torch.empty((num_token_ids, intermediate), dtype=inner_type, device=x.device)
    _grouped_product(
        x, x_scale, up, aligned, inner, inner_scale, tiling, top_k, "swiglu" if gated else "relu2"
    )
    if inner_scale is not None:
        inner_scale = inner_scale[:, None]
    elif isinstance(down, ScaledExperts):
        inner, inner_scale = quantize(inner, Quantizer())
    # Not before: memory peaks here, and of lines that were quantised the 16 bits are gone by now.
    outputs = torch.empty((num_token_ids, size), dtype=torch.float32, device=x.device)
    _grouped_product(inner, inner_scale, down, aligned, outputs, None, tiling, 1)
    block = min(triton.next_power_of_2(size), 512)
    _moe_sum_kernel[(tokens, triton.cdiv(size, block))](
        outputs=outputs,
        topk_weights=topk_weights,
        out=out,
        weights_stride=LineStrides(*topk_weights.stride()),
        SIZE=size,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=max(block // 128, 1),
        **pdl(x),
    )
    return out


def _grouped_product(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor | ScaledExperts,
    aligned: ExpertBlocks,
    out: Tensor,
    out_scale: Tensor | None,
    tiling: MoETiling,
    top_k: int,
    activation: Literal["relu2", "swiglu"] | None = None,
) -> None:
    """out [token ids, N]: line ``id // top_k`` of x times the weight of the token id's expert, then
    perhaps an activation, of which swiglu leaves N / 2.
    x_scale: [], [lines] or [num_experts, 1]. out_scale: [num_experts], of out in 8 bits."""
    values, weight_scale = _values(weight), None
    num_blocks, (num_experts, n, size) = aligned.blocks.shape[1], values.shape
    if isinstance(weight, ScaledExperts) and x_scale is not None:
        x_scale = x_scale.expand(num_experts, len(x))
        weight_scale = weight.scale.view(num_experts, -1).expand(num_experts, n)
    # Blocks of an expert follow each other, so that the later ones find its weight in the L2 cache.
    _fused_moe_kernel[(triton.cdiv(n, tiling.block_n), num_blocks)](
        x=x,
        weight=values,
        x_scale=x_scale,
        weight_scale=weight_scale,
        out_scale=out_scale,
        sorted_token_ids=aligned.sorted_token_ids,
        blocks=aligned.blocks,
        out=out,
        num_blocks=num_blocks,
        x_stride=LineStrides(*x.stride()),
        weight_stride=WeightStrides(*values.stride()),
        x_scale_stride=None if x_scale is None else ScaleStrides(*x_scale.stride()),
        weight_scale_stride=None if weight_scale is None else ScaleStrides(*weight_scale.stride()),
        dot_type=None if weight_scale is not None else operand_type(x.dtype, x),
        N=n,
        K=size,
        TOP_K=top_k,
        RELU2=activation == "relu2",
        GATED=activation == "swiglu",
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **pdl(x),
    )
