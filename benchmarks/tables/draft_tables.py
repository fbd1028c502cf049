"""Tables of as many drafts as pay, from `drafts-8b.json`."""

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
    worst = min(row["of_best"] for row in ramps)
    note = (
        f"{result['name']} shapes, {result['options']['ssm_dtype']} states, prompts of "
        f"{result['options']['isl']} tokens. While the load ramped "
        f"{' → '.join(str(row['requests']) for row in ramps)}, the least was {worst:.3f} of the "
        f"best fixed number for so many. {environment(result)}"
    )
    return f"{markdown(header, lines)}\n\n{note}"


TABLES = {"drafts": drafts}
