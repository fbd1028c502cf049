"""Tables of lockstep decode, from `itl-*.json`."""

from __future__ import annotations

from typing import Any

from markdown import markdown
from source import RESULTS, environment, load

Row = dict[str, Any]

WAYS = ("blocking", "defer", "always", "auto")


def lockstep() -> str:
    """Nemotron-H-8B beside vLLM's V2 runner: both layouts in one line a batch."""
    result = load("h200", "itl-8b")
    by_batch: dict[int, dict[str, Row]] = {}
    for row in result["rows"]:
        by_batch.setdefault(row["batch"], {})[row["state_layout"]] = row
    lines = []
    for batch, rows in by_batch.items():
        steps = [rows[layout] for layout in ("replay", "columns")]
        theirs = [row["peers"]["v2"] for row in steps]
        lines.append(
            [
                str(batch),
                f"{theirs[0]['step_ms']:.2f}",
                *(f"{row['step_ms']:.2f}" for row in steps),
                *(f"{their['ratio']:.3f}" for their in theirs),
                f"{steps[0]['decode_tok_s']:.0f}",
            ]
        )
    header = [
        "requests", "vLLM, ms", "`replay`, ms", "`columns`, ms", "`replay` ÷ vLLM",
        "`columns` ÷ vLLM", "`replay`, tokens/s",
    ]  # fmt: skip
    env, row = result["environment"], result["rows"][0]
    bandwidth = row.get("bandwidth")
    copied = f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, " if bandwidth else ""
    note = (
        f"{env['device']}, {result['dtype']} weights, {row['ssm_dtype']} state, {row['drafts']} "
        f"drafts, {row['acceptance']} tokens accepted per step, {row['isl']} in / {row['osl']} "
        f"out, blocks of {row['block_size']}, means of {len(row['repeats'])} repeats, {copied}"
        f"torch {env['torch']}, commit {_commits(result)}."
    )
    return f"{markdown(header, lines)}\n\n{note}"


def plain_decode() -> str:
    """Without drafts: `replay` beside `columns`, which an older commit had."""
    result = load("h200", "itl-8b-plain")
    lines = [
        [
            str(row["batch"]),
            f"{row['step_ms']:.2f}",
            f"{row['peers']['before']['step_ms']:.2f}",
            f"{row['peer_ratio']:.3f}",
            f"{row['decode_tok_s']:.0f}",
        ]
        for row in sorted(result["rows"], key=lambda row: row["batch"])
    ]
    header = ["requests", "`replay`, ms", "`columns`, ms", "÷", "`replay`, tokens/s"]
    return f"{markdown(header, lines)}\n\n{environment(result)}"


def strategies() -> str:
    """ITL under each strategy."""
    result = load("h200", "itl-8b-strategies")
    by_case: dict[tuple[int, str], Row] = {}
    for row in result["rows"]:
        by_case.setdefault((row["batch"], row["lengths"]), {})[row["strategy"]] = row["itl_ms"]
    lines = [
        [
            str(batch),
            lengths,
            *(f"{itl[way]:.2f}" for way in WAYS),
            f"{100 * (itl['auto'] / itl['blocking'] - 1):+.1f} %",
            f"{itl['auto'] / min(itl[way] for way in WAYS if way != 'auto'):.3f}",
        ]
        for (batch, lengths), itl in sorted(by_case.items())
    ]
    names = (f"`{way}`" for way in WAYS)
    table = markdown(["rows", "lengths", *names, "from `blocking`", "÷ best other"], lines)
    return f"{table}\n\n{result['environment']['device']}, commits {_commits(result)}."


def window_steps() -> str:
    """With the window, and with a write in every step."""
    results = [load("h200", name) for name in ("itl-8b-window", "itl-8b-no-window")]
    found = [{row["batch"]: row for row in result["rows"]} for result in results]
    lines = []
    for batch in sorted(found[0]):
        ms = [rows[batch]["step_ms"] for rows in found]
        tokens = found[0][batch]["decode_tok_s"]
        lines.append(
            [str(batch), *(f"{x:.2f}" for x in ms), f"{ms[0] / ms[1]:.3f}", f"{tokens:.0f}"]
        )
    header = ["rows", "window, ms", "none, ms", "÷", "tokens/s"]
    return f"{markdown(header, lines)}\n\n{environment(results[0])}"


def window_shapes() -> str:
    """With the window: other shapes, numbers of drafts, and states."""
    lines = []
    for path in RESULTS.glob("*/itl-window-*.json"):
        result = load(path.parent.name, path.stem)
        depth, whole = result["layers"]
        for row in result["rows"]:
            floor = row.get("floor_ratio")
            lines.append(
                [
                    path.parent.name.upper(),
                    result["name"],
                    "all" if depth == whole else f"{depth} of {whole}",
                    row["ssm_dtype"],
                    str(row["drafts"]),
                    f"{row['acceptance']:.1f}",
                    str(row["batch"]),
                    f"{row['step_ms']:.2f}",
                    f"{row['itl_ms']:.2f}",
                    f"{row['decode_tok_s']:.0f}",
                    f"{floor:.2f}" if floor else "-",
                    result["environment"]["commit"],
                ]
            )
    lines.sort(key=lambda line: (*line[:2], line[3], int(line[4]), int(line[6])))
    header = [
        "GPU", "shape", "layers", "state", "drafts", "accepted", "rows", "step, ms", "ITL, ms",
        "tokens/s", "÷ floor", "commit",
    ]  # fmt: skip
    return markdown(header, lines)


def _commits(result: Row) -> str:
    return ", ".join(dict.fromkeys(str(run["commit"]) for run in result["runs"]))


TABLES = {
    "lockstep": lockstep,
    "plain-decode": plain_decode,
    "itl-strategies": strategies,
    "window-steps": window_steps,
    "window-shapes": window_shapes,
}
