"""Which frame a step takes, and which of its launches are captured as CUDA graphs."""

from __future__ import annotations

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
from hybrid_runtime.specdecode.buckets import Bucket, Buckets, graph_size
from hybrid_runtime.specdecode.frame import Frame
from hybrid_runtime.specdecode.phases import LayeredTarget, Phases

Work = tuple[str, Callable[[], object]]
"""A size, and what captures it."""
Progress = Callable[[int, int], None]
"""Called as capturing goes on, with how many sizes are done and how many there are."""


class CapturedSteps:
    """Frames of padded steps. Those in which every row decodes are captured when they are first
    needed; those with prompts by `capture` alone, and launched one by one until then.

    Verify pass and drafter of a step with prompts are captured once, acceptance for each kind.

    phases: what is launched.
    buckets: sizes of steps with prompts.
    """

    def __init__(self, phases: Phases, buckets: Buckets) -> None:
        manager = phases.manager
        self.buckets = buckets
        self._phases, self._max_requests = phases, manager.max_requests
        self._max_context = phases.sequences.history.shape[1]
        self._graphs = Graphs(manager.device)
        # A padded row, with the tokens of one that decodes.
        line = torch.zeros(ENTRY_FIELDS, dtype=torch.int32, device=manager.device)
        line[SLOT : SLOT + 1] = -1
        self._width = phases.sequences.num_draft + 1
        line[SCHEDULED : SCHEDULED + 1] = self._width
        self._padded = line.expand(manager.max_rows, -1).contiguous()
        self._decoding: dict[tuple[int, Acceptance], Frame] = {}
        self._mixed: dict[tuple[Bucket, Acceptance | None], Frame] = {}
        self._hidden: Tensor | None = None
        self._ran_whole = False

    def decoding(self, rows: int, accept: Acceptance) -> Frame:
        """The frame of a step of `rows` rows that all decode, of any context; it is captured now if
        it is not yet, over rows that are all padding."""
        size = graph_size(rows, self._max_requests)
        key = size, accept
        if key in self._decoding:
            return self._decoding[key]
        frame = self._decoding_frame(size, accept)
        self._prepare(frame)
        self._record("verify_and_accept", key, self._phases.verify_and_accept, frame)
        if self._phases.drafter is not None:
            self._record("draft", key, self._phases.draft, frame)
        self._decoding[key] = frame
        return frame

    def mixed(self, bucket: Bucket, accept: Acceptance | None) -> Frame:
        """The frame of a step with prompts. Kinds of acceptance that `capture` was not told of are
        captured now, if their bucket is."""
        first = self._mixed.get((bucket, None))
        if first is None:
            return self._uncaptured(bucket, accept)
        if (bucket, accept) not in self._mixed:
            self._prepare(first)
            frame = replace(first, accept=accept, graphs=dict(first.graphs))
            self._record("accept", (bucket, accept), self._phases.accept, frame)
            self._mixed[bucket, accept] = frame
        return self._mixed[bucket, accept]

    def launch(self, phase: Callable[[Frame], None], frame: Frame) -> None:
        """Run a phase, by its graph if the frame has one."""
        key = frame.graphs.get(phase.__name__)
        if key is None:
            phase(frame)
        else:
            self._graphs.replay(key)

    def capture(self, accepts: Sequence[Acceptance], progress: Progress | None) -> None:
        """Capture every size, for each kind of acceptance.

        Raises:
            torch.OutOfMemoryError: a size does not fit; it says which.
        """
        work = self._with_prompts(accepts)
        for size in reversed(self._decoding_sizes()):
            for accept in accepts:
                work.append((f"{size} decoding rows", partial(self.decoding, size, accept)))
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

    def _with_prompts(self, accepts: Sequence[Acceptance]) -> list[Work]:
        """All sizes of steps with prompts."""
        work: list[Work] = []
        buckets = self.buckets
        if self._phases.manager.device.type == "cuda":
            compile_all = partial(self._compile, list(buckets.all()), accepts)
            work.append(("the kernels of all sizes", compile_all))
        for bucket in buckets.all():
            act = partial(self._capture_mixed, bucket, accepts, buckets.most_tokens)
            work.append((_name(bucket), act))
        return work

    def _compile(self, buckets: list[Bucket], accepts: Sequence[Acceptance]) -> None:
        """Compile side by side what all sizes launch: kernels depend on how many rows decode and on
        how many prompt tokens there are, but not on both."""
        tokens = min(bucket.prompt_tokens for bucket in buckets)
        one_each = {bucket.prompt_tokens: bucket for bucket in buckets}
        chosen = {*one_each.values(), *(b for b in buckets if b.prompt_tokens == tokens)}
        frames = [self._decoding_frame(size, accepts[0]) for size in self._decoding_sizes()]
        frames += [self._uncaptured(bucket, accepts[0]) for bucket in chosen]
        with compiling():
            self._phases.manager.compile_flush()
            for frame in frames:
                self._compile_frame(frame)
                for accept in accepts[1:]:
                    self._phases.accept(replace(frame, accept=accept))

    def _decoding_sizes(self) -> list[int]:
        most = self._max_requests
        return sorted({graph_size(n, most) for n in range(1, most + 1)})

    def _capture_mixed(
        self, bucket: Bucket, accepts: Sequence[Acceptance], most_tokens: int
    ) -> None:
        """Capture a bucket; its frame for `None`, steps that emit nothing, is the first one's.
        most_tokens: of any bucket."""
        if (bucket, accepts[0]) in self._mixed:
            return
        first = self._uncaptured(bucket, accepts[0])
        self._prepare(first)
        if self._hidden is None:
            self._warm_up(self._phases.verify, first)
            assert first.verify_output is not None
            like = first.verify_output.hidden
            self._hidden = like.new_empty((most_tokens, *like.shape[1:]))
        # One memory for all buckets: a pass's hidden states outlive its graph, until they are used.
        first.hidden = self._hidden[: first.inputs.tokens.shape[0]]
        self._record("verify", bucket, self._phases.verify, first)
        for accept in accepts:
            frame = first if accept is accepts[0] else replace(first, accept=accept)
            frame.graphs = dict(first.graphs)
            self._record("accept", (bucket, accept), self._phases.accept, frame)
            self._mixed[bucket, accept] = frame
        self._mixed[bucket, None] = first
        if self._phases.drafter is not None:
            self._record("draft", bucket, self._phases.draft, first)
            for accept in accepts:
                self._mixed[bucket, accept].graphs |= {"draft": first.graphs["draft"]}

    def _prepare(self, frame: Frame) -> None:
        """Rows that are all padding; those that decode have their tokens, because the prompts' are
        looked for behind them."""
        self._phases.prepare(frame, self._padded, frame.batch.num_update_rows)

    def _record(
        self, name: str, key: Hashable, phase: Callable[[Frame], None], frame: Frame
    ) -> None:
        """Capture one phase of a frame; `launch` replays it from then on."""
        warm_up = partial(self._warm_up, phase, frame)
        self._graphs.capture((name, key), partial(phase, frame), warm_up)
        frame.graphs[name] = name, key

    def _warm_up(self, phase: Callable[[Frame], None], frame: Frame) -> None:
        """Launch every kernel of a phase over rows that are all padding. The target runs as a whole
        the first time, for the sake of what a layer makes at its first use, then in few layers."""
        runs_target = phase in (self._phases.verify, self._phases.verify_and_accept)
        with self._few_layers() if runs_target and self._ran_whole else nullcontext():
            phase(frame)
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

    def _decoding_frame(self, size: int, accept: Acceptance) -> Frame:
        width = self._width
        return self._phases.buffers.frame(
            rows=size, tokens=size * width, num_update_rows=size, max_scheduled=width,
            max_context=self._max_context, accept=accept, pad=width,
        )  # fmt: skip

    def _uncaptured(self, bucket: Bucket, accept: Acceptance | None) -> Frame:
        """A frame of the bucket, for any context."""
        width = self._width
        return self._phases.buffers.frame(
            rows=bucket.rows,
            tokens=bucket.update_rows * width + bucket.prompt_tokens,
            num_update_rows=bucket.update_rows,
            max_scheduled=max(bucket.prompt_tokens, width),
            max_context=self._max_context,
            accept=accept,
            pad=0,
        )


def _name(bucket: Bucket) -> str:
    return f"{bucket.update_rows} decoding rows and {bucket.prompt_tokens} prompt tokens"
