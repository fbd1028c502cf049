"""Log-probabilities of emitted tokens, and of the most likely ones beside them: plain torch."""

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Log-probabilities by the model, before anything changes its logits.

    Args:
        logits: float [rows, n, V], as the model gives them.
        tokens: int32 [rows, n], emitted at these positions; -1 where none is.
        most: how many of the most likely tokens are given, at most V.

    Returns:
        int32 [rows, n, 1 + 2 * most]: the token's log-probability, the ids of the most likely
        tokens, most likely first, and theirs; all log-probabilities as the bits of a float32.
    """
    best, ids = logits.topk(most, dim=-1)
    total = logits.to(torch.float32).logsumexp(-1, keepdim=True)
    own = logits.gather(-1, tokens.clamp(min=0).long()[..., None])
    found = torch.cat([own, best], -1).to(torch.float32) - total
    bits = found.view(torch.int32)
    return torch.cat([bits[..., :1], ids.to(torch.int32), bits[..., 1:]], -1)
