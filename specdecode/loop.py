"""The speculative step: verify, accept, keep the state right, draft again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybrid_runtime.kernels import advance as fields
from hybrid_runtime.specdecode.acceptance import Acceptance
from hybrid_runtime.specdecode.batch import Caches, RowBatch, StatePositions
from hybrid_runtime.specdecode.drafter import Drafter, Verified
from hybrid_runtime.specdecode.sequences import Sequences
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Step


class Target(Protocol):
    """The model whose text is wanted."""

    def __call__(
        self, tokens: Tensor, batch: RowBatch, positions: StatePositions, caches: Caches
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a step, still on the device.

    emitted: int32 `[rows, K + 3]`: up to K + 1 tokens (tail -1), their count (0: none emitted), and
    how many drafts wait for the next step.
    """

    step: Step
    emitted: Tensor


class SpeculativeLoop:
    """Steps of a batch of sequences under one target, one drafter (None: plain decoding)."""

    def __init__(
        self,
        target: Target,
        manager: HybridStateManager,
        sequences: Sequences,
        caches: Caches,
        drafter: Drafter | None,
    ) -> None:
        self.target, self.manager, self.caches = target, manager, caches
        self.sequences, self.drafter = sequences, drafter

    @torch.inference_mode()
    def step(self, rows: StepRows, num_update_rows: int, accept: Acceptance) -> Outcome:
        """Run `rows`, of which the first `num_update_rows` have at most K + 1 tokens.

        The first K drafts of a row with `draft` = d are the d that the last step proposed for it.
        Raises what the model raises, after giving up the step: its requests are released.
        """
        state, sequences = self.manager, self.sequences
        step = state.begin_step(rows)
        try:
            # Where everything is, from the exact counts that only the device has.
            entry = step.entries[: len(rows)]
            place = sequences.place(
                entry[:, fields.SLOT],
                entry[:, fields.SCHEDULED],
                entry[:, fields.DRAFT],
                state.computed,
                num_tokens=int(rows.scheduled[rows.slot >= 0].sum()),
            )
            batch = self._batch(rows, place.slot, place.row_start, place.computed, num_update_rows)
            n = len(rows)
            positions = StatePositions(
                place.draft.int(),
                step.read_column[:n],
                step.read_offset[:n],
                step.write_column[:n],
            )

            # Verify: the target reads the certain tokens and all guesses in one pass.
            hidden = self.target(place.tokens, batch, positions, self.caches)
            logits = self.target.logits(hidden[place.verify])

            # Accept: a prefix of the guesses, and one token of the target's own.
            at = place.slot.clamp(min=0)
            probs = None if sequences.draft_probs is None else sequences.draft_probs[at]
            accepted = accept(
                logits,
                sequences.drafts[at],
                place.draft.int(),
                place.emits,
                probs,
                sequences.sampling.select(place.slot),
                place.certain,
            )
        except BaseException:
            state.abandon(step)
            raise
        state.end_step(step, accepted.num_accepted)
        sequences.append(place, accepted.tokens, accepted.num_accepted)

        # Draft: guesses for the next step, from what is certain now.
        waiting = torch.zeros_like(accepted.num_accepted)
        if self.drafter is not None:
            verified = Verified(batch, place, hidden, accepted.num_accepted, sequences)
            drafts, probs = self.drafter.propose(verified)
            sequences.propose(place, drafts, probs)
            waiting = (drafts >= 0).sum(1, dtype=torch.int32)
        counts = torch.stack([accepted.num_accepted, waiting], 1)
        return Outcome(step, torch.cat([accepted.tokens, counts], 1))

    @staticmethod
    def _batch(
        rows: StepRows, slot: Tensor, row_start: Tensor, computed: Tensor, num_update_rows: int
    ) -> RowBatch:
        live = rows.slot >= 0
        scheduled = rows.scheduled * live
        return RowBatch(
            slot=slot.int(),
            row_start=row_start,
            computed=computed.int(),
            max_scheduled=int(scheduled.max(initial=1)),
            max_context=int((rows.computed_max * live + scheduled).max(initial=1)),
            num_update_rows=num_update_rows,
            num_update_tokens=int(scheduled[:num_update_rows].sum()),
            max_update=int(scheduled[:num_update_rows].max(initial=1)),
        )
