"""Tables of the state manager and its kernels: copies, host time, update, numerics."""

from __future__ import annotations

import operator

from markdown import markdown
from source import environment, load, versions

ORDER = operator.itemgetter("state", "tokens", "rows")
BESIDE_FLASHINFER = ("window-short", "window-long", "window")
"""Calls, the newest last: what is in several of them is taken from that one."""
SHOWN = (1, 16, 256, 1024)
"""Rows; others are in the results."""


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
        if row["rows"] in SHOWN
    ]
    header = ["rows", "crossing", "`always`", "`auto`", "vLLM 0.33.0", "floor"]
    return markdown(header, rows) + "\n\n" + environment(result)


def host() -> str:
    """Host time of the manager's part of a step."""
    result = load("h200", "postprocess")
    rows = [
        [str(row["rows"]), us(row["again both"]), us(row["whole both"])]
        for row in result["host"]
        if row["readback"]
    ]
    header = ["rows", "repeated step", "whole step"]
    other = load("h200", "postprocess-second-host")
    slow = next(row for row in other["host"] if row["rows"] == 256 and row["readback"])
    note = (
        "The processor under the same GPU differs from lease to lease: on a second machine the "
        f"repeated step of 256 rows took {us(slow['again both'])} and the whole one "
        f"{us(slow['whole both'])}."
    )
    return f"{markdown(header, rows)}\n\n{note} {environment(result)}"


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
    newest, commits = {}, {}
    for name in BESIDE_FLASHINFER:
        result = load("h200", name)
        for row in result["gpu"]:
            newest[ORDER(row)] = row
            commits[ORDER(row)] = result["environment"]["commit"]
    shown = [key for key in sorted(newest) if key[1] >= 4 and key[2] in (1, 128)]
    lines = []
    for key in shown:
        row = newest[key]
        lines.append(
            [
                *map(str, key),
                *(us(row[name]) for name in ("ours", "ours floor", "flashinfer")),
                f"{row['ours ÷ flashinfer']:.2f}",
                *(_both(row, f"{what} error") for what in ("state", "output")),
            ]
        )
    header = [
        "state", "tokens", "rows", "`replay`", "floor", "FlashInfer", "÷ FlashInfer",
        "errors of states", "of outputs",
    ]  # fmt: skip
    made = ", ".join(dict.fromkeys(commits[key] for key in shown))
    both = all("flashinfer form" in newest[key] for key in shown)
    pdl = "and as many" if both else "none of them"
    note = f"FlashInfer's forms: 62, {pdl} with programmatic launches."
    return f"{markdown(header, lines)}\n\n{note} {versions(result)}, commits {made}."


def gdn() -> str:
    """GPU time of one layer's update of Gated DeltaNet beside vLLM's, and errors."""
    result = load("h100", "gdn")
    lines = [
        [
            *(str(row[name]) for name in ("heads", "drafts", "rows")),
            us(row["vllm"]),
            *(
                cell
                for form in ("every step", "window")
                for cell in (
                    us(row[form]),
                    f"{row[f'{form} ÷ vllm']:.2f}",
                    us(row[f"{form} floor"]),
                )
            ),
            f"{row['window state error']:.1e}",
        ]
        for row in result["gpu"]
    ]
    header = [
        "heads", "drafts", "rows", "vLLM 0.25.1", "a write a step", "÷ vLLM", "floor",
        "with the ring", "÷ vLLM", "floor", "error of states",
    ]  # fmt: skip
    return markdown(header, lines) + "\n\n" + environment(result)


def _both(row: dict[str, float], name: str) -> str:
    return " : ".join(f"{row[f'{side} {name}']:.1e}" for side in ("ours", "flashinfer"))


TABLES = {
    "candidates": candidates,
    "gdn": gdn,
    "postcopy": postcopy,
    "host": host,
    "numerics": numerics,
    "window": window,
}


def us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
