"""Tokens sorted by expert and cut into blocks, so that a program works for one expert.

The host knows only how many blocks there can be at most, and does not wait for more: a launch
over the blocks has a program for each that is possible, and those without tokens end at once.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton
from hybrid_runtime.kernels.common.pdl import pdl, pdl_wait

MAX_RANKED = 8192
"""Token ids that are sorted by comparing each with every other in one launch; torch sorts more."""


class ExpertBlocks(NamedTuple):
    """Token id ``t * top_k + i`` is token t with its i-th expert.

    Attributes:
        sorted_token_ids: int32 [T * top_k], token ids by expert, those of an expert ascending and
            without padding between experts.
        blocks: int32 [3, max_blocks], by expert: the block's expert, and its first and last
            (exclusive) position in `sorted_token_ids`. Behind the last block the expert is -1 and
            the positions are undefined.
    """

    sorted_token_ids: Tensor
    blocks: Tensor


def max_blocks(num_token_ids: int, num_experts: int, block_size: int) -> int:
    """Most blocks that so many token ids can need."""
    used_experts = min(num_token_ids, num_experts)
    return used_experts + (num_token_ids - used_experts) // block_size


def align_block_size_reference(topk_ids: Tensor, num_experts: int, block_size: int) -> ExpertBlocks:
    """Sort token ids by expert and cut each expert's into blocks.

    Args:
        topk_ids: integer [T, top_k], each 0 to num_experts - 1.
        num_experts: experts there are.
        block_size: token ids per block; an expert's last block may have fewer.
    """
    flat = topk_ids.flatten()
    tokens = flat.bincount(minlength=num_experts)
    blocks = (tokens + block_size - 1) // block_size
    expert = torch.arange(num_experts, device=flat.device).repeat_interleave(blocks)
    block = torch.arange(expert.shape[0], device=flat.device)
    within_expert = block - (blocks.cumsum(0) - blocks)[expert]
    ends = tokens.cumsum(0)
    first = (ends - tokens)[expert] + within_expert * block_size
    last = (first + block_size).minimum(ends[expert])
    room = max_blocks(flat.shape[0], num_experts, block_size) - block.shape[0]
    lines = F.pad(torch.stack([expert, first, last]).int(), (0, room), value=-1)
    return ExpertBlocks(flat.argsort(stable=True).int(), lines)


@triton.jit(do_not_specialize=["num_token_ids", "num_blocks"])
def _align_block_size_kernel(
    topk_ids,
    sorted_token_ids,
    blocks,
    num_token_ids,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    BINS: tl.constexpr,
    COUNTED: tl.constexpr,
    RANKED: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0 lists the blocks; each other program places LINES token ids."""
    pdl_wait(PDL)
    if tl.program_id(0) == 0:
        _list_blocks(topk_ids, blocks, num_token_ids, num_blocks, BLOCK_SIZE, BINS, COUNTED)
    else:
        _place_token_ids(topk_ids, sorted_token_ids, num_token_ids, RANKED, LINES)


@triton.jit
def _list_blocks(
    topk_ids,
    blocks,
    num_token_ids,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    BINS: tl.constexpr,
    COUNTED: tl.constexpr,
):
    o_expert = tl.arange(0, BINS)
    b_tokens = tl.zeros((BINS,), tl.int32)
    at = 0
    while at < num_token_ids:
        o_id = at + tl.arange(0, COUNTED)
        m_id = o_id < num_token_ids
        b_expert = tl.load(topk_ids + o_id, mask=m_id, other=0).to(tl.int32)
        b_tokens += tl.histogram(b_expert, BINS, mask=m_id)
        at += COUNTED
    b_ends = tl.cumsum(b_tokens, axis=0)
    b_blocks = (b_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE
    b_block_ends = tl.cumsum(b_blocks, axis=0)
    most = tl.max(b_blocks, axis=0)
    i_block = 0
    while i_block < most:
        p_block = blocks + b_block_ends - b_blocks + i_block
        b_first = b_ends - b_tokens + i_block * BLOCK_SIZE
        m_block = i_block < b_blocks
        tl.store(p_block, o_expert, mask=m_block)
        tl.store(p_block + num_blocks, b_first, mask=m_block)
        tl.store(p_block + 2 * num_blocks, tl.minimum(b_first + BLOCK_SIZE, b_ends), mask=m_block)
        i_block += 1
    unused = tl.sum(b_blocks, axis=0)
    while unused < num_blocks:
        o_block = unused + o_expert
        tl.store(blocks + o_block, tl.full((BINS,), -1, tl.int32), mask=o_block < num_blocks)
        unused += BINS


@triton.jit
def _place_token_ids(
    topk_ids, sorted_token_ids, num_token_ids, RANKED: tl.constexpr, LINES: tl.constexpr
):
    """A token id's place is the number of smaller keys (expert, token id): all at once, and no
    atomics."""
    o_own = (tl.program_id(0) - 1) * LINES + tl.arange(0, LINES)
    m_own = o_own < num_token_ids
    b_expert = tl.load(topk_ids + o_own, mask=m_own, other=0).to(tl.int32)
    b_own = b_expert * num_token_ids + o_own
    b_smaller = tl.zeros((LINES, RANKED), tl.int32)
    at = 0
    while at < num_token_ids:
        o_id = at + tl.arange(0, RANKED)
        m_id = o_id < num_token_ids
        b_key = tl.load(topk_ids + o_id, mask=m_id, other=0).to(tl.int32) * num_token_ids + o_id
        b_key = tl.where(m_id, b_key, 0x7FFFFFFF)
        b_smaller += (b_key[None, :] < b_own[:, None]).to(tl.int32)
        at += RANKED
    tl.store(sorted_token_ids + tl.sum(b_smaller, axis=1), o_own, mask=m_own)


def align_block_size(topk_ids: Tensor, num_experts: int, block_size: int) -> ExpertBlocks:
    """`align_block_size_reference` where Triton runs by one launch (more than `MAX_RANKED` token
    ids: a sort by torch and one launch), without waiting for the device."""
    if not runs_triton(topk_ids):
        return align_block_size_reference(topk_ids, num_experts, block_size)
    flat = topk_ids.flatten()
    num_token_ids = flat.shape[0]
    num_blocks = max_blocks(num_token_ids, num_experts, block_size)
    blocks = torch.empty((3, num_blocks), dtype=torch.int32, device=flat.device)
    ranked = num_token_ids <= MAX_RANKED and num_experts * num_token_ids < 1 << 31
    if ranked:
        sorted_token_ids = torch.empty(num_token_ids, dtype=torch.int32, device=flat.device)
    else:
        # Fewer digits to sort by.
        narrow = flat.to(torch.int16) if num_experts <= 1 << 15 else flat
        sorted_token_ids = narrow.sort(stable=True)[1].int()
    if num_token_ids:
        _align_block_size_kernel[(1 + (triton.cdiv(num_token_ids, 32) if ranked else 0),)](
            topk_ids=flat,
            sorted_token_ids=sorted_token_ids,
            blocks=blocks,
            num_token_ids=num_token_ids,
            num_blocks=num_blocks,
            BLOCK_SIZE=block_size,
            BINS=max(triton.next_power_of_2(num_experts), 16),
            COUNTED=min(max(triton.next_power_of_2(num_token_ids), 128), 1024),
            RANKED=128,
            LINES=32,
            num_warps=4,
            **pdl(flat),
        )
    return ExpertBlocks(sorted_token_ids, blocks)
