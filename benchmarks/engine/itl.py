"""Inter-token latency of the engine on Nemotron shapes with random weights.

    python benchmarks/engine/itl.py --shape 8b --strategies all --lengths all --acceptance 3
    python benchmarks/engine/itl.py --shape tiny
    python benchmarks/engine/itl.py merge A.json B.json --peer vllm.jsonl
    python benchmarks/engine/itl.py plot benchmarks/results/h200/itl-8b.json

`merge` makes one result of several runs, with vLLM's beside; `plot` needs matplotlib. Each run
prints a table and writes JSON; `hybrid-runtime bench DIR` measures a checkpoint in the same way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import peer
import torch
from record import arguments, copy_bandwidth, environment, save
from shapes import SHAPES, build, config

from hybrid_runtime.bench import options
from hybrid_runtime.bench.report import table

Row = dict[str, Any]
TIMELINE_BATCH = 16


def run(argv: Sequence[str]) -> Path:
    """Measure one shape."""
    args = _parse(argv)
    shape = SHAPES[args.shape]
    sizes = config(shape, args.layers, args.mtp_pattern)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    bandwidth = copy_bandwidth() if on_gpu else None
    wanted = options.loads(args)
    start = time.perf_counter()
    model, head = build(sizes, device, getattr(torch, dtype), args.seed)
    if on_gpu:
        torch.cuda.synchronize()
    print(f"weights: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    env = environment()
    result: Row = {
        "environment": env,
        "shape": args.shape,
        "name": shape.name,
        "layers": [sizes.num_hidden_layers, len(shape.pattern)],
        "dtype": dtype,
        "weight_bytes": sum(p.nbytes for part in (model, head) for p in part.parameters()),
        # JSON has no infinity, which that limit holds.
        "config": {k: v for k, v in asdict(sizes).items() if k != "time_step_limit"},
        "runs": [env | {"arguments": list(argv)}],
    }
    path = Path()

    def write(rows: list[Row]) -> None:
        nonlocal path, result
        result |= {"rows": _with_one_timeline(rows)}
        path = save(f"itl-{args.shape}", result, args.out)

    options.run(model, head, wanted, bandwidth, write)
    if args.peer:
        result = peer.attach(result, peer.read(args.peer))
        write(result["rows"])
    _table(result)
    return path


def merge(argv: Sequence[str]) -> Path:
    """Results of several runs as one."""
    parser = argparse.ArgumentParser(prog="itl.py merge", description=merge.__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JSON of earlier runs, one shape")
    parser.add_argument("--peer", type=Path, nargs="+", default=[], help="run_nemotron.py's lines")
    parser.add_argument("--out", type=Path, help="default: under benchmarks/results/")
    args = parser.parse_args(argv)
    result = peer.merge([json.loads(path.read_text()) for path in args.results])
    if args.peer:
        result = peer.attach(result, peer.read(args.peer))
    path = save(f"itl-{result['shape']}", result, args.out)
    _table(result)
    return path


def plot(argv: Sequence[str]) -> Path:
    """ITL and TPS over batch, and one step's timeline, beside the JSON they are made from."""
    import plots

    parser = argparse.ArgumentParser(prog="itl.py plot", description=plot.__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    args = parser.parse_args(argv)
    made = [
        picture
        for path in args.results
        for picture in plots.draw(json.loads(path.read_text()), path.parent)
    ]
    if not made:
        raise ValueError("no rows with figures to draw")
    print(*made[:-1], sep="\n")
    return made[-1]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, help="the first so many only")
    parser.add_argument("--mtp-pattern", help="layers of the MTP head, of * - E")
    parser.add_argument("--dtype", help="of weights; bfloat16, float32 on a CPU")
    parser.add_argument("--peer", type=Path, nargs="+", help="JSON lines of run_nemotron.py")
    options.add_options(parser, repeats=5)
    chosen = parser.parse_known_args(argv)[0].shape
    parser.set_defaults(**SHAPES[chosen].defaults)
    return parser.parse_args(argv)


def _with_one_timeline(rows: list[Row]) -> list[Row]:
    """Timelines are long: of each strategy only the one nearest `TIMELINE_BATCH` is kept."""
    traced = [row for row in rows if row.get("profile")]
    kept: dict[str, Row] = {}
    for row in sorted(traced, key=lambda r: (abs(r["batch"] - TIMELINE_BATCH), r["lengths"])):
        kept.setdefault(row["strategy"], row)
    out = []
    for row in rows:
        if row.get("profile") and row is not kept[row["strategy"]]:
            short = {k: v for k, v in row["profile"].items() if k != "timeline"}
            row = row | {"profile": short}
        out.append(row)
    return out


def _table(result: Row) -> None:
    whole = result["layers"][0] == result["layers"][1]
    depth = "" if whole else " ({} of {} layers)".format(*result["layers"])
    title = f"{result['name']}{depth}, {result['environment']['device']}, {result['dtype']}"
    table(title, result["rows"])


def main(argv: Sequence[str] | None = None) -> int:
    """2 and one line on standard error for input that can't be used."""
    given = list(sys.argv[1:] if argv is None else argv)
    commands = {"merge": merge, "plot": plot}
    try:
        if given and given[0] in commands:
            print(commands[given[0]](given[1:]))
        else:
            print(run(given))
    except ValueError as error:
        print(f"itl.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
