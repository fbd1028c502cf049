"""A step's memory: what its launches read and write, at addresses that never change."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step.commit_tokens import DraftInputs
from hybrid_runtime.kernels.step.prepare_inputs import StepInputs
from hybrid_runtime.models.forward_batch import RowBatch, StatePositions
from hybrid_runtime.specdecode.acceptance import Acceptance, Accepted
from hybrid_runtime.specdecode.draft_length import DraftLength
from hybrid_runtime.specdecode.drafter import VerifyOutput
from hybrid_runtime.specdecode.shape import StepShape
from hybrid_runtime.state.manager import HybridStateManager

Phase = Literal["verify", "accept", "verify_and_accept", "draft"]
"""A method of `Phases` that can be captured."""


@dataclass(slots=True)
class Frame:
    """What the launches of a step read and write. Views of `StepBuffers`.

    shape: rows and tokens, padding included.
    num_draft: most drafts of a row, d. Acceptance looks at so many; without decoding rows as many
        as beside prompts.
    propose: how many drafts are proposed behind the step.
    inputs: the step's rows and tokens.
    batch: the same rows, as a forward pass takes them.
    positions: where their Mamba states are read and written.
    draft_inputs: of the drafter's passes.
    emitted: int32 `[rows, K + 2]`, emitted tokens (tail -1) and, last, their count, negative where
        the text has ended.
    num_accepted: int32 `[rows]`, the same counts, for the state manager.
    accept: which drafts are accepted; None where no row emits.
    in_order: all rows run d + 1 tokens, so each token's logits are needed, in order.
    pad: tokens of a row beyond those of the step.
    graphs: key of each captured phase, of "draft" by the number of drafts; the others are launched
        one by one.
    hidden: where verify leaves its hidden states; None: in memory of its own.
    verify_output: what the target's pass leaves for acceptance and drafter.
    logprobs: int32 `[rows, d + 1, 1 + 2 * most]`, of the emitted tokens, if they are wanted.
    """

    shape: StepShape
    num_draft: int
    propose: int
    inputs: StepInputs
    batch: RowBatch
    positions: StatePositions
    draft_inputs: DraftInputs
    emitted: Tensor
    num_accepted: Tensor
    accept: Acceptance | None
    in_order: bool
    pad: int
    graphs: dict[tuple[Phase, int], Hashable] = field(default_factory=dict)
    hidden: Tensor | None = None
    verify_output: VerifyOutput | None = None
    logprobs: Tensor | None = None

    def graph_of(self, phase: Phase) -> Hashable | None:
        """Key of a phase's graph, if it is captured."""
        return self.graphs.get((phase, self.propose if phase == "draft" else 0))

    def add_graph(self, phase: Phase, key: Hashable) -> None:
        self.graphs[phase, self.propose if phase == "draft" else 0] = key


class StepBuffers:
    """Memory of the largest step.

    inputs, draft_inputs, emitted, num_accepted: as of `Frame`.
    nothing: what a step emits of which no row reaches the end of its text.
    """

    def __init__(
        self,
        manager: HybridStateManager,
        max_tokens: int,
        drafts: DraftLength,
        rounding: Rounding | None,
    ) -> None:
        rows, device, num_draft = manager.max_rows, manager.device, drafts.most
        self.inputs = StepInputs.empty(rows, max_tokens, num_draft, device)
        self.draft_inputs = DraftInputs.empty(rows, max_tokens, num_draft, device)
        self.emitted = torch.zeros((rows, num_draft + 2), dtype=torch.int32, device=device)
        self.num_accepted = torch.zeros(rows, dtype=torch.int32, device=device)
        self.nothing = Accepted(
            tokens=torch.full((rows, num_draft + 1), -1, dtype=torch.int32, device=device),
            num_accepted=torch.zeros(rows, dtype=torch.int32, device=device),
        )
        self._manager, self._drafts, self._rounding = manager, drafts, rounding

    def frame(
        self,
        shape: StepShape,
        row_tokens: int,
        max_scheduled: int,
        max_context: int,
        accept: Acceptance | None,
        propose: int,
        pad: int = 0,
    ) -> Frame:
        """The frame of a step of that shape.

        Args:
            shape: as of `Frame`.
            row_tokens: most tokens of a decoding row.
            max_scheduled: upper bound of tokens per row.
            max_context: upper bound of tokens in the cache and scheduled, per row.
            accept, propose, pad: as of `Frame`.
        """
        inputs = self.inputs.first(shape.rows, shape.tokens)
        return Frame(
            shape=shape,
            # Steps without decoding rows share the kernels of those that have some.
            num_draft=row_tokens - 1 if shape.decode_rows else self._drafts.beside_prompts,
            propose=propose,
            inputs=inputs,
            batch=RowBatch(
                slot=inputs.slot,
                cu_seqlens=inputs.cu_seqlens,
                computed=inputs.computed,
                max_scheduled=max_scheduled,
                max_context=max_context,
                num_update_rows=shape.decode_rows,
                num_update_tokens=shape.decode_tokens,
                max_update=row_tokens,
            ),
            positions=self._positions(inputs),
            draft_inputs=self.draft_inputs.first(shape.rows, shape.tokens),
            emitted=self.emitted[: shape.rows],
            num_accepted=self.num_accepted[: shape.rows],
            accept=accept,
            in_order=not (shape.prompt_rows or shape.longest),
            pad=pad,
        )

    def clear(self) -> None:
        """Make all rows padding, and every index one that is there. Rows have no tokens then;
        before a frame is run, `Phases.prepare` must give its decoding rows theirs, because the
        prompts' kernels count from behind them and would write in front of their memory."""
        self._manager.positions.clear()
        for part in (*self.inputs, *self.draft_inputs, self.emitted, self.num_accepted):
            part.zero_()
        self.inputs.slot.fill_(-1)
        self.draft_inputs.slot.fill_(-1)

    def _positions(self, inputs: StepInputs) -> StatePositions:
        state = self._manager.positions.first(inputs.slot.shape[0])
        return StatePositions(
            draft=inputs.num_draft,
            read_column=state.read_column,
            read_offset=state.read_offset,
            write_column=state.write_column,
            replay=state.replay,
            rounding=self._rounding,
            cuts=state.cuts,
            ring_length=self._manager.layout.ring_length,
        )
