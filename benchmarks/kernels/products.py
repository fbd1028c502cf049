"""What do the matrix products of a step cost at each number of tokens, and how fast can they be?

    python benchmarks/kernels/products.py
    python benchmarks/kernels/products.py --shape 9b-v2 --tokens 64,1024

All products of a model's layers (not the output head's), by PyTorch, on random data. They run for a
second before anything is timed, and without a pause, as under a load: what the GPU's power allows
is less than what it reaches in a burst. For models without experts. GPU milliseconds.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
import torch.nn.functional as F
from record import arguments, numbers, save, show
from shapes import SHAPES, config
from torch import Tensor

Row = dict[str, Any]
TOKENS = (
    64, 128, 256, 512, 768, 1024, 1280, 1344, 1408, 1536, 2048, 2432, 2464, 2560, 2816, 3072,
)  # fmt: skip
DENSE = [name for name, shape in SHAPES.items() if "E" not in shape.pattern]
COPIES = 3
"""Of each weight, so that none is in the cache when it is used again."""
ROUNDS, WARM_UP_S = 7, 1.0


def sizes(name: str) -> dict[str, tuple[int, int, int]]:
    """Outputs, inputs and number of each product of a step."""
    model = config(SHAPES[name])
    layers, hidden = Counter(model.pattern), model.hidden_size
    mamba, heads = model.mamba2, model.num_attention_heads * model.head_dim
    keys = 2 * model.num_key_value_heads * model.head_dim
    return {
        "in_proj": (mamba.inner + mamba.conv_channels + mamba.heads, hidden, layers["M"]),
        "out_proj": (hidden, mamba.inner, layers["M"]),
        "up_proj": (model.intermediate_size, hidden, layers["-"]),
        "down_proj": (hidden, model.intermediate_size, layers["-"]),
        "qkv": (heads + keys, hidden, layers["*"]),
        "o_proj": (hidden, heads, layers["*"]),
    }


class Products:
    """Weights and inputs of all products."""

    def __init__(self, shape: str, most: int, device: torch.device) -> None:
        self.sizes, self.device = sizes(shape), device
        generator = torch.Generator(device).manual_seed(0)

        def normal(lines: int, size: int) -> Tensor:
            made = torch.empty(lines, size, device=device, dtype=torch.bfloat16)
            return made.normal_(0, 0.02, generator=generator)

        self.weights = {
            k: [normal(o, i) for _ in range(COPIES)] for k, (o, i, _) in self.sizes.items()
        }
        self.inputs = {k: normal(most, i) for k, (_, i, _) in self.sizes.items()}

    def launch(self, tokens: int) -> list[tuple[str, torch.cuda.Event, torch.cuda.Event]]:
        """Each kind of product, once per copy, between two events."""
        marks = []
        for name, copies in self.weights.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            x = self.inputs[name][:tokens]
            first.record()
            for weight in copies:
                F.linear(x, weight)
            last.record()
            marks.append((name, first, last))
        return marks

    def rows(self, tokens: list[int]) -> list[Row]:
        """Medians over rounds, each with all numbers of tokens in another order."""
        end = time.perf_counter() + WARM_UP_S
        while time.perf_counter() < end:
            self.launch(max(tokens))
            torch.cuda.synchronize()
        found: dict[int, list[dict[str, float]]] = {count: [] for count in tokens}
        order = random.Random(0)
        for _ in range(ROUNDS):
            launched = [(n, self.launch(n)) for n in order.sample(tokens, len(tokens))]
            torch.cuda.synchronize()
            for count, marks in launched:
                found[count].append({k: a.elapsed_time(b) / COPIES for k, a, b in marks})
        return [self._row(count, found[count]) for count in tokens]

    def _row(self, tokens: int, found: list[dict[str, float]]) -> Row:
        each = {k: statistics.median(one[k] for one in found) for k in self.sizes}
        step = sum(each[k] * number for k, (_, _, number) in self.sizes.items())
        flops = sum(2 * tokens * o * i * number for o, i, number in self.sizes.values())
        return {"tokens": tokens, "step_ms": step, "tflop_s": flops / step / 1e9, "each_ms": each}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="8b", choices=DENSE)
    parser.add_argument("--tokens", type=numbers, default=TOKENS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("products.py times a GPU's products, and there is none")
    rows = Products(args.shape, max(args.tokens), torch.device("cuda")).rows(args.tokens)
    shape = SHAPES[args.shape].name
    path = save("products", {"shape": args.shape, "name": shape, "rows": rows}, args.out)
    shown = [{k: row[k] for k in ("tokens", "step_ms", "tflop_s")} for row in rows]
    show(f"matrix products of a step, {shape}", shown)
    print(path)


if __name__ == "__main__":
    main()
