"""What does a sampled step cost more than a greedy one?

    python benchmarks/kernels/sampling.py
    python benchmarks/kernels/sampling.py --vocabulary 3000 --rows 1,2

From logits to accepted tokens, GPU microseconds: greedy, our selection by thresholds, and the same
distribution by PyTorch's sort. Rows of K + 1 = 4 positions. Logits are flat (a standard normal, as
models of random weights give) or peaked (a normal and 30 tokens high above it, as trained ones do).
Without a CUDA device the plain-torch forms are timed, on the host.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from record import arguments, graph_us, host_us, numbers, plain, save, show

from hybrid_runtime.kernels.sampling.accept import accept_drafts
from hybrid_runtime.kernels.sampling.naive import select_reference
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.kernels.sampling.select import select_tokens
from hybrid_runtime.specdecode.acceptance import greedy
from hybrid_runtime.specdecode.sampling import TARGET

WIDTH = 4
ROTATE = 256 << 20  # bytes of logits that the launches of one graph read, at least
# temperature, top-k, top-p, min-p
PARAMS: dict[str, tuple[float, int, float, float]] = {
    "T": (1.0, 0, 1.0, 0.0),
    "min-p": (1.0, 0, 1.0, 0.05),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 20, top-p 0.95": (0.6, 20, 0.95, 0.0),
    "top-k 5000, top-p 0.95": (1.0, 5000, 0.95, 0.0),
}


class Bench:
    """Rows of logits, as many sets of them as the launches of a graph should rotate over."""

    def __init__(self, rows: int, vocabulary: int, kind: str, dtype: torch.dtype) -> None:
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if on_gpu else "cpu")
        shape = (rows, WIDTH, vocabulary)
        size = math.prod(shape) * dtype.itemsize
        self.logits = [
            self._logits(shape, kind).to(dtype) for _ in range(-(-ROTATE // size) if on_gpu else 1)
        ]
        self.drafts = torch.zeros((rows, WIDTH - 1), dtype=torch.int32, device=self.device)
        self.emits = torch.ones(rows, dtype=torch.int32, device=self.device)
        self.num_draft = self.emits * (WIDTH - 1)
        self.position = self.emits * 100

    def _logits(self, shape: tuple[int, ...], kind: str) -> torch.Tensor:
        logits = torch.randn(shape, device=self.device)
        if kind == "peaked":
            logits[..., torch.randperm(shape[-1], device=self.device)[:30]] += 12
        return logits

    def greedy(self) -> list[float]:
        return self._us(lambda x: greedy(x, self.drafts, self.num_draft, self.emits))

    def ours(self, params: tuple[float, int, float, float]) -> list[float]:
        sampling = self._sampling(params)

        def step(x: torch.Tensor) -> object:
            chosen = select_tokens(x, sampling, self.position, TARGET, self.num_draft, self.emits)
            return accept_drafts(chosen, self.drafts, self.num_draft, self.emits)

        return self._us(step)

    def sort(self, params: tuple[float, int, float, float]) -> list[float]:
        sampling = self._sampling(params)

        def step(x: torch.Tensor) -> object:
            chosen = select_reference(x, sampling, self.position, TARGET)
            return accept_drafts(chosen, self.drafts, self.num_draft, self.emits)

        return self._us(step, most=4)

    def _us(self, step: Callable[[torch.Tensor], object], most: int = 64) -> list[float]:
        calls = [lambda x=x: step(x) for x in self.logits[:most]]
        if self.device.type == "cpu":
            return host_us(calls[0], repeats=2, number=4)
        return graph_us(calls, repeats=5, number=max(1, 32 // len(calls)))

    def _sampling(self, params: tuple[float, int, float, float]) -> SamplingTensors:
        rows = len(self.emits)
        temperature, top_k, top_p, min_p = params

        def line(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=self.device)

        return SamplingTensors(
            line(temperature),
            line(top_k, torch.int32),
            line(top_p),
            line(min_p),
            torch.arange(rows, device=self.device),
        )


def compare(vocabulary: int, row_counts: list[int], dtype: torch.dtype) -> list[dict[str, Any]]:
    results = []
    for rows, kind in itertools.product(row_counts, ("flat", "peaked")):
        bench = Bench(rows, vocabulary, kind, dtype)
        base = bench.greedy()
        for name, params in PARAMS.items():
            ours, sort = bench.ours(params), bench.sort(params)
            medians = {
                "greedy": statistics.median(base),
                "ours": statistics.median(ours),
                "sort": statistics.median(sort),
            }
            repeats = {"greedy repeats": base, "ours repeats": ours, "sort repeats": sort}
            results.append({"rows": rows, "logits": kind, "params": name} | medians | repeats)
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--rows", type=numbers, default=[1, 16, 64])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    results = compare(args.vocabulary, args.rows, getattr(torch, args.dtype))
    show("logits to accepted tokens, us", plain(results, "repeats"))
    result = {"vocabulary": args.vocabulary, "positions": WIDTH, "dtype": args.dtype, "unit": "us"}
    print(save("sampling", result | {"gpu": results}, args.out))


if __name__ == "__main__":
    main()
