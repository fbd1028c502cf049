"""Replay in vLLM (0.25.1, GPU needed) where nothing that is free holds a number, and between dummy
runs.

    HYBRID_RUNTIME_VLLM=replay python benchmarks/vllm/poison.py --out poison.json

The requests of `serve.py serve` run on the shipped checkpoint in one engine, synchronously:

1. as they are;
2. with NaN in the drafts of all free request slots, and in the Mamba layers' memory of all free
   blocks that no prefix hit may find (attention layers share most of it), after every step;
3. with a dummy run after every tenth step;
4. with CUDA graphs a few of them, and after the tenth step all graphs captured once more.

Texts, hits, acceptance and preemptions of 2 and 3 must be those of 1, and no log-probability of 2
may be NaN. Dummy runs and captures must change no byte of the drafts, nor of the Mamba blocks that
requests hold or a prefix hit may find. After a capture texts are not compared.

With HYBRID_RUNTIME_VLLM=0 the same is asked of vLLM's own layers.

A fault of vLLM is kept out (`dummy_run`): in a dummy run its drafter writes keys and values into
the blocks that the table of slot 0 names, a request's or whoever's they are by now.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from comparison import compared, line
from record import arguments, environment, save
from serve import counters, difference, model_state
from shipped import ENVIRONMENT, PRECISE, serving_engine
from torch import Tensor
from traffic import drive, empty, traffic

EVERY = 10
"""Steps from one dummy run to the next, and before the capture."""
CAPTURING = 32
"""Requests of the run with a capture."""


class Memory:
    """drafts: of all layers, by request slot. states: of each Mamba layer, its cache group and its
    windows and states, by block."""

    def __init__(self, llm: Any) -> None:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.pool = scheduler.kv_cache_manager.block_pool
        self.managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        workers: list[Any] = []
        llm.collective_rpc(lambda worker: workers.append(worker))
        self.worker, self.runner = workers[0], workers[0].model_runner
        replay = getattr(self.runner.model_state, "layers", None)
        self.drafts: list[Tensor] = list(replay.rings) if replay else []
        context = self.runner.vllm_config.compilation_config.static_forward_context
        self.states = [
            (index, part)
            for index, group in enumerate(self.runner.kv_cache_config.kv_cache_groups)
            for name in group.layer_names
            if not isinstance(context[name].kv_cache, Tensor)
            for part in context[name].kv_cache[:2]
        ]

    def kept(self, group: int) -> list[int]:
        """Blocks of a cache group that requests hold or a prefix hit may find."""
        from vllm.v1.core.kv_cache_utils import get_group_id

        held = [b for blocks in self.managers[group].req_to_blocks.values() for b in blocks]
        found = [
            b for b in self.pool.blocks if b.block_hash and get_group_id(b.block_hash) == group
        ]
        return sorted({b.block_id for b in (*held, *found) if not b.is_null})

    def free(self) -> list[int]:
        """Blocks that nobody holds and no prefix hit may find."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        return [b.block_id for b in free if not b.block_hash]


