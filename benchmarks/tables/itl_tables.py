"""Tables of the engine's benchmark, from `itl-*.json`; None while there are no results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markdown import markdown
from source import RESULTS, load

Row = dict[str, Any]

SHAPES = ("8b", "9b-v2", "nano-30b", "super-120b")
STRATEGIES = ("8b-strategies", "9b-v2", "nano-30b", "super-120b")
"""Files of results: those beside vLLM's, and those of all strategies in one process."""
OTHERS = ("blocking", "defer", "always")


def lockstep() -> str | None:
    """Nemotron-H-8B beside vLLM's V2 runner: both layouts in one line a batch."""
    result = _load("8b")
    by_batch: dict[int, dict[str, Row]] = {}
    for row in _main(result) if result else []:
        if row["strategy"] == "auto" and "v2" in row.get("peers", {}):
            by_batch.setdefault(row["batch"], {})[row["state_layout"]] = row
    if result is None or not by_batch:
        return None
    lines = []
    for batch, rows in by_batch.items():
        steps = [rows[layout] for layout in ("replay", "columns")]
        theirs = [row["peers"]["v2"] for row in steps]
        lines.append(
            [
                str(batch),
                _ms(theirs[0]["step_ms"]),
                *(_ms(row["step_ms"]) for row in steps),
                *(_ratio(their["ratio"]) for their in theirs),
                f"{steps[0]['decode_tok_s']:.0f}",
            ]
        )
    header = [
        "requests", "vLLM, ms", "`replay`, ms", "`columns`, ms", "`replay` ÷ vLLM",
        "`columns` ÷ vLLM", "`replay`, tokens/s",
    ]  # fmt: skip
    return markdown(header, lines) + "\n\n" + _note(result, next(iter(by_batch.values()))["replay"])


def peer() -> str | None:
    """Nemotron-H-8B beside vLLM: `auto`, the load that has the most batches."""
    result = _load("8b")
    rows = [r for r in _main(result) if r["strategy"] == "auto"] if result else []
    if not result or not rows:
        return None
    lines = []
    runners = [r for r in ("v1", "v2") if any(r in row.get("peers", {}) for row in rows)]
    for row in rows:
        theirs = row.get("peers", {})
        lines.append(
            [
                str(row["batch"]),
                row["state_layout"],
                row["lengths"],
                _ms(row["step_ms"]),
                *(_ms(theirs.get(runner, {}).get("step_ms")) for runner in runners),
                *(_ratio(theirs.get(runner, {}).get("ratio")) for runner in runners),
                _ms(row["itl_ms"]),
                _ms(row["itl_ms_p99"]),
                f"{row['decode_tok_s']:.0f}",
                _share(row.get("idle_share")),
                f"{row['operations']:.0f}" if "operations" in row else "-",
                _ratio(row["floor_ratio"]),
            ]
        )
    header = [
        "rows", "state", "lengths", "step, ms", *(f"vLLM {r.upper()}" for r in runners),
        *(f"÷ {r.upper()}" for r in runners), "ITL, ms", "p99", "tokens/s", "idle",
        "GPU operations", "÷ floor",
    ]  # fmt: skip
    return markdown(header, lines) + "\n\n" + _note(result, rows[0])


def strategies() -> str | None:
    """ITL under each strategy that was measured in the same process, all shapes and batches."""
    lines = []
    for shape in STRATEGIES:
        result = _load(shape)
        by_case: dict[tuple[int, str], dict[str, Row]] = {}
        for row in _main(result) if result else []:
            if row["state_layout"] == "replay":
                continue
            by_case.setdefault((row["batch"], row["lengths"]), {})[row["strategy"]] = row
        for (batch, lengths), rows in by_case.items():
            if result is None or not {"auto", "blocking"} <= rows.keys():
                continue
            itl = {name: rows[name]["itl_ms"] for name in ("auto", *OTHERS) if name in rows}
            best = min(value for name, value in itl.items() if name != "auto")
            lines.append(
                [
                    result["name"],
                    str(batch),
                    lengths,
                    *(_ms(itl.get(name)) for name in OTHERS),
                    _ms(itl["auto"]),
                    f"{100 * (itl['auto'] / itl['blocking'] - 1):+.1f} %",
                    _ratio(itl["auto"] / best),
                ]
            )
    if not lines:
        return None
    header = ["shape", "rows", "lengths", *(f"`{n}`" for n in OTHERS), "`auto`"]
    table = markdown([*header, "from `blocking`", "÷ best other"], lines)
    return f"{table}\n\n{_commits(STRATEGIES)}"


def shapes() -> str | None:
    """Every shape under `auto`."""
    lines = []
    for shape in SHAPES:
        result = _load(shape)
        for row in _main(result) if result else []:
            if result is None or row["strategy"] != "auto" or row["lengths"] != "equal":
                continue
            depth, whole = result["layers"]
            lines.append(
                [
                    result["name"],
                    "all" if depth == whole else f"{depth} of {whole}",
                    str(row["batch"]),
                    row["state_layout"],
                    _ms(row["step_ms"]),
                    _ms(row["itl_ms"]),
                    _ms(row["itl_ms_p99"]),
                    f"{row['decode_tok_s']:.0f}",
                    _share(row.get("idle_share")),
                    _ratio(row["floor_ratio"]),
                ]
            )
    if not lines:
        return None
    header = ["shape", "layers", "rows", "state", "step, ms", "ITL, ms", "p99", "tokens/s", "idle"]
    return f"{markdown([*header, '÷ floor'], lines)}\n\n{_commits(SHAPES)}"


TABLES = {
    "lockstep": lockstep,
    "itl-peer": peer,
    "itl-strategies": strategies,
    "itl-shapes": shapes,
}


def _commits(shapes: Sequence[str]) -> str:
    """Where and of what these files were measured."""
    found = [result for result in map(_load, shapes) if result is not None]
    commits = dict.fromkeys(str(run["commit"]) for result in found for run in result["runs"])
    return f"{found[0]['environment']['device']}, commits {', '.join(commits)}."


def _load(shape: str) -> Row | None:
    name = f"itl-{shape}"
    return load("h200", name) if (RESULTS / "h200" / f"{name}.json").is_file() else None


def _main(result: Row) -> list[Row]:
    """Rows of the load (drafts, lengths of prompt and output, dtype) that has the most, in order of
    their batch."""
    loads: dict[tuple[Any, ...], list[Row]] = {}
    for row in result["rows"]:
        if row["step_ms"] is not None:
            key = tuple(row[k] for k in ("drafts", "isl", "osl", "ssm_dtype", "acceptance"))
            loads.setdefault(key, []).append(row)
    rows = max(loads.values(), key=len, default=[])
    return sorted(rows, key=lambda r: (r["batch"], r["lengths"], r["state_layout"]))


def _note(result: Row, row: Row) -> str:
    env, repeats = result["environment"], len(row["repeats"])
    commits = ", ".join(dict.fromkeys(str(run["commit"]) for run in result["runs"]))
    return (
        f"{env['device']}, {result['dtype']} weights, {row['ssm_dtype']} state, {row['drafts']} "
        f"drafts, {row['acceptance']} tokens accepted per step, {row['isl']} in / {row['osl']} "
        f"out, blocks of {row['block_size']}, means of {repeats} repeats, copy bandwidth "
        f"{row['bandwidth'] / 1e12:.2f} TB/s, torch {env['torch']}, commit {commits}."
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
