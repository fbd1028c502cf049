"""How fast are drafts found from an output head in 8 bits, and are they the same drafts?

    python benchmarks/kernels/draft_head.py
    python benchmarks/kernels/draft_head.py --tune --models 8b --lines 1,16,64,80
    python benchmarks/kernels/draft_head.py --models tiny --lines 1,3 --checked 64

GPU microseconds from hidden states to tokens, beside the product with the output weight and the
argmax of its logits; the limit is the time to read the copy in 8 bits at the copy bandwidth. Then
`--checked` lines: how many tokens are not the index of the largest logit (`different`; some are its
equals), how many have a smaller logit (`worse`), and how many a logit so much smaller that rounding
to 16 bits cannot be why (`missed`). Weights are normal; hidden states are so too, or have channels
10 to 30 times as large as others (outliers). `--tune` compares launch shapes instead. Without a
CUDA device the plain-torch forms are timed, on the host.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
import torch.nn.functional as F
from record import arguments, copy_bandwidth, graph_us, host_us, save, show
from shapes import SHAPES, config
from torch import Tensor

from hybrid_runtime.device.compile import compiling
from hybrid_runtime.kernels.sampling.argmax import argmax
from hybrid_runtime.kernels.sampling.narrow_head import (
    PART,
    HeadTiling,
    head_tiling,
    narrow,
    narrow_argmax,
    proposals,
)

AT_ONCE = 256
KINDS = ("normal", "outliers")


class Bench:
    """An output weight and its copy in 8 bits."""

    def __init__(self, model: str) -> None:
        shape = config(SHAPES[model])
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.weight = self._normal(shape.vocab_size, shape.hidden_size).mul_(0.02)
        self.head = narrow(self.weight)

    def _normal(self, *sizes: int) -> Tensor:
        return torch.randn(
            sizes, dtype=torch.bfloat16, device=self.device, generator=self.generator
        )

    def hidden(self, lines: int, kind: str = "normal") -> Tensor:
        x = self._normal(lines, self.weight.shape[1])
        if kind == "outliers":
            uniform = torch.rand(x.shape[1], device=self.device, generator=self.generator)
            order = torch.rand(x.shape[1], device=self.device, generator=self.generator)
            x *= torch.where(order < 0.01, 10 + 20 * uniform, 1.0).to(x.dtype)
        return x

    def tokens(self, x: Tensor, tiling: HeadTiling | None = None) -> Tensor:
        out = torch.empty(len(x), dtype=torch.int32, device=self.device)
        return narrow_argmax(x, self.head, out, tiling)

    def full_us(self, x: Tensor) -> list[float]:
        return self._us(lambda: argmax(F.linear(x, self.weight)))

    def ours_us(self, x: Tensor, tiling: HeadTiling | None = None) -> list[float]:
        return self._us(lambda: self.tokens(x, tiling))

    def proposals_us(self, x: Tensor, tiling: HeadTiling) -> list[float]:
        return self._us(lambda: proposals(x, self.head, tiling))

    def _us(self, call: Callable[[], object]) -> list[float]:
        if not self.on_gpu:
            return host_us(call, repeats=2, number=4)
        return graph_us([call] * 4, repeats=5, number=8)

    def _lines(self, kind: str, lines: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Hidden states of so many lines, their logits and best tokens, a few at a time."""
        for start in range(0, lines, AT_ONCE):
            x = self.hidden(min(AT_ONCE, lines - start), kind)
            logits = F.linear(x, self.weight)
            yield x, logits, argmax(logits)

    def agreement(self, kind: str, lines: int, tiling: HeadTiling | None = None) -> dict[str, int]:
        """Of so many lines, how many tokens differ, and by how much."""
        counts = {"different": 0, "worse": 0, "missed": 0}
        for x, logits, best in self._lines(kind, lines):
            found = self.tokens(x, tiling)
            most, own = (logits.gather(1, t.long()[:, None])[:, 0].float() for t in (best, found))
            counts["different"] += int((found != best).sum())
            counts["worse"] += int((own < most).sum())
            counts["missed"] += int((own < most - 2 * most.abs() * 2**-7).sum())
        return counts


def compare(models: list[str], line_counts: list[int], checked: int) -> dict[str, Any]:
    times, agreements = [], []
    bandwidth = copy_bandwidth() if torch.cuda.is_available() else None
    for model in models:
        bench = Bench(model)
        for lines in line_counts:
            x = bench.hidden(lines)
            full, ours = bench.full_us(x), bench.ours_us(x)
            limit = bench.weight.numel() / bandwidth * 1e6 if bandwidth else None
            medians = {"full": statistics.median(full), "8 bits": statistics.median(ours)}
            repeats = {"full repeats": full, "8 bits repeats": ours}
            times.append({"model": model, "lines": lines, "limit": limit} | medians | repeats)
        for kind in KINDS:
            counts = bench.agreement(kind, checked)
            agreements.append({"model": model, "hidden": kind, "lines": checked} | counts)
        del bench
    return {"gpu": times, "agreement": agreements}


def tilings(lines: int) -> list[HeadTiling]:
    """Launch shapes to compare for so many lines."""
    most = head_tiling(lines).block_m
    shapes = itertools.product({max(most // 2, 16), most}, (128, 256), (4, 8), (2, 3, 4))
    # What fits the shared memory of a Hopper GPU.
    return [
        tiling
        for tiling in itertools.starmap(HeadTiling, shapes)
        if (PART + tiling.block_m) * tiling.block_k * tiling.stages < 227 << 10
    ]


def tune(models: list[str], line_counts: list[int], checked: int) -> dict[str, Any]:
    results = []
    for model in models:
        bench = Bench(model)
        inputs = {lines: bench.hidden(lines) for lines in line_counts}
        with compiling() if bench.on_gpu else nullcontext():
            for lines, x in inputs.items():
                for tiling in tilings(lines):
                    bench.tokens(x, tiling)
        for lines, x in inputs.items():
            for tiling in tilings(lines):
                row = {"model": model, "lines": lines} | tiling._asdict()
                row["us"] = statistics.median(bench.ours_us(x, tiling))
                if bench.on_gpu:
                    row["proposals"] = statistics.median(bench.proposals_us(x, tiling))
                results.append(row | bench.agreement("normal", checked, tiling))
    return {"gpu": results}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", default="8b,nano-30b,9b-v2")
    parser.add_argument("--lines", default="1,8,16,64,80,256")
    parser.add_argument("--checked", type=int, default=10240, help="lines to compare")
    parser.add_argument("--tune", action="store_true", help="compare launch shapes")
    args = parser.parse_args()
    measure = tune if args.tune else compare
    result = measure(args.models.split(","), [int(n) for n in args.lines.split(",")], args.checked)
    for name, rows in result.items():
        show(name, [{k: v for k, v in row.items() if not k.endswith("repeats")} for row in rows])
    print(save("draft-head-tune" if args.tune else "draft-head", {"unit": "us"} | result, args.out))


if __name__ == "__main__":
    main()
