"""What does keeping boundary states cost on the GPU, and the manager's whole step on the host?

python benchmarks/kernels/postprocess.py [--peer PATH]
Shape: 40 Mamba layers, 128 heads x 64 x 128 fp16 and a 6 x 10240 bf16 window (Nemotron-3-Super with
3 drafts), block of 4336 tokens. `--peer` names vLLM's `v1/worker/mamba_utils.py`; its fused kernel
is then measured in the same run on the same state.
"""

from __future__ import annotations

import ast
import importlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import numpy as np
import torch
from record import arguments, copy_bandwidth, graph_us, plain, save, show

from hybrid_runtime.kernels.mamba2.recurrence import mamba2
from hybrid_runtime.kernels.step import entry as fields
from hybrid_runtime.kernels.step.state_copy import postcopy
from hybrid_runtime.state import HybridStateManager, StateLayout, StepRows

LAYERS, DRAFTS, BLOCK = 40, 3, 4336
LAYOUT = StateLayout(mamba2(128, 64, 128, 8, 4, torch.bfloat16, torch.float16), DRAFTS, BLOCK)
REPEATS = 7
STATE_ROWS = 16  # rows that own blocks; the others' tables point at the same ones, and never copy


class Bench:
    """A bound manager for `rows` requests, and steps in which chosen rows cross a boundary."""

    def __init__(self, rows: int, states: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.rows = rows
        self.states = states
        self.manager = HybridStateManager(LAYOUT, rows, DRAFTS, "cuda", readback=False)
        table = torch.arange(2 * STATE_ROWS, dtype=torch.int32).view(STATE_ROWS, 2)
        table = table.repeat(math.ceil(rows / STATE_ROWS), 1)[:rows]
        # Columns 0 (the boundary's) and 1 (running), then the drafts' in the same blocks.
        self.table = torch.cat([table, table[:, 1:].repeat(1, 4)], 1).contiguous().cuda()
        self.manager.bind(states, self.table)
        self.table_states = self.manager._bound()

    def case(self, crossing: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Entries, placement and counts of a step in which `crossing` rows pass token 4336."""
        entries = torch.zeros(2 * self.rows, fields.ENTRY_FIELDS, dtype=torch.int32)
        entries[: self.rows, fields.SLOT] = torch.arange(self.rows)
        entries[:, fields.EVERY] = BLOCK
        entries[: len(crossing), fields.CANDIDATE] = torch.tensor(crossing, dtype=torch.int32)
        placed = torch.zeros(4, self.rows, dtype=torch.int32)
        placed[fields.CERTAIN] = 2000
        placed[fields.PLACED_DRAFT] = DRAFTS
        for row in crossing:
            placed[fields.CERTAIN, row], placed[fields.COLUMN, row] = BLOCK - 1, 1
        accepted = torch.full((self.rows,), 3, dtype=torch.int32)
        return entries.cuda(), placed.cuda(), accepted.cuda()

    def ours(self, crossing: list[int], every_row: bool) -> Callable[[], object]:
        entries, placed, accepted = self.case(crossing)
        count = self.rows if every_row else len(crossing)
        return lambda: postcopy(
            self.table_states, entries, placed, accepted, count, every_row, BLOCK
        )


class Peer:
    """vLLM's `postprocess_mamba_fused_kernel`, launched over the same state as vLLM launches it."""

    def __init__(self, path: Path, bench: Bench) -> None:
        self.kernel = load_kernels(path).postprocess_mamba_fused_kernel
        self.bench = bench
        pairs = [
            (t, conv)
            for pair in bench.states.values()
            for t, conv in zip(pair, (1, 0), strict=True)
        ]

        self.tensors = [tensor for tensor, _ in pairs]

        def meta(dtype: torch.dtype, *values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device="cuda")

        self.tables = meta(torch.int64, bench.table.data_ptr())
        self.metadata = (
            meta(torch.int64, *(t.data_ptr() for t, _ in pairs)),
            meta(torch.int64, *(t.stride(0) * t.element_size() for t, _ in pairs)),
            meta(torch.int32, *(t.element_size() for t, _ in pairs)),
            meta(torch.int64, *(t.stride(1) if conv else t[0].numel() for t, conv in pairs)),
            meta(torch.int32, *(t.size(1) if conv else 0 for t, conv in pairs)),
            meta(torch.int32, *(0 for _ in pairs)),
            meta(torch.int32, *(0 for _ in pairs)),
            meta(torch.int64, *(0 for _ in pairs)),
        )

    def __call__(self, crossing: list[int]) -> Callable[[], object]:
        _, placed, accepted = self.bench.case(crossing)
        rows = self.bench.rows
        column, draft = placed[fields.COLUMN].contiguous(), placed[fields.PLACED_DRAFT].contiguous()
        computed = (placed[fields.CERTAIN] - 1).contiguous()
        scheduled = draft + 1
        out = accepted.clone()
        options = {"block_size": BLOCK, "COPY_BLOCK_SIZE": 1024, "CONV_STATE_DIM_FIRST": False}
        grid: tuple[int, ...] = (rows, 2 * LAYERS)
        if "TEMPORAL_TILES" in self.kernel.arg_names:  # from 0.27 on, 16 programs share a state
            options["TEMPORAL_TILES"] = 16
            grid = (*grid, 16)
        return lambda: self.kernel[grid](
            accepted, column, scheduled, computed, draft, self.tables, self.bench.table.stride(0),
            *self.metadata, out, None, rows, **options,
        )  # fmt: skip

    def check(self) -> None:
        """Both kernels leave the same state in the boundary's block of row 0."""
        source = [t.normal_().clone() for t in self.tensors]
        results = []
        for run in (self([0]), self.bench.ours([0], every_row=True)):
            for t, s in zip(self.tensors, source, strict=True):
                t.copy_(s)
            run()
            conv_states, ssm = self.tensors[0::2], self.tensors[1::2]
            results.append([t[0, :3].clone() for t in conv_states] + [t[0].clone() for t in ssm])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert not torch.equal(results[0][-1], source[-1][0])


def load_kernels(path: Path) -> ModuleType:
    """The Triton kernels of vLLM's file as a module of their own (its imports need all of vLLM)."""
    source = path.read_text()
    kernels = [
        "\n".join(source.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno])
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)
    ]
    file = Path(tempfile.mkdtemp()) / "peer_kernels.py"
    file.write_text("\n\n".join(["import triton\nimport triton.language as tl", *kernels]))
    sys.path.insert(0, str(file.parent))
    return importlib.import_module("peer_kernels")


