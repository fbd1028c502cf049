"""Logits after penalties and biases, at every position of a step as if it were decoded alone.

Nothing is kept from step to step: the tokens of each row's history are counted anew, and the drafts
before a position count for it. Three launches where Triton runs; what rows without penalties cost
is a copy of their logits to float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_runtime.kernels.common.backend import runs_triton


class Penalties(NamedTuple):
    """What changes logits, by slot.

    Attributes:
        history: int32 [slots, length], prompt and output.
        prompt_length: int32 [slots], tokens of it that are the prompt's.
        repetition: float32 [slots], divides positive logits of tokens in prompt or output, and
            multiplies the others; 1 = off.
        presence: float32 [slots], subtracted from the logits of tokens in the output.
        frequency: float32 [slots], the same for each time that the output has them.
        bias_tokens: int32 [slots, biases], whose logits are biased, each once; -1 = none.
        bias: float32 [slots, biases], what is added to them, behind the penalties.
    """

    history: Tensor
    prompt_length: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    bias_tokens: Tensor
    bias: Tensor


def penalise_reference(
    logits: Tensor, penalties: Penalties, slot: Tensor, position: Tensor, drafts: Tensor
) -> Tensor:
    """Apply penalties and biases.

    Args:
        logits: float [rows, n, V]; position j follows on the history and the first j drafts.
        penalties: by slot.
        slot: int32 [rows]; a negative one is padding.
        position: int [rows], tokens of the history that count.
        drafts: int32 [rows, n - 1]; -1 is a draft that was not made.

    Returns:
        float32 [rows, n, V]; anything in padded rows.
    """
    rows, width, vocabulary = logits.shape
    at = slot.clamp(min=0)
    history = penalties.history[at].long().clamp(0, vocabulary - 1)
    index = torch.arange(history.shape[1], device=logits.device)
    known = (index < position[:, None]).float()
    output = known * (index >= penalties.prompt_length[at][:, None])
    zeros = logits.new_zeros((rows, vocabulary), dtype=torch.float32)
    seen, count = zeros.scatter_add(1, history, known), zeros.scatter_add(1, history, output)
    repetition, presence, frequency = (x[at][:, None] for x in penalties[2:5])
    bias = zeros.scatter_add(
        1,
        penalties.bias_tokens[at].long().clamp(min=0),
        torch.where(penalties.bias_tokens[at] >= 0, penalties.bias[at], 0.0),
    )
    lines = []
    for ahead in range(width):
        if ahead:
            draft = drafts[:, ahead - 1 : ahead]
            made = torch.where(draft >= 0, 1.0, 0.0)
            count = count.scatter_add(1, draft.long().clamp(min=0), made)
            seen = seen.scatter_add(1, draft.long().clamp(min=0), made)
        x = logits[:, ahead].float()
        x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
        lines.append(x - frequency * count - presence * (count > 0) + bias)
    return torch.stack(lines, 1)


_IN_PROMPT = tl.constexpr(1 << 30)
"""In a token's word: the prompt has it. The bits below count it in the output."""


