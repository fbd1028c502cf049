"""Tables of the state manager and its kernels: copies, host time, predicate, update, numerics."""

from __future__ import annotations

import operator

from markdown import markdown
from source import environment, load, versions

ORDER = operator.itemgetter("state", "tokens", "rows")
BESIDE_FLASHINFER = ("window-short", "window-long", "window")
"""Calls, the newest last: what is in several of them is taken from that one."""


def candidates() -> str:
    """Chance that a step has any row that may cross a boundary; computed, not measured."""
    block, drafts = 4336, 3
    lines = []
    for rows in (1, 16, 64, 256, 1024):
        chance = (drafts + 1) / block
        lines.append(
            [str(rows), f"{100 * (1 - (1 - chance) ** rows):.1f} %", f"{rows * chance:.2f}"]
        )
    header = ["rows", "steps with a candidate", "candidates a step, mean"]
    note = f"Blocks of {block} tokens, {drafts} drafts, rows anywhere in their blocks; computed."
    return markdown(header, lines) + "\n\n" + note


def postcopy() -> str:
    """GPU time of saving boundary states."""
    result = load("h200", "postprocess")
    words = {"none": "nothing to copy", "one": "one row", "all": "all rows"}
    rows = [
        [
            str(row["rows"]),
            words[row["crossing"]],
            us(row["always"]),
            us(row["auto"]) if "auto" in row else "no launch",
            us(row["vLLM"]),
            us(row["floor"]) if row["floor"] else "-",
        ]
        for row in result["gpu"]
    ]
    header = ["rows", "crossing", "`always`", "`auto`", "vLLM 0.33.0", "floor"]
    return markdown(header, rows) + "\n\n" + environment(result)


def host() -> str:
    """Host time of the manager's part of a step."""
    result = load("h200", "postprocess")
    names = ("again both", "again best", "whole both", "whole best")
    rows = [
        [str(row["rows"]), "yes" if row["readback"] else "no", *(us(row[k]) for k in names)]
        for row in result["host"]
    ]
    header = ["rows", "readback", "repeated step", "its best", "whole step", "its best"]
    other = load("h200", "postprocess-second-host")
    slow = next(row for row in other["host"] if row["rows"] == 256 and not row["readback"])
    note = (
        "The processor under the same GPU differs from lease to lease: on a second machine the "
        f"repeated step of 256 rows took {us(slow['again both'])} and the whole one "
        f"{us(slow['whole both'])}."
    )
    return f"{markdown(header, rows)}\n\n{note} {environment(result)}"


def predicate() -> str:
    """Host time to know which rows may cross a boundary."""
    result = load("h200", "predicate")
    names = ("python loop", "post-copy list", "with pre-copy")
    rows = [[str(row["rows"]), *(us(row[n]) for n in names)] for row in result["rows"]]
    table = markdown(["rows", "Python loop", "candidate list", "with the pre-copy's"], rows)
    return f"{table}\n\n{environment(result)}"


def numerics() -> str:
    """Errors of states and outputs against fp64."""
    result = load("h200", "numerics")
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for row in result["rows"]:
        errors = " / ".join(
            f"{row[name]:.1e}" for name in ("outputs rms", "outputs", "final state")
        )
        cells.setdefault(row["state"], {})[row["layout"], row["rounding"]] = errors
    kinds = ("columns", "to nearest"), ("replay", "to nearest"), ("replay", "by chance")
    rows = [[state, *(line.get(kind, "-") for kind in kinds)] for state, line in cells.items()]
    apart = result["fp32 replay against columns"]
    of_head = max(value for name, value in apart.items() if "all heads" not in name)
    of_all = max(value for name, value in apart.items() if "all heads" in name)
    note = (
        f"{result['tokens']} tokens, {result['drafts']} drafts, {result['sequences']} sequences. "
        f"In float32 the layouts are {of_all:.1e} of the largest entry apart, {of_head:.1e} of the "
        f"largest entry of the head. {environment(result)}"
    )
    header = ["state", "`columns`", "`replay`", "`replay`, stochastically rounded"]
    return markdown(header, rows) + "\n\n" + note


def window() -> str:
    """GPU time of one layer's update beside FlashInfer's, and errors."""
    newest = {}
    for name in BESIDE_FLASHINFER:
        result = load("h200", name)
        for row in result["gpu"]:
            newest[ORDER(row)] = row, result["environment"]["commit"]
    lines = []
    for _, (row, commit) in sorted(newest.items()):
        lines.append(
            [
                row["state"],
                str(row["tokens"]),
                str(row["rows"]),
                *(us(row[name]) for name in ("ours", "ours floor", "flashinfer")),
                f"{row['ours ÷ flashinfer']:.2f}",
                *(f"{row[f'{side} state error']:.1e}" for side in ("ours", "flashinfer")),
                commit,
            ]
        )
    header = [
        "state", "tokens", "rows", "`replay`", "floor", "FlashInfer", "÷ FlashInfer",
        "error of states", "FlashInfer's", "commit",
    ]  # fmt: skip
    return f"{markdown(header, lines)}\n\n{versions(result)}."


def kv_blocks() -> str:
    """GPU time of paged attention by the size of its blocks."""
    result = load("h200", "kv-blocks")
    largest = str(result["blocks"][-1])
    lines = [
        [
            *(str(row[name]) for name in ("rows", "tokens", "context")),
            us(row["us"][largest]),
            *(f"{row['us'][str(size)] / row['us'][largest]:.2f}" for size in result["blocks"][:-1]),
        ]
        for row in result["rows"]
    ]
    sizes = [f"{size} ÷ {largest}" for size in result["blocks"][:-1]]
    header = ["rows", "tokens each", "context", f"blocks of {largest}, µs", *sizes]
    return f"{markdown(header, lines)}\n\n{environment(result)}"


TABLES = {
    "candidates": candidates,
    "kv-blocks": kv_blocks,
    "postcopy": postcopy,
    "host": host,
    "predicate": predicate,
    "numerics": numerics,
    "window": window,
}


def us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
