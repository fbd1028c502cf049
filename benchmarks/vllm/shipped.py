"""An engine of vLLM with the checkpoint that this package ships, or with a small Qwen of random
weights, for `serve.py serve`."""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nemotron
import qwen

CHECKPOINT = Path(__file__).parents[2] / "hybrid_runtime" / "checkpoints" / "python-small"
ENVIRONMENT = nemotron.ENVIRONMENT | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
PRECISE = {
    "TRITON_F32_DEFAULT": "ieee",
    # The same launch shapes in all engines, and so the same order of sums.
    "VLLM_TRITON_FORCE_FIRST_CONFIG": "1",
}
"""Beside these, where texts are compared: true fp32, and sums in one order."""


def checkpoint(dtype: str) -> str:
    """The shipped checkpoint, said to be of `dtype`: vLLM's draft head takes it from the file even
    where the engine is told otherwise."""
    directory = Path(tempfile.mkdtemp())
    for file in CHECKPOINT.iterdir():
        (directory / file.name).symlink_to(file)
    config = directory / "config.json"
    config.unlink()
    values = json.loads((CHECKPOINT / config.name).read_text())
    config.write_text(json.dumps(values | {"dtype": dtype}))
    return str(directory)


def serving_engine(args: argparse.Namespace) -> Any:
    from vllm import LLM

    draft = None
    if args.drafts:
        draft = {
            "method": "mtp",
            "num_speculative_tokens": args.drafts,
            "attention_backend": "TRITON_ATTN",
        }
    if args.qwen:
        model = nemotron.checkpoint(qwen.small(), args.dtype, 2048)
        more = {"load_format": "dummy", "tokenizer": model, "skip_tokenizer_init": True}
        more |= {"gdn_prefill_backend": "triton", "mamba_ssm_cache_dtype": "float32"}
    else:
        model, more = checkpoint(args.dtype), {}
    llm = LLM(
        model=model,
        dtype=args.dtype,
        max_model_len=2048,
        max_num_seqs=args.at_once,
        max_num_batched_tokens=args.batched_tokens,
        enforce_eager=not args.graphs,
        enable_prefix_caching=args.mode == "align",
        mamba_cache_mode=args.mode,
        async_scheduling=not args.synchronous,
        num_gpu_blocks_override=max(args.blocks),
        # With a cache of given size this is only what must be free at the start.
        gpu_memory_utilization=0.05 if args.kv_gib else 0.3,
        kv_cache_memory_bytes=int(args.kv_gib * 2**30) or None,
        attention_config={"backend": "TRITON_ATTN"},
        tensor_parallel_size=args.tensor_parallel,
        disable_custom_all_reduce=args.tensor_parallel > 1,
        speculative_config=draft,
        disable_log_stats=False,
        seed=0,
        **more,
    )
    if args.qwen:
        llm.collective_rpc(nemotron.fill, args=(nemotron.depth(qwen.small()),))
        llm.collective_rpc(qwen.draftable)
    if args.drafts and args.mode == "align":
        mend(llm)
    if args.drafts and version("vllm").startswith("0.25."):
        llm.collective_rpc(sort_prompts_last)
    return llm


def mend(llm: Any) -> None:
    """Give prefix hits all of their attention blocks.

    Where no cache group is marked as the drafter's, vLLM 0.25.1 takes all of them for it. The
    attention group then looks for one block more than it needs and gives that up; so does the Mamba
    group, but it gives up nothing. A hit is then a block longer than the attention's, whose keys
    and values are never computed, and the text is wrong, whoever moves the states.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    coordinator = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator
    for index, group in enumerate(coordinator.attention_groups):
        if isinstance(group.spec, MambaSpec):
            coordinator.attention_groups[index] = group._replace(use_eagle=False)
            for manager in group.group_ids:
                coordinator.single_type_managers[manager].use_eagle = False


class RowTokens(int):
    """Scheduled tokens of a request, sorted behind those of all requests that decode if it still
    runs its prompt."""

    prompt = False

    def __lt__(self, other: int) -> bool:
        return (self.prompt, int(self)) < (getattr(other, "prompt", False), int(other))


def sort_prompts_last(worker: Any) -> None:
    """Have prompts come last in a step's rows, however few tokens they have.

    vLLM 0.25.1 sorts rows by their tokens alone, and takes all that follow a prompt for prompts. A
    chunk of at most K tokens thus makes prompts of the rows that decode, whose drafts then count
    as certain (mended in 0.26, vllm-project/vllm#47381).
    """
    runner = worker.model_runner
    if not hasattr(runner, "req_states"):
        return  # the V1 runner
    states, prepare = runner.req_states, runner.prepare_inputs

    def prepare_inputs(step: Any, *args: Any) -> Any:
        tokens = step.num_scheduled_tokens
        step.num_scheduled_tokens = sortable = {r: RowTokens(n) for r, n in tokens.items()}
        for request, count in sortable.items():
            index = states.req_id_to_index[request]
            done = states.num_computed_prefill_tokens[index]
            count.prompt = bool(done < states.prefill_len.np[index])
        try:
            return prepare(step, *args)
        finally:
            step.num_scheduled_tokens = tokens

    runner.prepare_inputs = prepare_inputs
