"""Logits after penalties, biases and bans, at every position of a step as if it were decoded alone.

Nothing is kept from step to step: the tokens of each row's history are counted anew, and the drafts
before a position count for it. Three launches where Triton runs; what rows without penalties cost
is a copy of their logits to float32.

A ban is a few tokens, of which the last is not drawn (its logit is -inf) where the output ends with
the others, as long as its time has not come. One token that is banned for good, a word of several,
and an end of text that must not come yet are all such bans.
"""

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
        ban_until: int32 [slots, bans], a ban holds for tokens at positions below; 0 = no ban.
        ban_end: int32 [slots, bans], where it ends in `ban_tokens`, not decreasing; it begins where
            the one before it ends. All have at least one token.
        ban_tokens: int32 [slots, length], tokens of all bans, one after another.
        allowed: int32 [slots, words], bit t % 32 of word t // 32 is 1 if token t can be drawn;
            None = all can, of all slots.
    """

    history: Tensor
    prompt_length: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    bias_tokens: Tensor
    bias: Tensor
    ban_until: Tensor
    ban_end: Tensor
    ban_tokens: Tensor
    allowed: Tensor | None


def penalise_reference(
    logits: Tensor, penalties: Penalties, slot: Tensor, position: Tensor, drafts: Tensor
) -> Tensor:
    """Apply penalties, biases and bans.

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
    forbidden = zeros > 0
    if penalties.allowed is not None:
        token = torch.arange(vocabulary, device=logits.device)
        forbidden = (penalties.allowed[at][:, token // 32] >> (token % 32)) & 1 == 0
    lines = []
    for ahead in range(width):
        if ahead:
            draft = drafts[:, ahead - 1 : ahead]
            made = torch.where(draft >= 0, 1.0, 0.0)
            count = count.scatter_add(1, draft.long().clamp(min=0), made)
            seen = seen.scatter_add(1, draft.long().clamp(min=0), made)
        x = logits[:, ahead].float()
        x = torch.where(seen > 0, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency * count - presence * (count > 0) + bias
        banned = banned_reference(penalties, at, position, drafts[:, :ahead], vocabulary)
        lines.append(x.masked_fill(forbidden | banned, -torch.inf))
    return torch.stack(lines, 1)


def banned_reference(
    penalties: Penalties, at: Tensor, position: Tensor, drafts: Tensor, vocabulary: int
) -> Tensor:
    """Which tokens bans keep from following on the history and `drafts`.

    Args:
        penalties: by slot.
        at: int [rows], slots.
        position: int [rows], tokens of the history that count.
        drafts: int32 [rows, n], all of which count; -1 equals no token.
        vocabulary: V.

    Returns:
        bool [rows, V].
    """
    position, drafted = position.long(), drafts.shape[1]
    until, end = penalties.ban_until[at], penalties.ban_end[at].long()
    tokens = penalties.ban_tokens[at].long()
    # Of each token of a ban: which it is, and how far before the banned one it must be.
    index = torch.arange(tokens.shape[1], device=at.device).expand_as(tokens).contiguous()
    ban = torch.searchsorted(end, index, right=True).clamp(max=end.shape[1] - 1)
    back = end.gather(1, ban) - 1 - index
    source = position[:, None] + drafted - back
    text = penalties.history[at].gather(1, source.clamp(0, penalties.history.shape[1] - 1))
    if drafted:
        draft = drafts.gather(1, (source - position[:, None]).clamp(0, drafted - 1))
        text = torch.where(source >= position[:, None], draft, text)
    text = torch.where(source >= penalties.prompt_length[at][:, None], text, -1)
    differs = torch.where(back > 0, text != tokens, False)
    differs = torch.zeros_like(until).scatter_add(1, ban, differs.int())
    holds = (position[:, None] + drafted < until) & (differs == 0)
    last = tokens.gather(1, (end - 1).clamp(min=0)).clamp(0, vocabulary - 1)
    count = torch.zeros((len(at), vocabulary), dtype=torch.int32, device=at.device)
    return count.scatter_add(1, last, holds.int()) > 0


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
    draft_stride, allowed, allowed_stride, out, ALLOWS: tl.constexpr, WIDTH: tl.constexpr,
    V: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The penalties of all positions of a row, and what is not among its allowed tokens; one
    program per row and TILE of the vocabulary."""
    i_row = tl.program_id(0)
    i_slot = tl.maximum(tl.load(slot + i_row), 0)
    r = tl.load(repetition + i_slot * stride)
    p = tl.load(presence + i_slot * stride)
    f = tl.load(frequency + i_slot * stride)
    active = ((r != 1) | (p != 0) | (f != 0)).to(tl.int32) > 0
    o_v = tl.program_id(1) * TILE + tl.arange(0, TILE)
    m_v = o_v < V
    b_word = tl.load(words + i_row.to(tl.int64) * V + o_v, mask=m_v & active, other=0)
    if ALLOWS:
        p_bits = allowed + i_slot.to(tl.int64) * allowed_stride + (o_v >> 5)
        b_allowed = (tl.load(p_bits, mask=m_v, other=0) >> (o_v & 31)) & 1
    for i_ahead in tl.static_range(WIDTH):
        i_line = (i_row * WIDTH + i_ahead).to(tl.int64)
        b_x = tl.load(logits + i_line * logits_stride + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_count = b_word & (_IN_PROMPT - 1)
        b_repeated = tl.where(b_x > 0, b_x / r, b_x * r)
        b_x = tl.where(b_word != 0, b_repeated, b_x)
        b_x -= f * b_count.to(tl.float32) + tl.where(b_count > 0, p, 0.0)
        if ALLOWS:
            b_x = tl.where(b_allowed != 0, b_x, float("-inf"))
        tl.store(out + i_line * V + o_v, b_x, mask=m_v)
        if i_ahead + 1 < WIDTH:
            draft = tl.load(drafts + i_row * draft_stride + i_ahead)
            b_word += ((o_v == draft) & active).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=["slot", "position", "drafts"])
def _bias_kernel(
    out, bias_tokens, bias, ban_until, ban_end, ban_tokens, table_stride, history, history_stride,
    prompt_length, stride, slot, position, drafts, draft_stride, WIDTH: tl.constexpr,
    V: tl.constexpr, BIASES: tl.constexpr, BANS: tl.constexpr, BIAS_TILE: tl.constexpr,
    BAN_TILE: tl.constexpr,
):  # fmt: skip
    """Add a line's biases, then apply its bans; one program per line."""
    i_line = tl.program_id(0)
    i_row = i_line // WIDTH
    i_slot = tl.load(slot + i_row)
    real = i_slot >= 0
    i_slot = tl.maximum(i_slot, 0)
    p_line = out + i_line.to(tl.int64) * V
    o_bias = tl.arange(0, BIAS_TILE)
    m_bias = (o_bias < BIASES) & real
    p_bias = i_slot * table_stride + o_bias
    b_token = tl.load(bias_tokens + p_bias, mask=m_bias, other=-1)
    b_bias = tl.load(bias + p_bias, mask=m_bias, other=0.0)
    m_bias &= (b_token >= 0) & (b_token < V)
    b_x = tl.load(p_line + b_token, mask=m_bias, other=0.0)
    tl.store(p_line + b_token, b_x + b_bias, mask=m_bias)
    # A token may be biased and banned, by different threads.
    tl.debug_barrier()

    known = tl.load(position + i_row)
    at = known + i_line % WIDTH
    prompt = tl.load(prompt_length + i_slot * stride)
    o_ban = tl.arange(0, BAN_TILE)
    p_ban = i_slot * table_stride + o_ban
    m_ban = (o_ban < BANS) & real
    m_ban &= at < tl.load(ban_until + p_ban, mask=m_ban, other=0)
    b_end = tl.load(ban_end + p_ban, mask=m_ban, other=0)
    b_length = b_end - tl.load(ban_end + p_ban - 1, mask=m_ban & (o_ban > 0), other=0)
    p_last = ban_tokens + i_slot * table_stride + b_end - 1
    b_token = tl.load(p_last, mask=m_ban, other=0)
    longest = tl.max(tl.where(m_ban, b_length, 0))
    back = 1
    while back < longest:
        i_text = at - back
        made = i_text >= known
        p_text = history + i_slot.to(tl.int64) * history_stride + i_text
        text = tl.load(p_text, mask=(i_text >= prompt) & (made == 0), other=-1)
        draft = tl.load(drafts + i_row * draft_stride + (i_text - known), mask=made, other=-1)
        text = tl.where(made, draft, text)
        m_more = m_ban & (b_length > back)
        b_wanted = tl.load(p_last - back, mask=m_more, other=0)
        m_ban &= (b_length <= back) | (b_wanted == text)
        back += 1
    m_ban &= (b_token >= 0) & (b_token < V)
    tl.store(p_line + b_token, float("-inf"), mask=m_ban)


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
        allowed=words if penalties.allowed is None else penalties.allowed,
        allowed_stride=0 if penalties.allowed is None else penalties.allowed.stride(0),
        out=out,
        ALLOWS=penalties.allowed is not None,
        WIDTH=width,
        V=vocabulary,
        TILE=TILE,
        num_warps=4,
        **by_slot,
    )
    table = penalties.bias_tokens.stride(0)
    for part in (penalties.bias, penalties.ban_until, penalties.ban_end, penalties.ban_tokens):
        assert part.stride(0) == table  # one line of one upload has all of a slot's
    biases, bans = penalties.bias_tokens.shape[1], penalties.ban_until.shape[1]
    _bias_kernel[(rows * width,)](
        out=out,
        bias_tokens=penalties.bias_tokens,
        bias=penalties.bias,
        ban_until=penalties.ban_until,
        ban_end=penalties.ban_end,
        ban_tokens=penalties.ban_tokens,
        table_stride=table,
        history=penalties.history,
        history_stride=penalties.history.stride(0),
        prompt_length=penalties.prompt_length,
        stride=stride,
        slot=slot,
        position=position,
        drafts=drafts,
        draft_stride=drafts.stride(0),
        WIDTH=width,
        V=vocabulary,
        BIASES=biases,
        BANS=bans,
        BIAS_TILE=triton.next_power_of_2(biases),
        BAN_TILE=triton.next_power_of_2(bans),
        num_warps=4,
    )
    return out
