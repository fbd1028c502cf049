"""What do routed experts in 8 bits cost beside those in bfloat16, and which launch shapes are best?

    python benchmarks/kernels/fp8_experts.py
    python benchmarks/kernels/fp8_experts.py --shapes nano-30b --tokens 4,64 --sweep --processes 12

Up, relu2, down and sum of all layers' routed experts, as a step computes them, on random tokens
whose experts are drawn at random. CUDA graphs over calls that choose anew, whose experts together
are larger than the L2 cache; `floor` is the bytes of the chosen experts over the copy bandwidth.
Results are compared with the reference before anything is timed. `--sweep` tries other launch
shapes of the products in 8 bits, which so many processes compile beforehand, and shows the best.
JSON is written shape by shape. GPU milliseconds of all layers.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
import triton
from record import arguments, copy_bandwidth, graph_us, host_us, numbers, plain, save, show
from shapes import SHAPES, config
from torch import Tensor

from hybrid_runtime.kernels.linear.quantize import LARGEST, quantize_lines_reference
from hybrid_runtime.kernels.moe.fused_moe import MoETiling, fused_moe, fused_moe_reference
from hybrid_runtime.models.formats import FP8_PER_CHANNEL, FP8_PER_TENSOR, PLAIN, Format
from hybrid_runtime.models.linear import Experts, StackedMatrix

Row = dict[str, Any]
TOKENS = (1, 4, 16, 64, 128, 256, 512, 2560)
FORMATS: dict[str, Format] = {
    "bf16": PLAIN, "per_tensor": FP8_PER_TENSOR, "per_channel": FP8_PER_CHANNEL,
}  # fmt: skip
INPUT_SCALES = {"up_proj": 0.01, "down_proj": 0.06}
"""Of normal numbers, and of their squared ReLU."""
TOLERANCE = 2e-2
"""Of the norm: bfloat16 results, 14-bit sums, and what lies between two numbers of 8 bits."""
SHARED_MEMORY = 227 * 1024
SHOWN = 6
"""Of a sweep's launch shapes."""


class Size(NamedTuple):
    """count: experts of a layer, top_k of which a token has. size, inner: of one."""

    count: int
    top_k: int
    size: int
    inner: int
    layers: int


def size_of(shape: str, most: int) -> Size:
    """most: of any dimension, for trials without a GPU."""
    model = config(SHAPES[shape], len(SHAPES[shape].pattern))
    count = min(model.n_routed_experts, most)
    return Size(
        count=count,
        top_k=min(model.num_experts_per_tok, count),
        size=min(model.moe_latent_size or model.hidden_size, most),
        inner=min(model.moe_intermediate_size, most),
        layers=model.pattern.count("E"),
    )


def made(size: Size, device: torch.device) -> dict[str, Experts]:
    """The same experts in every format."""
    found = {}
    for name, format in FORMATS.items():
        generator = torch.Generator(device).manual_seed(0)
        experts = Experts(size.count, size.size, size.inner, device, torch.bfloat16)
        experts.store_as(format, device)
        for which, matrix in experts.named_children():
            assert isinstance(matrix, StackedMatrix)
            fill(matrix, generator, INPUT_SCALES[which])
        experts.join()
        found[name] = experts
    return found


def fill(matrix: StackedMatrix, generator: torch.Generator, input_scale: float) -> None:
    """Expert by expert, the same weights for every format."""
    tensors = {name: getattr(matrix, name).data for name in matrix.stored()}
    for expert, values in enumerate(tensors["weight"]):
        weight = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
        weight.normal_(0, matrix.inputs**-0.5, generator=generator)
        if matrix.format is PLAIN:
            values.copy_(weight)
        elif matrix.format is FP8_PER_TENSOR:
            scale = weight.float().abs().amax() / LARGEST
            values.copy_((weight.float() / scale).clamp(-LARGEST, LARGEST))
            tensors["weight_scale"][expert] = scale
            tensors["input_scale"][expert] = input_scale
        else:
            values_, scale = quantize_lines_reference(weight)
            values.copy_(values_)
            tensors["weight_scale"][expert] = scale


class Call(NamedTuple):
    """Tokens [T, size], and their experts [T, top_k] with weights."""

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor


