"""Tables of what FP8 costs in accuracy, from `fp8-accuracy.json` of each device that has one."""

from __future__ import annotations

import statistics
from typing import Any

from markdown import markdown
from source import RESULTS, environment, load

Row = dict[str, Any]
DEVICES = ("h200", "h100", "cpu")
NAME = "fp8-accuracy"


def accuracy() -> str:
    """Logits of rounded weights, in prompts and in decode."""
    lines = []
    for device, result in _measured():
        pairs: dict[tuple[str, ...], dict[str, Row]] = {}
        for row in result["logits"]:
            key = (row["model"], row["of"], row["against"])
            pairs.setdefault(key, {})[row["phase"]] = row
        for key, phases in pairs.items():
            both = [phases[phase] for phase in ("prompt", "decode")]
            share = both[0]["share"]
            lines.append(
                [
                    device,
                    *key,
                    f"{100 * share:.0f} %" if share else "-",
                    " / ".join(f"{row['rms']:.4f}" for row in both),
                    " / ".join(f"{row['largest']:.2g}" for row in both),
                    " / ".join(f"{100 * row['same_best']:.1f} %" for row in both),
                    " / ".join(f"{row['kl']:.1e}" for row in both),
                ]
            )
    header = [
        "device", "model", "logits of", "against", "numbers in 8 bits", "error, rms", "largest",
        "same best token", "KL, nats a token",
    ]  # fmt: skip
    _, result = _measured()[0]
    prompt, behind = result["lengths"]
    note = (
        f"Each cell: in a prompt of {prompt} tokens / in the {behind} behind it, of which a step "
        f"verifies {result['verified']}; {result['sequences']} texts."
    )
    return f"{markdown(header, lines)}\n\n{note} {_where()}"


def texts() -> str:
    """The shipped checkpoint: acceptance, greedy texts and perplexity."""
    lines = []
    for device, result in _measured():
        for dtype in dict.fromkeys(row["dtype"] for row in result["texts"]):
            rows = {row["drafter"]: row for row in result["texts"] if row["dtype"] == dtype}
            found = [row["perplexity"] for row in result["perplexity"] if row["dtype"] == dtype]
            first = rows["none"]["first_different"]
            lines.append(
                [
                    device,
                    dtype,
                    *(
                        f"{rows[name]['acceptance_plain']:.3f} : {rows[name]['acceptance_fp8']:.3f}"
                        for name in ("mtp", "eagle")
                    ),
                    " / ".join(str(rows[name]["same"]) for name in ("none", "mtp", "eagle"))
                    + f" of {rows['none']['texts']}",
                    f"{first[0]} / {statistics.median(first):.0f}" if first else "-",
                    " : ".join(f"{value:.4f}" for value in found),
                ]
            )
    header = [
        "device", "activations", "tokens per step, MTP", "EAGLE",
        "same texts, no drafter / MTP / EAGLE", "first other token, least / median", "perplexity",
    ]  # fmt: skip
    of = " ".join(dict.fromkeys(_text(result) for _, result in _measured()))
    note = "Plain weights : FP8 per channel."
    return f"{markdown(header, lines)}\n\n{note} {of} {_where()}"


def _text(result: Row) -> str:
    text, row = result["text"], result["perplexity"][0]
    return (
        f"The text is the {text['of']} ({text['files']}); perplexity of a byte over "
        f"{row['scored']} of its {text['bytes']} bytes."
    )


def _measured() -> list[tuple[str, Row]]:
    """Name of each device that there are results of, and these."""
    there = [name for name in DEVICES if (RESULTS / name / f"{NAME}.json").exists()]
    return [(name.upper(), load(name, NAME)) for name in there]


def _where() -> str:
    return " ".join(environment(result) for _, result in _measured())


TABLES = {NAME: accuracy, "fp8-texts": texts}