@triton.jit(do_not_specialize_on_alignment=["slot", "position"])
def _count_kernel(
    history, history_stride, prompt_length, repetition, presence, frequency, stride, slot, position,
    words, V: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count a row's tokens; one program per row and TILE of its history."""
    i_row = tl.program_id(0)
    i_slot = tl.maximum(tl.load(slot + i_row), 0)
    active = tl.load(repetition + i_slot * stride) != 1
    active |= tl.load(presence + i_slot * stride) != 0
    active |= tl.load(frequency + i_slot * stride) != 0
    active = active.to(tl.int32) > 0  # the interpreter spreads no comparison of floats
    o_token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_token = (o_token < tl.load(position + i_row)) & active & (tl.load(slot + i_row) >= 0)
    b_token = tl.load(history + i_slot.to(tl.int64) * history_stride + o_token, m_token, other=0)
    m_token &= (b_token >= 0) & (b_token < V)
    m_prompt = o_token < tl.load(prompt_length + i_slot * stride)
    p_word = words + i_row.to(tl.int64) * V + b_token
    tl.atomic_or(p_word, tl.full((TILE,), _IN_PROMPT, tl.int32), mask=m_token & m_prompt)
    tl.atomic_add(p_word, tl.full((TILE,), 1, tl.int32), mask=m_token & (m_prompt == 0))


@triton.jit(do_not_specialize_on_alignment=["slot", "drafts"])
def _penalise_kernel(
    logits, logits_stride, words, repetition, presence, frequency, stride, slot, drafts,
    draft_stride, out, WIDTH: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The penalties of all positions of a row; one program per row and TILE of the vocabulary."""
    i_row = tl.program_id(0)
    i_slot = tl.maximum(tl.load(slot + i_row), 0)
    r = tl.load(repetition + i_slot * stride)
    p = tl.load(presence + i_slot * stride)
    f = tl.load(frequency + i_slot * stride)
    active = ((r != 1) | (p != 0) | (f != 0)).to(tl.int32) > 0
    o_v = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_v = o_v < V
    b_word = tl.load(words + i_row.to(tl.int64) * V + o_v, mask=m_v & active, other=0)
    for i_ahead in tl.static_range(WIDTH):
        i_line = (i_row * WIDTH + i_ahead).to(tl.int64)
        b_x = tl.load(logits + i_line * logits_stride + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_count = b_word & (_IN_PROMPT - 1)
        b_repeated = tl.where(b_x > 0, b_x / r, b_x * r)
        b_x = tl.where(b_word != 0, b_repeated, b_x)
        b_x -= f * b_count.to(tl.float32) + tl.where(b_count > 0, p, 0.0)
        tl.store(out + i_line * V + o_v, b_x, mask=m_v)
        if i_ahead + 1 < WIDTH:
            draft = tl.load(drafts + i_row * draft_stride + i_ahead)
            b_word += ((o_v == draft) & active).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=["slot"])
def _bias_kernel(
    out, bias_tokens, bias, bias_stride, slot, WIDTH: tl.constexpr, V: tl.constexpr,
    BIASES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add a line's biases; one program per line."""
    i_line = tl.program_id(0)
    i_slot = tl.load(slot + i_line // WIDTH)
    o_bias = tl.arange(0, TILE)
    m_bias = (o_bias < BIASES) & (i_slot >= 0)
    p_bias = i_slot * bias_stride + o_bias
    b_token = tl.load(bias_tokens + p_bias, mask=m_bias, other=-1)
    b_bias = tl.load(bias + p_bias, mask=m_bias, other=0.0)
    m_bias &= (b_token >= 0) & (b_token < V)
    p_out = out + i_line.to(tl.int64) * V + b_token
    tl.store(p_out, tl.load(p_out, mask=m_bias, other=0.0) + b_bias, mask=m_bias)


TOKENS, TILE = 1024, 2048
"""Tokens of the history, and of the vocabulary, per program."""


def penalise(
    logits: Tensor, penalties: Penalties, slot: Tensor, position: Tensor, drafts: Tensor
) -> Tensor:
    """`penalise_reference` by a clear and three launches where Triton runs (and not in fp64)."""
    rows, width, vocabulary = logits.shape
    if not rows or not runs_triton(logits) or logits.dtype == torch.float64:
        return penalise_reference(logits, penalties, slot, position, drafts)
    lines = logits.flatten(0, 1)
    if lines.stride(1) != 1:
        lines = lines.contiguous()
    words = torch.zeros((rows, vocabulary), dtype=torch.int32, device=logits.device)
    out = torch.empty((rows, width, vocabulary), dtype=torch.float32, device=logits.device)
    stride = penalties.repetition.stride(0)
    assert all(x.stride(0) == stride for x in penalties[1:5])
    by_slot = {
        "repetition": penalties.repetition,
        "presence": penalties.presence,
        "frequency": penalties.frequency,
        "stride": stride,
        "slot": slot,
    }
    _count_kernel[(rows, triton.cdiv(penalties.history.shape[1], TOKENS))](
        history=penalties.history,
        history_stride=penalties.history.stride(0),
        prompt_length=penalties.prompt_length,
        position=position,
        words=words,
        V=vocabulary,
        TILE=TOKENS,
        num_warps=4,
        **by_slot,
    )
    _penalise_kernel[(rows, triton.cdiv(vocabulary, TILE))](
        logits=lines,
        logits_stride=lines.stride(0),
        words=words,
        drafts=drafts,
        draft_stride=drafts.stride(0),
        out=out,
        WIDTH=width,
        V=vocabulary,
        TILE=TILE,
        num_warps=4,
        **by_slot,
    )
    biases = penalties.bias_tokens.shape[1]
    _bias_kernel[(rows * width,)](
        out=out,
        bias_tokens=penalties.bias_tokens,
        bias=penalties.bias,
        bias_stride=penalties.bias.stride(0),
        slot=slot,
        WIDTH=width,
        V=vocabulary,
        BIASES=biases,
        TILE=triton.next_power_of_2(biases),
        num_warps=4,
    )
    return out
