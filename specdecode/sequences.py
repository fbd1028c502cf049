"""Tokens, lengths and drafts of every slot, on the device: what steps take their inputs from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_runtime.specdecode.sampling import SamplingParams, SamplingTensors


@dataclass(frozen=True, slots=True)
class Placement:
    """Rows of one step, derived on the device from exact counts.

    slot, computed, scheduled, draft: int64 `[rows]`; row_start: int32 `[rows + 1]`.
    certain: computed + scheduled - draft. emits: bool `[rows]`, false for an unfinished prefill
    chunk and for padded rows. tokens: int64 `[T]` to run. verify: int64 `[rows, K + 1]`, flat index
    of the token after which draft j is to be judged (repeated once a row has no more).
    """

    slot: Tensor
    row_start: Tensor
    computed: Tensor
    scheduled: Tensor
    draft: Tensor
    certain: Tensor
    emits: Tensor
    tokens: Tensor
    verify: Tensor


class Sequences:
    """Per-slot token histories.

    history: int32 `[slots + 1, max_length + 1]`; length: int64 `[slots]`, tokens known (prompt and
    emitted); drafts: int32 `[slots + 1, K]`, -1 where there is none; sampling by slot.
    """

    def __init__(
        self, slots: int, max_length: int, num_draft: int, device: torch.device | str
    ) -> None:
        # The last row takes what rows that emit nothing would write.
        self.history = torch.zeros((slots + 1, max_length + 1), dtype=torch.int32, device=device)
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)
        self.drafts = torch.full((slots + 1, num_draft), -1, dtype=torch.int32, device=device)
        self.draft_probs: Tensor | None = None
        self.sampling = SamplingTensors(
            temperature=torch.zeros(slots, dtype=torch.float32, device=device),
            top_k=torch.zeros(slots, dtype=torch.int32, device=device),
            top_p=torch.ones(slots, dtype=torch.float32, device=device),
            seed=torch.zeros(slots, dtype=torch.int64, device=device),
        )
        self.num_draft = num_draft

    def admit(self, slot: int, tokens: Sequence[int], params: SamplingParams, seed: int) -> None:
        """Start a sequence in `slot` from its prompt."""
        prompt = torch.tensor(tokens, dtype=torch.int32)
        at = slice(slot, slot + 1)
        self.history[slot, : len(tokens)].copy_(prompt)
        # Slices are filled by a launch; assigning to one element would synchronise.
        self.length[at].fill_(len(tokens))
        self.drafts[at].fill_(-1)
        self.sampling.temperature[at].fill_(params.temperature)
        self.sampling.top_k[at].fill_(params.top_k)
        self.sampling.top_p[at].fill_(params.top_p)
        self.sampling.seed[at].fill_(seed)

    def place(
        self, slot: Tensor, scheduled: Tensor, draft: Tensor, computed: Tensor, num_tokens: int
    ) -> Placement:
        """Positions and input tokens of a step's rows.

        slot, scheduled, draft: int `[rows]`; computed: exact tokens by slot, int `[slots]`;
        num_tokens: sum of `scheduled`.
        """
        slot, scheduled, draft = slot.long(), scheduled.long(), draft.long()
        live = slot >= 0
        at = slot.clamp(min=0)
        scheduled = torch.where(live, scheduled, 0)
        n = torch.where(live, computed[at].long(), 0)
        certain = n + scheduled - draft
        row_start = torch.nn.functional.pad(scheduled.cumsum(0), (1, 0))
        token = torch.arange(num_tokens, device=slot.device)
        row = torch.searchsorted(row_start[1:], token, right=True)
        position = n[row] + token - row_start[row]
        guess = (position - certain[row]).clamp(0, max(self.num_draft - 1, 0))
        tokens = self.history[at[row], position]
        if self.num_draft:
            drafted = self.drafts[at[row], guess]
            tokens = torch.where(position >= certain[row], drafted, tokens)
        step = torch.arange(self.num_draft + 1, device=slot.device)
        verify = (row_start[1:] - 1 - draft)[:, None] + torch.minimum(step, draft[:, None])
        return Placement(
            slot=slot,
            row_start=row_start.int(),
            computed=n,
            scheduled=scheduled,
            draft=draft,
            certain=certain,
            emits=live & (certain >= self.length[at]),
            # A guess that was not made is -1; it needs a valid id, and is never accepted.
            tokens=tokens.clamp(min=0).long(),
            verify=verify.clamp(min=0),
        )

    def append(self, place: Placement, tokens: Tensor, num_accepted: Tensor) -> None:
        """Add what a step emitted: tokens int32 `[rows, K + 1]`, num_accepted int32 `[rows]`."""
        at = place.slot.clamp(min=0)
        step = torch.arange(tokens.shape[1], device=tokens.device)
        target = self.length[at][:, None] + step
        live = place.emits[:, None] & (step < num_accepted[:, None])
        spare = self.history.shape[0] - 1
        self.history[torch.where(live, at[:, None], spare), torch.where(live, target, 0)] = tokens
        self.length.index_add_(0, at, torch.where(place.emits, num_accepted.long(), 0))

    def propose(self, place: Placement, drafts: Tensor, probs: Tensor | None) -> None:
        """Keep the drafts of the rows that emitted: int32 `[rows, K]`, float `[rows, K, V]`."""
        at = torch.where(place.emits, place.slot, self.drafts.shape[0] - 1)
        self.drafts[at] = drafts
        if probs is not None:
            if self.draft_probs is None:
                shape = (self.drafts.shape[0], *probs.shape[1:])
                self.draft_probs = torch.zeros(shape, dtype=probs.dtype, device=probs.device)
            self.draft_probs[at] = probs
