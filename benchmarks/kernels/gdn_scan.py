"""GPU time and error of Gated DeltaNet's scan of prompts, beside FLA's chunk kernels.

16 key heads and 32 value heads, states of 128 x 128 in float32, bf16 inputs, heads that forget fast
and slowly. Every prompt starts from a state and stores one; `checkpoint`: also one in its middle.
Launches rotate over at least 256 MiB of inputs and states, and the two sides take turns.

`--peer` times FLA's `chunk_gated_delta_rule` as vLLM has it (0.25.1), or that of the package `fla`
where there is no vLLM. `fla`: alone, its keys and queries normalised and its gates computed before;
`layer`: with the launches by which vLLM's layer computes them, and fetches and stores states, as
ours does too. Errors are against the specification in fp64, before anything is timed. `--sweep`
times ours at other launch shapes.

`--shape tiny` runs ours once on a CPU, and checks it; with TRITON_INTERPRET=1 the kernels.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from record import arguments, copy_bandwidth, graph_us, numbers, plain, save, show
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import Cuts, StateRows
from hybrid_runtime.kernels.gdn.chunk_scan import ScanTiling, chunk_scan
from hybrid_runtime.kernels.gdn.naive import chunk_scan_reference, gates, normalised

ROTATE = 256 << 20  # bytes that the launches of one graph work on, at least
PROMPTS = "1x1024,1x4096,1x16384,8x1024"
TILINGS = [ScanTiling(64, 32, *rest) for rest in ((4, 4, 2), (4, 4, 3), (4, 4, 4), (8, 4, 3))]
TILINGS += [ScanTiling(64, 64, *rest) for rest in ((4, 4, 2), (4, 4, 3), (4, 8, 3), (8, 4, 3))]
TILINGS += [ScanTiling(64, 128, 4, 8, 2)]
WORST = 1e-2
"""Relative error of outputs, root of mean squares, that none may reach: bf16 leaves 2e-3."""


class Shape(NamedTuple):
    heads: int = 32
    key_heads: int = 16
    dim: int = 128


class Data(NamedTuple):
    """What one launch works on. mixed: q, k and v `[tokens, channels]`, as a convolution leaves
    them. a, b: `[tokens, Hv]`. states: `[blocks, Hv, V, K]`, three of a row."""

    mixed: Tensor
    a: Tensor
    b: Tensor
    states: Tensor


class Case:
    """Prompts of one length. Of a row's blocks the first is read, the second gets its checkpoint,
    the third its state."""

    def __init__(self, shape: Shape, rows: int, length: int, device: str) -> None:
        self.shape, self.rows, self.length, self.device = shape, rows, length, device
        self.tokens = rows * length
        self.A_log = torch.linspace(-4, 1, shape.heads, device=device)
        self.dt_bias = torch.randn(shape.heads, device=device)
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.table = torch.arange(3 * rows, **ints).view(rows, 3)
        self.starts = torch.arange(rows + 1, **ints) * length
        zero = torch.zeros(rows, **ints)
        slot = torch.arange(rows, **ints)
        self.where = StateRows(self.table, slot, self.starts, zero, zero, zero, zero + 2)
        self.cuts = Cuts(zero + length // 2 + 1, zero + 1)

    @property
    def copies(self) -> int:
        """Launches of a graph, each on data of its own."""
        heads, key_heads, dim = self.shape
        one = self.tokens * 2 * dim * (2 * key_heads + heads) + self.rows * 4 * heads * dim**2
        return max(3, math.ceil(ROTATE / one))

    def draw(self) -> Data:
        heads, key_heads, dim = self.shape
        channels = (2 * key_heads + heads) * dim
        gate = torch.randn(2, self.tokens, heads, device=self.device).bfloat16()
        mixed = torch.randn(self.tokens, channels, device=self.device).bfloat16()
        states = torch.randn(3 * self.rows, heads, dim, dim, device=self.device) * 0.3
        return Data(mixed, gate[0], gate[1], states)

    def parts(self, data: Data) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        heads, key_heads, dim = self.shape
        sizes = [key_heads * dim, key_heads * dim, heads * dim]
        q, k, v = (part.unflatten(1, (-1, dim)) for part in data.mixed.split(sizes, dim=1))
        return q, k, v

    def run(
        self, data: Data, cuts: Cuts | None, tiling: ScanTiling | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ours: outputs, and the states after each row's last token."""
        y = chunk_scan(
            *self.parts(data), data.a, data.b, self.A_log, self.dt_bias, data.states, self.where,
            self.length, cuts, tiling=tiling,
        )  # fmt: skip
        return y, data.states[2::3]

    def exact(self, data: Data) -> tuple[Tensor, Tensor]:
        """The same by the specification, in fp64."""
        q, k, v, a, b, states = (
            part.double() for part in (*self.parts(data), data.a, data.b, data.states)
        )
        given = q, k, v, a, b, self.A_log.double(), self.dt_bias.double(), states
        return chunk_scan_reference(*given, self.where, self.length), states[2::3]


