"""For `itl.py plot`: ITL and TPS over batch, and one step's timeline, as pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = dict[str, Any]

# One colour per strategy and kind of operation in all pictures; chosen to be told apart by
# readers who see few colours.
COLOURS = {
    "auto": "#0072b2", "always": "#e69f00", "defer": "#009e73", "blocking": "#d55e00",
    "replay": "#cc79a7",
    "v1": "#555555", "v2": "#999999",
}  # fmt: skip
KINDS = {
    "matrix products": "#4477aa", "state": "#ee6677", "convolution": "#ccbb44",
    "attention": "#228833", "norm": "#66ccee", "elementwise": "#99ddbb", "experts": "#aa3377",
    "bookkeeping": "#222222", "copies": "#ff9900", "other": "#bbbbbb",
}  # fmt: skip


def draw(result: Row, folder: Path) -> list[Path]:
    """All pictures that the result has figures for; the files written."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "itl", "font.size": 9})
    made = []
    for lengths in ("equal", "staggered"):
        rows = _decoding(result, lengths)
        if rows:
            suffix = "" if lengths == "equal" else "-staggered"
            path = folder / f"itl-{result['shape']}{suffix}.svg"
            made.append(_write(_over_batch(result, rows, lengths), path))
    traced = [r for r in result["rows"] if (r.get("profile") or {}).get("timeline")]
    if traced:
        best = next((r for r in traced if r["strategy"] == "auto"), traced[0])
        made.append(_write(_timeline(result, best), folder / f"timeline-{result['shape']}.png"))
    return made


def _decoding(result: Row, lengths: str) -> list[Row]:
    """Rows of the first load (drafts, lengths of prompt and output, dtype) over all batches."""
    rows = [r for r in result["rows"] if r["lengths"] == lengths and r["step_ms"] is not None]
    key = ("drafts", "isl", "osl", "ssm_dtype", "acceptance")
    return [r for r in rows if all(r[k] == rows[0][k] for k in key)]


def _name(row: Row) -> str:
    """The strategy, or the replay layout, in which strategies differ little."""
    return "replay" if row["state_layout"] == "replay" else row["strategy"]


def _over_batch(result: Row, rows: list[Row], lengths: str) -> Figure:
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for panel, title, ours, theirs in (
        (panels[0], "ITL, ms per token", "itl_ms", lambda p: p["itl_ms"]),
        (panels[1], "decode tokens/s", "decode_tok_s", None),
    ):
        for name in dict.fromkeys(_name(r) for r in rows):
            line = sorted((r["batch"], r[ours]) for r in rows if _name(r) == name)
            _line(panel, line, name, COLOURS[name])
        _peers(panel, rows, theirs)
        panel.set(title=title, xlabel="requests at once", xscale="log", ylim=(0, None))
        batches = sorted({r["batch"] for r in rows})
        panel.set_xticks(batches, [str(b) for b in batches], minor=False)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend(frameon=False)
    one = rows[0]
    figure.suptitle(
        f"{result['name']}, {result['environment']['device']}: {one['drafts']} drafts, "
        f"{one['isl']} in / {one['osl']} out, {one['ssm_dtype']} state, {lengths} lengths",
        fontsize=9,
    )
    return figure


def _peers(panel: Axes, rows: list[Row], value: Callable[[Row], float] | None) -> None:
    for runner in ("v1", "v2"):
        # By batch, because each strategy's row has the same peer beside it.
        beside = {r["batch"]: (r, r["peers"][runner]) for r in rows if runner in r.get("peers", {})}
        line = [
            # Tokens per second of the full batch: each row emits one token per ITL.
            (batch, value(its) if value else 1e3 * batch / its["itl_ms"])
            for batch, (_, its) in sorted(beside.items())
        ]
        if line:
            _line(panel, line, f"vLLM 0.25.1 {runner.upper()}", COLOURS[runner], dashed=True)


def _line(
    panel: Axes, line: list[tuple[int, float]], label: str, colour: str, dashed: bool = False
) -> None:
    style = "--" if dashed else "-"
    panel.plot(*zip(*line, strict=True), style, color=colour, label=label, marker="o", ms=3, lw=1.3)


def _timeline(result: Row, row: Row) -> Figure:
    profile = row["profile"]
    lanes: dict[str, list[tuple[float, float]]] = {}
    for line in profile["timeline"]:
        start, duration, kind = line.split(" ", 2)
        lanes.setdefault(kind, []).append((float(start) / 1e3, float(duration) / 1e3))
    order = [kind for kind in KINDS if kind in lanes]
    figure, panel = plt.subplots(figsize=(9, 0.3 * len(order) + 1.2), layout="constrained")
    for height, kind in enumerate(reversed(order)):
        panel.broken_barh(lanes[kind], (height - 0.4, 0.8), color=KINDS[kind], linewidth=0.4)
    labels = [f"{kind} ({sum(d for _, d in lanes[kind]):.2f} ms)" for kind in reversed(order)]
    panel.set_yticks(range(len(order)), labels)
    panel.set(xlabel="ms", xlim=(0, None))
    panel.set_title(
        f"One step of {result['name']} under {row['strategy']}, {row['batch']} requests: "
        f"{profile['operations_per_step']:.0f} operations, idle {profile['idle_share']:.1%}",
        fontsize=9,
    )
    return figure


def _write(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date the same figures give the same file.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=110, metadata=metadata)
    plt.close(figure)
    return path
