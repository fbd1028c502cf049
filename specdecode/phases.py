"""The launches of a speculative step, phase by phase, over a frame."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from torch import Tensor

from hybrid_runtime.kernels.step.commit_tokens import commit_tokens
from hybrid_runtime.kernels.step.prepare_inputs import prepare_inputs
from hybrid_runtime.models.forward_batch import Caches, RowBatch, StatePositions
from hybrid_runtime.specdecode.acceptance import Acceptance, Accepted, greedy
from hybrid_runtime.specdecode.drafter import Drafter, VerifyOutput
from hybrid_runtime.specdecode.frame import Frame, Phase, StepBuffers
from hybrid_runtime.specdecode.sequences import Sequences
from hybrid_runtime.state.manager import HybridStateManager


class TargetModel(Protocol):
    """The model whose text is wanted; a `HybridModel` is one."""

    def __call__(
        self, tokens: Tensor, batch: RowBatch, positions: StatePositions, caches: Caches
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@runtime_checkable
class LayeredTarget(Protocol):
    """A target that can launch each of its kernels once, instead of once per layer. Passes that
    only warm up are short then; any other target runs as a whole in them."""

    def few_layers(self) -> AbstractContextManager[None]:
        """Within it a call of the target launches every kernel that it launches otherwise, over
        the same numbers of rows and tokens, and returns a tensor of the same shape."""


class Phases:
    """What a step launches. All but `prepare` may be captured: nothing in them depends on what only
    the host knows of one step.

    drafter: None for plain decoding. The other arguments are those of `SpecDecodeRunner`.
    """

    def __init__(
        self,
        target: TargetModel,
        manager: HybridStateManager,
        sequences: Sequences,
        caches: Caches,
        drafter: Drafter | None,
        buffers: StepBuffers,
    ) -> None:
        self.target, self.manager, self.caches = target, manager, caches
        self.sequences, self.drafter, self.buffers = sequences, drafter, buffers

    def launch(self, phase: Phase, frame: Frame) -> None:
        """Run one phase."""
        run: Callable[[Frame], None] = getattr(self, phase)
        run(frame)

    def prepare(self, frame: Frame, entries: Tensor, num_rows: int) -> None:
        """Fill the frame's inputs from the exact counts, which only the device has; its rows
        beyond `num_rows` are padding."""
        text = self.sequences
        prepare_inputs(
            entries=entries,
            num_rows=num_rows,
            computed=self.manager.computed,
            history=text.history,
            drafts=text.drafts,
            length=text.length,
            out=frame.inputs,
            max_scheduled=frame.batch.max_scheduled,
            pad=frame.pad,
        )

    def verify(self, frame: Frame) -> None:
        """Run the target over certain tokens and drafts, in one pass."""
        inputs = frame.inputs
        hidden = self.target(inputs.tokens, frame.batch, frame.positions, self.caches)
        if frame.hidden is not None:
            hidden = frame.hidden.copy_(hidden)
        frame.verify_output = VerifyOutput(
            frame.batch, inputs, hidden, frame.draft_inputs, self.sequences
        )

    def accept(self, frame: Frame) -> None:
        """Accept leading drafts, append them and a token of the target's own to the sequences; how
        many tokens each row emits."""
        if frame.accept is None:
            rows = frame.inputs.slot.shape[0]
            nothing = self.buffers.nothing
            accepted = Accepted(nothing.tokens[:rows], nothing.num_accepted[:rows])
        else:
            accepted = self._verify_drafts(frame, frame.accept)
        commit_tokens(
            inputs=frame.inputs,
            tokens=accepted.tokens,
            num_accepted=accepted.num_accepted,
            history=self.sequences.history,
            length=self.sequences.length,
            ends=self.sequences.ends,
            emitted=frame.emitted,
            counts=frame.num_accepted,
            out=frame.draft_inputs,
            max_scheduled=frame.batch.max_scheduled,
        )
        frame.logprobs = accepted.logprobs

    def verify_and_accept(self, frame: Frame) -> None:
        """Both, in one graph."""
        self.verify(frame)
        self.accept(frame)

    def draft(self, frame: Frame) -> None:
        """Propose drafts for the next step, from what is certain now."""
        assert frame.verify_output is not None
        assert self.drafter is not None
        drafts, probs = self.drafter.propose(frame.verify_output, frame.propose)
        self.sequences.propose(frame.draft_inputs.slot, drafts, probs)

    def _verify_drafts(self, frame: Frame, accept: Acceptance) -> Accepted:
        """Which of the step's drafts the target accepts."""
        assert frame.verify_output is not None
        inputs, text, hidden = frame.inputs, self.sequences, frame.verify_output.hidden
        d = frame.num_draft
        verify = None if frame.in_order else inputs.verify[:, : d + 1]
        if frame.shape.prompt_rows and verify is not None:  # few of the tokens are looked at
            hidden, verify = hidden.index_select(0, verify.flatten()), None
        logits = self.target.logits(hidden)
        if verify is None:
            logits = logits.unflatten(0, (-1, d + 1))
        drafts = inputs.drafts[:, :d]
        if accept is greedy:
            return greedy(logits, drafts, inputs.num_draft, inputs.emits, verify=verify)
        probs = text.draft_probs
        return accept(
            logits=logits,
            drafts=drafts,
            num_draft=inputs.num_draft,
            emits=inputs.emits,
            draft_probs=None if probs is None else probs[inputs.slot.clamp(min=0), :d],
            sampling=text.sampling.of(inputs.slot),
            position=inputs.certain,
            verify=verify,
        )