def calls(size: Size, tokens: int, device: torch.device) -> list[Call]:
    """Which choose anew: so many that few tokens do not find their experts in the cache."""
    generator = torch.Generator(device).manual_seed(tokens)

    def one() -> Call:
        scores = torch.rand(tokens, size.count, device=device, generator=generator)
        x = torch.randn(tokens, size.size, device=device, generator=generator)
        weights, ids = scores.topk(size.top_k)
        return Call(x.bfloat16(), weights / size.top_k, ids)

    return [one() for _ in range(max(4, 32 // tokens))]


def timed(
    experts: Experts, given: list[Call], tiling: MoETiling | None = None
) -> list[Callable[[], object]]:
    up, down = experts.up_proj.format.experts(experts.up_proj, experts.down_proj)
    return [lambda g=one: fused_moe(*g, up, down, tiling) for one in given]


def error(experts: Experts, given: Call) -> float:
    """Of the norm, against the reference."""
    up, down = experts.up_proj.format.experts(experts.up_proj, experts.down_proj)
    want = fused_moe_reference(*given, up, down).float()
    return float((fused_moe(*given, up, down).float() - want).norm() / want.norm())


def tilings(mean: float) -> Iterator[MoETiling]:
    """Launch shapes to try, for so many token ids of an expert that has any."""
    fitting = min(max(triton.next_power_of_2(round(mean)), 16), 128)
    blocks_m = {max(fitting // 2, 16), fitting, min(2 * fitting, 128)}
    for block_m, block_n, block_k, warps, stages in itertools.product(
        sorted(blocks_m), (64, 128, 256), (128, 256), (4, 8), (3, 4, 5)
    ):
        spread = block_m * block_n // (32 * warps)  # sums that a thread holds, twice
        if (block_m + block_n) * block_k * stages <= SHARED_MEMORY and 4 <= spread <= 128:
            yield MoETiling(block_m, block_n, block_k, warps, stages)


def compile_for(size: Size, name: str, some: list[MoETiling]) -> None:
    """Leave compiled kernels in Triton's cache: what they are made for are the sizes of an expert,
    of which there may be few."""
    device = torch.device("cuda")
    few = size._replace(count=size.top_k)
    experts = made(few, device)[name]
    given = calls(few, 4, device)[:1]
    for tiling in some:
        try:
            timed(experts, given, tiling)[0]()
        except triton.runtime.errors.OutOfResources:
            continue
    torch.cuda.synchronize()


def compile_all(size: Size, wanted: set[MoETiling], processes: int) -> None:
    order, spawn = sorted(wanted), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        jobs = [
            pool.submit(compile_for, size, name, order[start::processes])
            for name in ("per_tensor", "per_channel")
            for start in range(processes)
        ]
        for job in jobs:
            job.result()


def swept(experts: Experts, given: list[Call], mean: float) -> list[Row]:
    """Launch shapes by their microseconds, the fastest first."""
    found: list[Row] = []
    for tiling in tilings(mean):
        try:
            us = min(graph_us(timed(experts, given, tiling), repeats=2, number=3))
        except triton.runtime.errors.OutOfResources:
            continue
        found.append({"us": us, **tiling._asdict()})
    return sorted(found, key=lambda row: row["us"])


def measure(size: Size, tokens: list[int], device: torch.device, processes: int) -> list[Row]:
    """A row per number of tokens. processes: that compile a sweep's kernels; 0: no sweep."""
    on_gpu = device.type == "cuda"
    bandwidth = copy_bandwidth() if on_gpu else None
    experts = made(size, device)
    given = {count: calls(size, count, device) for count in tokens}
    chosen = {
        count: sum(len(one.topk_ids.unique()) for one in some) / len(some)
        for count, some in given.items()
    }
    means = {count: count * size.top_k / chosen[count] for count in tokens}
    if processes:
        compile_all(size, {t for mean in means.values() for t in tilings(mean)}, processes)
    rows: list[Row] = []
    for count in tokens:
        row: Row = {"tokens": count, "experts": chosen[count], "errors": {}}
        for name, one in experts.items():
            row["errors"][name] = found = error(one, given[count][0])
            if not found < TOLERANCE:
                raise SystemExit(f"{name}, {count} tokens: off by {found:.2g} of the norm")
        for name, one in experts.items():
            run = timed(one, given[count])
            us = min(graph_us(run, repeats=3, number=5) if on_gpu else host_us(run[0], 1, 1))
            row[name] = us * size.layers / 1e3
        if bandwidth is not None:
            read = chosen[count] * 2 * size.size * size.inner * size.layers
            row |= {"floor": read / bandwidth * 1e3, "floor_bf16": 2 * read / bandwidth * 1e3}
        if processes:
            best = {n: swept(experts[n], given[count], means[count]) for n in [*FORMATS][1:]}
            row |= {f"best_{n}": some[0]["us"] * size.layers / 1e3 for n, some in best.items()}
            row["sweep"] = {n: some[:SHOWN] for n, some in best.items()}
            for n, some in best.items():
                print(count, n, *(" ".join(map(str, one.values())) for one in some[:3]), sep="; ")
        rows.append(row)
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", default="nano-30b,super-120b", help="names, by commas")
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS))
    parser.add_argument("--sweep", action="store_true", help="try other launch shapes in 8 bits")
    parser.add_argument("--processes", type=int, default=8, help="that compile for a sweep")
    parser.add_argument("--trial", action="store_true", help="tiny sizes, on a CPU too; no figures")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.trial:
        raise SystemExit("fp8_experts.py times a GPU's products, and there is none")
    device, processes = torch.device("cuda" if on_gpu else "cpu"), args.processes
    result: dict[str, Any] = {"shapes": {}}
    for shape in args.shapes.split(","):
        size = size_of(shape, 32 if args.trial else 1 << 30)
        rows = measure(size, args.tokens, device, processes if args.sweep and on_gpu else 0)
        show(f"routed experts of a step, {SHAPES[shape].name}, ms", plain(rows, "errors", "sweep"))
        about = {"name": SHAPES[shape].name, **size._asdict(), "rows": rows}
        result["shapes"][shape] = about
        if not args.trial:
            print(save("fp8_experts", result, args.out))


if __name__ == "__main__":
    main()
