"""Tables of the state manager and its kernels: copies, host time, predicate, update, numerics."""

from __future__ import annotations

from markdown import markdown
from source import environment, load


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
    parts = ("check", "plan and pack", "upload", "launch")
    rows = [
        [str(row["rows"]), "yes" if row["readback"] else "no", *(us(row[k]) for k in names + parts)]
        for row in result["host"]
    ]
    header = ["rows", "readback", "repeated step", "its best", "whole step", "its best"]
    other = load("h200", "postprocess-second-host")
    slow, fast = (
        next(r for r in source["host"] if r["rows"] == 256 and not r["readback"])
        for source in (other, result)
    )
    note = (
        "The processor under the same GPU differs from lease to lease: on a second machine, where "
        f"the parts took {slow['check'] / fast['check']:.1f} times as long, the repeated step "
        f"of 256 rows took {us(slow['again both'])} and the whole one {us(slow['whole both'])}."
    )
    table = markdown([*header, *(f"of it: {p}" for p in parts)], rows)
    return f"{table}\n\n{note} {environment(result)}"


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


def verify() -> str:
    """GPU time of the state update of one layer at 4 tokens a row: both layouts, and the plain form
    of columns."""
    result = load("h200", "verify")
    rows = []
    for row in result["gpu"]:
        if row["tokens"] != 4:
            continue
        share = row["replay TB/s"] * 1e12 / row["bandwidth"]
        rows.append(
            [
                row["state"],
                str(row["rows"]),
                *(us(row[name]) for name in ("baseline", "update", "floor")),
                *(us(row[name]) for name in ("replay", "replay floor")),
                *(f"{row['replay'] / row[name]:.3f}" for name in ("baseline", "update")),
                f"{100 * share:.0f} %",
            ]
        )
    header = [
        "state", "rows", "plain", "`columns`", "floor", "`replay`", "floor", "÷ plain",
        "÷ `columns`", "of bandwidth",
    ]  # fmt: skip
    return markdown(header, rows) + "\n\n" + environment(result)


def verify_drafts() -> str:
    """The same by the number of drafts, for one row and for 64."""
    result = load("h200", "verify")
    lines = []
    for row in result["gpu"]:
        if row["rows"] not in (1, 64) or row["tokens"] == 1:
            continue
        share = row["replay TB/s"] * 1e12 / row["bandwidth"]
        lines.append(
            [
                row["state"],
                str(row["rows"]),
                str(row["tokens"] - 1),
                us(row["update"]),
                us(row["replay"]),
                f"{row['replay'] / row['update']:.3f}",
                f"{100 * share:.0f} %",
            ]
        )
    header = ["state", "rows", "drafts", "`columns`", "`replay`", "÷ `columns`", "of bandwidth"]
    return markdown(header, lines) + "\n\n" + environment(result)


TABLES = {
    "candidates": candidates,
    "postcopy": postcopy,
    "host": host,
    "predicate": predicate,
    "numerics": numerics,
    "verify": verify,
    "verify-drafts": verify_drafts,
}


def us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
