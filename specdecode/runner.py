"""One speculative step of a batch: prepare, verify, accept, draft. `reference.py` is the same step
for one request, in the paper's order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.graphs import Graphs
from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Readback
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step.commit_tokens import commit_tokens
from hybrid_runtime.kernels.step.prepare_inputs import prepare_inputs
from hybrid_runtime.models.forward_batch import Caches, RowBatch, StatePositions
from hybrid_runtime.specdecode.acceptance import Acceptance, Accepted, greedy
from hybrid_runtime.specdecode.drafter import Drafter, VerifyOutput
from hybrid_runtime.specdecode.frame import Frame, StepBuffers, graph_size
from hybrid_runtime.specdecode.sequences import Sequences
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Step


class TargetModel(Protocol):
    """The model whose text is wanted; `NemotronH` is one."""

    def __call__(
        self, tokens: Tensor, batch: RowBatch, positions: StatePositions, caches: Caches
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


OnVerified = Callable[[int, Tensor, Tensor], None]
"""Called as soon as a step's verify pass is queued, with its number, the target's hidden states
after the final norm `[T, hidden]`, and the index of each row's first token, int32 `[rows + 1]`."""


class SpecDecodeRunner:
    """Runs steps of a batch of sequences under one target and at most one drafter.

    target: the model.
    manager: keeps its Mamba states right.
    sequences: the requests' tokens, lengths, drafts and sampling parameters, by slot.
    caches: the memory of target and draft head.
    drafter: None for plain decoding.
    max_tokens: most tokens of one step.
    steps_ahead: steps that may be queued before the results of the first are read.
    graphs: replay CUDA graphs for steps in which all rows decode. They are captured once per
        padded number of rows.
    stochastic_rounding: verify passes round narrow states stochastically (replay layout).
    """

    def __init__(
        self,
        target: TargetModel,
        manager: HybridStateManager,
        sequences: Sequences,
        caches: Caches,
        drafter: Drafter | None,
        max_tokens: int,
        steps_ahead: int = 0,
        graphs: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        self.target, self.manager, self.caches = target, manager, caches
        self.sequences, self.drafter = sequences, drafter
        device, slots, num_draft = manager.device, manager.max_requests, sequences.num_draft
        self.width = num_draft + 1
        rounding = Rounding(sequences.rounding_seed, layer=0) if stochastic_rounding else None
        most_tokens = max(max_tokens, slots * self.width)
        self._buffers = StepBuffers(manager, most_tokens, num_draft, rounding)
        self.waits = Waits()
        self._results = Readback(slots * (self.width + 1), steps_ahead + 1, device, self.waits)
        # Results travel beside the drafter's passes, not in front of them.
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graphs = Graphs(device) if graphs and device.type == "cuda" else None
        self._frames: dict[tuple[int, Acceptance], Frame] = {}

    @torch.inference_mode()
    def step(
        self,
        rows: StepRows,
        num_update_rows: int,
        accept: Acceptance | None,
        on_verified: OnVerified | None = None,
    ) -> Step:
        """Queue one step; `read` gives what it emitted.

        Raises what the model or `on_verified` raises, after giving up the step: its requests are
        released. After Ctrl-C and its like nothing is, and the manager must be `reset`.

        Args:
            rows: decoding rows first.
            num_update_rows: rows that decode: they run one certain token and K drafts, those that
                the last step proposed (-1 where it proposed none). The others run any number of
                certain tokens.
            accept: which drafts are accepted. None if no row reaches the end of its text: there
                are no logits then, and nothing is copied to the host.
            on_verified: looks at the target's hidden states.
        """
        step = self.manager.begin_step(rows)
        try:
            self._wait_for_copies()
            frame = self._frame(rows, num_update_rows, accept)
            self._prepare(frame, step.entries, len(rows))
            self._launch(self._verify_and_accept, frame)
            assert frame.verify_output is not None
            assert frame.num_accepted is not None
            if on_verified is not None:
                on_verified(step.number, frame.verify_output.hidden, frame.batch.cu_seqlens)
            self.manager.end_step(step, frame.num_accepted)
            self._copy_results(step, frame)
            if self.drafter is not None:
                self._launch(self._draft, frame)
        except Exception:
            self.manager.abandon(step)
            raise
        return step

    def read(self, step: Step, reason: str) -> NDArray[np.int32]:
        """What a step emitted, `[rows, K + 2]`: up to K + 1 tokens (tail -1) and their count, 0
        where the row is in the middle of its prompt. Waits if it must, for that `reason`."""
        n = len(step.rows)
        values = self._results.read(step.number, reason)
        if len(values):
            emitted = values.reshape(n, self.width + 1)
        else:
            emitted = np.full((n, self.width + 1), -1, np.int32)
            emitted[:, -1] = 0
        if self.manager.readback:
            self.manager.accepted(step)
        else:
            self.manager.resolve(step, emitted[:, -1])
        return emitted

    @torch.inference_mode()
    def capture(self, accept: Acceptance = greedy) -> None:
        """Capture the graphs of all sizes now, largest first, and compile what steps with prompts
        need. The rows of all these passes are padding."""
        if self._graphs is None:
            return
        self.manager.compile_flush()
        max_rows = self.manager.max_requests
        for length in (1, 8, 64, self._buffers.inputs.tokens.shape[0]):
            frame = self._buffers.frame(1, length, 0, length, length, accept)
            self._prepare(frame, self._no_entries(), 0)
            self._verify_and_accept(frame)
            if self.drafter is not None:
                self._draft(frame)
        for size in sorted({graph_size(n, max_rows) for n in range(1, max_rows + 1)}, reverse=True):
            self._captured(self._graphs, size, accept)

    # -- phases of a step ------------------------------------------------------------------------

    def _prepare(self, frame: Frame, entries: Tensor, num_rows: int) -> None:
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
            pad=frame.batch.max_scheduled,
        )

    def _verify_and_accept(self, frame: Frame) -> None:
        """The part of a step up to its results, captured in one graph."""
        frame.verify_output = self._verify(frame)
        frame.num_accepted = self._accept(frame, frame.verify_output.hidden)

    def _verify(self, frame: Frame) -> VerifyOutput:
        """Run the target over certain tokens and drafts, in one pass."""
        inputs = frame.inputs
        hidden = self.target(inputs.tokens, frame.batch, frame.positions, self.caches)
        return VerifyOutput(frame.batch, inputs, hidden, frame.draft_inputs, self.sequences)

    def _accept(self, frame: Frame, hidden: Tensor) -> Tensor:
        """Accept leading drafts, append them and a token of the target's own to the sequences; how
        many tokens each row emits, int32 `[rows]`."""
        if frame.accept is None:
            rows = frame.inputs.slot.shape[0]
            nothing = self._buffers.nothing
            accepted = Accepted(nothing.tokens[:rows], nothing.num_accepted[:rows])
        else:
            accepted = self._judge(frame, hidden, frame.accept)
        commit_tokens(
            inputs=frame.inputs,
            tokens=accepted.tokens,
            num_accepted=accepted.num_accepted,
            history=self.sequences.history,
            length=self.sequences.length,
            emitted=frame.emitted,
            out=frame.draft_inputs,
            max_scheduled=frame.batch.max_scheduled,
        )
        return accepted.num_accepted

    def _judge(self, frame: Frame, hidden: Tensor, accept: Acceptance) -> Accepted:
        """Hold the drafts against the target's own distributions."""
        inputs, text = frame.inputs, self.sequences
        judged = hidden if frame.all_decode else hidden.index_select(0, inputs.verify)
        logits = self.target.logits(judged).unflatten(0, (-1, self.width))
        if accept is greedy:
            return greedy(logits, inputs.guesses, inputs.draft, inputs.emits)
        probs = text.draft_probs
        return accept(
            logits=logits,
            drafts=inputs.guesses,
            num_draft=inputs.draft,
            emits=inputs.emits,
            draft_probs=None if probs is None else probs[inputs.slot.clamp(min=0)],
            sampling=text.sampling.of(inputs.slot),
            position=inputs.certain,
        )

    def _draft(self, frame: Frame) -> None:
        """Propose drafts for the next step, from what is certain now."""
        assert frame.verify_output is not None
        assert self.drafter is not None
        drafts, probs = self.drafter.propose(frame.verify_output)
        self.sequences.propose(frame.draft_inputs.slot, drafts, probs)

    # -- results ---------------------------------------------------------------------------------

    def _copy_results(self, step: Step, frame: Frame) -> None:
        """Start the emitted tokens on their way to the host; none where no row emits."""
        rows = 0 if frame.accept is None else len(step.rows)
        values = frame.emitted[:rows].flatten()
        if self._copies is None:
            self._results.start(step.number, values)
            return
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            self._results.start(step.number, values)

    def _wait_for_copies(self) -> None:
        """Let the device copy the last results before it overwrites them."""
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)

    # -- frames ----------------------------------------------------------------------------------

    def _frame(self, rows: StepRows, num_update_rows: int, accept: Acceptance | None) -> Frame:
        n = len(rows)
        if self._graphs is not None and n == num_update_rows:
            assert accept is not None  # a row that decodes emits
            return self._captured(self._graphs, graph_size(n, self.manager.max_requests), accept)
        return self._buffers.frame(
            rows=n,
            tokens=int(rows.scheduled.sum()),
            num_update_rows=num_update_rows,
            max_scheduled=int(rows.scheduled.max(initial=1)),
            max_context=int((rows.computed_max + rows.scheduled).max(initial=1)),
            accept=accept,
        )

    def _captured(self, graphs: Graphs, size: int, accept: Acceptance) -> Frame:
        """The frame of `size` decoding rows, of any context; its graphs are captured now if they
        are not yet, over rows that are all padding."""
        key = (size, accept)
        if key in self._frames:
            return self._frames[key]
        max_context = self.sequences.history.shape[1]
        frame = self._buffers.frame(size, size * self.width, size, self.width, max_context, accept)
        frame.graph_key = key
        self._prepare(frame, self._no_entries(), 0)
        phases = [self._verify_and_accept] + [self._draft] * (self.drafter is not None)
        for phase in phases:
            graphs.capture((phase.__name__, key), partial(phase, frame))
        self._frames[key] = frame
        return frame

    def _launch(self, phase: Callable[[Frame], None], frame: Frame) -> None:
        """Run a phase, by its graph if the frame has one."""
        if self._graphs is None or frame.graph_key is None:
            phase(frame)
        else:
            self._graphs.replay((phase.__name__, frame.graph_key))

    def _no_entries(self) -> Tensor:
        return torch.zeros((1, 1), dtype=torch.int32, device=self.manager.device)
