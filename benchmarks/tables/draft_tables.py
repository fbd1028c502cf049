"""Tables of as many drafts as pay, from `drafts-8b.json`, and of drafts by row, simulated."""

from __future__ import annotations

from typing import Any

from markdown import markdown
from source import RESULTS, environment, load

Row = dict[str, Any]
DEVICES = ("h200", "h100")
NAME = "drafts-8b"


def drafts() -> str:
    """What pays, beside each fixed number, while so many requests decode and as the load ramps."""
    device = next(name for name in DEVICES if (RESULTS / name / f"{NAME}.json").exists())
    result = load(device, NAME)
    fixed = result["options"]["numbers"]
    lines = []
    for curve in result["options"]["curves"]:
        rows = [row for row in result["rows"] if row["curve"] == curve]
        for count in dict.fromkeys(row["requests"] for row in rows):
            found = {row["fixed"]: row for row in rows if row["requests"] == count}
            pays = found[None]
            lines.append(
                [
                    curve,
                    str(count),
                    *(f"{found[number]['tok_s']:.0f}" for number in fixed),
                    f"{pays['tok_s']:.0f}",
                    f"{pays['drafts']:.1f}",
                    f"{pays['of_best']:.3f}",
                    f"{pays['tok_s'] / found[3]['tok_s']:.2f}",
                ]
            )
    header = [
        "curve", "requests", *(f"{number} fixed" for number in fixed), "what pays, tokens/s",
        "drafts", "÷ best fixed", "÷ 3 drafts",
    ]  # fmt: skip
    ramps = [row for row in result["rows"] if row["fixed"] == "ramp"]
    note = (
        f"{result['name']} shapes, {result['options']['ssm_dtype']} states, prompts of "
        f"{result['options']['isl']} tokens. "
    )
    if ramps:
        path = " → ".join(str(row["requests"]) for row in ramps)
        worst = min(row["of_best"] for row in ramps)
        note += (
            f"While the load ramped {path}, the least was {worst:.3f} of the best fixed number for "
            "so many. "
        )
    return f"{markdown(header, lines)}\n\n{note}{environment(result)}"


def by_row() -> str:
    """What different numbers of drafts for the rows of a step should bring."""
    result = load("cpu", "drafts-by-row")
    passes, tokens = (result["options"][name] for name in ("passes", "tokens"))
    lines = []
    for load_name in dict.fromkeys(row["load"] for row in result["rows"]):
        for count in result["options"]["rows"]:
            found = {
                (row["pass_ms"], row["tokens"]): row
                for row in result["rows"]
                if row["load"] == load_name and row["requests"] == count
            }
            alike = [row["alike_of_best"] for row in found.values()]
            shown = [f"{found[one, n]['of_best']:.3f}" for one in passes for n in tokens]
            lines.append([load_name, str(count), f"{min(alike):.3f} to {max(alike):.3f}", *shown])
    names = [f"{n} tokens" if n else "endless" for n in tokens]
    header = ["requests accept", "requests", "one number for all rows"]
    header += [f"{name}, {one} ms a pass" for one in passes for name in names]
    guesses = " and ".join(
        f"{one} ms a pass with {more:g} times"
        for one, more in zip(passes, result["options"]["uneven"], strict=True)
    )
    note = (
        f"Tokens/s over those of the best fixed number, simulated: steps cost what they did in "
        f"`{result['costs']}` ({result['of']['device']}, commit {result['of']['commit']}), draft "
        f"passes and what uneven rows add are assumed: {guesses} the verify pass. "
        f"{environment(result)}"
    )
    return f"{markdown(header, lines)}\n\n{note}"


TABLES = {"drafts": drafts, "drafts-by-row": by_row}