class Poison:
    """Called after every step: what is free holds NaN."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.found: dict[str, Any] = dict.fromkeys(("steps", "blocks", "slots"), 0)
        with torch.inference_mode():
            for part in memory.drafts:
                part.fill_(math.nan)

    @torch.inference_mode()
    def __call__(self) -> None:
        blocks, slots = self.memory.free(), list(self.memory.runner.req_states.free_indices)
        for _, part in self.memory.states:
            part[blocks] = math.nan
        for part in self.memory.drafts:
            part[:, slots] = math.nan
        for name, count in (("steps", 1), ("blocks", len(blocks)), ("slots", len(slots))):
            self.found[name] += count


class Interruptions:
    """Called after every step: now and then a dummy run, or once a capture of the model's CUDA
    graphs, and the bytes that it changed."""

    def __init__(self, memory: Memory, captures: bool) -> None:
        self.memory, self.captures = memory, captures
        names = ("steps", "dummy_runs", "captures", "blocks", "guess_bytes", "state_bytes")
        self.found: dict[str, Any] = dict.fromkeys(names, 0)

    @torch.inference_mode()
    def __call__(self) -> None:
        memory, found = self.memory, self.found
        found["steps"] += 1
        if found["steps"] % EVERY or found["captures"]:
            return
        kept = [memory.kept(group) for group in range(len(memory.managers))]
        drafts = [part.clone() for part in memory.drafts]
        states = [part[kept[group]] for group, part in memory.states]
        if self.captures:
            found["captures"] += capture_again(memory.runner)
        else:
            dummy_run(memory)
            found["dummy_runs"] += 1
        found["blocks"] += sum(len(kept[group]) for group in {g for g, _ in memory.states})
        found["guess_bytes"] += changed(drafts, memory.drafts)
        now = [part[kept[group]] for group, part in memory.states]
        found["state_bytes"] += changed(states, now)


def changed(before: list[Tensor], after: list[Tensor]) -> int:
    """Bytes that differ."""
    pairs = [
        [part.contiguous().view(torch.uint8) for part in pair]
        for pair in zip(before, after, strict=True)
    ]
    return sum(int((one != other).sum()) for one, other in pairs)


def dummy_run(memory: Memory) -> None:
    """vLLM's, of one row. Meanwhile the table of slot 0 names the null block: the drafter finds by
    it where to write, though a dummy is no slot's."""
    tables = [table.gpu for table in memory.runner.block_tables.block_tables]
    rows = [table[0].clone() for table in tables]
    for table in tables:
        table[0] = 0
    memory.worker.execute_dummy_batch()
    for table, row in zip(tables, rows, strict=True):
        table[0] = row


def capture_again(runner: Any) -> int:
    """The model's CUDA graphs once more; how many there are."""
    graphs = runner.cudagraph_manager
    torch.cuda.synchronize()
    graphs.graphs.clear()
    graphs.capture(
        runner.model,
        runner.model_state,
        runner.input_buffers,
        runner.intermediate_tensors,
        runner.block_tables,
        runner.attn_groups,
        runner.kv_cache_config,
        use_aux_hidden_state_outputs=runner.use_aux_hidden_state_outputs,
    )
    return len(graphs.graphs)


def measure(args: argparse.Namespace) -> None:
    llm = serving_engine(args)
    (kind,) = llm.collective_rpc(model_state)
    requests = traffic(args)
    result: dict[str, Any] = {
        "environment": environment(),
        "options": {name: value for name, value in vars(args).items() if name != "out"},
        "model_state": kind,
        "runs": {},
    }

    def run(name: str, between: Any, count: int = len(requests)) -> dict[str, Any]:
        empty(llm)
        counted = counters(llm)
        run = {"ours": True, "blocks": max(args.blocks), "reads": True}
        run |= drive(llm, requests[:count], args.at_once, name, between=between)
        run["metrics"] = difference(counters(llm), counted)
        if between is not None:
            found = result["runs"][name] = between.found
            values = [lead for leads in run["gaps"] for lead in leads]
            found["tokens"] = len(values)
            found["not_finite"] = sum(not math.isfinite(value) for value in values)
            if count == len(requests):
                found["comparison"] = compared(clean, run)
                print(line(found["comparison"]), flush=True)
            print(name, {key: found[key] for key in found if key != "comparison"}, flush=True)
            if args.out:
                save("vllm_poison", result, args.out)
        return run

    clean = run("clean", None)
    memory = Memory(llm)
    run("poisoned", Poison(memory))
    run("dummies", Interruptions(memory, captures=False))
    graphs = memory.runner.cudagraph_manager
    if graphs is not None and graphs.needs_capture():
        run("captures", Interruptions(memory, captures=True), CAPTURING)


def main() -> None:
    parser = arguments(__doc__, "default: none")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=300, help="at most so many are generated")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--batched-tokens", type=int, default=1024)
    parser.add_argument(
        "--blocks", type=lambda text: [int(text)], default=[300], help="few: preemption"
    )
    parser.add_argument("--kv-gib", type=float, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_false", dest="graphs", help="no CUDA graphs")
    parser.add_argument("--qwen", action="store_true", help="Gated DeltaNet, with random weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(mode="align", synchronous=True, tensor_parallel=1)
    args = parser.parse_args()
    for name, value in (ENVIRONMENT | PRECISE).items():
        os.environ.setdefault(name, value)
    measure(args)


if __name__ == "__main__":
    main()
