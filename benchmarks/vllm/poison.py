"""Replay in vLLM (0.25.1, GPU needed) where nothing that is free holds a number.

    HYBRID_RUNTIME_VLLM=replay python benchmarks/vllm/poison.py --out poison.json

The requests of `serve.py serve` run twice on the shipped checkpoint in one engine, synchronously.
The second time all free blocks of the cache that no prefix hit may find, and the guesses of all
free request slots, are NaN after every step; texts and log-probabilities must be those of the first
run. Dummy runs, and a second capture of the CUDA graphs, go between two steps of it, and must leave
every byte of the guesses alone.
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
from record import environment, save
from serve import counters, difference, model_state
from shipped import ENVIRONMENT, PRECISE, serving_engine
from torch import Tensor
from traffic import drive, empty, traffic

EVERY = 50
"""Steps from one dummy run to the next."""
CAPTURED = 3
"""After so many dummy runs the graphs are captured again, if there are any."""


class Poison:
    """Called between two steps."""

    def __init__(self, llm: Any) -> None:
        engine = llm.llm_engine.engine_core.engine_core
        self.pool = engine.scheduler.kv_cache_manager.block_pool
        workers: list[Any] = []
        llm.collective_rpc(lambda worker: workers.append(worker))
        self.worker, self.runner = workers[0], workers[0].model_runner
        layers = self.runner.model_state.layers
        self.guesses: list[Tensor] = list(layers.cache)
        self.states = [part for layer in layers.layers for part in layer.kv_cache[:2]]
        self.found = dict.fromkeys(
            ("steps", "blocks", "slots", "dummy_runs", "captures", "changed"), 0
        )
        with torch.inference_mode():
            for part in self.guesses:
                part.fill_(math.nan)

    @torch.inference_mode()
    def __call__(self) -> None:
        found = self.found
        found["steps"] += 1
        free = [
            b.block_id for b in self.pool.free_block_queue.get_all_free_blocks() if not b.block_hash
        ]
        slots = list(self.runner.req_states.free_indices)
        for part in self.states:
            part[free] = math.nan
        for part in self.guesses:
            part[:, slots] = math.nan
        found["blocks"] += len(free)
        found["slots"] += len(slots)
        if found["steps"] % EVERY == 0:
            before = [part.clone() for part in self.guesses]
            self.worker.execute_dummy_batch()
            found["dummy_runs"] += 1
            if found["dummy_runs"] == CAPTURED:
                found["captures"] += capture_again(self.runner)
            found["changed"] += sum(
                int((a.view(torch.uint8) != b.view(torch.uint8)).sum())
                for a, b in zip(before, self.guesses, strict=True)
            )


def capture_again(runner: Any) -> int:
    """The model's CUDA graphs once more; how many there are."""
    graphs = runner.cudagraph_manager
    if graphs is None or not graphs.needs_capture():
        return 0
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


def measure(args: argparse.Namespace) -> dict[str, Any]:
    llm = serving_engine(args)
    (kind,) = llm.collective_rpc(model_state)
    requests = traffic(args)
    runs, poison = [], None
    for number in range(2):
        empty(llm)
        counted = counters(llm)
        if number:
            poison = Poison(llm)
        found = drive(llm, requests, args.at_once, f"r{number}", between=poison)
        runs.append(
            found
            | {"ours": True, "blocks": max(args.blocks), "reads": True}
            | {"metrics": difference(counters(llm), counted)}
        )
    assert poison is not None
    comparison = compared(*runs)
    values = [lead for run in runs[1:] for leads in run["gaps"] for lead in leads]
    result = {
        "environment": environment(),
        "options": {name: value for name, value in vars(args).items() if name != "out"},
        "model_state": kind,
        "poisoned": poison.found,
        "tokens": len(values),
        "not_finite": sum(not math.isfinite(value) for value in values),
        "comparison": comparison,
    }
    print(line(comparison), result["poisoned"], result["not_finite"], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.set_defaults(mode="align", synchronous=True, tensor_parallel=1)
    args = parser.parse_args()
    for name, value in (ENVIRONMENT | PRECISE).items():
        os.environ.setdefault(name, value)
    result = measure(args)
    if args.out:
        save("vllm_poison", result, args.out)


if __name__ == "__main__":
    main()
