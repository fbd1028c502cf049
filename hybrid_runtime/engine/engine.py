"""The engine: prompts in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor

from hybrid_runtime.device.sync import Waits
from hybrid_runtime.engine.core import EngineCore
from hybrid_runtime.engine.memory import Memory
from hybrid_runtime.engine.offload.cache import HostCache
from hybrid_runtime.engine.pooler import Pooler, Pooling, pooled_from
from hybrid_runtime.engine.prefix_cache import PrefixCache, Retention
from hybrid_runtime.engine.request import Completion, Request
from hybrid_runtime.engine.scheduler import Scheduler, overshoot
from hybrid_runtime.engine.stats import EngineStats
from hybrid_runtime.engine.tokenize import Prompt, encode, encode_instructed
from hybrid_runtime.models.checkpoint import load_eagle, load_mtp, load_nemotron_h, resolve
from hybrid_runtime.models.nemotron_h import NemotronH
from hybrid_runtime.specdecode.acceptance import (
    Acceptance,
    greedy,
    rejection,
    synthetic_acceptance,
    synthetic_rates,
)
from hybrid_runtime.specdecode.drafter import DrafterName, make_drafter
from hybrid_runtime.specdecode.runner import SpecDecodeRunner
from hybrid_runtime.specdecode.sampling import SamplingParams
from hybrid_runtime.specdecode.sequences import Sequences
from hybrid_runtime.state.layout import ConvLayout, LayoutKind, StateLayout
from hybrid_runtime.state.layouts.flush import Foldable
from hybrid_runtime.state.manager import HybridStateManager, Strategy


class QueueFull(RuntimeError):
    """As many requests wait as may; try again when some have been served."""


class Engine:
    """Continuous batching over one Nemotron-H model with an optional drafter.

    drafter: "mtp" or "eagle" (with their `head`), "ngram", or None. strategy: see
    `HybridStateManager`. max_requests, max_model_len: requests that run at once and tokens of each,
    output included; they size the memory. max_tokens_per_step: bounds a step's prompt chunks.
    ssm_dtype: of the SSM states. conv_layout: of the windows, see `StateLayout`.
    num_speculative_tokens: most drafts per step (K); must be 0 without a drafter.
    block_size: tokens per block; None derives it from the state layout. num_blocks: KV blocks and
    state blocks of the pools; None makes both large enough for `max_requests` full-length requests.
    synthetic_length: mean accepted length to pretend, for measurements; the text is then wrong.
    sampled_drafts: draw drafts of MTP and EAGLE at the request's temperature (see `HeadDrafter`).
    graphs: replay CUDA graphs where all rows decode; None: on a GPU.
    steps_ahead: steps queued before the results of the first are read, 0 or 1; None: 1 on a GPU,
    where the host then never keeps it waiting.
    state_layout: "replay" keeps one state per request, into which the next step folds what was
    accepted; "columns" one for every guess. Without drafts there are no guesses, and "columns" is
    used.
    stochastic_rounding: fp16 or bf16 states of decoding rows are rounded up or down by chance, so
    that their mean error is zero; by the request's seed, position, layer and element, whatever slot
    or batch it is in. States of prompt chunks are rounded to nearest, so a request that is computed
    again after a preemption, or from a prefix hit, may round otherwise there.
    prefix_caching: later prompts start from the blocks that earlier ones with the same beginning
    and tenant have left. retention: which states are kept for that (see `PrefixCache`).
    host_blocks: KV blocks and state blocks in pinned host memory, for what the device has no room
    for; None: none.
    max_waiting: requests that may wait; `submit` raises `QueueFull` beyond.
    """

    def __init__(
        self,
        model: NemotronH,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        *,
        drafter: DrafterName | None = None,
        head: Any = None,
        num_speculative_tokens: int = 0,
        strategy: Strategy = "auto",
        max_requests: int = 8,
        max_model_len: int = 2048,
        max_tokens_per_step: int = 2048,
        block_size: int | None = None,
        num_blocks: tuple[int, int] | None = None,
        ssm_dtype: torch.dtype = torch.float32,
        conv_layout: ConvLayout = "SD",
        synthetic_length: float | None = None,
        sampled_drafts: bool = False,
        graphs: bool | None = None,
        steps_ahead: int | None = None,
        state_layout: LayoutKind = "replay",
        stochastic_rounding: bool = False,
        prefix_caching: bool = True,
        retention: Retention = "all",
        host_blocks: tuple[int, int] | None = None,
        max_waiting: int | None = None,
    ) -> None:
        k = num_speculative_tokens
        if drafter is not None and drafter not in get_args(DrafterName):
            raise ValueError(
                f"drafter is {drafter!r}; it must be None or one of {get_args(DrafterName)}"
            )
        if (drafter is None) != (k == 0):
            raise ValueError(
                f"num_speculative_tokens is {k} with drafter={drafter!r}; it must be 0 without a "
                "drafter and at least 1 with one"
            )
        if max_model_len < 2:
            raise ValueError(f"max_model_len is {max_model_len}; it must be at least 2")
        if max_tokens_per_step < max(2, k + 1):
            raise ValueError(
                f"max_tokens_per_step is {max_tokens_per_step}; with num_speculative_tokens={k} it "
                f"must be at least {max(2, k + 1)}, or nobody could ever decode"
            )
        on_gpu = model.device.type == "cuda"
        graphs = on_gpu if graphs is None else graphs
        ahead = int(on_gpu) if steps_ahead is None else steps_ahead
        if ahead not in (0, 1):
            raise ValueError(f"steps_ahead is {ahead}; it must be 0 or 1")
        self.model, self.tokenizer = model, tokenizer
        self._greedy_only: Acceptance = greedy
        sampling: Acceptance = rejection
        device, dtype = model.device, model.dtype
        if synthetic_length is not None:
            forced = synthetic_acceptance(synthetic_rates(synthetic_length, k), device)
            self._greedy_only = sampling = forced
        layout = StateLayout.from_config(
            model.config, k, ssm_dtype, conv_layout, conv_dtype=dtype, block_size=block_size,
            kind=state_layout if k else "columns",
        )  # fmt: skip
        if stochastic_rounding and (ssm_dtype == torch.float32 or not layout.replays):
            raise ValueError(
                f"stochastic_rounding is True with ssm_dtype={ssm_dtype} and "
                f"state_layout={layout.kind!r}; it must be False unless states are float16 or "
                "bfloat16 in the replay layout, which needs drafts"
            )
        longest = max_model_len + overshoot(k, ahead)
        host_decides = strategy in ("blocking", "defer")
        self.manager = HybridStateManager(
            layout, max_requests, k, device, strategy, steps_in_flight=ahead, readback=host_decides
        )
        drawn = model.config.vocab_size if sampled_drafts and head is not None else 0
        # One more than can be computed: see `Request.device_tokens`.
        self.sequences = Sequences(max_requests, longest + 1, k, device, drawn, ahead)
        self.waits = Waits()
        memory = Memory.allocate(
            model, head, layout, max_requests, longest, num_blocks, ahead + 2, self.waits
        )
        if memory.states:
            foldable = None
            if memory.window_cache is not None:
                seed = self.sequences.rounding_seed if stochastic_rounding else None
                foldable = Foldable(memory.window_cache, model.A_log, seed)
            self.manager.bind(memory.states, memory.state.device_table, foldable=foldable)
        if host_blocks is not None and not prefix_caching:
            raise ValueError(
                f"host_blocks is {host_blocks} with prefix_caching=False; it must be None, because "
                "only filed blocks go to the host"
            )
        self.prefix_cache = PrefixCache(
            memory.kv, memory.state, layout.block_size, retention,
            None if host_blocks is None else HostCache(memory.host_tier(host_blocks)),
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.manager, memory.kv, memory.state, max_requests, max_tokens_per_step,
            max_model_len, ahead, self.prefix_cache if prefix_caching else None,
        )  # fmt: skip
        self.max_waiting = max_waiting
        self.runner = SpecDecodeRunner(
            model, self.manager, self.sequences, memory.caches,
            make_drafter(drafter, head, memory.caches, k, sampled_drafts),
            max_tokens_per_step, ahead, graphs, stochastic_rounding,
        )  # fmt: skip
        self.core = EngineCore(
            self.scheduler,
            self.runner,
            tokenizer,
            eos_token_ids,
            self._greedy_only,
            sampling,
            ahead,
        )
        self._next_id = 0

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        drafter: DrafterName | None = "mtp",
        num_speculative_tokens: int | None = None,
        eagle_path: str | Path | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> Engine:
        """Engine for a checkpoint directory or hub id.

        num_speculative_tokens: default 3 with a drafter. eagle_path: the EAGLE head's own
        checkpoint; default the sub-directory `eagle` of `path`. device: default a GPU where there
        is one. options: as of `Engine`.
        """
        directory = resolve(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"checkpoint {directory} has no tokenizer.json; it must hold one")
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model = load_nemotron_h(directory, where, dtype)
        head: Any = None
        if drafter == "mtp":
            head = load_mtp(directory, model)
        elif drafter == "eagle":
            head = load_eagle(eagle_path or directory / "eagle", model)
        if num_speculative_tokens is None:
            num_speculative_tokens = 0 if drafter is None else 3
        return cls(
            model,
            Tokenizer.from_file(str(file)),
            model.config.eos_token_id,
            drafter=drafter,
            head=head,
            num_speculative_tokens=num_speculative_tokens,
            **options,
        )

    # -- requests --------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        deadline: float | None = None,
    ) -> Request:
        """Queue one prompt (text or token ids); `ValueError` if it can never run, `QueueFull` if
        too many wait. tenant: who must not find what others have computed. deadline: seconds from
        now, after which it ends with what it has."""
        self._check_queue()
        tokens = encode(prompt, self.tokenizer, self.model.config.vocab_size)
        params = params or SamplingParams()
        seed = params.seed
        if seed is None:
            seed = int(np.random.default_rng().integers(2**63 - 1))
        stream = DecodeStream(ids=tokens[-4:])
        request = Request(self._next_id, tokens, params, seed, stream, tenant=tenant)
        return self._add(request, deadline)

    def submit_embedding(
        self,
        prompt: Prompt,
        pooling: Pooling = "last",
        instruction: Prompt = "",
        *,
        tenant: str = "",
        deadline: float | None = None,
    ) -> Request:
        """Queue one prompt to be embedded, beside those that generate; arguments and errors as of
        `embed` and `submit`. It ends as "embedded", with `request.embedding` not normalised."""
        self._check_queue()
        tokens, count = encode_instructed(
            prompt, instruction, self.tokenizer, self.model.config.vocab_size
        )
        request = Request(
            self._next_id, tokens, SamplingParams(), 0, DecodeStream(), tenant=tenant,
            pooled_from=pooled_from(pooling, len(tokens), count),
        )  # fmt: skip
        if self.core.pooler is None:
            self.core.pooler = Pooler(
                self.manager.max_requests, self.model.config.hidden_size, self.core.ahead,
                self.model.device, self.waits,
            )  # fmt: skip
        return self._add(request, deadline)

    def abort(self, request: Request) -> None:
        """End a request now; nothing happens to one that has ended."""
        if request.finish_reason is None:
            self.core.finish(request, "abort")

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs, and no results are on their way."""
        return not self.scheduler.waiting and self.core.idle

    def capture(self) -> None:
        """Compile all kernels and capture all CUDA graphs of greedy decoding now, not when a step
        first needs them. Nothing is done without graphs."""
        self.runner.capture(self._greedy_only)

    def step(self) -> list[Request]:
        """Queue one step and read the results of the one before (with `steps_ahead` 0: of this
        one); the requests that got tokens or ended by them."""
        return self.core.step()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Complete all prompts; `params` for all, or one per prompt."""
        if isinstance(prompts, str):
            raise ValueError("prompts is a str; it must be a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"params has {len(params)} entries; it must have {len(prompts)}")
        with Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("tokens", total=sum(p.max_tokens for p in params))
            requests = self._serve(
                (self.submit(prompt, p) for prompt, p in zip(prompts, params, strict=True)),
                lambda live: bar.update(task, completed=sum(len(r.output) for r in live)),
            )
        return [Completion.of(r) for r in requests]

    def embed(
        self,
        prompts: Sequence[Prompt],
        pooling: Pooling = "last",
        instruction: Prompt = "",
        normalize: bool = True,
    ) -> Tensor:
        """One vector per prompt, float32 `[prompts, hidden]` on the CPU, pooled from the model's
        hidden states after its final norm.

        pooling: "last", the last token's (with an end-of-text token, if the tokenizer adds one), or
        "mean" over all tokens. instruction: what stands in front of every prompt, text or ids as
        they are; its tokens run, and are left out of the mean. normalize: to length 1. `ValueError`
        for a prompt that is empty or, instruction included, longer than `max_model_len`. What the
        step of a prompt raises is raised here, after the others have ended.
        """
        if isinstance(prompts, str):
            raise ValueError("prompts is a str; it must be a list of prompts")
        requests = self._serve(
            self.submit_embedding(prompt, pooling, instruction) for prompt in prompts
        )
        for error in (r.error for r in requests if r.error is not None):
            raise error
        vectors = torch.empty(len(requests), self.model.config.hidden_size)
        for line, request in zip(vectors, requests, strict=True):
            assert request.embedding is not None
            line.copy_(request.embedding)
        return F.normalize(vectors) if normalize else vectors

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Text of one completion, piece by piece; ending the iteration early aborts it."""
        request = self.submit(prompt, params)
        shown = 0
        try:
            while request.finish_reason is None:
                self.step()
                ready = request.settled
                if ready > shown:
                    yield request.text[shown:ready]
                    shown = ready
        finally:
            self.abort(request)
        if request.error is not None:
            raise request.error

    def stats(self) -> EngineStats:
        done = self.core.counts
        return EngineStats(
            done.steps, done.emitted, done.mean_acceptance_length, self.manager.stats(),
            self.scheduler.preemptions, self.prefix_cache.stats(),
        )  # fmt: skip

    def _serve(
        self, submitted: Iterable[Request], shown: Callable[[list[Request]], None] | None = None
    ) -> list[Request]:
        """Submit requests and run until all have ended; none is left behind by a failure."""
        requests: list[Request] = []
        try:
            for request in submitted:
                requests.append(request)
            while any(r.finish_reason is None for r in requests):
                self.step()
                if shown is not None:
                    shown(requests)
        except BaseException:
            for request in requests:
                self.abort(request)
            raise
        return requests

    def _check_queue(self) -> None:
        waiting = len(self.scheduler.waiting)
        if self.max_waiting is not None and waiting >= self.max_waiting:
            raise QueueFull(f"{waiting} requests wait; max_waiting is {self.max_waiting}")

    def _add(self, request: Request, deadline: float | None) -> Request:
        self.core.add(request, deadline)
        self._next_id += 1
        return request
