"""Which frame a step takes, and which of its launches are captured as CUDA graphs."""

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hybrid_runtime.device.compile import compiling
from hybrid_runtime.device.graphs import Graphs
from hybrid_runtime.kernels.step.entry import ENTRY_FIELDS, SCHEDULED, SLOT
from hybrid_runtime.specdecode.acceptance import Acceptance
from hybrid_runtime.specdecode.draft_length import Drafts, StepCost
from hybrid_runtime.specdecode.frame import Frame, Phase
from hybrid_runtime.specdecode.phases import LayeredTarget, Phases
from hybrid_runtime.specdecode.shape import PaddedShapes, StepShape

Work = tuple[str, Callable[[], object]]
"""A shape, and what captures it."""
Progress = Callable[[int, int], None]
"""Called as capturing goes on, with how many shapes are done and how many there are."""


class CapturedSteps:
    """Frames of padded steps. Those in which every row decodes are captured when they are first
    needed; those with prompts by `capture` alone, and launched one by one until then.

    Verify pass and drafter of a step with prompts are captured once, acceptance for each kind.
    Where all rows decode, the drafter is captured for each number of drafts that may follow.

    The drafter's graph is the same behind every acceptance that `capture` knows: where all rows
    decode, the verify passes of all but the first copy their hidden states to where those of the
    first are.

    phases: what is launched.
    shapes: to which steps are padded.
    """

    def __init__(self, phases: Phases, shapes: PaddedShapes) -> None:
        manager = phases.manager
        self.shapes, self._phases = shapes, phases
        self._max_context = phases.sequences.history.shape[1]
        self._graphs = Graphs(manager.device)
        # Padded rows; each pass gives them the tokens of those that decode.
        line = torch.zeros(ENTRY_FIELDS, dtype=torch.int32, device=manager.device)
        line[SLOT : SLOT + 1] = -1
        self._padded = line.expand(manager.max_rows, -1).contiguous()
        self._frames: dict[tuple[StepShape, Acceptance | None], Frame] = {}
        self._hidden: Tensor | None = None
        self._ran_whole = False

    def frame(self, shape: StepShape, accept: Acceptance | None, propose: int) -> Frame:
        """The frame of a step of that padded shape, of any context. propose: as of `Frame`; beside
        prompts there is one number of drafts."""
        if shape.prompt_rows:
            return self._mixed(shape, accept)
        return self._decoding(shape, accept, propose)

    def _decoding(self, shape: StepShape, accept: Acceptance | None, propose: int) -> Frame:
        """Where all rows decode. It is captured now if it is not yet, over rows that are all
        padding."""
        if (shape, accept) not in self._frames:
            self._capture_verify(shape, accept, None)
        frame = self._frames[shape, accept]
        frame.propose = propose
        if self._phases.drafter is not None and frame.graph_of("draft") is None:
            self._capture_draft(frame)
        return frame

    def _capture_decoding(self, shape: StepShape, accepts: Sequence[Acceptance]) -> None:
        """With all drafts that may be proposed behind it."""
        hidden = None
        for accept in accepts:
            if (shape, accept) not in self._frames:
                self._capture_verify(shape, accept, hidden)
            verified = self._frames[shape, accept].verify_output
            hidden = verified.hidden if verified is not None and hidden is None else hidden
        first, *others = (self._frames[shape, accept] for accept in accepts)
        for propose in self.shapes.drafts.after(shape.drafts):
            for frame in (first, *others):
                frame.propose = propose
            if self._phases.drafter is not None and first.graph_of("draft") is None:
                self._capture_draft(first, *others)

    def _capture_verify(
        self, shape: StepShape, accept: Acceptance | None, hidden: Tensor | None
    ) -> None:
        """Verify and accept. hidden: as of `Frame`."""
        frame = self._uncaptured(shape, accept)
        frame.hidden = hidden
        self._prepare(frame)
        self._record("verify_and_accept", (shape, accept), frame)
        self._frames[shape, accept] = frame

    def _capture_draft(self, first: Frame, *others: Frame) -> None:
        """Of frames with the same hidden states."""
        self._prepare(first)
        self._phases.accept(replace(first, accept=None))  # the drafter's rows are padding, too
        self._record_draft((first.shape, first.accept, first.propose), first, *others)

    def _mixed(self, shape: StepShape, accept: Acceptance | None) -> Frame:
        """Where prompts run. Kinds of acceptance that `capture` did not know are captured now, if
        their shape is."""
        first = self._frames.get((shape, None))
        if first is None:
            return self._uncaptured(shape, accept)
        key = shape, accept
        if key not in self._frames:
            self._prepare(first)
            frame = replace(first, accept=accept, graphs=dict(first.graphs))
            self._record("accept", key, frame)
            self._record_draft(key, frame)
            self._frames[key] = frame
        return self._frames[key]

    def launch(self, phase: Phase, frame: Frame) -> None:
        """Run a phase, by its graph if the frame has one."""
        key = frame.graph_of(phase)
        if key is None:
            self._phases.launch(phase, frame)
        else:
            self._graphs.replay(key)

    def capture(self, accepts: Sequence[Acceptance], progress: Progress | None) -> None:
        """Capture every shape, for each kind of acceptance.

        Raises:
            torch.OutOfMemoryError: a shape does not fit; it says which.
        """
        work = self._with_prompts(accepts)
        for shape in self.shapes.decoding():
            name = f"{shape.decode_rows} decoding rows"
            work.append((name, partial(self._capture_decoding, shape, accepts)))
        for done, (name, act) in enumerate(work):
            if progress is not None:
                progress(done, len(work))
            try:
                act()
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    f"no memory for steps with {name}; max_requests, max_prompt_tokens, "
                    "max_tokens_per_step or num_blocks must be smaller, or graphs False"
                ) from error
        if self._phases.manager.device.type == "cuda":
            torch.cuda.empty_cache()  # of calls that were not replays
        if progress is not None:
            progress(len(work), len(work))

    def costs(self, accept: Acceptance) -> dict[tuple[int, Drafts], StepCost]:
        """What steps take in which all rows decode, by rows and drafts; the rows are all padding.
        None on a CPU. Waits for the device."""
        if self._phases.manager.device.type != "cuda":
            return {}
        events = {}
        for shape in self.shapes.decoding():
            frame = self._decoding(shape, accept, shape.drafts.most)
            self._prepare(frame)
            self._spread_tokens(frame)
            for _ in range(2):  # the first one finds its weights anywhere
                begin, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                begin.record()
                self.launch("verify_and_accept", frame)
                between.record()
                if self._phases.drafter is not None:
                    self.launch("draft", frame)
                end.record()
            events[shape.decode_rows, shape.drafts] = begin, between, end
        torch.cuda.synchronize(self._phases.manager.device)
        return {
            key: StepCost(begin.elapsed_time(between) / 1e3, between.elapsed_time(end) / 1e3)
            for key, (begin, between, end) in events.items()
        }

    def _with_prompts(self, accepts: Sequence[Acceptance]) -> list[Work]:
        """All shapes of steps with prompts."""
        work: list[Work] = []
        if self._phases.manager.device.type == "cuda":
            compile_all = partial(self._compile, list(self.shapes.mixed()), accepts)
            work.append(("the kernels of all sizes", compile_all))
        for shape in self.shapes.mixed():
            act = partial(self._capture_mixed, shape, accepts)
            name = f"{shape.decode_rows} decoding rows and {shape.prompt_tokens} prompt tokens"
            work.append((name, act))
        return work

    def _compile(self, mixed: list[StepShape], accepts: Sequence[Acceptance]) -> None:
        """Compile side by side what all shapes launch: kernels depend on how many rows decode and
        on how many prompt tokens there are, but not on both."""
        tokens = min(shape.prompt_tokens for shape in mixed)
        one_each = {shape.prompt_tokens: shape for shape in mixed}
        chosen = {*one_each.values(), *(s for s in mixed if s.prompt_tokens == tokens)}
        shapes = [*self.shapes.decoding(), *chosen]
        frames = [self._uncaptured(shape, accepts[0]) for shape in shapes]
        with compiling():
            self._phases.manager.compile_flush()
            for frame in frames:
                self._compile_frame(frame)
                for accept in accepts[1:]:
                    self._phases.accept(replace(frame, accept=accept))

    def _capture_mixed(self, shape: StepShape, accepts: Sequence[Acceptance]) -> None:
        """Capture a shape; its frame for `None`, steps that emit nothing, is the first one's."""
        if (shape, accepts[0]) in self._frames:
            return
        first = self._uncaptured(shape, accepts[0])
        self._prepare(first)
        if self._hidden is None:
            self._warm_up("verify", first)
            assert first.verify_output is not None
            like = first.verify_output.hidden
            self._hidden = like.new_empty((self.shapes.most_tokens, *like.shape[1:]))
        # One memory for all shapes: a pass's hidden states outlive its graph, until they are used.
        first.hidden = self._hidden[: shape.tokens]
        self._record("verify", shape, first)
        for accept in accepts:
            frame = first if accept is accepts[0] else replace(first, accept=accept)
            frame.graphs = dict(first.graphs)
            self._record("accept", (shape, accept), frame)
            self._frames[shape, accept] = frame
        self._frames[shape, None] = first
        self._record_draft(shape, *(self._frames[shape, accept] for accept in accepts))

    def _record_draft(self, key: Hashable, *frames: Frame) -> None:
        """Capture the drafter of frames, after all that runs before it: what its passes need for a
        moment may lie where a later capture leaves its results, and these must outlive it."""
        if self._phases.drafter is not None:
            self._record("draft", key, frames[0])
            for frame in frames[1:]:
                frame.add_graph("draft", ("draft", key))

    def _prepare(self, frame: Frame) -> None:
        """Rows that are all padding; those that decode have their tokens, because the prompts' are
        looked for behind them."""
        self._padded[:, SCHEDULED].fill_(frame.shape.mean_tokens)
        self._phases.prepare(frame, self._padded, frame.shape.decode_rows)

    def _spread_tokens(self, frame: Frame) -> None:
        """Let all tokens differ: equal ones would take the same routed experts, whose weights cost
        as much as those of one token."""
        tokens, last = frame.inputs.tokens, self._phases.sequences.vocabulary - 1
        tokens.copy_(torch.linspace(0, last, len(tokens), dtype=torch.float64))

    def _record(self, phase: Phase, key: Hashable, frame: Frame) -> None:
        """Capture one phase of a frame; `launch` replays it from then on."""
        act, warm_up = (partial(run, phase, frame) for run in (self._phases.launch, self._warm_up))
        self._graphs.capture((phase, key), act, warm_up)
        frame.add_graph(phase, (phase, key))

    def _warm_up(self, phase: Phase, frame: Frame) -> None:
        """Launch every kernel of a phase over rows that are all padding. The target runs as a whole
        the first time, for the sake of what a layer makes at its first use, then in few layers."""
        runs_target = phase in ("verify", "verify_and_accept")
        with self._few_layers() if runs_target and self._ran_whole else nullcontext():
            self._phases.launch(phase, frame)
        self._ran_whole |= runs_target

    def _few_layers(self) -> AbstractContextManager[None]:
        target = self._phases.target
        return target.few_layers() if isinstance(target, LayeredTarget) else nullcontext()

    def _compile_frame(self, frame: Frame) -> None:
        """All phases over rows that are all padding, where launches only compile."""
        self._phases.buffers.clear()
        self._prepare(frame)
        with self._few_layers():
            self._phases.verify_and_accept(frame)
        if self._phases.drafter is not None:
            self._phases.draft(frame)

    def _uncaptured(self, shape: StepShape, accept: Acceptance | None) -> Frame:
        """A frame of the shape, for any context."""
        return self._phases.buffers.frame(
            shape=shape,
            row_tokens=shape.row_tokens,
            max_scheduled=max(shape.prompt_tokens, shape.row_tokens),
            max_context=self._max_context,
            accept=accept,
            # Prompts' rows beyond those of the step have no tokens, the others as many as these,
            # or one where these differ.
            pad=0 if shape.prompt_rows else 1 if shape.longest else shape.row_tokens,
            propose=self.shapes.drafts.beside_prompts
            if shape.prompt_rows
            else shape.row_tokens - 1,
        )
