"""The distribution a token is drawn from, and the draw: plain torch, by sorting the vocabulary."""

import torch
from torch import Tensor

from hybrid_runtime.kernels.sampling.argmax import count_broken
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.kernels.sampling.uniform import uniform_reference


def probabilities_reference(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """The distribution of each token: temperature, then top-k, then top-p, then min-p.

    Equal logits rank by token id, lowest first: top-k keeps exactly k tokens. Top-p looks at the
    distribution that top-k left and keeps a token when those ranked before it sum to less than
    top_p, so at least one stays. Min-p keeps tokens whose probability is at least min_p times the
    largest. Temperature 0 gives all to the first of the largest logits.

    Args:
        logits: float [rows, n, V].
        sampling: parameters of the rows.

    Returns:
        float32 [rows, n, V].

    Raises:
        ValueError: wrong shape.
    """
    sampling = sampling.by_row()
    rows = len(sampling.temperature)
    if logits.dim() != 3 or logits.shape[0] != rows:
        raise ValueError(f"logits has shape {list(logits.shape)}, must be [{rows}, n, V]")
    logits = logits.to(torch.float32)
    temperature, top_k, top_p, min_p = (x[:, None, None] for x in sampling[:4])
    token = torch.arange(logits.shape[-1], device=logits.device)
    # The largest becomes 0 first, so that no temperature can overflow it.
    shifted = logits - logits.amax(-1, keepdim=True)
    ranked, order = (shifted / torch.where(temperature > 0, temperature, 1.0)).sort(
        dim=-1, descending=True, stable=True
    )
    cut = (top_k > 0) & (token >= top_k)
    ranked = ranked.masked_fill(cut, -torch.inf).softmax(-1)
    before = ranked.cumsum(-1, dtype=torch.float64) - ranked
    # Rounding must not cut the tail of a row that asked for everything.
    ranked = ranked.masked_fill((before >= top_p) & (top_p < 1), 0.0)
    ranked = ranked.masked_fill(ranked < min_p * ranked[..., :1], 0.0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    sampled = torch.empty_like(ranked).scatter_(-1, order, ranked)
    greedy = (token == logits.argmax(-1, keepdim=True)).to(torch.float32)
    return torch.where(temperature > 0, sampled, greedy)


def sample_reference(probs: Tensor, u: Tensor) -> Tensor:
    """Draw by inverting the cumulative distribution.

    Args:
        probs: float32 [..., V], not negative, not all zero; need not sum to 1.
        u: float32 [...] in [0, 1).

    Returns:
        int32 [...], the first token whose cumulative share exceeds `u`; never one of
        probability 0.

    Raises:
        ValueError: shapes that do not fit.
    """
    if u.shape != probs.shape[:-1]:
        raise ValueError(f"u has shape {list(u.shape)}, must be {list(probs.shape[:-1])}")
    # In float64 the order of summation, which devices choose, practically never shows.
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    reached = (cumulative > u.to(torch.float64)[..., None] * cumulative[..., -1:]) & (probs > 0)
    # A parallel scan need not be monotone: reached could be empty for a u close to 1.
    token = torch.where(reached.any(-1), reached.to(torch.uint8).argmax(-1), probs.argmax(-1))
    return token.to(torch.int32)


def select_reference(
    logits: Tensor, sampling: SamplingTensors, position: Tensor, stream: int, marks: bool = False
) -> Tensor:
    """One token per position.

    Args:
        logits: float [rows, n, V].
        sampling: parameters of the rows.
        position: int [rows], absolute position of the first token; keys the random numbers.
        stream: what they are for.
        marks: positions with broken logits get -1 minus their count (see `count_broken`), otherwise
            any token.

    Returns:
        int32 [rows, n].
    """
    sampling = sampling.by_row()
    positions = position.long()[:, None] + torch.arange(logits.shape[1], device=logits.device)
    u = uniform_reference(sampling.seed, positions, stream)
    tokens = sample_reference(probabilities_reference(logits, sampling), u)
    if marks:
        broken = count_broken(logits)
        tokens = torch.where(broken > 0, -1 - broken, tokens).to(torch.int32)
    return tokens
