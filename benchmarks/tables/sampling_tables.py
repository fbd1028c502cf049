"""What sampling costs more than taking the likeliest token."""

from __future__ import annotations

from markdown import markdown
from source import environment, load


def sampling() -> str:
    """GPU time from logits to accepted tokens; the difference as a share of a whole step."""
    result = load("h200", "sampling")
    steps = {
        row["batch"]: row["step_ms"] * 1e3
        for row in load("h200", "itl-8b")["rows"]
        if row["state_layout"] == "replay"
    }
    rows = [
        [
            str(row["rows"]),
            row["logits"],
            row["params"],
            f"{row['greedy']:.0f} µs",
            f"{row['ours']:.0f} µs",
            f"{row['sort']:.0f} µs",
            f"{100 * (row['ours'] - row['greedy']) / steps[row['rows']]:.1f} %",
        ]
        for row in result["gpu"]
    ]
    header = ["requests", "logits", "sampling", "greedy", "sampled", "by sorting", "of a step"]
    return markdown(header, rows) + "\n\n" + environment(result)


TABLES = {"sampling": sampling}
