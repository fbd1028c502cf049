"""Bits per byte, and how many drafts greedy decoding accepts, on left-out files."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .heads import unroll
from .trunk import Trunk


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Outcome of greedy speculation: tokens per step, and how often draft ``i`` was accepted."""

    length: float
    rates: tuple[float, ...]
    steps: int


@torch.no_grad()
def bits_per_byte(trunk: Trunk, windows: np.ndarray, skip: int, batch: int = 16) -> float:
    """Mean bits per token of ``windows`` int64 [n, length] after the first ``skip`` tokens."""
    device = next(trunk.parameters()).device
    total, count = 0.0, 0
    for rows in torch.from_numpy(windows).split(batch):
        tokens = rows.to(device)
        logits = trunk.lm_head(trunk(tokens[:, :-1]))[:, skip:]
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), tokens[:, skip + 1 :].flatten(), reduction="sum"
        )
        total += loss.item()
        count += tokens[:, skip + 1 :].numel()
    return total / count / math.log(2)


@torch.no_grad()
def continue_greedily(trunk: Trunk, prompts: Tensor, tokens: int) -> Tensor:
    """``prompts`` int64 [n, length] and their greedy continuation [n, length + tokens].

    Runs the whole sequence again for every token: slow, but it needs no cache of its own.
    """
    text = prompts
    for _ in range(tokens):
        text = torch.cat([text, trunk.lm_head(trunk(text)[:, -1:]).argmax(-1)], 1)
    return text


@torch.no_grad()
def acceptance(
    trunk: Trunk, head: nn.Module, text: Tensor, prompt: int, drafts: int, stop: int
) -> Acceptance:
    """Replay greedy speculation over ``text`` int64 [n, length], greedy from ``prompt`` on.

    Along a greedy text the drafts of a step are accepted up to the first that differs from it, so
    feeding the text itself as draft tokens gives the same counts as running the loop. A sequence
    is followed to its first ``stop`` token.
    """
    hidden = trunk(text)
    outputs = unroll(head, trunk.backbone.embeddings, text, hidden, drafts)
    starts = outputs[0].shape[1]
    right = []
    for k, out in enumerate(outputs):
        guess = trunk.lm_head(out).argmax(-1)[:, : starts - 2]
        right.append(guess == text[:, k + 2 : k + starts])
    hits = torch.stack(right, -1).long().cumprod(-1).cpu()  # [n, starts - 2, drafts]
    first_stop = [
        next((i for i in range(prompt, len(row)) if row[i] == stop), len(row))
        for row in text.tolist()
    ]
    accepted = torch.zeros(drafts, dtype=torch.long)
    steps = 0
    for row, end in enumerate(first_stop):
        position = prompt - 1  # last position whose hidden state is known; the next token too
        while position + drafts + 2 < min(end, hits.shape[1]):
            got = hits[row, position]
            accepted += got
            steps += 1
            position += int(got.sum()) + 1
    rates = tuple(float(a) / max(steps, 1) for a in accepted)
    return Acceptance(1.0 + sum(rates), rates, steps)
