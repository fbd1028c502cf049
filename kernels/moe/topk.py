"""Each token's experts, chosen by a router's logits."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from einops import rearrange
from torch import Tensor
from triton.language.extra import libdevice

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait

MAX_EXPERTS = 1024
MAX_TOP_K = 32
"""What the kernel holds in registers; larger routers go to the reference."""


def topk_reference(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Grouped sigmoid top-k (DeepSeek-V3 report, section 2.1.2).

    Experts are chosen by sigmoid score plus bias: first the `topk_group` groups whose two best
    experts sum highest, then the best `top_k` experts in them, best first. Of equal ones the lowest
    index comes first (torch.topk promises no order). Weights are the scores without the bias.

    Args:
        logits: [T, experts].
        bias: [experts].
        top_k: experts per token.
        num_expert_group: groups of equal size that the experts are divided into.
        topk_group: groups that a token's experts may come from.
        renormalize: divide each token's weights by their sum.
        routed_scaling_factor: factor of the weights.

    Returns:
        topk_weights [T, top_k] in fp32 (fp64 for fp64), topk_ids int64 [T, top_k].

    Raises:
        ValueError: groups that do not divide the experts, or fewer candidates than top_k.
    """
    _check(logits, bias, top_k, num_expert_group, topk_group)
    fine = logits.dtype in (torch.float32, torch.float64)
    scores = (logits if fine else logits.float()).sigmoid()
    choice = scores + bias
    if topk_group < num_expert_group:
        grouped = rearrange(choice, "token (group e) -> token group e", group=num_expert_group)
        best = _best(grouped.topk(2, dim=-1)[0].sum(-1), topk_group)
        kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=choice.device)
        grouped = grouped.masked_fill(~kept.scatter(1, best, True)[..., None], float("-inf"))
        choice = rearrange(grouped, "token group e -> token (group e)")
    topk_ids = _best(choice, top_k)
    topk_weights = scores.gather(-1, topk_ids)
    if renormalize:
        topk_weights = topk_weights / (topk_weights.sum(-1, keepdim=True) + 1e-20)
    return topk_weights * routed_scaling_factor, topk_ids


