"""The host's own work in a step of steady decode: Python calls and microseconds, by part.

    python benchmarks/engine/host_time.py --before ../older
    python benchmarks/engine/host_time.py --rows 1,4 --drafts 3 --steps 40 --repeats 1

The engine runs on the CPU as it does on a GPU: prefix caching, steps padded to the sizes of CUDA
graphs, one step queued ahead. What would be a launch on a device is replaced, and nothing else:

- the target's passes give zeros, before anything is measured;
- replaying a graph does nothing (verify, acceptance and drafter are in it), so each step emits what
  was put into its buffer once: row i emits 1 + i mod (K + 1) tokens;
- the two kernels launched one by one (a step's placement, its inputs) are given their arguments as
  on a GPU, and not launched.

Calls are those of this repository's functions, resumptions of generators among them
(`sys.setprofile`), means over the steps: blocks fill up in some of them and are filed. Times are
the thread's own, so that other processes do not count: medians and 99th percentiles over steps of a
run without the profiler. Those of parts come from a run of their own, whose timers cost some
microseconds. `--before` runs an older checkout of this repository by turns (ABBA), each run in a
process of its own.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[1] / "common"))  # behind an older checkout's

import numpy as np
import torch
from shapes import SHAPES, config
from torch import Tensor

from hybrid_runtime.device.graphs import Graphs
from hybrid_runtime.engine import Engine, EngineConfig, SamplingParams
from hybrid_runtime.engine.core import EngineCore
from hybrid_runtime.engine.scheduler import Scheduler
from hybrid_runtime.kernels.step.direct_launch import DirectLaunch
from hybrid_runtime.models.nemotron_h import NemotronH
from hybrid_runtime.specdecode.drafter import VerifyOutput
from hybrid_runtime.specdecode.runner import SpecDecodeRunner
from hybrid_runtime.state.manager import HybridStateManager

Row = dict[str, Any]
PARTS = {
    "schedule": (Scheduler, ("admit", "schedule")),
    "begin_step": (HybridStateManager, ("begin_step",)),
    "launch": (SpecDecodeRunner, ("step",)),
    "read": (SpecDecodeRunner, ("read",)),
    "hand_out": (EngineCore, ("_postprocess",)),
}
"""Methods whose time is a part's, without parts inside it; the rest of a step is "other"."""
BLOCK = 1056
"""Tokens between two states that are saved, the 8B's: a row gets there every 420th step. Its KV
blocks have 32 tokens."""
WARM_UP = 16


