"""Drafters: something cheap that guesses the next K tokens of every row, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from hybrid_runtime.kernels.sampling.argmax import argmax
from hybrid_runtime.kernels.step.commit_tokens import DraftInputs
from hybrid_runtime.kernels.step.prepare_inputs import StepInputs
from hybrid_runtime.models.forward_batch import Caches, RowBatch
from hybrid_runtime.specdecode import ngram
from hybrid_runtime.specdecode.sampling import DRAFT, probabilities, sample, uniform
from hybrid_runtime.specdecode.sequences import Sequences

DrafterName = Literal["mtp", "eagle", "ngram"]


class DraftHead(Protocol):
    """A small network that continues the target's hidden states (MTP, EAGLE)."""

    def __call__(
        self, tokens: Tensor, hidden: Tensor, batch: RowBatch, caches: Caches
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step leaves for the drafter: its rows, the target's hidden states `[T, hidden]` after
    the final norm, and the inputs of the drafter's passes; the sequences hold the new tokens."""

    batch: RowBatch
    rows: StepInputs
    hidden: Tensor
    inputs: DraftInputs
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
        device, slots = caches.kv_block_table.device, caches.kv_block_table.shape[0]
        self._one_each = torch.arange(slots + 1, dtype=torch.int32, device=device)

    def propose(self, verified: Verified) -> tuple[Tensor, Tensor | None]:
        inputs, sequences, batch = verified.inputs, verified.sequences, verified.batch
        rows = inputs.slot.shape[0]
        hidden = self.head(inputs.tokens, verified.hidden, batch, self.caches)
        hidden = hidden.index_select(0, inputs.last)
        drafts = torch.empty((rows, self.num_draft), dtype=torch.int32, device=hidden.device)
        probs: list[Tensor] = []
        for ahead in range(self.num_draft):
            if ahead:
                step = RowBatch(
                    slot=inputs.slot,
                    cu_seqlens=self._one_each[: rows + 1],
                    computed=inputs.computed[ahead - 1],
                    max_scheduled=1,
                    max_context=batch.max_context + ahead,
                )
                hidden = self.head(drafts[:, ahead - 1], hidden, step, self.caches)
            logits = self.head.logits(hidden)
            if self.sampled:
                at = inputs.slot.clamp(min=0)
                sampling = sequences.sampling.select(at)
                p = probabilities(logits[:, None], sampling)[:, 0]
                # The draft stands for the token behind all that is known and the drafts before it.
                position = sequences.length[at].long() + ahead
                drafts[:, ahead].copy_(sample(p, uniform(sampling.seed, position, DRAFT)))
                probs.append(p)
            else:
                argmax(logits, drafts[:, ahead])
        return drafts, torch.stack(probs, 1) if probs else None


class NgramDrafter:
    """Prompt look-up: what followed the last time the text ended like this. No network at all."""

    def __init__(self, num_draft: int) -> None:
        self.num_draft = num_draft

    def propose(self, verified: Verified) -> tuple[Tensor, Tensor | None]:
        at = verified.inputs.slot.clamp(min=0)
        sequences = verified.sequences
        return ngram.propose(sequences.history[at], sequences.length[at], self.num_draft), None


def make_drafter(
    name: DrafterName | None, head: DraftHead | None, caches: Caches, k: int, sampled: bool
) -> Drafter | None:
    """The drafter of that name, None for none; `ValueError` for one without its network."""
    if name is None:
        return None
    if name == "ngram":
        return NgramDrafter(k)
    if head is None:
        raise ValueError(f"head is None; drafter {name!r} needs its network")
    return HeadDrafter(head, caches, k, sampled)