def softmax_topk_reference(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of the highest logits, best first, with their softmax over all experts as
    weights.

    Args:
        logits: [T, experts].
        top_k: experts per token.
        renormalize: divide each token's weights by their sum.

    Returns:
        As of `topk_reference`.

    Raises:
        ValueError: fewer experts than top_k.
    """
    _check(logits, None, top_k, 1, 1)
    fine = logits.dtype in (torch.float32, torch.float64)
    scores = (logits if fine else logits.float()).softmax(-1)
    topk_ids = _best(logits, top_k)
    topk_weights = scores.gather(-1, topk_ids)
    if renormalize:
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
    return topk_weights, topk_ids


def _best(values: Tensor, count: int) -> Tensor:
    if values.is_cpu and values.numel() > 1024:
        # Several times faster than a sort, and as good where no two of the best are equal.
        best, index = values.topk(min(count + 1, values.shape[-1]), dim=-1)
        if not (best[..., 1:] == best[..., :-1]).any():
            return index[..., :count]
    return values.sort(dim=-1, descending=True, stable=True)[1][..., :count]


def _check(
    logits: Tensor, bias: Tensor | None, top_k: int, num_expert_group: int, topk_group: int
) -> None:
    experts = logits.shape[-1]
    if logits.dim() != 2 or (bias is not None and bias.shape != (experts,)):
        raise ValueError(
            f"logits is {tuple(logits.shape)} and bias {None if bias is None else [*bias.shape]}, "
            "must be [T, experts] and [experts]"
        )
    if num_expert_group < 1 or experts % num_expert_group:
        raise ValueError(f"num_expert_group is {num_expert_group}, must divide {experts} experts")
    if not 1 <= topk_group <= num_expert_group:
        raise ValueError(
            f"topk_group is {topk_group}, must be 1 to num_expert_group ({num_expert_group})"
        )
    if topk_group < num_expert_group and experts < 2 * num_expert_group:
        raise ValueError(
            f"num_expert_group is {num_expert_group}, must leave 2 of {experts} experts or more "
            "per group"
        )
    if not 1 <= top_k <= experts // num_expert_group * topk_group:
        raise ValueError(
            f"top_k is {top_k}, must be 1 to {experts // num_expert_group * topk_group}, the "
            f"experts in {topk_group} of {num_expert_group} groups"
        )


@triton.jit
def _sigmoid(v, PRECISE: tl.constexpr):
    if PRECISE:  # to the bit what torch computes on a GPU; tl.exp is coarser
        e = libdevice.exp(-v)
    else:
        e = tl.exp(-v)
    return tl.div_rn(1.0, 1.0 + e)


@triton.jit
def _topk_kernel(
    logits,
    bias,
    topk_weights,
    topk_ids,
    scale,
    logits_stride,
    bias_stride,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PRECISE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token. Position g * BLOCK_E + e is expert e of group g. SOFTMAX: scores are
    those of `softmax_topk`, and there is no bias."""
    pdl_wait(PDL)
    GROUP_SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    i_token = tl.program_id(0).to(tl.int64)
    o_pos = tl.arange(0, BLOCK_G * BLOCK_E)
    o_group = o_pos // BLOCK_E
    o_expert = o_group * GROUP_SIZE + o_pos % BLOCK_E
    m_pos = (o_group < NUM_GROUPS) & (o_pos % BLOCK_E < GROUP_SIZE)
    p_logits = logits + i_token * logits_stride.token
    p_logit = p_logits + o_expert * logits_stride.expert
    b_logit = tl.load(p_logit, mask=m_pos, other=0.0).to(tl.float32)
    if SOFTMAX:
        b_choice = tl.where(m_pos, b_logit, float("-inf"))
        highest = tl.max(b_choice, axis=0)
        total = tl.sum(tl.exp(b_choice - highest), axis=0)
    else:
        b_choice = tl.load(bias + o_expert * bias_stride, mask=m_pos, other=0.0).to(tl.float32)
        b_choice = tl.where(m_pos, _sigmoid(b_logit, PRECISE) + b_choice, float("-inf"))

    if TOPK_GROUP < NUM_GROUPS:
        b_table = tl.reshape(b_choice, (BLOCK_G, BLOCK_E))
        o_g = tl.arange(0, BLOCK_G)
        o_e = tl.arange(0, BLOCK_E)
        b_best = tl.max(b_table, axis=1)
        m_rest = o_e[None, :] != tl.argmax(b_table, axis=1)[:, None]
        b_value = b_best + tl.max(tl.where(m_rest, b_table, float("-inf")), axis=1)
        b_value = tl.where(o_g < NUM_GROUPS, b_value, float("-inf"))
        m_kept = o_g < 0
        for _ in tl.static_range(TOPK_GROUP):
            m_taken = o_g == tl.argmax(b_value, axis=0)
            m_kept = m_kept | m_taken
            b_value = tl.where(m_taken, float("-inf"), b_value)
        b_table = tl.where(m_kept[:, None], b_table, float("-inf"))
        b_choice = tl.reshape(b_table, (BLOCK_G * BLOCK_E,))

    o_k = tl.arange(0, BLOCK_K)
    b_id = tl.zeros((BLOCK_K,), tl.int32)
    for i in range(TOP_K):
        best = tl.argmax(b_choice, axis=0)
        # NaN (a padded row's) compares with nothing: any expert will do, but it must be one.
        expert = tl.minimum(best // BLOCK_E * GROUP_SIZE + best % BLOCK_E, NUM_EXPERTS - 1)
        b_id = tl.where(o_k == i, expert, b_id)
        b_choice = tl.where(o_pos == best, float("-inf"), b_choice)

    m_k = o_k < TOP_K
    p_logit = p_logits + b_id * logits_stride.expert
    b_logit = tl.load(p_logit, mask=m_k, other=0.0).to(tl.float32)
    if SOFTMAX:
        b_weight = tl.where(m_k, tl.exp(b_logit - highest) / total, 0.0)
    else:
        b_weight = tl.where(m_k, _sigmoid(b_logit, PRECISE), 0.0)
    if RENORMALIZE:
        b_weight = tl.div_rn(b_weight, tl.sum(b_weight, axis=0) + 1e-20)
    tl.store(topk_weights + i_token * TOP_K + o_k, b_weight * scale, mask=m_k)
    tl.store(topk_ids + i_token * TOP_K + o_k, b_id.to(tl.int64), mask=m_k)


class LogitsStrides(NamedTuple):
    """Strides of [tokens, experts]."""

    token: int
    expert: int


def topk(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """`topk_reference` by one launch where Triton runs (and not in fp64).

    Routers of more than `MAX_EXPERTS` experts or `MAX_TOP_K` choices go to the reference. A token
    with NaN among its logits gets experts that exist, perhaps one twice.

    Raises:
        ValueError: as the reference.
    """
    fine = torch.float64 in (logits.dtype, bias.dtype)
    if not runs_triton(logits) or fine or top_k > MAX_TOP_K or logits.shape[-1] > MAX_EXPERTS:
        return topk_reference(
            logits, bias, top_k, num_expert_group, topk_group, renormalize, routed_scaling_factor
        )
    _check(logits, bias, top_k, num_expert_group, topk_group)
    if topk_group == num_expert_group:
        num_expert_group = topk_group = 1
    return _launch(
        logits, bias, top_k, num_expert_group, topk_group, renormalize, routed_scaling_factor
    )


def softmax_topk(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """`softmax_topk_reference` by one launch, with the exceptions and errors of `topk`."""
    fine = logits.dtype == torch.float64
    if not runs_triton(logits) or fine or top_k > MAX_TOP_K or logits.shape[-1] > MAX_EXPERTS:
        return softmax_topk_reference(logits, top_k, renormalize)
    _check(logits, None, top_k, 1, 1)
    return _launch(logits, None, top_k, 1, 1, renormalize, 1.0)


def _launch(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Arguments as of `topk_reference`; without bias the scores are softmax."""
    tokens, num_experts = logits.shape
    topk_weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    topk_ids = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    block_g = triton.next_power_of_2(num_expert_group)
    block_e = triton.next_power_of_2(num_experts // num_expert_group)
    if tokens:
        _topk_kernel[(tokens,)](
            logits=logits,
            bias=bias,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            scale=float(routed_scaling_factor),
            logits_stride=LogitsStrides(*logits.stride()),
            bias_stride=0 if bias is None else bias.stride(0),
            NUM_EXPERTS=num_experts,
            NUM_GROUPS=num_expert_group,
            TOPK_GROUP=topk_group,
            TOP_K=top_k,
            SOFTMAX=bias is None,
            RENORMALIZE=renormalize,
            PRECISE=logits.is_cuda,
            BLOCK_G=block_g,
            BLOCK_E=block_e,
            BLOCK_K=triton.next_power_of_2(top_k),
            # Few warps: each choice is a reduction, and across warps that means a barrier.
            num_warps=2 if block_g * block_e > 256 else 1,
            **pdl(logits),
        )
    return topk_weights, topk_ids
