"""Tables of the HTTP server: its soak, and a public client's figures."""

from __future__ import annotations

from markdown import markdown
from source import load, machine


def soak_http() -> str:
    """What the soak through the server counted."""
    result = load("cpu", "soak-http")
    names = (
        "submitted", "queue full", "ended by length", "ended by left", "ended by deadline",
        "ended by error", "right", "wrong", "beginnings right", "beginnings wrong",
        "unexpected errors", "leaked",
    )  # fmt: skip
    lines = [[name, str(result["counts"].get(name, 0))] for name in names]
    return markdown(["what", "count"], lines) + "\n\n" + machine(result)


def guidellm() -> str:
    """What GuideLLM measured."""
    result = load("cpu", "guidellm")
    header = [
        "streams", "requests", "failed", "output tokens/s", "TTFT p50, ms", "TTFT p95, ms",
        "ITL p50, ms", "ITL p95, ms",
    ]  # fmt: skip
    lines = [
        [
            str(row["streams"]),
            str(row["successful"]),
            str(row["errored"]),
            f"{row['output_tokens_per_second']:.0f}",
            *(f"{row['time_to_first_token_ms'][p]:.0f}" for p in ("p50", "p95")),
            *(f"{row['inter_token_latency_ms'][p]:.1f}" for p in ("p50", "p95")),
        ]
        for row in result["rows"]
    ]
    options = result["options"]
    said = (
        f"GuideLLM {result['rows'][0]['guidellm']}, `{options['path']}`, "
        f"{options['prompt_tokens']} tokens in, {options['output_tokens']} out, "
        f"`{options['serve']}`."
    )
    return f"{markdown(header, lines)}\n\n{said} {machine(result)}"


TABLES = {"soak-http": soak_http, "guidellm": guidellm}