@contextmanager
def steady(rows: int, drafts: int, steps: int) -> Iterator[Engine]:
    """An engine in which so many requests decode, with room for so many steps."""
    model = NemotronH(config(SHAPES["tiny"]), "cpu", torch.float32)
    sizes = model.config
    zeros = torch.zeros(8192, max(sizes.hidden_size, sizes.vocab_size))
    fields = {
        "forward": lambda tokens, *_: zeros[: len(tokens), : sizes.hidden_size],
        "logits": lambda hidden: zeros[: len(hidden), : sizes.vocab_size],
    }
    for name, stub in fields.items():
        object.__setattr__(model, name, stub)
    length = (steps + WARM_UP) * (drafts + 1) + 2 * BLOCK
    options = EngineConfig(
        drafter="ngram" if drafts else None, num_speculative_tokens=drafts, max_requests=rows,
        max_model_len=length, block_size=BLOCK, steps_ahead=1, graphs=True, adaptive=False,
    )  # fmt: skip
    engine = Engine(model, options, eos_token_ids=(2,))
    if drafts:
        engine.runner.drafter = _Drafter(torch.full((2 * rows + 16, drafts), -1).int())
    # Prompts of different lengths, so that blocks fill up in different steps.
    params = SamplingParams(max_tokens=length)
    requests = [engine.submit([3 + row] * (1 + row * BLOCK // rows), params) for row in range(rows)]
    while not all(request.output for request in requests):
        engine.step()
    assert len(engine.scheduler.running) == rows
    emitted = engine.runner._buffers.emitted
    emitted[:] = -1
    for row in range(len(emitted)):
        count = 1 + row % (drafts + 1)
        emitted[row, :count], emitted[row, -1] = 5, count
    with _without_launches():
        for _ in range(WARM_UP):
            engine.step()
        yield engine
    assert len(engine.scheduler.running) == rows, "requests have ended; nothing was steady"


class _Drafter:
    """Has no draft."""

    def __init__(self, none: Tensor) -> None:
        self._none = none

    def propose(self, output: VerifyOutput, count: int) -> tuple[Tensor, None]:
        return self._none[: len(output.inputs.slot), :count], None


@contextmanager
def _without_launches() -> Iterator[None]:
    """Nothing is launched, as the module's docstring says."""
    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith("hybrid_runtime.kernels.")
        and isinstance(getattr(module, "_launch", None), DirectLaunch)
    ]
    with (
        patch.object(Graphs, "replay", lambda graphs, key: None),
        patch.object(DirectLaunch, "__call__", lambda launch, grid, arguments, constants: None),
    ):
        before = [module.runs_triton for module in modules]
        for module in modules:
            module.runs_triton = lambda tensor: True
        try:
            yield
        finally:
            for module, runs in zip(modules, before, strict=True):
                module.runs_triton = runs


def _packages() -> Iterator[str]:
    for name in ("", ".kernels", ".specdecode"):
        yield from sys.modules[f"hybrid_runtime{name}"].__path__


def calls(engine: Engine, steps: int) -> dict[str, float]:
    """Python calls per step, by part, and in "total"."""
    codes = {
        inspect.unwrap(getattr(owner, name)).__code__: part
        for part, (owner, names) in PARTS.items()
        for name in names
    }
    counted: Counter[str] = Counter()
    inside = ["other"]
    # Constructors of named tuples and dataclasses are made from strings.
    ours = ("<string>", *(str(Path(path).resolve()) for path in _packages()))

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            if frame.f_code in codes:
                inside.append(codes[frame.f_code])
            counted[inside[-1]] += frame.f_code.co_filename.startswith(ours)
        elif event == "return" and frame.f_code in codes:
            inside.pop()

    for _ in range(steps):
        sys.setprofile(count)
        try:
            engine.step()
        finally:
            sys.setprofile(None)
    # "other" has `Engine.step` itself.
    found = {part: counted[part] / steps for part in (*PARTS, "other")}
    return found | {"total": sum(found.values())}


def times(engine: Engine, steps: int) -> dict[str, float]:
    """Microseconds per step: median and 99th percentile."""
    taken = []
    for _ in range(steps):
        start = time.thread_time_ns()
        engine.step()
        taken.append((time.thread_time_ns() - start) / 1e3)
    return {"p50": float(np.percentile(taken, 50)), "p99": float(np.percentile(taken, 99))}


def part_times(engine: Engine, steps: int) -> dict[str, float]:
    """Median microseconds per step, by part."""
    spent: Counter[str] = Counter()
    nested = [0]

    def timed(part: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            nested.append(0)
            start = time.thread_time_ns()
            try:
                return act(*args, **options)
            finally:
                took = time.thread_time_ns() - start
                spent[part] += took - nested.pop()
                nested[-1] += took

        return wrapper

    chosen = [(o, n, part) for part, (o, names) in PARTS.items() for n in names]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in chosen]
    found: dict[str, list[float]] = {part: [] for part in (*PARTS, "other")}
    try:
        for (owner, name, act), (_, _, part) in zip(before, chosen, strict=True):
            setattr(owner, name, timed(part, act))
        whole = timed("other", engine.step)
        for _ in range(steps):
            spent.clear()
            whole()
            for part in found:
                found[part].append(spent[part] / 1e3)
    finally:
        for owner, name, act in before:
            setattr(owner, name, act)
    return {part: statistics.median(values) for part, values in found.items()}


def measure(rows: int, drafts: int, steps: int) -> Row:
    """One load: `calls`, `us` and `parts_us`."""
    counted = max(steps // 4, 1)
    with steady(rows, drafts, 2 * steps + counted) as engine:
        return {
            "rows": rows,
            "drafts": drafts,
            "us": times(engine, steps),
            "parts_us": part_times(engine, steps),
            "calls": calls(engine, counted),
        }


def _measured_in(checkout: Path | None, args: argparse.Namespace, folder: Path) -> list[Row]:
    """The loads in a process of its own: of this checkout, or of another one."""
    environment = dict(os.environ)
    python = [sys.executable]
    if checkout is not None:
        # Laid out as it is installed.
        tree = folder / "hybrid_runtime"
        if not tree.exists():
            tree.mkdir()
            parts = [*(checkout / "hybrid_runtime").iterdir(), checkout / "kernels"]
            for part in (*parts, checkout / "specdecode"):
                (tree / part.name).symlink_to(part.resolve())
        paths = [str(folder), str(checkout.resolve() / "benchmarks" / "common")]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    out = folder / "loads.json"
    loads = {"rows": args.rows, "drafts": args.drafts, "steps": args.steps, "out": str(out)}
    subprocess.run([*python, __file__, "--child", json.dumps(loads)], check=True, env=environment)
    found: list[Row] = json.loads(out.read_text())
    return found


def _child(loads: Row) -> None:
    torch.set_num_threads(1)
    cases = product(loads["drafts"], loads["rows"])
    found = [measure(rows, drafts, loads["steps"]) for drafts, rows in cases]
    Path(loads["out"]).write_text(json.dumps(found))


def _median(repeats: list[Row]) -> Row:
    """One load of one checkout: medians of the repeats, which are kept."""
    row = {name: repeats[0][name] for name in ("rows", "drafts", "calls")}
    for name in ("us", "parts_us"):
        row[name] = {
            key: statistics.median(one[name][key] for one in repeats) for key in repeats[0][name]
        }
    return row | {"repeats": [{name: one[name] for name in ("us", "parts_us")} for one in repeats]}


def run(argv: Sequence[str]) -> Path:
    from record import environment, save, show  # what a child of an older checkout does not need

    args = _parse(argv)
    checkouts: dict[str, Path | None] = {"ours": None}
    if args.before is not None:
        checkouts["before"] = args.before
    found: dict[str, list[list[Row]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.repeats):
            for name in list(checkouts)[:: 1 if number % 2 else -1]:
                found[name].append(_measured_in(checkouts[name], args, Path(folder)))
    rows = [
        {"engine": name} | _median(list(repeats))
        for name, every in found.items()
        for repeats in zip(*every, strict=True)
    ]
    chosen = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "out"}
    result = {"environment": environment(), "options": chosen, "block_size": BLOCK, "rows": rows}
    path = save("host-time", result, args.out)
    show(
        "the host's part of a step of steady decode: Python calls, us",
        [
            {"engine": row["engine"], "K": row["drafts"], "rows": row["rows"]}
            | {"calls": row["calls"]["total"], "us": row["us"]["p50"], "p99": row["us"]["p99"]}
            | {f"{part} us": value for part, value in row["parts_us"].items()}
            for row in rows
        ],
    )
    return path


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, help="JSON file; default under benchmarks/results/")
    add("--rows", type=_ints, default=[1, 4, 16, 64])
    add("--drafts", type=_ints, default=[3, 0])
    add("--steps", type=int, default=400, help="of each load that are timed")
    add("--repeats", type=int, default=5)
    add("--before", type=Path, help="an older checkout of this repository, to run beside")
    return parser.parse_args(argv)


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--child"]:
        _child(json.loads(given[1]))
    else:
        print(run(given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