def gpu_cases(peer_path: Path | None) -> list[dict[str, Any]]:
    """GPU time per launch; each graph holds several launches, on different rows' state."""
    states = {i: LAYOUT.allocate(2 * STATE_ROWS, "cuda") for i in range(LAYERS)}
    for pair in states.values():
        for tensor in pair:
            tensor.normal_()
    bandwidth = copy_bandwidth()
    results = []
    for rows in (1, 16, 64, 256, 512, 1024):
        bench = Bench(rows, states)
        peer = Peer(peer_path, bench) if peer_path else None
        if peer is not None and rows == 16:
            peer.check()
        cases: dict[str, list[list[int]]] = {
            "none": [[]],
            "one": [[r] for r in range(min(rows, 16))],
        }
        if rows == 16:
            cases["all"] = [list(range(16))]
        for name, crossings in cases.items():
            runs = {"always": [bench.ours(c, every_row=True) for c in crossings]}
            if name != "none":
                runs["auto"] = [bench.ours(c, every_row=False) for c in crossings]
            if peer is not None:
                runs["vLLM"] = [peer(c) for c in crossings]
            moved = 2 * len(crossings[0]) * bench.table_states.bytes_per_move()
            # ABBA: every variant once in each direction, repeats of both joined.
            times: dict[str, list[float]] = {key: [] for key in runs}
            for key in [*runs, *reversed(runs)]:
                times[key] += graph_us(runs[key], repeats=5)
            results.append(
                {"rows": rows, "crossing": name, "floor": moved / bandwidth * 1e6}
                | {k: statistics.median(v) for k, v in times.items()}
                | {"repeats": times, "bandwidth": bandwidth}
            )
    return results


