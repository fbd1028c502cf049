"""The engine: prompts in, text or embeddings out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any, Self, Unpack

import torch
from tokenizers import Tokenizer
from torch import Tensor

from hybrid_runtime.device.process import OneProcess, enter_process
from hybrid_runtime.device.sync import Waits
from hybrid_runtime.engine import build
from hybrid_runtime.engine.arguments import (
    check_params,
    check_positions,
    check_service,
    each_params,
    each_positions,
)
from hybrid_runtime.engine.bans import bans
from hybrid_runtime.engine.chat import ChatTemplate, Message
from hybrid_runtime.engine.checks import DTypeName
from hybrid_runtime.engine.config import EngineConfig, EngineOptions
from hybrid_runtime.engine.conversation import Conversation, conversation
from hybrid_runtime.engine.core import EngineCore
from hybrid_runtime.engine.load import QuantizationName, load
from hybrid_runtime.engine.owner import Owner
from hybrid_runtime.engine.pooler import Pooling, pooled_from, stacked
from hybrid_runtime.engine.progress import progress_bar, timed
from hybrid_runtime.engine.request import Completion, Request, raise_first
from hybrid_runtime.engine.stats import EngineStats
from hybrid_runtime.engine.stop_tokens import StopTokens
from hybrid_runtime.engine.summary import log_engine
from hybrid_runtime.engine.tokenize import (
    Prompt,
    encode,
    encode_instructed,
    prompt_list,
)
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.specdecode.sampling import SamplingParams


class QueueFull(RuntimeError):
    """As many requests wait as may; try again when some have been served."""


class Engine(OneProcess):
    """Continuous batching over one model with an optional drafter."""

    def __init__(
        self,
        model: HybridModel,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Collection[int] | None = None,
        head: Any = None,
        chat_template: ChatTemplate | None = None,
        default_params: SamplingParams | None = None,
    ) -> None:
        """Take memory for a model whose weights are loaded.

        tokenizer: None = prompts are token ids, and there is no text.
        eos_token_ids: tokens that end a text; None = those of the model's config.
        head: the network of drafter "mtp" or "eagle".
        chat_template: makes a prompt of a conversation.
        default_params: of requests that come without; None = greedy.

        Raises `ValueError` for a config that does not go with the
        model, the head or the device's memory.
        """
        enter_process()
        config = config.resolved(head)
        layout = config.layout(model)
        plan = build.memory_plan(config, layout, model, head)
        self.model: Any = model  # its class is known where it was loaded
        self.config, self.tokenizer = config, tokenizer
        self.chat_template = chat_template
        self.default_params = default_params or SamplingParams()
        self.waits = Waits()
        self.manager = build.state_manager(config, layout, model.device)
        self.sequences = build.token_buffers(config, model, head)
        memory = build.cache_memory(config, layout, model, head, plan.num_blocks, self.waits)
        build.bind_states(config, self.manager, memory, model, self.sequences)
        self.prefix_cache = build.prefix_cache(config, memory, layout.block_size)
        drafts = config.draft_length()
        self.scheduler = build.scheduler(config, self.manager, memory, self.prefix_cache, drafts)
        self.runner = build.runner(
            config, model, head, self.manager, memory, self.sequences, drafts
        )
        greedy, sampling = build.acceptances(config, model.device)
        self._accepts = tuple(dict.fromkeys((greedy, sampling)))
        eos = model.eos_token_ids if eos_token_ids is None else eos_token_ids
        ahead = config.steps_ahead_on(model.device)
        self.core = EngineCore(
            self.scheduler, self.runner, tokenizer, eos, greedy, sampling, ahead,
            lambda: build.pooler(config, model, self.waits),
            lambda: build.prompt_logprobs(config, model, self.waits),
        )  # fmt: skip
        log_engine(config, layout, model, plan)
        self._stop_tokens = None
        if tokenizer is not None and ahead and self.scheduler.keeps_turn_ends:
            self._stop_tokens = StopTokens(tokenizer, model.vocab_size)
        self._ids = count()
        self._owner, self._memory = Owner(), memory

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | DTypeName | None = None,
        eagle_path: str | Path | None = None,
        quantization: QuantizationName | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        """Engine for a checkpoint directory or hub id.

        device: None = a GPU where there is one.
        dtype: of the weights, and of keys and values unless `kv_cache_dtype` or the checkpoint
            says otherwise; "auto" = the checkpoint's own; None = that on a GPU, float32 on a CPU.
        eagle_path: the EAGLE head's own checkpoint; None = the sub-directory `eagle` of `path`.
        quantization: "fp8" = plain weights are rounded to 8 bits as they are loaded; None = weights
            are what the checkpoint's files say.
        options: the fields of `EngineConfig`. All of them are checked before weights are loaded.
        """
        enter_process()
        loaded = load(path, EngineConfig(**options), device, dtype, eagle_path, quantization)
        return cls(
            loaded.model, loaded.config, tokenizer=loaded.tokenizer, head=loaded.head,
            chat_template=loaded.chat_template, eos_token_ids=loaded.generation.eos_token_ids,
            default_params=loaded.generation.params,
        )  # fmt: skip

    # -- requests --------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        deadline: float | None = None,
        checkpoints_at: Sequence[int] = (),
    ) -> Request:
        """Queue one prompt (text or token ids); `ValueError` if it can never run, `QueueFull` if
        too many wait.

        tenant: only its own requests find what this one leaves in the prefix cache.
        deadline: seconds from now, after which it ends with what it has.
        checkpoints_at: tokens of the prompt behind which others may go on; the state is kept there
            (`replay` only; of positions at most K tokens apart, at the last). What earlier prompts
            have named in front of the last one makes room first, unless it is named again.
        """
        self.check_queue()
        return self.add(self.prepare(
            prompt, params, tenant=tenant, deadline=deadline, checkpoints_at=checkpoints_at
        ))  # fmt: skip

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
        self.check_queue()
        return self.add(
            self.prepare_embedding(prompt, pooling, instruction, tenant=tenant, deadline=deadline)
        )

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        deadline: float | None = None,
        checkpoints_at: Sequence[int] = (),
    ) -> Request:
        """A request for `add`, encoded and checked; arguments and errors as of `submit`. Changes
        nothing, so any thread may call it."""
        check_service(tenant, deadline)
        vocabulary = self.model.vocab_size
        tokens = encode(prompt, self.tokenizer, vocabulary)
        params = self.default_params if params is None else params
        check_params(params, vocabulary)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        banned = bans(params, len(tokens), self.tokenizer, self.core.eos, vocabulary)
        request = Request(
            next(self._ids), tokens, params, seed, tenant=tenant, lasts=deadline, bans=banned,
            stops=() if self._stop_tokens is None else self._stop_tokens.of(params),
            checkpoints_at=check_positions(checkpoints_at, len(tokens)),
        )  # fmt: skip
        self.scheduler.check(request)
        return request

    def prepare_embedding(
        self,
        prompt: Prompt,
        pooling: Pooling = "last",
        instruction: Prompt = "",
        *,
        tenant: str = "",
        deadline: float | None = None,
    ) -> Request:
        """The same for a prompt to be embedded; arguments and errors as of `submit_embedding`."""
        check_service(tenant, deadline)
        tokens, instructed = encode_instructed(
            prompt, instruction, self.tokenizer, self.model.vocab_size
        )
        request = Request(
            next(self._ids), tokens, SamplingParams(), 0, tenant=tenant, lasts=deadline,
            pooled_from=pooled_from(pooling, len(tokens), instructed),
        )  # fmt: skip
        self.scheduler.check(request)
        return request

    def add(self, request: Request) -> Request:
        """Queue a prepared request, once; `QueueFull` if too many wait."""
        self._owner.check()
        self.check_queue()
        self.core.add(request)
        return request

    def check_queue(self) -> None:
        """Raises `QueueFull` if as many requests wait as may. Any thread may call it."""
        if self.scheduler.full:
            waiting = len(self.scheduler.waiting)
            raise QueueFull(f"{waiting} requests wait; max_waiting is {self.config.max_waiting}")

    def abort(self, request: Request) -> None:
        """End a request now; nothing happens to one that has ended."""
        if request.finish_reason is None:
            self._owner.check()
            self.core.finish(request, "abort")

    def fail(self, request: Request, error: Exception) -> None:
        """End a request now as "error"; nothing happens to one that has ended."""
        self._owner.check()
        self.core.finish(request, "error", error)

    def hand_over(self, thread: Thread | None = None) -> None:
        """Let another thread use this engine from now on: `thread`, or whichever comes first. It
        belongs to the first one that used it, until that one ends; others get `RuntimeError`."""
        self._owner.hand_over(thread)

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs, and no results are on their way."""
        return self.core.idle

    def capture(self, progress: bool = False) -> None:
        """Compile all kernels and capture all CUDA graphs now, so that the first request of any
        kind is as fast as the hundredth. Nothing is done without graphs. progress: show a bar.

        Raises `torch.OutOfMemoryError`, which says what does not fit.
        """
        self._owner.check()
        if not self.config.graphs_on(self.model.device):
            return
        with timed("compiled and captured"), progress_bar(progress, "capturing") as bar:
            build.pooler(self.config, self.model, self.waits).compile(self.model.dtype)
            self.runner.capture(self._accepts, bar)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests as "abort" and give the memory of the blocks back. Nothing can run
        after it; another call may follow."""
        if self._owner.closed:
            return
        self._owner.check()
        try:
            self.core.end_all()
        finally:
            self._owner.close()
            self._memory.release()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, on the device and the host; running requests go on."""
        self._owner.check()
        self.core.change(self.prefix_cache.clear)

    def step(self) -> list[Request]:
        """Queue one step and read the results of the one before (with `steps_ahead` 0: of this
        one); the requests that got tokens or ended by them."""
        self._owner.check()
        self.runner.pace.begin(time.perf_counter())
        return self.core.step()

    @property
    def spare_time(self) -> float:
        """Seconds for which `step` need not be called, because the device is busy with what is
        queued. Who gets requests one by one takes what comes meanwhile: it runs in the next step,
        not in the one behind it. 0 where the next step would make the device wait."""
        return self.runner.pace.spare(time.perf_counter())

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        raise_errors: bool = True,
        checkpoints_at: Sequence[Sequence[int]] | None = None,
    ) -> list[Completion]:
        """Complete all prompts; `params` for all, or one per prompt. The `n` completions of a
        prompt are neighbours. checkpoints_at: per prompt, as of `submit`.

        All prompts are checked before the first is run, and queued as there is room. What the step
        of a prompt raises is raised here, after the others have ended; with `raise_errors=False`
        it is in that prompt's `Completion`, whose `finish_reason` is "error".
        """
        prompts = prompt_list(prompts)
        given = each_params(self.default_params if params is None else params, len(prompts))
        each = zip(prompts, given, each_positions(checkpoints_at, len(prompts)), strict=True)
        requests = [
            self.prepare(prompt, one, checkpoints_at=places)
            for prompt, many, places in each for one in many.each()
        ]  # fmt: skip
        most = sum(r.max_tokens for r in requests)
        self._owner.check()
        with progress_bar(progress, "tokens") as bar:
            self.core.serve(requests, lambda: bar(sum(len(r.output) for r in requests), most))
        if raise_errors:
            raise_first(requests)
        return [Completion.of(r) for r in requests]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Completion:
        """The assistant's answer to a conversation; arguments and errors as of `chat_prompt`."""
        if params is not None and params.n != 1:
            raise ValueError(f"n is {params.n}; it must be 1 in a chat")
        prompt = self.conversation(messages, tools=tools, template_options=template_options)
        return self.generate([prompt.tokens], params, checkpoints_at=[prompt.checkpoints_at])[0]

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins. Changes nothing,
        so any thread may call it.

        messages: mappings with `role` and `content`.
        tools: JSON schemas of functions that may be called.
        template_options: further variables of the chat template, such as `enable_thinking`.

        Raises `ValueError` for a checkpoint without one, or messages that it
        refuses.
        """
        found = self.conversation(messages, tools=tools, template_options=template_options)
        return found.tokens.tolist()

    def conversation(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """The same, with the positions in it that `submit` takes as `checkpoints_at`."""
        how = tools, template_options, self.tokenizer, self.model.vocab_size
        return conversation(self.chat_template, messages, *how)

    def embed(
        self,
        prompts: Sequence[Prompt],
        pooling: Pooling = "last",
        instruction: Prompt = "",
        normalize: bool = True,
        progress: bool = False,
    ) -> Tensor:
        """One vector per prompt, float32 `[prompts, hidden]` on the CPU, pooled from the model's
        hidden states after its final norm.

        pooling: "last", the last token's (with an end-of-text token, if the tokenizer adds one), or
            "mean" over all tokens.
        instruction: put in front of every prompt, text or ids as they are; its tokens run, and are
            left out of the mean.
        normalize: to length 1.
        progress: show a bar.

        `ValueError` for a prompt that is empty or, instruction included, longer than
        `max_model_len`. What the step of a prompt raises is raised here, after the others have
        ended.
        """
        requests = [self.prepare_embedding(p, pooling, instruction) for p in prompt_list(prompts)]
        most = len(requests)
        self._owner.check()
        with progress_bar(progress, "embedded") as bar:
            self.core.serve(
                requests, lambda: bar(sum(r.embedding is not None for r in requests), most)
            )
        return stacked(requests, self.model.hidden_size, normalize)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Text of one completion, piece by piece; ending the iteration early aborts it. Raises what
        its step raises."""
        request = self.prepare(prompt, params)
        shown = 0
        try:
            self.add(request)
            while request.finish_reason is None:
                self.step()
                ready = request.settled
                if ready > shown:
                    yield request.text[shown:ready]
                    shown = ready
        finally:
            self.abort(request)
        raise_first([request])

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        """Of keys and values in memory, whatever was left to the checkpoint."""
        return self.config.kv_dtype(self.model)

    def stats(self) -> EngineStats:
        done = self.core.counts
        return EngineStats(
            done.steps, done.emitted, done.mean_acceptance_length, self.runner.drafts.stats(),
            self.manager.stats(), self.scheduler.preemptions, self.prefix_cache.stats(),
        )  # fmt: skip
