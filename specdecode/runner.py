"""The speculative step: verify, accept, keep the state right, draft again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.graphs import Graphs
from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Readback
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step.commit_tokens import DraftInputs, commit_tokens
from hybrid_runtime.kernels.step.prepare_inputs import StepInputs, prepare_inputs
from hybrid_runtime.models.forward_batch import Caches, RowBatch, StatePositions
from hybrid_runtime.specdecode.acceptance import Acceptance, Accepted, greedy
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


@dataclass(slots=True)
class Frame:
    """Everything that the launches of a step read and write, at addresses that never change.

    uniform: every row runs K + 1 tokens, so each token is judged and nothing has to be gathered.
    verified, num_accepted: what the verify pass left for the drafter and the state manager.
    key: what its graphs are filed under.
    """

    batch: RowBatch
    inputs: StepInputs
    positions: StatePositions
    drafting: DraftInputs
    emitted: Tensor
    uniform: bool
    verified: Verified | None = None
    num_accepted: Tensor | None = None
    key: Hashable = None


Watch = Callable[[int, Tensor, Tensor], None]
"""Called with a step's number, the target's hidden states `[T, hidden]` after the final norm, and
the first token of each row in them, int32 `[rows + 1]`, as soon as the verify pass is queued."""


class SpecDecodeRunner:
    """Steps of a batch of sequences under one target, one drafter (None: plain decoding).

    max_tokens: most tokens of one step. steps_ahead: steps that may be queued before the results of
    the first are read. graphs: replay CUDA graphs for steps in which all rows decode, captured once
    per padded number of rows. stochastic_rounding: verify passes round narrow states by chance
    (replay layout).
    """

    def __init__(
        self,
        target: Target,
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
        device, slots = manager.device, manager.max_requests
        self.width = sequences.num_draft + 1
        self._stochastic = stochastic_rounding
        most = max(max_tokens, slots * self.width)
        self._inputs = StepInputs.empty(slots, most, sequences.num_draft, device)
        self._drafting = DraftInputs.empty(slots, most, sequences.num_draft, device)
        self._emitted = torch.zeros((slots, self.width + 1), dtype=torch.int32, device=device)
        self._nothing = Accepted(
            torch.full((slots, self.width), -1, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
        )
        self.waits = Waits()
        size = slots * (self.width + 1)
        self._results = Readback(size, steps_ahead + 1, device, self.waits)
        # Results travel beside the drafter's passes, not in front of them.
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._graphs = Graphs(device) if graphs and device.type == "cuda" else None
        self._frames: dict[tuple[int, Acceptance], Frame] = {}

    @torch.inference_mode()
    def step(
        self,
        rows: StepRows,
        num_update_rows: int,
        accept: Acceptance | None,
        watch: Watch | None = None,
    ) -> Step:
        """Queue one step of `rows`; `read` gives what it emitted.

        The first `num_update_rows` rows decode: one certain token and K drafts, those that the
        last step proposed (-1 where it proposed none). The others run any number of certain tokens.
        accept: None where no row comes to the end of its text; there are no logits then, and
        nothing travels back. Raises what the model or `watch` raises, after giving up the step: its
        requests are released.
        """
        state, n = self.manager, len(rows)
        step = state.begin_step(rows)
        graphs = self._graphs if n == num_update_rows else None
        try:
            if self._aside is not None:  # the last results must be gone before they are overwritten
                torch.cuda.current_stream().wait_stream(self._aside)
            if graphs is None:
                frame = self._eager(rows, num_update_rows)
            else:
                assert accept is not None  # rows that decode come to their end
                frame = self._captured(graphs, padded(n, state.max_requests), accept)
            self._place_rows(step.entries, n, frame, pad=self.width)
            if graphs is None:
                self._verify(frame, accept)
            else:
                graphs.replay(("verify", frame.key))
            assert frame.num_accepted is not None
            if watch is not None:
                assert frame.verified is not None
                watch(step.number, frame.verified.hidden, frame.batch.cu_seqlens)
            state.end_step(step, frame.num_accepted)
            self._send(step, frame, 0 if accept is None else n)
            if self.drafter is not None:
                if graphs is None:
                    self._draft(frame)
                else:
                    graphs.replay(("draft", frame.key))
        except BaseException:
            state.abandon(step)
            raise
        return step

    def read(self, step: Step, reason: str) -> NDArray[np.int32]:
        """What a step emitted, `[rows, K + 2]`: up to K + 1 tokens (tail -1) and their count, 0
        where the row is in the middle of its prompt. Waits if it must."""
        n = len(step.rows)
        values = self._results.read(step.number, reason)
        if len(values):
            emitted = values.reshape(n, self.width + 1)
        else:
            emitted = np.full((n, self.width + 1), -1, np.int32)
            emitted[:, -1] = 0
        self.manager.resolve(step, emitted[:, -1])
        return emitted

    @torch.inference_mode()
    def capture(self, accept: Acceptance = greedy) -> None:
        """Capture the graphs of all padded sizes now, largest first, and compile what steps with
        prompts need, with rows that touch nothing."""
        if self._graphs is None:
            return
        self.manager.compile_flush()
        most = self.manager.max_requests
        nobody = torch.zeros((1, 1), dtype=torch.int32, device=self.manager.device)
        for length in (1, 8, 64, self._inputs.tokens.shape[0]):
            frame = self._frame(1, length, 0, length, length)
            self._place_rows(nobody, 0, frame, pad=length)
            self._verify(frame, accept)
            if self.drafter is not None:
                self._draft(frame)
        for size in sorted({padded(n, most) for n in range(1, most + 1)}, reverse=True):
            self._captured(self._graphs, size, accept)

    # -- inside a step ---------------------------------------------------------------------------

    def _captured(self, graphs: Graphs, size: int, accept: Acceptance) -> Frame:
        """The frame of `size` rows that all decode, its graphs captured if they are not yet, with
        rows that touch nothing. They must serve any context."""
        key = (size, accept)
        if key in self._frames:
            return self._frames[key]
        most = self.sequences.history.shape[1]
        frame = self._frame(size, size * self.width, size, self.width, most)
        frame.key = key
        nobody = torch.zeros((1, 1), dtype=torch.int32, device=self.manager.device)
        self._place_rows(nobody, 0, frame, pad=self.width)
        graphs.capture(("verify", key), lambda: self._verify(frame, accept))
        if self.drafter is not None:
            graphs.capture(("draft", key), lambda: self._draft(frame))
        self._frames[key] = frame
        return frame

    def _place_rows(self, entries: Tensor, num_rows: int, frame: Frame, pad: int) -> None:
        """Where everything is, from the exact counts that only the device has."""
        text = self.sequences
        prepare_inputs(
            entries,
            num_rows,
            self.manager.computed,
            text.history,
            text.drafts,
            text.length,
            frame.inputs,
            frame.batch.max_scheduled,
            pad,
        )

    def _verify(self, frame: Frame, accept: Acceptance | None) -> None:
        """The target reads the certain tokens and all guesses in one pass; a prefix of the guesses
        is accepted, and one token of the target's own follows."""
        inputs, text = frame.inputs, self.sequences
        hidden = self.target(inputs.tokens, frame.batch, frame.positions, self.caches)
        if accept is None:
            rows = inputs.slot.shape[0]
            nothing = self._nothing
            accepted = Accepted(nothing.tokens[:rows], nothing.num_accepted[:rows])
        else:
            accepted = self._judge(frame, hidden, accept)
        commit_tokens(
            inputs,
            accepted.tokens,
            accepted.num_accepted,
            text.history,
            text.length,
            frame.emitted,
            frame.drafting,
            frame.batch.max_scheduled,
        )
        frame.num_accepted = accepted.num_accepted
        frame.verified = Verified(frame.batch, inputs, hidden, frame.drafting, text)

    def _judge(self, frame: Frame, hidden: Tensor, accept: Acceptance) -> Accepted:
        """What of the guesses the target's own distributions leave."""
        inputs, text = frame.inputs, self.sequences
        judged = hidden if frame.uniform else hidden.index_select(0, inputs.verify)
        logits = self.target.logits(judged).unflatten(0, (-1, self.width))
        if accept is greedy:
            return greedy(logits, inputs.guesses, inputs.draft, inputs.emits)
        at = inputs.slot.clamp(min=0)
        return accept(
            logits,
            inputs.guesses,
            inputs.draft,
            inputs.emits,
            None if text.draft_probs is None else text.draft_probs[at],
            text.sampling.select(at),
            inputs.certain.long(),
        )

    def _draft(self, frame: Frame) -> None:
        """Guesses for the next step, from what is certain now."""
        assert frame.verified is not None
        assert self.drafter is not None
        drafts, probs = self.drafter.propose(frame.verified)
        self.sequences.propose(frame.drafting.slot, drafts, probs)

    def _send(self, step: Step, frame: Frame, rows: int) -> None:
        """Start the results of the first `rows` rows on their way to the host."""
        values = frame.emitted[:rows].flatten()
        if self._aside is None:
            self._results.start(step.number, values)
            return
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            self._results.start(step.number, values)

    def _eager(self, rows: StepRows, num_update_rows: int) -> Frame:
        n, tokens = len(rows), int(rows.scheduled.sum())
        longest = int(rows.scheduled.max(initial=1))
        context = int((rows.computed_max + rows.scheduled).max(initial=1))
        return self._frame(n, tokens, num_update_rows, longest, context)

    def _frame(
        self, rows: int, tokens: int, num_update_rows: int, max_scheduled: int, max_context: int
    ) -> Frame:
        inputs = self._inputs.first(rows, tokens)
        state, rounding = self.manager.positions.first(rows), None
        if self._stochastic:
            rounding = Rounding(self.sequences.rounding_seed, layer=0)
        return Frame(
            batch=RowBatch(
                slot=inputs.slot,
                cu_seqlens=inputs.cu_seqlens,
                computed=inputs.computed,
                max_scheduled=max_scheduled,
                max_context=max_context,
                num_update_rows=num_update_rows,
                num_update_tokens=num_update_rows * self.width,
                max_update=self.width,
            ),
            inputs=inputs,
            positions=StatePositions(
                inputs.draft,
                state.read_column,
                state.read_offset,
                state.write_column,
                state.replay,
                rounding,
            ),
            drafting=self._drafting.first(rows, tokens),
            emitted=self._emitted[:rows],
            uniform=num_update_rows == rows,
        )


def padded(rows: int, most: int) -> int:
    """Rows of the graph that serves `rows`: a power of two up to 8, then a multiple of 8 (of 32
    above 64)."""
    if rows <= 8:
        size = 1 << (rows - 1).bit_length()
    else:
        step = 8 if rows <= 64 else 32
        size = -(-rows // step) * step
    return min(size, most)
