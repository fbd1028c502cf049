"""What finding a token costs: sampled beside the likeliest, and drafts by 8 bits of a weight."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from markdown import markdown

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from shapes import SHAPES
from source import environment, load

Row = dict[str, Any]

SHOWN = ("top-p 0.9", "top-k 20, top-p 0.95")
"""Ways to sample; others are in the results."""


def sampling() -> str:
    """GPU time from logits to accepted tokens; the difference as a share of a whole step."""
    result = load("h200", "sampling")
    kinds: dict[tuple[int, str], dict[str, Row]] = {}
    for row in result["gpu"]:
        if row["params"] in SHOWN:
            kinds.setdefault((row["rows"], row["params"]), {})[row["logits"]] = row
    steps = {
        row["batch"]: row["step_ms"] * 1e3
        for row in load("h200", "itl-8b")["rows"]
        if row["state_layout"] == "replay"
    }
    rows = []
    for (requests, params), found in kinds.items():
        both = found["flat"], found["peaked"]
        more = max(row["ours"] - row["greedy"] for row in both)
        rows.append(
            [
                str(requests),
                params,
                f"{both[0]['greedy']:.0f} µs",
                *(
                    " : ".join(f"{row[how]:.0f}" for row in both) + " µs"
                    for how in ("ours", "sort")
                ),
                f"{100 * more / steps[requests]:.1f} %",
            ]
        )
    header = ["requests", "sampling", "greedy", "sampled", "by sorting", "of a step"]
    return markdown(header, rows) + "\n\n" + environment(result)


def draft_head() -> str:
    """GPU time from hidden states to drafts, and how many of them are others."""
    result = load("h200", "draft-head")
    rows = [
        [
            SHAPES[row["model"]].name,
            str(row["lines"]),
            f"{row['full']:.0f} µs",
            f"{row['8 bits']:.0f} µs",
            f"{row['full'] / row['8 bits']:.2f}",
            f"{row['limit']:.0f} µs",
        ]
        for row in result["gpu"]
        if row["lines"] in (1, 256)
    ]
    header = ["shape", "rows", "by all logits", "by 8 bits", "faster by", "limit"]
    checked, different, worse, missed = (
        sum(row[name] for row in result["agreement"])
        for name in ("lines", "different", "worse", "missed")
    )
    note = (
        f"Of {checked:,} drafts {different} are other tokens; {worse} of these have a smaller "
        f"logit, {missed} by more than rounding to 16 bits explains."
    )
    return markdown(header, rows) + f"\n\n{note} {environment(result)}"


TABLES = {"sampling": sampling, "draft-head": draft_head}
