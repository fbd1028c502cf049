"""Rows of `serve.py`: medians over the repeats, ratios to the other engine, the table shown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from functools import reduce
from operator import getitem
from typing import Any

Row = dict[str, Any]

FIGURES = (
    ("output_tok_s",), ("requests_s",), ("goodput_s",), ("good_share",), ("tokens_per_arrival",),
    ("ttft_ms", "mean"), ("ttft_ms", "p50"), ("ttft_ms", "p99"),
    ("itl_ms", "mean"), ("itl_ms", "p50"), ("itl_ms", "p99"),
    ("e2e_s", "p50"), ("e2e_s", "p99"),
)  # fmt: skip
NAMES = ["_".join(path) for path in FIGURES]
"""What is compared, as paths into `serving.figures`, and the names that rows give it."""


def compared(made: Iterable[Row]) -> list[Row]:
    """Rows of one load, with the first engine's figures over those of the others."""
    rows = list(made)
    first = rows[0]
    for row in rows[1:]:
        row["ours_to_this"] = {
            name: first[name] / row[name] for name in NAMES if row[name] and first[name]
        }
    return rows


def medians(repeats: list[Row]) -> Row:
    """The repeats, and every figure's median."""
    row: Row = {}
    for path, name in zip(FIGURES, NAMES, strict=True):
        values = [reduce(getitem, path, one) for one in repeats]
        row[name] = None if None in values else statistics.median(values)
    return row | {"repeats": repeats}


def lines(result: Row) -> list[Row]:
    """The table on the terminal."""
    table = []
    for row in result["rows"]:
        load = f"{row['places']} places" if row["places"] else f"{row['rate']:.3g}/s"
        used = " ".join(f"{name}={value}" for name, value in row["setting"].items())
        line = {"load": load, "engine": row["engine"], "setting": used or "-"}
        shown = (
            "output_tok_s",
            "goodput_s",
            "ttft_ms_p50",
            "ttft_ms_p99",
            "itl_ms_p50",
            "itl_ms_p99",
        )
        ratio = row.get("ours_to_this", {})
        for name in shown:
            line[name] = math.nan if row[name] is None else row[name]
            if len(result["engines"]) > 1:
                line[f"÷ {name}"] = ratio.get(name, math.nan)
        table.append(line)
    return table
