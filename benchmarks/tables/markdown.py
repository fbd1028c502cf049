"""Tables in Markdown."""

from __future__ import annotations


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table, numbers to the right."""
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
