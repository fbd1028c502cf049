"""This engine in a process of its own, for `serve.py`, which starts it:

    python benchmarks/engine/serve_ours.py SETTINGS.json

`SETTINGS.json` is what `serve.py` writes; runs are asked for on standard input.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from record import environment
from serving import answer
from shapes import measured
from workload import Ask

from hybrid_runtime.engine import Engine, EngineConfig, Request, SamplingParams
from hybrid_runtime.engine.memory_plan import Planner
from hybrid_runtime.models.model import HybridModel

Row = dict[str, Any]


def _beside_others(model: HybridModel, head: Any, options: Row) -> EngineConfig:
    """A config whose engine takes the blocks that its requests can use, and leaves the rest of the
    GPU to the other engine."""
    chosen = EngineConfig(**options)
    if chosen.num_blocks is not None or "memory_fraction" in options:
        return chosen
    layout = chosen.layout(model)
    planner = Planner(chosen, layout, model, head, model.device)
    return replace(chosen, num_blocks=planner.full_blocks(chosen.max_requests))


class Ours:
    """The engine as `serving.drive` takes it."""

    def __init__(self, settings: Row) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        shape = measured(settings["shape"], settings["layers"])
        dtype = getattr(torch, settings["dtype"])
        model, head = shape.build(device, dtype, settings["quantization"])
        drafts, rates = settings["drafts"], settings["rates"]
        used = head if drafts else None
        options: Row = {
            "drafter": "mtp" if drafts else None,
            "num_speculative_tokens": drafts,
            "adaptive": False,
            "synthetic_acceptance": None if rates is None else tuple(rates),
            "max_requests": settings["max_requests"],
            "max_model_len": settings["max_model_len"],
            "max_tokens_per_step": settings["max_tokens_per_step"],
            "ssm_dtype": getattr(torch, settings["ssm_dtype"]),
        }
        budgets = [one["budget"] for one in settings["turns"]["ours"] if "budget" in one]
        if budgets:
            options["max_prompt_tokens"] = max(budgets)  # what is captured
        options |= settings["ours"]
        started = time.perf_counter()
        self.engine = Engine(model, _beside_others(model, used, options), head=used)
        self.engine.capture()
        self.about = {
            "options": {name: str(value) for name, value in options.items()},
            "block_size": self.engine.manager.layout.block_size,
            "capture_s": time.perf_counter() - started,
            "environment": environment(),
        }
        self._usual = self.engine.scheduler.max_prompt_tokens, self.engine.core.steps_ahead
        self._early = False
        self._sampling = settings["sampling"]
        self._numbers: dict[int, int] = {}
        self._known: dict[int, int] = {}

    def submit(self, number: int, ask: Ask) -> None:
        params = SamplingParams(
            **self._sampling, max_tokens=ask.output, ignore_eos=True, seed=number
        )
        request = self.engine.submit(ask.prompt, params)
        self._numbers[request.id], self._known[request.id] = number, 0

    def step(self) -> Iterator[tuple[int, int, bool]]:
        return map(self._result, self.engine.step())

    def reset(self) -> None:
        while not self.engine.idle:
            self.engine.step()
        self.engine.reset_prefix_cache()

    def use(self, setting: Mapping[str, Any]) -> None:
        """budget: most prompt tokens of a step. steps_ahead: 0, a step is queued when the results
        of the one before have been read. queue: "early", it is queued as soon as it can be."""
        budget, steps_ahead = self._usual
        self.engine.scheduler.max_prompt_tokens = setting.get("budget", budget)
        self.engine.core.steps_ahead = setting.get("steps_ahead", steps_ahead)
        self._early = setting.get("queue") == "early"

    @property
    def spare_time(self) -> float:
        return 0.0 if self._early else self.engine.spare_time

    def _result(self, request: Request) -> tuple[int, int, bool]:
        if request.error is not None:
            raise RuntimeError(f"request {request.id} failed") from request.error
        new = len(request.output) - self._known[request.id]
        self._known[request.id] += new
        return self._numbers[request.id], new, request.finish_reason is not None


def main() -> None:
    engine = Ours(json.loads(Path(sys.argv[1]).read_text()))
    answer(engine, engine.about)


if __name__ == "__main__":
    main()