class Peer:
    """FLA's chunk kernels. One copy's `run` needs what `prepare` made of it."""

    def __init__(self, case: Case) -> None:
        self.case, self.of_vllm = case, True
        try:
            from vllm.model_executor.layers.fla.ops import chunk_gated_delta_rule
        except ImportError:
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule

            self.of_vllm = False
        self.chunk = chunk_gated_delta_rule
        # It keeps what it derives from this tensor, and only from this one.
        self.starts = case.starts.long() if not self.of_vllm else case.starts

    def prepare(self, data: Data) -> tuple[Tensor, ...]:
        """Normalised q and k, v, g, beta, each `[1, tokens, ...]`, and the states to start from:
        `[rows, Hv, V, K]`, or `[rows, Hv, K, V]` for `fla`."""
        case = self.case
        q, k, v = case.parts(data)
        g, beta = gates(data.a, data.b, case.A_log, case.dt_bias, torch.float32)
        # It multiplies queries by K ** -0.5 itself, and `fla` wants as many as values.
        group = 1 if self.of_vllm else case.shape.heads // case.shape.key_heads
        k, q = (part.bfloat16() for part in normalised(q.float(), k.float(), group))
        q = (q.float() * case.shape.dim**0.5).bfloat16()
        states = data.states[::3] if self.of_vllm else data.states[::3].mT
        return *(part[None].contiguous() for part in (q, k, v, g, beta)), states.contiguous()

    def run(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor) -> Any:
        """Outputs and last states."""
        y, last = self.chunk(
            q, k, v, g, beta, initial_state=states, output_final_state=True, cu_seqlens=self.starts
        )
        return y[0], last if self.of_vllm else last.mT

    def layer(self, data: Data) -> Any:
        """From the convolution's outputs to the states in their blocks, as vLLM's layer does it."""
        from vllm.model_executor.layers.fla.ops import fused_post_conv_prep

        case = self.case
        _, key_heads, dim = case.shape
        prepared = fused_post_conv_prep(
            data.mixed, data.a, data.b, case.A_log, case.dt_bias, key_heads, dim, dim
        )
        start = data.states[case.table[:, 0]]
        y, last = self.run(*(part[None] for part in prepared), start)
        data.states[case.table[:, 2]] = last
        return y


def relative(got: Tensor, want: Tensor) -> float:
    """Error, root of mean squares."""
    return float(((got.double() - want).square().sum() / want.square().sum()).sqrt())


