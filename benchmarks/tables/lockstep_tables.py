"""Tables of lockstep decode, from `itl-*.json`."""

from __future__ import annotations

from typing import Any

from markdown import markdown
from source import environment, load

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


def fp8_steps() -> str:
    """Weights in 8 bits, rounded at load and as in ModelOpt's checkpoints, beside bfloat16, by the
    same call."""
    rounded, plain = load("h200", "itl-8b-fp8"), load("h200", "itl-8b-beside-fp8")
    given = {row["batch"]: row for row in load("h200", "itl-8b-modelopt")["rows"]}
    lines = []
    for ours, other in zip(rounded["rows"], plain["rows"], strict=True):
        steps = [other["step_ms"], ours["step_ms"]]
        of_file = given.get(ours["batch"])
        lines.append(
            [
                str(ours["batch"]),
                *(f"{step:.2f}" for step in steps),
                f"{steps[1] / steps[0]:.3f}",
                *(
                    (f"{of_file['step_ms']:.2f}", f"{of_file['step_ms'] / steps[0]:.3f}")
                    if of_file
                    else ("-", "-")
                ),
                f"{other['ttft_ms']:.0f}",
                f"{ours['ttft_ms']:.0f}",
                f"{ours['decode_tok_s']:.0f}",
            ]
        )
    header = [
        "requests", "bfloat16, ms", "FP8 at load, ms", "÷", "as ModelOpt, ms", "÷",
        "TTFT, bfloat16, ms", "FP8, ms", "FP8, tokens/s",
    ]  # fmt: skip
    row = rounded["rows"][0]
    note = (
        f"{rounded['name']} shapes, {row['drafts']} drafts, {row['acceptance']} tokens accepted "
        f"per step, {row['isl']} in / {row['osl']} out. {environment(rounded)}"
    )
    return f"{markdown(header, lines)}\n\n{note}"


def fp8_large() -> str:
    """The largest model of the family, whole, with its draft head, on one GPU."""
    result = load("h200", "itl-super-120b-fp8")
    lines = [
        [
            str(row["batch"]),
            f"{row['step_ms']:.2f}",
            f"{row['decode_tok_s']:.0f}",
            f"{row['itl_ms_p50']:.1f} / {row['itl_ms_p99']:.1f}",
            f"{row['ttft_ms']:.0f}",
        ]
        for row in result["rows"]
    ]
    header = ["requests", "step, ms", "tokens/s", "ITL p50 / p99, ms", "TTFT, ms"]
    row = result["rows"][0]
    note = (
        f"{result['name']}, all {result['layers'][0]} layers and the MTP head, weights drawn in "
        f"FP8 where NVIDIA's checkpoint has them in FP8, {row['ssm_dtype']} states, "
        f"{row['drafts']} drafts, {row['acceptance']} tokens accepted per step, {row['isl']} in / "
        f"{row['osl']} out. {environment(result)}"
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
    """ITL under each strategy, of rows that cross boundaries at different steps."""
    result = load("h200", "itl-8b-strategies")
    by_batch: dict[int, Row] = {}
    for row in result["rows"]:
        if row["lengths"] == "staggered":
            by_batch.setdefault(row["batch"], {})[row["strategy"]] = row["itl_ms"]
    lines = [
        [
            str(batch),
            *(f"{itl[way]:.2f}" for way in WAYS),
            f"{100 * (itl['auto'] / itl['blocking'] - 1):+.1f} %",
            f"{itl['auto'] / min(itl[way] for way in WAYS if way != 'auto'):.3f}",
        ]
        for batch, itl in sorted(by_batch.items())
    ]
    names = (f"`{way}`" for way in WAYS)
    table = markdown(["rows", *names, "from `blocking`", "÷ best other"], lines)
    return f"{table}\n\n{result['environment']['device']}, commits {_commits(result)}."


def _commits(result: Row) -> str:
    return ", ".join(dict.fromkeys(str(run["commit"]) for run in result["runs"]))


TABLES = {
    "lockstep": lockstep,
    "fp8-steps": fp8_steps,
    "fp8-large": fp8_large,
    "plain-decode": plain_decode,
    "itl-strategies": strategies,
}