def host_cases() -> list[dict[str, Any]]:
    """Host time of a skipped step under `auto`, queue drained before each: `block_demand` and
    `begin_step` ("begin"), as the engine calls them, and `end_step` ("end").

    "whole" steps pack and send their rows, as after any change in the batch; "again" steps repeat
    the last one's rows, as steady decode does. Repeats of all cases take turns.
    """
    runs = [
        HostRun(rows, readback) for rows in (1, 16, 64, 256, 1024) for readback in (False, True)
    ]
    for _ in range(REPEATS):
        for run in runs:
            run.repeat()
    return [run.result() for run in runs]


class HostRun:
    """Skipped steps of one batch size."""

    def __init__(self, rows: int, readback: bool) -> None:
        layout = StateLayout(mamba2(1, 1, 4, 1, 4), DRAFTS, BLOCK)
        self.manager = HybridStateManager(layout, rows, DRAFTS, "cuda", readback=readback)
        table = torch.zeros(rows, 64, dtype=torch.int32, device="cuda")
        self.manager.bind({0: layout.allocate(4, "cuda")}, table)
        self.rows, self.readback = rows, readback
        self.start = (500 + np.arange(rows) % 1000).astype(np.int32)
        self.accepted = torch.full((rows,), 3, dtype=torch.int32, device="cuda")
        self.times: dict[str, list[tuple[float, float]]] = {"whole": [], "again": []}

    def repeat(self) -> None:
        """Admit all, run 40 steps of each kind, release all; keeps medians of begin and end."""
        for slot in range(self.rows):
            self.manager.admit(slot, int(self.start[slot]), 0)
        computed = self.start
        for kind in self.times:
            begin, end = [], []
            for number in range(50):
                # Steps of 3 and 2 drafts in turn are never the same again; both can accept 3.
                draft = 2 if kind == "whole" and number % 2 else 3
                rows = StepRows.exact(
                    np.arange(self.rows),
                    computed,
                    np.full(self.rows, draft + 1),
                    np.full(self.rows, draft),
                )
                torch.cuda.synchronize()
                t0 = time.perf_counter()
                self.manager.block_demand(rows, computed)
                step = self.manager.begin_step(rows)
                t1 = time.perf_counter()
                self.manager.end_step(step, self.accepted)
                t2 = time.perf_counter()
                if self.readback:
                    self.manager.accepted(step)
                else:
                    self.manager.resolve(step, np.full(self.rows, 3, np.int32))
                assert step.skipped
                computed = computed + 3
                if number >= 10:
                    begin.append((t1 - t0) * 1e6)
                    end.append((t2 - t1) * 1e6)
            self.times[kind].append((statistics.median(begin), statistics.median(end)))
        for slot in range(self.rows):
            self.manager.release(slot)

    def result(self) -> dict[str, Any]:
        row: dict[str, Any] = {"rows": self.rows, "readback": self.readback}
        for kind, times in self.times.items():
            both = [begin + end for begin, end in times]
            row |= {
                f"{kind} begin": statistics.median(t[0] for t in times),
                f"{kind} end": statistics.median(t[1] for t in times),
                f"{kind} both": statistics.median(both),
                f"{kind} best": min(both),
            }
        return row | {"repeats": self.times}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--peer", type=Path, help="vLLM's v1/worker/mamba_utils.py")
    args = parser.parse_args()
    gpu, host = gpu_cases(args.peer), host_cases()
    hidden = ("repeats", "bandwidth")
    keys = list(dict.fromkeys(k for row in gpu for k in row if k not in hidden))
    show("post-copy, GPU us per launch", [{k: row.get(k, "") for k in keys} for row in gpu])
    show("skipped step, host us", plain(host, "repeats"))
    result = {"layers": LAYERS, "block": BLOCK, "unit": "us", "gpu": gpu, "host": host}
    print(save("postprocess", result, args.out))


if __name__ == "__main__":
    main()
