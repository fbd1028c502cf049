"""Lockstep decode of a shape with random weights: all requests decode, none comes or goes.

    python benchmarks/engine/itl.py --shape 8b --batches 1,16,64 --acceptance 3
    python benchmarks/engine/itl.py --shape 8b --layouts columns --strategies all --acceptance 3
    python benchmarks/engine/itl.py --shape 8b --batches 1,16,64 --acceptance 3 --repeats 3 \
        --before "../older/.venv/bin/python ../older/benchmarks/engine/itl.py"
    python benchmarks/engine/itl.py --shape qwen3.5-9b --batches 1,16,64 --acceptance 3
    python benchmarks/engine/itl.py merge A.json B.json --peer vllm.jsonl

Prints a table and writes JSON; `hybrid-runtime bench DIR` measures a checkpoint in the same way.
`--before` has an older checkout take turns (ABBA): both sides run twice, in processes of their own,
and rows get the older one's step and the ratio to it as those of a peer. `merge` makes one result
of several runs, with vLLM's beside (lines of `vllm/lockstep.py`, see `peer.py`). What of Qwen's
shapes vLLM runs is a little different: `common/qwen.py`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import peer
import torch
from record import arguments, environment, save
from shapes import NAMES, QUANTIZATIONS, measured

from hybrid_runtime.bench import options
from hybrid_runtime.bench.measure import measure_all
from hybrid_runtime.bench.report import table

Row = dict[str, Any]


def run(argv: Sequence[str]) -> None:
    """Measure one shape."""
    args = _parse(argv)
    if args.before:
        beside(args, argv)
        return
    shape = measured(args.shape, args.layers)
    on_gpu = torch.cuda.is_available()
    dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    wanted = options.loads(args)
    device = "cuda" if on_gpu else "cpu"
    model, head = shape.build(device, getattr(torch, dtype), args.quantization)
    env = environment()
    result: Row = {
        "environment": env,
        "shape": args.shape,
        "name": shape.title,
        "layers": [shape.sizes.num_hidden_layers, shape.depth],
        "dtype": dtype,
        "quantization": args.quantization,
        "config": shape.fields,
        "runs": [env | {"arguments": list(argv)}],
    }

    def write(rows: list[Row]) -> None:
        save(f"itl-{args.shape}", result | {"rows": rows}, args.out)
        result["rows"] = rows

    measure_all(model, head, wanted, write)
    _finish(result, args.out)


def beside(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """This checkout and an older one in turns."""
    place = next(i for i, word in enumerate(argv) if word.startswith("--before"))
    given = [*argv[:place], *argv[place + (1 if "=" in argv[place] else 2) :]]
    commands = {"now": [sys.executable, __file__], "before": shlex.split(args.before)}
    found: dict[str, list[Row]] = {side: [] for side in commands}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "itl.json"
        for side in ("now", "before", "before", "now"):
            subprocess.run([*commands[side], *given, "--out", str(out)], check=True)
            found[side].append(json.loads(out.read_text()))
    now, before = (peer.merge(results) for results in found.values())
    _finish(peer.attach(now, peer.entries(before)), args.out)


def merge(argv: Sequence[str]) -> None:
    """Results of several runs as one."""
    parser = argparse.ArgumentParser(prog="itl.py merge", description=merge.__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JSON of earlier runs, one shape")
    parser.add_argument("--peer", type=Path, help="JSON lines of vllm/lockstep.py")
    parser.add_argument("--out", type=Path, help="default: under benchmarks/results/")
    args = parser.parse_args(argv)
    result = peer.merge([json.loads(path.read_text()) for path in args.results])
    _finish(peer.attach(result, peer.read(args.peer)) if args.peer else result, args.out)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=NAMES, default="8b")
    parser.add_argument("--layers", type=int, help="the first so many only")
    parser.add_argument("--dtype", help="of weights; bfloat16, float32 on a CPU")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the weights; none")
    parser.add_argument(
        "--before", help="how itl.py of an older checkout is started, to run beside"
    )
    options.add_options(parser)
    chosen = parser.parse_known_args(argv)[0].shape
    parser.set_defaults(**measured(chosen).defaults)
    return parser.parse_args(argv)


def _finish(result: Row, out: Path | None) -> None:
    path = save(f"itl-{result['shape']}", result, out)
    whole = result["layers"][0] == result["layers"][1]
    depth = "" if whole else " ({} of {} layers)".format(*result["layers"])
    title = f"{result['name']}{depth}, {result['environment']['device']}, {result['dtype']}"
    table(title, result["rows"])
    print(path)


def main(argv: Sequence[str] | None = None) -> int:
    """2 and one line on standard error for input that can't be used."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given[:1] == ["merge"]:
            merge(given[1:])
        else:
            run(given)
    except ValueError as error:
        print(f"itl.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
