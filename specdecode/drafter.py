"""Drafters: something cheap that guesses the next K tokens of every row, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybrid_runtime.specdecode import ngram
from hybrid_runtime.specdecode.batch import Caches, RowBatch
from hybrid_runtime.specdecode.sampling import DRAFT, probabilities, sample, uniform
from hybrid_runtime.specdecode.sequences import Placement, Sequences


class DraftHead(Protocol):
    """A small network that continues the target's hidden states (MTP, EAGLE)."""

    def __call__(
        self, tokens: Tensor, hidden: Tensor, batch: RowBatch, caches: Caches
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step leaves for the drafter: its rows, the target's hidden states `[T, hidden]` after
    the final norm, and accepted counts int32 `[rows]`; the sequences hold the new tokens."""

    batch: RowBatch
    place: Placement
    hidden: Tensor
    num_accepted: Tensor
    sequences: Sequences


class Drafter(Protocol):
    """Guesses for every row that emitted: int32 `[rows, K]` (tail -1), and the distributions they
    were drawn from, float32 `[rows, K, V]`, or None where they were not drawn."""

    def propose(self, verified: Verified) -> tuple[Tensor, Tensor | None]: ...


class HeadDrafter:
    """K passes of a draft head (MTP or EAGLE), each fed its own hidden state.

    The head's attention has a cache of its own. Its position p sees token p + 1, so its first pass
    covers the same rows as the target's step, with tokens shifted by one; what it stores for
    rejected positions is overwritten by the next step's first pass. It has no Mamba layer, hence
    no state to roll back. `sampled` draws drafts from the head's distribution at the row's
    temperature instead of taking the likeliest: more of them are accepted at high temperature, but
    the text of a seed then depends on the drafts.
    """

    def __init__(
        self, head: DraftHead, caches: Caches, num_draft: int, sampled: bool = False
    ) -> None:
        self.head, self.caches, self.num_draft, self.sampled = head, caches, num_draft, sampled

    def propose(self, verified: Verified) -> tuple[Tensor, Tensor | None]:
        place, sequences, batch = verified.place, verified.sequences, verified.batch
        rows = place.slot.shape[0]
        device = place.slot.device
        at = place.slot.clamp(min=0)
        final = place.certain + verified.num_accepted.clamp(min=1) - 1

        token = torch.arange(place.tokens.shape[0], device=device)
        row = torch.searchsorted(place.row_start[1:], token, right=True)
        position = place.computed[row] + token - place.row_start[row]
        shifted = sequences.history[at[row], position + 1].clamp(min=0)
        hidden = self.head(shifted, verified.hidden, batch, self.caches)
        last = place.row_start[:-1] + final - 1 - place.computed
        hidden = hidden[last.clamp(min=0)]

        single = torch.arange(rows + 1, dtype=torch.int32, device=device)
        # A row in the middle of its prompt has no token to go on from, and owns no blocks for it.
        slot = torch.where(place.emits, place.slot, -1).int()
        drafts: list[Tensor] = []
        probs: list[Tensor] = []
        for ahead in range(self.num_draft):
            if ahead:
                step = RowBatch(
                    slot=slot,
                    row_start=single,
                    computed=(final + ahead - 1).int(),
                    max_scheduled=1,
                    max_context=batch.max_context + ahead,
                )
                hidden = self.head(drafts[-1], hidden, step, self.caches)
            logits = self.head.logits(hidden)
            if self.sampled:
                sampling = sequences.sampling.select(at)
                p = probabilities(logits[:, None], sampling)[:, 0]
                # The draft stands for the token at position final + 1 + ahead.
                drafts.append(sample(p, uniform(sampling.seed, final + 1 + ahead, DRAFT)))
                probs.append(p)
            else:
                drafts.append(logits.argmax(-1).int())
        return torch.stack(drafts, 1), torch.stack(probs, 1) if probs else None


class NgramDrafter:
    """Prompt look-up: what followed the last time the text ended like this. No network at all."""

    def __init__(self, num_draft: int) -> None:
        self.num_draft = num_draft

    def propose(self, verified: Verified) -> tuple[Tensor, Tensor | None]:
        at = verified.place.slot.clamp(min=0)
        sequences = verified.sequences
        return ngram.propose(
            sequences.history[at], sequences.length[at].int(), self.num_draft
        ), None
