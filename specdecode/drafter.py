"""Drafters: cheap proposals for the next K tokens of every row, made on the device."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from hybrid_runtime.kernels.sampling.argmax import argmax
from hybrid_runtime.kernels.sampling.narrow_head import (
    NarrowHead,
    can_narrow,
    narrow,
    narrow_argmax,
)
from hybrid_runtime.kernels.sampling.probabilities import select_with_probabilities
from hybrid_runtime.kernels.step.commit_tokens import DraftInputs
from hybrid_runtime.kernels.step.prepare_inputs import StepInputs
from hybrid_runtime.models.forward_batch import Caches, RowBatch, WantedTokens
from hybrid_runtime.specdecode import ngram
from hybrid_runtime.specdecode.sampling import DRAFT
from hybrid_runtime.specdecode.sequences import Sequences
from hybrid_runtime.specdecode.shape import most_rows

DrafterName = Literal["mtp", "eagle", "ngram"]


class DraftHead(Protocol):
    """A small network that continues the target's hidden states (MTP, EAGLE).

    Its `output_weight`, if it has one, is the matrix `[V, hidden]` whose products with hidden
    states are its logits.
    """

    def __call__(
        self,
        tokens: Tensor,
        hidden: Tensor,
        batch: RowBatch,
        caches: Caches,
        wanted: WantedTokens | None = None,
    ) -> Tensor:
        """Run one pass over all rows.

        Args:
            tokens: int [T], the token after each position.
            hidden: [T, hidden_size], the hidden state of each position.
            batch: the rows; computed is the position of a row's first token.
            caches: keys and values of the head's layers; those of all tokens are added.
            wanted: whose results are wanted; None = of all tokens.

        Returns:
            [T, hidden_size], or that of the wanted tokens; feeds both `logits` and the next pass.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, hidden_size] to [T, vocab_size]."""


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """What the target's pass over a step leaves for acceptance and drafter.

    batch: rows of the pass.
    inputs: the same rows with their tokens and counts.
    hidden: `[T, hidden]`, the target's hidden states after the final norm.
    draft_inputs: of the drafter's passes; filled once tokens are accepted.
    sequences: text of all requests; the accepted tokens are appended.
    """

    batch: RowBatch
    inputs: StepInputs
    hidden: Tensor
    draft_inputs: DraftInputs
    sequences: Sequences


class Drafter(Protocol):
    """Proposes the next tokens of every row."""

    def propose(self, output: VerifyOutput, count: int) -> tuple[Tensor, Tensor | None]:
        """So many drafts for the rows that emitted; with 0 a drafter sees the tokens all the same,
        so that it can go on later.

        Returns:
            int32 `[rows, count]`, the tail -1 where there are fewer, and the distributions that
            they were drawn from, float32 `[rows, count, V]`; None if they were not drawn.
        """


class HeadDrafter:
    """A pass of a draft head (MTP or EAGLE) for each draft; each after the first takes its own
    hidden state.

    The head's attention has a cache of its own, in which position p sees token p + 1: the first
    pass covers the rows of the target's pass, with tokens shifted by one, but only their keys and
    values: the result is wanted of one token per row, the last accepted one. What the pass stores
    for rejected positions is overwritten by the next step's first pass. A head has no Mamba layer,
    so there is no state to roll back.

    sampled: draw drafts from the head's distribution at the row's temperature instead of taking the
        most likely token. More of them are accepted at high temperature, but the text of a seed
        then depends on the drafts.
    narrow_head: the head's output weight with a copy in 8 bits, by which the most likely tokens are
        found without logits; None = by logits.
    """

    def __init__(
        self,
        head: DraftHead,
        caches: Caches,
        sampled: bool = False,
        narrow_head: NarrowHead | None = None,
    ) -> None:
        self.head, self.caches, self.sampled = head, caches, sampled
        self.narrow_head = narrow_head
        device, slots = caches.kv_block_table.device, caches.kv_block_table.shape[0]
        self._one_each = torch.arange(most_rows(slots) + 1, dtype=torch.int32, device=device)

    def propose(self, output: VerifyOutput, count: int) -> tuple[Tensor, Tensor | None]:
        inputs, sequences, batch = output.draft_inputs, output.sequences, output.batch
        rows = inputs.slot.shape[0]
        hidden = output.hidden
        drafts = torch.empty((rows, count), dtype=torch.int32, device=hidden.device)
        probs: list[Tensor] = []
        for ahead in range(max(count, 1)):  # the first one leaves the tokens' keys and values
            one_each = RowBatch(
                slot=inputs.slot,
                cu_seqlens=self._one_each[: rows + 1],
                computed=inputs.computed[ahead],
                max_scheduled=1,
                max_context=batch.max_context + ahead,
            )
            if ahead == 0:
                wanted = WantedTokens(inputs.last, one_each)
                hidden = self.head(inputs.tokens, hidden, batch, self.caches, wanted)
            else:
                hidden = self.head(drafts[:, ahead - 1], hidden, one_each, self.caches)
            if not count:
                break
            if not self.sampled:
                self._most_likely(hidden, drafts[:, ahead])
                continue
            # A draft's position is that of the token it stands for.
            position = sequences.length[inputs.slot.clamp(min=0)] + ahead
            sampling = sequences.sampling.of(inputs.slot)
            logits = self.head.logits(hidden)[:, None]
            drawn, p = select_with_probabilities(logits, sampling, position, DRAFT)
            drafts[:, ahead].copy_(drawn[:, 0])
            probs.append(p[:, 0])
        return drafts, torch.stack(probs, 1) if probs else None

    def _most_likely(self, hidden: Tensor, out: Tensor) -> None:
        if self.narrow_head is None:
            argmax(self.head.logits(hidden), out)
        else:
            narrow_argmax(hidden, self.narrow_head, out)


class NgramDrafter:
    """Prompt look-up: what followed the last time the text ended like this."""

    def propose(self, output: VerifyOutput, count: int) -> tuple[Tensor, Tensor | None]:
        at = output.draft_inputs.slot.clamp(min=0)
        sequences = output.sequences
        return ngram.propose(sequences.history[at], sequences.length[at], count), None


def make_drafter(
    name: DrafterName | None, head: DraftHead | None, caches: Caches, sampled: bool
) -> Drafter | None:
    """The drafter of that name, None for none.

    Raises:
        ValueError: a drafter that needs a head, and there is none.
    """
    if name is None:
        return None
    if name == "ngram":
        return NgramDrafter()
    if head is None:
        raise ValueError(f"head is None; drafter {name!r} needs one")
    weight = narrowed_weight(head, sampled, caches.kv_block_table.device)
    narrow_head = None if weight is None else narrow(weight)
    return HeadDrafter(head, caches, sampled, narrow_head)


def narrowed_weight(head: DraftHead | None, sampled: bool, device: torch.device) -> Tensor | None:
    """The output weight that a drafter on that device copies in 8 bits; None where it does not."""
    weight = getattr(head, "output_weight", None)
    if sampled or not isinstance(weight, Tensor) or not can_narrow(weight, device):
        return None
    return weight
