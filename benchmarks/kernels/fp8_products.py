"""What do products in 8 bits cost beside bfloat16's, with and without quantising their inputs?

    python benchmarks/kernels/fp8_products.py
    python benchmarks/kernels/fp8_products.py --shape 9b-v2 --tokens 1,64

All products of a model's layers (not the head's) as a step computes them, for models without
experts; `stream` and `library` are the Triton product and `torch._scaled_mm` alone, whatever
a step takes; `floor` is the weights' bytes over the copy bandwidth. CUDA graphs over distinct
weights, four times the L2 cache or more. GPU milliseconds of all layers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from products import DENSE, sizes
from record import arguments, copy_bandwidth, graph_us, host_us, numbers, save, show
from shapes import SHAPES
from torch import Tensor

from hybrid_runtime.kernels.linear.fp8_product import (
    FEW_TOKENS_OF_PARTS,
    product_tiling,
    scaled_mm,
    stream_product,
)
from hybrid_runtime.kernels.linear.quantize import (
    Quantizer,
    Scaled,
    quantize,
    quantize_lines_reference,
)
from hybrid_runtime.models.formats import FORMATS, PLAIN
from hybrid_runtime.models.linear import Linear

Row = dict[str, Any]
TOKENS = (1, 16, 32, 64, 128, 256, 512, 2560)
ROTATED = 200 * 2**20
"""Bytes of FP8 weights, of each product."""
IN_HALVES = {"out_proj", "down_proj", "o_proj"}


def made(outputs: int, inputs: int, device: torch.device, halves: bool) -> dict[str, Linear]:
    """One matrix in every format."""
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * inputs**-0.5
    values, scale = quantize_lines_reference(weight)
    found = {}
    for name, format in {"bf16": PLAIN, **FORMATS}.items():
        linear = Linear(inputs, outputs, device, torch.bfloat16, halves=halves)
        linear.store_as(format, device)
        linear.put("weight", weight if format is PLAIN else values)
        for one, like in linear.stored().items():
            if one == "weight_scale":
                linear.put(one, scale if like.dim() else scale.mean())
            elif one == "input_scale":
                linear.put(one, torch.tensor(0.01, device=device))
        found[name] = linear
    return found


def calls(copies: list[dict[str, Linear]], x: Tensor) -> dict[str, list[Callable[[], object]]]:
    """What is timed, once per copy."""
    tensor, lines = FORMATS
    one, each = Quantizer(torch.tensor(0.01, device=x.device)), Quantizer()
    per_tensor, per_line = quantize(x, one), quantize(x, each)
    tokens, outputs = len(x), copies[0]["bf16"].outputs
    tiling = product_tiling(tokens, outputs, copies[0]["bf16"].halves)

    def of(which: str, x: Tensor) -> list[Callable[[], object]]:
        return [lambda m=m[which]: m(x) for m in copies]

    found = {"bf16": of("bf16", x), "per_tensor": of(tensor, x), "per_channel": of(lines, x)}
    found["quantize"] = [lambda: quantize(x, one)] * len(copies)
    found["quantize_lines"] = [lambda: quantize(x, each)] * len(copies)
    for name, format, given in (("tensor", tensor, per_tensor), ("channel", lines, per_line)):
        weights = [Scaled(m[format].weight.data, m[format].weight_scale.data) for m in copies]
        if x.is_cuda and tokens <= 2 * FEW_TOKENS_OF_PARTS:
            found[f"stream_{name}"] = [
                lambda w=w, g=given: stream_product(g, w, x.dtype, None, tiling) for w in weights
            ]
        if x.is_cuda and scaled_mm(given, weights[0], x.dtype) is not None:
            found[f"library_{name}"] = [
                lambda w=w, g=given: scaled_mm(g, w, x.dtype) for w in weights
            ]
    return found


def measure(shape: str, tokens: list[int], device: torch.device, most: int) -> list[Row]:
    """A row per number of tokens. most: of a size's elements, for trials without a GPU."""
    rows: list[Row] = [{"tokens": count, "each_us": {}} for count in tokens]
    bandwidth = copy_bandwidth() if device.type == "cuda" else None
    for name, (outputs, inputs, layers) in sizes(shape).items():
        outputs, inputs = min(outputs, most), min(inputs, most)
        count = max(4, -(-ROTATED // (outputs * inputs))) if device.type == "cuda" else 2
        copies = [made(outputs, inputs, device, name in IN_HALVES) for _ in range(count)]
        for row in rows:
            x = torch.randn(row["tokens"], inputs, device=device, dtype=torch.bfloat16)
            each = {}
            for what, timed in calls(copies, x).items():
                if device.type == "cuda":
                    each[what] = min(graph_us(timed, repeats=3, number=5))
                else:
                    each[what] = min(host_us(timed[0], 1, 1))
                row[what] = row.get(what, 0.0) + each[what] * layers / 1e3
            row["each_us"][name] = each
            if bandwidth is not None:
                row["floor"] = row.get("floor", 0.0) + outputs * inputs * layers / bandwidth * 1e3
        del copies
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="8b", choices=DENSE)
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS))
    parser.add_argument("--trial", action="store_true", help="tiny sizes, on a CPU too; no figures")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.trial:
        raise SystemExit("fp8_products.py times a GPU's products, and there is none")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = measure(args.shape, args.tokens, device, 256 if args.trial else 1 << 30)
    name = SHAPES[args.shape].name
    show(
        f"products of a step, {name}, ms",
        [{k: v for k, v in row.items() if k != "each_us"} for row in rows],
    )
    if not args.trial:
        print(save("fp8_products", {"shape": args.shape, "name": name, "rows": rows}, args.out))


if __name__ == "__main__":
    main()
