"""How long `engine.capture()` takes: first with nothing compiled, then with Triton's cache on disk.

    python benchmarks/engine/capture.py
    python benchmarks/engine/capture.py --shape tiny --max-requests 4

Each time is that of a process of its own, weights aside. On a CPU there is nothing to capture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

import torch
from record import arguments, save, show
from shapes import NAMES, measured

from hybrid_runtime.engine import Engine, EngineConfig

Row = dict[str, Any]


def once(args: argparse.Namespace) -> Row:
    """Capture in this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, head = measured(args.shape).build(device, dtype)
    options = EngineConfig(
        drafter="mtp",
        num_speculative_tokens=args.drafts,
        adaptive=args.adaptive,
        max_requests=args.max_requests,
        max_model_len=args.max_model_len,
        max_tokens_per_step=8192,
    )
    engine = Engine(model, options, head=head)
    start = time.perf_counter()
    engine.capture()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {"seconds": time.perf_counter() - start}


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=NAMES, default="8b")
    parser.add_argument("--drafts", type=int, default=3, help="most of a row")
    parser.add_argument("--adaptive", action="store_true", help="as many drafts as pay")
    parser.add_argument("--max-requests", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument(
        "--once", action="store_true", help="in this process, as it finds the cache"
    )
    args = parser.parse_args(argv)
    if args.once:
        print(json.dumps(once(args)))
        return 0
    rows: list[Row] = []
    given = [*(sys.argv[1:] if argv is None else argv), "--once"]
    with tempfile.TemporaryDirectory() as cache:
        for kernels in ("not compiled yet", "on disk"):
            done = subprocess.run(
                [sys.executable, __file__, *given],
                env=os.environ | {"TRITON_CACHE_DIR": cache},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            rows.append({"kernels": kernels} | json.loads(done.stdout.splitlines()[-1]))
            result = {"shape": args.shape, "max_requests": args.max_requests, "rows": rows}
            path = save("capture", result, args.out)
    show(f"capture, {measured(args.shape).title}, {args.max_requests} requests", rows)
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