def check(name: str, got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Errors of outputs and states; ends the run where they are too large."""
    found = [relative(one, other) for one, other in zip(got, want, strict=True)]
    if not max(found) < WORST:
        raise SystemExit(f"{name}: outputs and states are off by {found}")
    return {f"{name} output error": found[0], f"{name} state error": found[1]}


def in_turns(sides: dict[str, list[Callable[[], object]]], repeats: int) -> dict[str, list[float]]:
    """GPU time of each side's calls, once in this order and once in the opposite."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name in [*sides, *reversed(sides)]:
        times[name] += graph_us(sides[name], repeats=repeats, number=2)
    return times


def measure_case(case: Case, args: Any, bandwidth: float) -> dict[str, Any]:
    data = [case.draw() for _ in range(case.copies)]
    row: dict[str, Any] = {"prompts": case.rows, "tokens each": case.length}
    want = case.exact(data[0])
    began = time.perf_counter()
    row |= check("ours", case.run(data[0], None), want)
    torch.cuda.synchronize()
    row["first call s"] = time.perf_counter() - began
    sides: dict[str, list[Callable[[], object]]] = {
        "ours": [lambda d=d: case.run(d, None) for d in data],
        "checkpoint": [lambda d=d: case.run(d, case.cuts) for d in data],
    }
    if args.peer:
        peer = Peer(case)
        ready = [peer.prepare(d) for d in data]
        row |= check("fla", peer.run(*ready[0]), want)
        sides["fla"] = [lambda r=r: peer.run(*r) for r in ready]
        if peer.of_vllm:
            sides["layer"] = [lambda d=d: peer.layer(d) for d in data]
    del want
    times = in_turns(sides, args.repeats)
    row |= {name: statistics.median(us) for name, us in times.items()}
    row |= {f"{name} repeats": us for name, us in times.items()}
    row |= {f"ours ÷ {name}": row["ours"] / row[name] for name in times if name in ("fla", "layer")}
    heads, key_heads, dim = case.shape
    size = case.tokens * 2 * (2 * dim * (key_heads + heads) + 2 * heads)
    row["floor"] = (size + 8 * case.rows * heads * dim**2) / bandwidth * 1e6
    if args.sweep:
        swept = {}
        for tiling in TILINGS:
            calls = [lambda d=d, t=tiling: case.run(d, None, t) for d in data]
            swept["/".join(map(str, tiling))] = min(graph_us(calls, 3, number=1))
        row |= {"swept": swept, "best": min(swept, key=lambda form: swept[form])}
    return row


def measure(args: Any) -> list[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    results: list[dict[str, Any]] = []
    for rows, length in (numbers(prompts.replace("x", ",")) for prompts in args.prompts.split(",")):
        case = Case(Shape(heads=args.heads), rows, length, "cuda")
        row = measure_case(case, args, bandwidth)
        torch.cuda.empty_cache()
        results.append(row)
        print({k: v for k, v in row.items() if not k.endswith("repeats")}, flush=True)
        save("gdn-scan", result(args, results, bandwidth), args.out)
    return results


def result(args: Any, rows: list[dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    return {
        "heads": args.heads, "key heads": 16, "state": [128, 128], "state dtype": "float32",
        "unit": "us", "tiling": "chunk/tile/prepare warps/carry warps/carry stages",
        "bandwidth": bandwidth, "gpu": rows,
    }  # fmt: skip


def rehearse() -> None:
    """Each call once, in a small shape on a CPU."""
    torch.manual_seed(0)
    case = Case(Shape(4, 2, 16), 2, 70, "cpu")
    data = case.draw()
    want = case.exact(data)
    for cuts in (None, case.cuts):
        print(check("ours", case.run(data, cuts), want))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=["full", "tiny"], default="full")
    parser.add_argument("--prompts", default=PROMPTS, help="number x tokens of each")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sweep", action="store_true", help="other launch shapes")
    parser.add_argument("--peer", action="store_true", help="FLA's beside it")
    args = parser.parse_args()
    if args.shape == "tiny":
        rehearse()
        return
    rows = measure(args)
    title = "Gated DeltaNet, scan of prompts, GPU us per layer"
    show(title, plain(rows, "repeats", "floor", "swept"))


if __name__ == "__main__":
    main()
