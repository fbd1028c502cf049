"""For `serve.py plot`: tokens per second over places, and how TTFT and ITL are spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, Any]
COLOURS = {"ours": "#0072b2", "vllm": "#d55e00"}


def draw(result: Row, path: Path) -> Path:
    """One picture of the closed loops; the file written."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "serve", "font.size": 9})
    rows = [row for row in result["rows"] if row["places"]]
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    _throughput(panels[0], rows)
    most = max(row["places"] for row in rows)
    for panel, name, title in (
        (panels[1], "itl_ms", "time per token, ms"),
        (panels[2], "ttft_ms", "time to first token, ms"),
    ):
        _spread(panel, [row for row in rows if row["places"] == most], name)
        panel.set(title=f"{title}, {most} places", ylabel="share below, %")
    options = result["options"]
    figure.suptitle(
        f"{result['name']}, {result['environment']['device']}: {options['lengths']} lengths, "
        f"{options['drafts']} drafts, acceptance {options['acceptance']}",
        fontsize=9,
    )
    target = path.with_suffix(".svg")
    # Without a date the same figures give the same file.
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)
    return target


def _throughput(panel: Axes, rows: list[Row]) -> None:
    for engine in dict.fromkeys(row["engine"] for row in rows):
        line = sorted((r["places"], r["output_tok_s"]) for r in rows if r["engine"] == engine)
        x, y = zip(*line, strict=True)
        panel.plot(x, y, color=COLOURS.get(engine), label=engine, marker="o", ms=3, lw=1.3)
    panel.set(title="output tokens/s", xlabel="places", ylim=(0, None))
    panel.set_xticks(sorted({row["places"] for row in rows}))
    panel.grid(alpha=0.3)
    panel.legend(frameon=False)


def _spread(panel: Axes, rows: list[Row], name: str) -> None:
    for row in rows:
        values = row[f"{name}_quantiles"]
        panel.plot(values, range(len(values)), color=COLOURS.get(row["engine"]), lw=1.3)
    panel.set(xscale="log", ylim=(0, 100))
    panel.grid(alpha=0.3)
