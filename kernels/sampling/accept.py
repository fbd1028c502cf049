"""Greedy acceptance: the leading drafts that are the target's own choice, or, for measurements, as
many as a random number says."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton


def drafted(drafts: Tensor, num_draft: Tensor) -> Tensor:
    """bool `[rows, K]`: the drafts that were made; -1 within a row's `num_draft` was not."""
    index = torch.arange(drafts.shape[1], device=drafts.device)
    return (index < num_draft[:, None]) & (drafts >= 0)


def num_leading(flags: Tensor) -> Tensor:
    """int64 `[rows]`: how many flags of each row are set before the first that is not."""
    return flags.long().cumprod(-1).sum(-1)


def emit(
    drafts: Tensor, num_accepted_drafts: Tensor, own: Tensor, emits: Tensor
) -> tuple[Tensor, Tensor]:
    """What a step emits: accepted drafts, then one token of the target's own.

    Args:
        drafts: int `[rows, K]`.
        num_accepted_drafts: int64 `[rows]`, 0 .. K.
        own: int32 `[rows]`, the target's token after them.
        emits: bool or int `[rows]`, 0 where a row emits nothing.

    Returns:
        tokens int32 `[rows, K + 1]`, the tail -1, and their count int32 `[rows]`.
    """
    emits = emits != 0
    index = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    last, own = num_accepted_drafts[:, None], own[:, None]
    tokens = torch.cat([drafts.to(torch.int32), own], dim=1)
    tokens = torch.where(index == last, own, tokens)
    tokens = torch.where((index <= last) & emits[:, None], tokens, -1)
    return tokens, torch.where(emits, num_accepted_drafts + 1, 0).to(torch.int32)


def accept_drafts_reference(
    chosen: Tensor,
    drafts: Tensor,
    num_draft: Tensor,
    emits: Tensor,
    rates: Tensor | None = None,
    drawn: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept leading drafts, and add the target's token after them.

    Args:
        chosen: int32 `[rows, K + 1]`, the target's token after each draft.
        drafts: int32 `[rows, K]`; -1 is a draft that was not made, which is never accepted.
        num_draft: int32 `[rows]`, 0 .. K.
        emits: bool or int `[rows]`, 0 where a row emits nothing.
        rates: float32 `[rows, K]`; given, a row's draft i is accepted if its `drawn` < rates[i],
            right or wrong.
        drawn: float32 `[rows]` in [0, 1), one number for all drafts of a row.

    Returns:
        as of `emit`.
    """
    if rates is None or drawn is None:
        agrees = chosen[:, :-1] == drafts
    else:
        agrees = drawn[:, None] < rates
    accepted = num_leading(agrees & drafted(drafts, num_draft))
    return emit(drafts, accepted, chosen.gather(1, accepted[:, None])[:, 0], emits)


@triton.jit(
    do_not_specialize_on_alignment=["chosen", "drafts", "num_draft", "emits", "tokens", "counts"]
)
def _accept_drafts_kernel(
    chosen,
    drafts,
    draft_stride,
    num_draft,
    emits,
    rates,
    rate_stride,
    drawn,
    tokens,
    counts,
    NUM_DRAFT: tl.constexpr,
    FORCED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program per row."""
    i_row = tl.program_id(0)
    o_j = tl.arange(0, WIDTH)
    m_token = o_j <= NUM_DRAFT
    m_draft = (o_j < tl.load(num_draft + i_row)) & (o_j < NUM_DRAFT)
    emits_any = tl.load(emits + i_row).to(tl.int32) != 0
    b_own = tl.load(chosen + i_row * (NUM_DRAFT + 1) + o_j, mask=m_token, other=0)
    b_draft = tl.load(drafts + i_row * draft_stride + o_j, mask=m_draft, other=-1)
    if FORCED:
        p_rates = rates + i_row * rate_stride + o_j
        m_agrees = tl.load(drawn + i_row) < tl.load(p_rates, mask=o_j < NUM_DRAFT, other=0.0)
    else:
        m_agrees = b_draft == b_own
    accepted = tl.min(tl.where(m_agrees & (b_draft >= 0), WIDTH, o_j), axis=0)
    b_token = tl.where(o_j < accepted, b_draft, b_own)
    b_token = tl.where((o_j <= accepted) & emits_any, b_token, -1)
    tl.store(tokens + i_row * (NUM_DRAFT + 1) + o_j, b_token, mask=m_token)
    tl.store(counts + i_row, tl.where(emits_any, accepted + 1, 0))


def accept_drafts(
    chosen: Tensor,
    drafts: Tensor,
    num_draft: Tensor,
    emits: Tensor,
    rates: Tensor | None = None,
    drawn: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`accept_drafts_reference` by one launch where Triton runs."""
    rows, width = chosen.shape
    if not rows or not runs_triton(chosen) or drafts.dtype != torch.int32:
        return accept_drafts_reference(chosen, drafts, num_draft, emits, rates, drawn)
    tokens = torch.empty((rows, width), dtype=torch.int32, device=chosen.device)
    counts = torch.empty(rows, dtype=torch.int32, device=chosen.device)
    forced = rates is not None
    _accept_drafts_kernel[(rows,)](
        chosen=chosen.contiguous(),
        drafts=drafts,
        draft_stride=drafts.stride(0),
        num_draft=num_draft.to(torch.int32),
        emits=emits,
        rates=rates if forced else counts,
        rate_stride=rates.stride(0) if rates is not None else 0,
        drawn=drawn if forced else counts,
        tokens=tokens,
        counts=counts,
        NUM_DRAFT=width - 1,
        FORCED=forced,
        # One more than the tokens, so that some index always fails.
        WIDTH=triton.next_power_of_2(width + 1),
        num_warps=1,
    )
    return tokens, counts
