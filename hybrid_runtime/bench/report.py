"""Results as a table on the terminal and as JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows of equal keys as a table; floats with three significant digits."""
    table = Table(title=title)
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=170).print(table)


def table(title: str, rows: list[Row]) -> None:
    """Print the main figures; those that differ between no rows stand in the title."""
    names = (
        "batch",
        "drafts",
        "isl",
        "osl",
        "ssm_dtype",
        "acceptance",
        "lengths",
        "state_layout",
        "strategy",
    )
    same = {n: rows[0][n] for n in names if len({str(r[n]) for r in rows}) == 1}
    peer = any(r.get("peer_ratio") for r in rows)
    lines = []
    for row in rows:
        line = {n: str(row[n]) for n in names if n not in same}
        line |= {
            "step ms": _number(row["step_ms"]),
            "ITL ms": _number(row["itl_ms"]),
            "p50": _number(row["itl_ms_p50"]),
            "p99": _number(row["itl_ms_p99"]),
            "tok/s": _number(row["decode_tok_s"]),
            "floor": _number(row["floor_ratio"]),
            "idle %": _number(row.get("idle_share"), 100),
            "ops": _number(row.get("operations")),
            "waits": _number(row["waits"]),
            "undecl.": _number(row["undeclared_waits"]),
            "implicit": _number(row["implicit_syncs"]),
            "starved": _number(row["starved_waits"]),
            "skipped %": _number(row["skip_rate"], 100),
        }
        if peer:
            line["÷ peer"] = _number(row.get("peer_ratio"))
        lines.append(line)
    show(", ".join([title, *(f"{n} {v}" for n, v in same.items())]), lines)


def _number(value: float | None, times: float = 1.0) -> str:
    if value is None:
        return "-"
    value *= times
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def dumps(value: Any, depth: int = 0) -> str:
    """JSON with six significant digits, whose innermost lists and objects take one line each."""
    if isinstance(value, float):
        return json.dumps(float(f"{value:.6g}"))
    if not isinstance(value, dict | list):
        return json.dumps(value)
    members = list(value.values()) if isinstance(value, dict) else value
    inner = [dumps(member, depth + 1) for member in members]
    if isinstance(value, dict):
        inner = [f"{json.dumps(k)}: {text}" for k, text in zip(value, inner, strict=True)]
    ends = "{}" if isinstance(value, dict) else "[]"
    if not any(isinstance(member, dict | list) and member for member in members):
        return ends[0] + ", ".join(inner) + ends[1]
    gap = "\n" + " " * (depth + 1)
    return ends[0] + gap + ("," + gap).join(inner) + "\n" + " " * depth + ends[1]
