"""The replay layout's state update in steady decode, and whole steps with a window and without."""

from __future__ import annotations

import operator

from markdown import markdown
from source import RESULTS, environment, load, versions
from state_tables import us

ORDER = operator.itemgetter("state", "tokens", "rows")


BESIDE_FLASHINFER = ("window-short", "window-long", "window")
"""Calls, the newest last: what is in several of them is taken from that one."""


def window() -> str:
    """GPU time of one layer's update beside FlashInfer's, and errors."""
    newest = {}
    for name in BESIDE_FLASHINFER:
        result = load("h200", name)
        for row in result["gpu"]:
            newest[ORDER(row)] = row, result["environment"]["commit"]
    lines = []
    for _, (row, commit) in sorted(newest.items()):
        lines.append(
            [
                row["state"],
                str(row["tokens"]),
                str(row["rows"]),
                *(us(row[name]) for name in ("ours", "ours floor", "flashinfer")),
                f"{row['ours ÷ flashinfer']:.2f}",
                *(f"{row[f'{side} state error']:.1e}" for side in ("ours", "flashinfer")),
                commit,
            ]
        )
    header = [
        "state", "tokens", "rows", "`replay`", "floor", "FlashInfer", "÷ FlashInfer",
        "error of states", "FlashInfer's", "commit",
    ]  # fmt: skip
    return f"{markdown(header, lines)}\n\n{versions(result)}."


def window_vllm() -> str:
    """Beside vLLM's kernel at its shipped tuning, which writes a state for every token."""
    result = load("h200", "window-vllm")
    lines = []
    for row in sorted(result["gpu"], key=ORDER):
        times = (us(row[name]) for name in ("ours", "vllm"))
        cells = [row["state"], *(str(row[name]) for name in ("tokens", "rows"))]
        lines.append([*cells, *times, f"{row['ours ÷ vllm']:.2f}"])
    header = ["state", "tokens", "rows", "`replay`", "vLLM", "÷ vLLM"]
    return markdown(header, lines) + "\n\n" + environment(result)


def window_steps() -> str | None:
    """Lockstep decode with the window, and with a write in every step."""
    names = ("itl-8b-window", "itl-8b-no-window")
    if not all((RESULTS / "h200" / f"{name}.json").is_file() for name in names):
        return None
    results = [load("h200", name) for name in names]
    pairs = zip(*(result["rows"] for result in results), strict=True)
    lines = []
    for with_, without in sorted(pairs, key=lambda pair: pair[0]["batch"]):
        assert with_["batch"] == without["batch"]
        lines.append(
            [
                str(with_["batch"]),
                *(f"{row['step_ms']:.2f}" for row in (with_, without)),
                f"{with_['step_ms'] / without['step_ms']:.3f}",
                f"{with_['decode_tok_s']:.0f}",
            ]
        )
    header = ["rows", "window, ms", "none, ms", "÷", "tokens/s"]
    return markdown(header, lines) + "\n\n" + environment(results[0])


def window_shapes() -> str | None:
    """Lockstep decode with the window: other shapes, numbers of drafts, and states."""
    lines = []
    for path in RESULTS.glob("*/itl-window-*.json"):
        result = load(path.parent.name, path.stem)
        depth, whole = result["layers"]
        for row in result["rows"]:
            lines.append(
                [
                    path.parent.name.upper(),
                    result["name"],
                    "all" if depth == whole else f"{depth} of {whole}",
                    row["ssm_dtype"],
                    str(row["drafts"]),
                    f"{row['acceptance']:.1f}",
                    str(row["batch"]),
                    f"{row['step_ms']:.2f}",
                    f"{row['itl_ms']:.2f}",
                    f"{row['decode_tok_s']:.0f}",
                    f"{row['floor_ratio']:.2f}",
                    result["environment"]["commit"],
                ]
            )
    if not lines:
        return None
    lines.sort(key=lambda line: (*line[:2], line[3], int(line[4]), int(line[6])))
    header = [
        "GPU", "shape", "layers", "state", "drafts", "accepted", "rows", "step, ms", "ITL, ms",
        "tokens/s", "÷ floor", "commit",
    ]  # fmt: skip
    return markdown(header, lines)


TABLES = {
    "window": window,
    "window-vllm": window_vllm,
    "window-steps": window_steps,
    "window-shapes": window_shapes,
}
"""Tables in Markdown."""
