"""The choice of experts from a router's logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
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
    groups: int,
    kept_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Grouped sigmoid top-k (DeepSeek-V3 report, section 2.1.2).

    Experts are chosen by sigmoid score plus bias: first the `kept_groups` groups whose two best
    experts sum highest, then the best `top_k` experts in them, best first. Of equals the lowest
    index comes first (torch.topk promises no order). Weights are the scores without the bias.

    Args:
        logits: [T, experts].
        bias: [experts].
        top_k: experts per token.
        groups: slices of equal size that the experts are divided into.
        kept_groups: groups that a token's experts may come from.
        normalise: divide each token's weights by their sum.
        scale: factor of the weights.

    Returns:
        Weights [T, top_k] in fp32 (fp64 for fp64), experts int64 [T, top_k].

    Raises:
        ValueError: groups that do not divide the experts, or fewer candidates than top_k.
    """
    _check(logits, bias, top_k, groups, kept_groups)
    fine = logits.dtype in (torch.float32, torch.float64)
    scores = (logits if fine else logits.float()).sigmoid()
    choice = scores + bias
    if kept_groups < groups:
        grouped = choice.view(len(choice), groups, choice.shape[1] // groups)
        best = _best(grouped.topk(2, dim=-1)[0].sum(-1), kept_groups)
        kept = best.new_zeros((len(choice), groups), dtype=torch.bool).scatter_(-1, best, True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).view(choice.shape)
    experts = _best(choice, top_k)
    weights = scores.gather(-1, experts)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts


def _best(values: Tensor, count: int) -> Tensor:
    if values.is_cpu and values.numel() > 1024:
        # Several times faster than a sort, and as good where no two of the best are equal.
        best, index = values.topk(min(count + 1, values.shape[-1]), dim=-1)
        if not (best[..., 1:] == best[..., :-1]).any():
            return index[..., :count]
    return values.sort(dim=-1, descending=True, stable=True)[1][..., :count]


def _check(logits: Tensor, bias: Tensor, top_k: int, groups: int, kept_groups: int) -> None:
    experts = logits.shape[-1]
    if logits.dim() != 2 or bias.shape != (experts,):
        raise ValueError(
            f"logits is {tuple(logits.shape)} and bias {tuple(bias.shape)}, must be "
            "[T, experts] and [experts]"
        )
    if not 1 <= kept_groups <= groups or experts % groups:
        raise ValueError(
            f"kept_groups is {kept_groups} of {groups} groups, must be 1 to groups, which must "
            f"divide {experts} experts"
        )
    if kept_groups < groups and experts < 2 * groups:
        raise ValueError(f"groups is {groups}, must leave 2 of {experts} experts or more per group")
    if not 1 <= top_k <= experts // groups * kept_groups:
        raise ValueError(
            f"top_k is {top_k}, must be 1 to {experts // groups * kept_groups}, the experts in "
            f"{kept_groups} of {groups} groups"
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
    weights,
    experts,
    scale,
    logits_token,
    logits_expert,
    bias_expert,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    PRECISE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per token. Position g * BLOCK_E + e is expert e of group g."""
    pdl_wait(PDL)
    size: tl.constexpr = EXPERTS // GROUPS
    token = tl.program_id(0).to(tl.int64)
    position = tl.arange(0, BLOCK_G * BLOCK_E)
    group = position // BLOCK_E
    expert = group * size + position % BLOCK_E
    inside = (group < GROUPS) & (position % BLOCK_E < size)
    line = logits + token * logits_token
    logit = tl.load(line + expert * logits_expert, mask=inside, other=0.0).to(tl.float32)
    choice = tl.load(bias + expert * bias_expert, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, _sigmoid(logit, PRECISE) + choice, float("-inf"))

    if KEPT < GROUPS:
        table = tl.reshape(choice, (BLOCK_G, BLOCK_E))
        g = tl.arange(0, BLOCK_G)
        e = tl.arange(0, BLOCK_E)
        first = tl.max(table, axis=1)
        others = e[None, :] != tl.argmax(table, axis=1)[:, None]
        value = first + tl.max(tl.where(others, table, float("-inf")), axis=1)
        value = tl.where(g < GROUPS, value, float("-inf"))
        kept = g < 0
        for _ in tl.static_range(KEPT):
            taking = g == tl.argmax(value, axis=0)
            kept = kept | taking
            value = tl.where(taking, float("-inf"), value)
        table = tl.where(kept[:, None], table, float("-inf"))
        choice = tl.reshape(table, (BLOCK_G * BLOCK_E,))

    k = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    for i in range(TOP_K):
        best = tl.argmax(choice, axis=0)
        # NaN (a padded row's) compares with nothing: any expert will do, but it must be one.
        taken = tl.minimum(best // BLOCK_E * size + best % BLOCK_E, EXPERTS - 1)
        chosen = tl.where(k == i, taken, chosen)
        choice = tl.where(position == best, float("-inf"), choice)

    used = k < TOP_K
    logit = tl.load(line + chosen * logits_expert, mask=used, other=0.0).to(tl.float32)
    weight = tl.where(used, _sigmoid(logit, PRECISE), 0.0)
    if NORMALISE:
        weight = tl.div_rn(weight, tl.sum(weight, axis=0) + 1e-20)
    tl.store(weights + token * TOP_K + k, weight * scale, mask=used)
    tl.store(experts + token * TOP_K + k, chosen.to(tl.int64), mask=used)


def topk(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    groups: int,
    kept_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`topk_reference` by one launch where Triton runs (and not in fp64).

    Routers of more than `MAX_EXPERTS` experts or `MAX_TOP_K` choices go to the reference. A token
    with NaN among its logits gets experts that exist, perhaps one twice.

    Raises:
        ValueError: as the reference.
    """
    fine = torch.float64 in (logits.dtype, bias.dtype)
    if not runs_triton(logits) or fine or top_k > MAX_TOP_K or logits.shape[-1] > MAX_EXPERTS:
        return topk_reference(logits, bias, top_k, groups, kept_groups, normalise, scale)
    _check(logits, bias, top_k, groups, kept_groups)
    tokens, count = logits.shape
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    if kept_groups == groups:
        groups = kept_groups = 1
    block_g = triton.next_power_of_2(groups)
    block_e = triton.next_power_of_2(count // groups)
    if tokens:
        _topk_kernel[(tokens,)](
            logits,
            bias,
            weights,
            experts,
            float(scale),
            *logits.stride(),
            bias.stride(0),
            EXPERTS=count,
            GROUPS=groups,
            KEPT=kept_groups,
            TOP_K=top_k,
            NORMALISE=normalise,
            PRECISE=logits.is_cuda,
            BLOCK_G=block_g,
            BLOCK_E=block_e,
            BLOCK_K=triton.next_power_of_2(top_k),
            # Few warps: each choice is a reduction, and across warps that means a barrier.
            num_warps=WARPS if block_g * block_e > 256 else 1,
            **pdl(logits),
        )
    return weights, experts


WARPS = 2
