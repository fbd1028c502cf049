"""Tables in Markdown."""

from __future__ import annotations


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table: columns of numbers to the right, columns of words to the left."""
    words = [column[0].lstrip("`")[:1].isalpha() for column in zip(*rows, strict=True)]
    rule = [":---" if left else "---:" for left in words]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))
