"""`hybrid-runtime bench`: inter-token latency of a checkpoint with its own drafter, or of a shape
with random weights; or the perplexity of a text."""

import argparse
import os
from pathlib import Path
from typing import Any

from hybrid_runtime.bench import options, perplexity, report, shapes
from hybrid_runtime.bench.machine import machine
from hybrid_runtime.bench.measure import Row, measure_all
from hybrid_runtime.device.select import select_device
from hybrid_runtime.engine.checks import DTYPES
from hybrid_runtime.engine.config import EngineConfig
from hybrid_runtime.engine.load import load
from hybrid_runtime.engine.threads import use_threads
from hybrid_runtime.models.model import HybridModel


def run(args: argparse.Namespace) -> None:
    """Measure; a table, and JSON if asked for. Loads that were measured are kept and shown,
    whatever ends the rest early."""
    if args.json is not None:
        check_writable(args.json)
    if (args.model is None) == (args.shape is None):
        raise ValueError(
            f"DIR is {args.model!r} and shape {args.shape!r}; exactly one must be given"
        )
    if args.perplexity is not None:
        if args.shape is not None:
            raise ValueError(f"shape is {args.shape!r}; random weights predict nothing, give DIR")
        perplexity.run(args, lambda one: None if args.json is None else write(args.json, one))
        return
    if args.window is not None:
        raise ValueError(f"window is {args.window}; it must be None without a perplexity")
    wanted = options.loads(args)
    config = EngineConfig(
        drafter="auto" if any(one.drafts for one in wanted) else None,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    model: HybridModel
    head: Any
    drafter: str | None
    if args.shape is not None:
        on = select_device(args.device)
        dtype = "bfloat16" if args.dtype in (None, "auto") and on.type == "cuda" else args.dtype
        dtype = "float32" if dtype in (None, "auto") else dtype
        model, head = shapes.build(args.shape, on, DTYPES[dtype], args.quantization, args.layers)
        name, drafter = args.shape, "mtp"
    else:
        loaded = load(args.model, config, args.device, args.dtype, None, args.quantization)
        model, head, drafter = loaded.model, loaded.head, loaded.config.drafter
        name = Path(args.model).resolve().name
    where, dtype = machine(), str(model.dtype).removeprefix("torch.")
    use_threads(args.threads, model)
    kept: list[Row] = []

    def save(rows: list[Row]) -> None:
        kept[:] = rows
        if args.json is not None:
            result = {"environment": where, "model": args.model or name, "dtype": dtype}
            result |= {"quantization": args.quantization, "layers": args.layers}
            write(args.json, result | {"drafter": drafter, "rows": rows})

    try:
        measure_all(model, head, wanted, save)
    finally:
        if kept:
            device = where["device"] if model.device.type == "cuda" else "CPU"
            drafts = f"drafts by {drafter}" if config.drafter else "no drafts"
            report.table(f"{name}, {device}, {dtype}, {drafts}", kept)


def check_writable(file: Path) -> None:
    """Refuse a file for results that can't be written, before they are there to be lost."""
    existed = file.exists()
    try:
        with file.open("a"):
            pass
    except OSError as error:
        raise ValueError(f"json is {str(file)!r}: {error.strerror}; it must be writable") from error
    if not existed:
        file.unlink()


def write(file: Path, result: Row) -> None:
    """Replace a file at once, so that what it held is there until all of the new is."""
    beside = file.with_name(f"{file.name}.{os.getpid()}.part")
    beside.write_text(report.dumps(result) + "\n")
    beside.replace(file)
