"""`hybrid-runtime bench DIR`: inter-token latency of a checkpoint with its own drafter, or the
perplexity of a text."""

import argparse
import os
from pathlib import Path

from hybrid_runtime.bench import options, perplexity, report
from hybrid_runtime.bench.machine import machine
from hybrid_runtime.bench.measure import Row, measure_all
from hybrid_runtime.engine.config import EngineConfig
from hybrid_runtime.engine.load import load
from hybrid_runtime.engine.threads import use_threads


def run(args: argparse.Namespace) -> None:
    """Measure; a table, and JSON if asked for. Loads that were measured are kept and shown,
    whatever ends the rest early."""
    if args.json is not None:
        check_writable(args.json)
    if args.perplexity is not None:
        perplexity.run(args, lambda one: None if args.json is None else write(args.json, one))
        return
    if args.window is not None:
        raise ValueError(f"window is {args.window}; it must be None without a perplexity")
    wanted = options.loads(args)
    config = EngineConfig(
        drafter="auto" if any(one.drafts for one in wanted) else None,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    loaded = load(args.model, config, args.device, args.dtype, None, args.quantization)
    model, where = loaded.model, machine()
    use_threads(args.threads, model)
    name, dtype = Path(args.model).resolve().name, str(model.dtype).removeprefix("torch.")
    kept: list[Row] = []

    def save(rows: list[Row]) -> None:
        kept[:] = rows
        if args.json is not None:
            result = {"environment": where, "model": str(args.model), "dtype": dtype}
            result["quantization"] = args.quantization
            write(args.json, result | {"drafter": loaded.config.drafter, "rows": rows})

    try:
        measure_all(model, loaded.head, wanted, save)
    finally:
        if kept:
            device = where["device"] if model.device.type == "cuda" else "CPU"
            drafts = f"drafts by {loaded.config.drafter}" if config.drafter else "no drafts"
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
