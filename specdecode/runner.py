"""One speculative step of a batch: prepare, verify, accept, draft. `reference.py` is the same step
for one request, in the paper's order."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.device.transfer import Readback
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.models.forward_batch import Caches
from hybrid_runtime.specdecode.acceptance import Acceptance, greedy
from hybrid_runtime.specdecode.capture import CapturedSteps, Progress
from hybrid_runtime.specdecode.draft_length import DraftLength
from hybrid_runtime.specdecode.drafter import Drafter
from hybrid_runtime.specdecode.frame import Frame, Phase, StepBuffers
from hybrid_runtime.specdecode.pace import Pace
from hybrid_runtime.specdecode.phases import Phases, TargetModel
from hybrid_runtime.specdecode.sequences import Sequences
from hybrid_runtime.specdecode.shape import PaddedShapes, StepShape, most_rows, pad_rows
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Step

OnVerified = Callable[[int, Tensor, Tensor], None]
"""Called as soon as a step's verify pass is queued, with its number, the target's hidden states
after the final norm `[T, hidden]`, and by row the index of its first token, int32; of rows that
decode it is not right."""


class SpecDecodeRunner:
    """Runs steps of a batch of sequences under one target and at most one drafter.

    A decoding row runs one certain token and 0 .. K drafts. Steps whose decoding rows have as many
    drafts each, a number that `drafts` knows, are padded and captured, and so are those of many
    rows with different numbers; other steps run as they are, without graphs.

    target: the model.
    manager: keeps its Mamba states right.
    sequences: the requests' tokens, lengths, drafts and sampling parameters, by slot.
    caches: the memory of target and draft head.
    drafter: None for plain decoding.
    max_tokens: most tokens of one step.
    steps_ahead: steps that may be queued before the results of the first are read.
    captured_prompt_tokens: pad steps to few shapes and replay CUDA graphs of them; on a CPU only
        pad them. Steps in which all rows decode are captured when first needed; those with prompts,
        up to so many prompt tokens, by `capture`. None: no padding, no graphs.
    stochastic_rounding: verify passes round narrow states stochastically (replay layout).
    drafts: how many drafts steps may have, which learns what they cost; None: always K.

    Raises:
        ValueError: the manager's steps have no room for padding.
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
        captured_prompt_tokens: int | None = None,
        stochastic_rounding: bool = False,
        drafts: DraftLength | None = None,
    ) -> None:
        self.manager, self.sequences, self.caches = manager, sequences, caches
        device, slots, num_draft = manager.device, manager.max_requests, sequences.num_draft
        self.drafts = drafts or DraftLength(num_draft, adaptive=False)
        rounding = Rounding(sequences.rounding_seed, layer=0) if stochastic_rounding else None
        shapes, most_tokens = None, max(max_tokens, slots * (num_draft + 1))
        if captured_prompt_tokens is not None:
            block_size = manager.layout.block_size
            shapes = PaddedShapes(
                slots, self.drafts, max_tokens, captured_prompt_tokens, block_size
            )
            most_tokens = max(most_tokens, shapes.most_tokens)
            if manager.max_rows < most_rows(slots):
                raise ValueError(
                    f"manager.max_rows is {manager.max_rows}; with captured_prompt_tokens it must "
                    f"be at least {most_rows(slots)}, for steps are padded"
                )
        self._buffers = StepBuffers(manager, most_tokens, self.drafts, rounding)
        self._phases = Phases(target, manager, sequences, caches, drafter, self._buffers)
        self._captured = None if shapes is None else CapturedSteps(self._phases, shapes)
        self.waits, self.pace = Waits(), Pace()
        emitted = self._buffers.emitted
        self._results = Readback(emitted.numel(), steps_ahead + 1, device, self.waits)
        self._logprobs: Readback | None = None
        self._logprob_words = 0  # of a token
        # Results travel beside the drafter's passes, not in front of them.
        cuda = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if cuda else None
        self._copied = torch.cuda.Event() if cuda else None
        self._padding = [slice(0, 0)] * (steps_ahead + 1)
        self._drafted = [(StepShape(0, 0, 0, 0), 0)] * (steps_ahead + 1)

    @property
    def drafter(self) -> Drafter | None:
        """Who proposes; may be replaced before anything is captured."""
        return self._phases.drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        self._phases.drafter = drafter

    @torch.inference_mode()
    def step(
        self,
        rows: StepRows,
        shape: StepShape,
        accept: Acceptance | None,
        on_verified: OnVerified | None = None,
        propose: int | None = None,
    ) -> Step:
        """Queue one step; `read` gives what it emitted.

        Raises what the model or `on_verified` raises, after giving up the step: its requests are
        released. After Ctrl-C and its like nothing is, and the manager must be `reset`.

        Args:
            rows: decoding rows first, which run one certain token and the first `rows.draft` of the
                drafts that the last step proposed (-1 where it proposed none). The others run any
                number of certain tokens.
            shape: of `rows`.
            accept: which drafts are accepted. None if no row reaches the end of its text: there
                are no logits then, and nothing is copied to the host.
            on_verified: looks at the target's hidden states.
            propose: how many drafts to propose for the next step; None: K, or beside prompts as
                many as `drafts` says.
        """
        decode_rows = shape.decode_rows
        if propose is None:
            propose = self.drafts.beside_prompts if shape.prompt_rows else self.drafts.most
        padded = None if self._captured is None else self._captured.shapes.of(shape)
        padding = 0
        if padded is not None and shape.prompt_rows:
            padding = padded.decode_rows - decode_rows
            rows = pad_rows(rows, shape, padded)
        step = self.manager.begin_step(rows)
        try:
            turn = step.number % len(self._padding)
            self._padding[turn] = slice(decode_rows, decode_rows + padding)
            self._drafted[turn] = padded or shape, propose
            self._wait_for_copies()
            if padded is not None:
                assert self._captured is not None
                frame = self._captured.frame(padded, accept, propose)
            else:
                frame = self._buffers.frame(
                    shape=shape,
                    row_tokens=shape.row_tokens,
                    max_scheduled=int(rows.scheduled.max(initial=1)),
                    max_context=int((rows.computed_max + rows.scheduled).max(initial=1)),
                    accept=accept,
                    propose=propose,
                )
            self._phases.prepare(frame, step.entries, len(rows))
            self._verify_and_accept(frame)
            assert frame.verify_output is not None
            if on_verified is not None:
                first_token = frame.batch.cu_seqlens[padding:]
                on_verified(step.number, frame.verify_output.hidden, first_token)
            self.manager.end_step(step, frame.num_accepted)
            self._copy_results(step, frame, len(rows) if accept is not None else 0)
            if self._phases.drafter is not None:
                self._launch("draft", frame)
        except Exception:
            self.manager.abandon(step)
            raise
        self.pace.queued(step.number, shape, time.perf_counter())
        return step

    def read(self, step: Step, reason: str) -> NDArray[np.int32]:
        """What a step emitted, `[rows, K + 2]`: up to K + 1 tokens (tail -1) and their count, 0
        where the row is in the middle of its prompt, negative where the text has ended by what the
        device knows. Waits if it must, for that `reason`."""
        n = len(step.rows)
        settle = None if self.manager.readback else self.manager.prepare_settle(step)
        asked = time.perf_counter()
        values = self._results.read(step.number, reason)
        took = self.pace.read(step.number, asked, time.perf_counter())
        if took is not None and self.drafts.adaptive and not took.shape.prompt_rows:
            shape, proposed = self._drafted[step.number % len(self._drafted)]
            self.drafts.took(took.shape.decode_rows, shape.drafts, proposed, took.seconds)
        if len(values):
            emitted = values.reshape(n, -1)
        else:
            emitted = np.full((n, self._buffers.emitted.shape[1]), -1, np.int32)
            emitted[:, -1] = 0
        if settle is None:
            self.manager.accepted(step)
        else:
            settle(emitted[:, -1])
        return self._without_padding(step, emitted)

    def read_logprobs(self, step: Step, reason: str) -> NDArray[np.int32]:
        """Of a step whose acceptance wants log-probabilities, those of the emitted tokens, int32
        `[rows, d + 1, 1 + 2 * most]`, see `token_logprobs`; d as in `Frame`."""
        assert self._logprobs is not None, "no step wanted log-probabilities"
        words = self._logprobs.read(step.number, reason)
        words = words.reshape(len(step.rows), -1, self._logprob_words)
        return self._without_padding(step, words)

    def _without_padding(self, step: Step, values: NDArray[np.int32]) -> NDArray[np.int32]:
        padding = self._padding[step.number % len(self._padding)]
        return np.delete(values, padding, axis=0) if padding.start != padding.stop else values

    @torch.inference_mode()
    def capture(
        self, accepts: Sequence[Acceptance] = (greedy,), progress: Progress | None = None
    ) -> None:
        """Compile and capture all that steps launch now; nothing is done without graphs. The rows
        of all these passes are padding.

        accepts: kinds of acceptance that will be asked for.
        progress: called as it goes on.

        Raises:
            torch.OutOfMemoryError: a size does not fit; it says which.
        """
        if self._captured is not None:
            # The last step's checkpoints would be looked for in padded rows.
            self._wait_for_copies()
            self._buffers.clear()
            self._captured.capture(accepts, progress)
            self.manager.compile_flush()
            if len(self.drafts.levels) > 1:
                self.drafts.measured(self._captured.costs(accepts[0]))

    # -- launches --------------------------------------------------------------------------------

    def _verify_and_accept(self, frame: Frame) -> None:
        """One graph, or with prompts two: acceptance of any kind follows the same verify pass."""
        if frame.graph_of("verify") is not None:
            self._launch("verify", frame)
            self._launch("accept", frame)
        else:
            self._launch("verify_and_accept", frame)

    def _launch(self, phase: Phase, frame: Frame) -> None:
        if self._captured is None:
            self._phases.launch(phase, frame)
        else:
            self._captured.launch(phase, frame)

    # -- results ---------------------------------------------------------------------------------

    def _copy_results(self, step: Step, frame: Frame, rows: int) -> None:
        """Start what the first `rows` rows emitted on its way to the host."""
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            self._results.start(step.number, frame.emitted[:rows].flatten())
            if rows and frame.logprobs is not None:
                readback = self._logprob_readback(frame.logprobs)
                readback.start(step.number, frame.logprobs[:rows].flatten())
        if self._copied is not None:
            self._copied.record(self._copies)

    def _logprob_readback(self, logprobs: Tensor) -> Readback:
        """Where log-probabilities of a step land, made when they are first wanted."""
        if self._logprobs is None:
            self._logprob_words = logprobs.shape[-1]
            words = self._buffers.nothing.tokens.numel() * self._logprob_words
            self._logprobs = Readback(words, self._results.depth, self.manager.device, self.waits)
        return self._logprobs

    def _wait_for_copies(self) -> None:
        """Let the device copy the last results before it overwrites them."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
