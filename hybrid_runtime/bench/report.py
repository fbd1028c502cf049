"""Results as a table on the terminal and as JSON."""

import json
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]

WIDTH = 170
"""Columns where there is no terminal that says how many it has."""
_FIGURES = {
    "step ms": "step_ms",
    "÷ peer": "peer_ratio",
    "ITL ms": "itl_ms",
    "p50": "itl_ms_p50",
    "p99": "itl_ms_p99",
    "tok/s": "decode_tok_s",
}
_LOAD = (
    "batch", "drafts", "isl", "osl", "ssm_dtype", "acceptance", "lengths", "state_layout",
    "strategy",
)  # fmt: skip


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print rows of equal keys as a table; floats with three significant digits."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


def table(title: str, rows: list[Row]) -> None:
    """Print the main figures; what differs between no rows stands in the title, and what no row
    has is left out."""
    same = {n: rows[0][n] for n in _LOAD if len({str(r[n]) for r in rows}) == 1}
    known = {n: of for n, of in _FIGURES.items() if any(r.get(of) is not None for r in rows)}
    lines = [
        {n: str(row[n]) for n in _LOAD if n not in same}
        | {n: _number(row.get(of)) for n, of in known.items()}
        for row in rows
    ]
    print(", ".join([title, *(f"{n} {v}" for n, v in same.items())]))
    show("", lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
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
