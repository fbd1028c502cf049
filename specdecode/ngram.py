"""Drafts by prompt look-up: what followed the last time the text ended like this."""

import torch
from torch import Tensor


def propose(
    history: Tensor, length: Tensor, num_draft: int, max_ngram: int = 4, min_ngram: int = 1
) -> Tensor:
    """Finds an earlier occurrence of each row's last tokens and proposes what followed it.

    The longest ending of ``max_ngram`` down to ``min_ngram`` tokens that occurred before wins. Of
    its occurrences those with the most known followers (up to ``num_draft``) are preferred, since
    in a repetitive text the one just before the end has hardly any; of these, the most recent one,
    as text resembles what is close to it.

    Args:
        history: int32 [rows, L], the tokens of each row; anything from ``length`` on is ignored.
        length: int32 [rows], 0 .. L.
        num_draft: most drafts per row.
        max_ngram: longest ending to look for.
        min_ngram: shortest ending to look for.

    Returns:
        int32 [rows, num_draft], the tail -1; all -1 where nothing was found.

    Raises:
        ValueError: wrong shapes, dtypes or bounds.
    """
    if history.dtype != torch.int32 or history.dim() != 2:
        raise ValueError(
            f"history is {history.dtype} {list(history.shape)}, must be int32 [rows, L]"
        )
    if length.dtype != torch.int32 or length.shape != history.shape[:1]:
        raise ValueError(
            f"length is {length.dtype} {list(length.shape)}, must be int32 [{history.shape[0]}]"
        )
    if num_draft < 0:
        raise ValueError(f"num_draft is {num_draft}, must be at least 0")
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(
            f"min_ngram is {min_ngram} and max_ngram {max_ngram}, "
            "must be 1 <= min_ngram <= max_ngram"
        )
    rows, width = history.shape
    if width == 0 or num_draft == 0:
        return history.new_full((rows, num_draft), -1)

    # Column e: an occurrence ends before token e, the first of its followers.
    end = torch.arange(width, device=history.device)
    size = length.long()[:, None]
    alive = (end >= 1) & (end < size)
    matched = torch.zeros_like(history, dtype=torch.int64)
    for back in range(1, max_ngram + 1):
        wanted = history.gather(1, (size - back).clamp(min=0))
        alive = alive & (history.roll(back, 1) == wanted) & (end >= back)
        matched = matched + alive

    followers = (size - end).clamp(0, num_draft)
    score = (matched * (num_draft + 1) + followers) * width + end
    score = torch.where(matched >= min_ngram, score, -1)
    best, start = score.max(-1, keepdim=True)
    source = start + torch.arange(num_draft, device=history.device)
    known = (best >= 0) & (source < size)
    return torch.where(known, history.gather(1, source.clamp(max=width - 1)), -1)
