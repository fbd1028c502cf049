"""What a profiler trace says of steady steps: busy, idle, and the kind of each kernel."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hybrid_runtime.bench.trace import Operation, analyse, busy

ROOT = Path(__file__).parents[2]


def test_gaps_are_idle_or_short_and_overlaps_count_once() -> None:
    found = busy([(100, 110), (0, 10), (12, 20), (15, 18), (19, 30), (35, 40)])
    assert found.window == 110
    assert found.short_gaps == 2 + 5
    assert found.idle == 60
    assert found.busy == 110 - 7 - 60
    assert busy([]).window == 0


def test_a_trace_gives_figures_per_step_and_the_timeline_of_one() -> None:
    operations = []
    for step in range(4):
        at = 100.0 * step
        operations += [
            Operation("_prepare_inputs_kernel", at, at + 2),
            Operation("nvjet_gemm", at + 3, at + 43),
            Operation("nvjet_gemm", at + 44, at + 84),
            Operation("_selective_state_update_kernel", at + 84, at + 90),
        ]
    report = analyse(operations, 4)
    assert report["operations_per_step"] == 4
    assert report["us_by_kind"] == {"matrix products": 80, "state": 6, "bookkeeping": 2}
    assert report["idle_share"] == pytest.approx(30 / 390)
    assert report["short_gaps_us_per_step"] == 2
    assert report["top"][0] == {"name": "nvjet_gemm", "us_per_step": 80, "per_step": 2}
    assert report["timeline"] == [
        "0.0 2.0 bookkeeping",
        "3.0 40.0 matrix products",
        "44.0 40.0 matrix products",
        "84.0 6.0 state",
    ]


def test_every_kernel_is_of_the_kind_of_its_room() -> None:
    """No kernel here is "other" in a trace, and none is taken for one of another room."""
    rooms = {
        "attention": {"attention"},
        "layers": {"norm", "elementwise"},
        "mamba": {"state", "convolution"},
        "moe": {"experts"},
        "replay": {"state"},
        "sampling": {"bookkeeping", "matrix products"},
        "step": {"bookkeeping", "state"},
    }
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or not node.name.endswith("_kernel"):
                continue
            if any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                kind = Operation(node.name, 0, 1).kind
                assert kind in rooms[path.parent.name], f"{node.name} is {kind}"
                found.setdefault(path.parent.name, set()).add(kind)
    assert found == rooms
