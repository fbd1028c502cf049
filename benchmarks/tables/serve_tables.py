"""Tables of the serving load and of what bounds it, from `serve-8b*.json` and others of a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from markdown import markdown
from source import environment, load

Row = dict[str, Any]

CLOSED = (
    ("output_tok_s", "tokens/s", ".0f"),
    ("ttft_ms_mean", "TTFT, ms", ".0f"),
    ("itl_ms_mean", "ITL, ms", ".2f"),
    ("itl_ms_p99", "ITL p99, ms", ".1f"),
)
"""Figure, its name, its format; each beside the other engine's, and over it."""
SERVED = (
    ("output_tok_s", "tokens/s", ".0f"),
    ("ttft_ms_p50", "TTFT p50, ms", ".0f"),
    ("ttft_ms_p99", "p99", ".0f"),
    ("itl_ms_p50", "ITL p50, ms", ".1f"),
    ("itl_ms_p99", "p99", ".1f"),
)
OPEN = (
    ("rate", "requests/s", ".1f"),
    ("output_tok_s", "tokens/s", ".0f"),
    ("goodput_s", "goodput, requests/s", ".1f"),
    ("ttft_ms_mean", "TTFT, ms", ".0f"),
    ("ttft_ms_p99", "TTFT p99, ms", ".0f"),
    ("itl_ms_mean", "ITL, ms", ".2f"),
    ("itl_ms_p99", "ITL p99, ms", ".1f"),
)


def served(device: str, name: str) -> str:
    """So many places, always taken: every engine with every budget, and ours over each."""
    result = load(device, name)
    rows = [row for row in result["rows"] if row["places"] is not None]
    lines = []
    for row in sorted(rows, key=lambda row: row["places"]):
        who = "this engine" if row["engine"] == "ours" else "vLLM"
        line = [str(row["places"]), f"{who}, {row['budget']:,}"]
        line += [f"{row[figure]:{form}}" for figure, _, form in SERVED]
        ratio = row.get("ours_to_this")
        lines.append([*line, f"{ratio['output_tok_s']:.2f}" if ratio else ""])
    header = [
        "places",
        "engine, most tokens a step",
        *(n for _, n, _ in SERVED),
        "tokens/s, ours ÷",
    ]
    pairs = [pair for pair in _pairs(result, "vllm") if pair[0]["places"] is not None]
    return f"{markdown(header, lines)}\n\n{_note(result, pairs)}"


def closed(device: str, *names: str, other: str = "vllm", titled: str = "ours : vLLM") -> str:
    """So many places, always taken: this engine beside another; of calls with the same options."""
    results = [load(device, name) for name in names]
    every = [pair for result in results for pair in _pairs(result, other)]
    pairs, lines = [pair for pair in every if pair[0]["places"] is not None], []
    for ours, theirs in sorted(pairs, key=lambda pair: pair[0]["places"]):
        line = [str(ours["places"])]
        for figure, _, form in CLOSED:
            line.append(f"{ours[figure]:{form}} : {theirs[figure]:{form}}")
            line.append(f"{theirs['ours_to_this'][figure]:.2f}")
        lines.append(line)
    header = ["places", *(x for _, name, _ in CLOSED for x in (f"{name}, {titled}", "÷"))]
    return f"{markdown(header, lines)}\n\n{_note(results[0], pairs)}"


def arrivals() -> str:
    """Poisson arrivals, as a share of what each engine serves at most."""
    result = load("h200", "serve-8b")
    pairs = [pair for pair in _pairs(result, "vllm") if pair[0]["places"] is None]
    lines = [
        [name, row["load"], *(f"{row[figure]:{form}}" for figure, _, form in OPEN)]
        for pair in pairs
        for name, row in zip(("ours", "vLLM"), pair, strict=True)
    ]
    header = ["engine", "load", *(name for _, name, _ in OPEN)]
    limits = result["options"]["objective"]
    said = (
        "Load: share of the requests/s that the engine itself served with the most places. "
        f"Goodput: requests with TTFT up to {limits['ttft']:.0f} ms and ITL up to "
        f"{limits['itl']:.0f} ms. "
    )
    return f"{markdown(header, lines)}\n\n{said}{_note(result, pairs)}"


def capture() -> str:
    """How long an engine takes to be ready, weights aside."""
    result = load("h200", "capture")
    lines = [[row["kernels"], f"{row['seconds']:.1f}"] for row in result["rows"]]
    said = f"Nemotron-H-8B shapes, {result['max_requests']} requests. {environment(result)}"
    return f"{markdown(['kernels', 'capture, s'], lines)}\n\n{said}"


def products() -> str:
    """Matrix products of a step, which bound a serving load."""
    result = load("h200", "products")
    lines = [
        [str(row["tokens"]), f"{row['step_ms']:.2f}", f"{row['tflop_s']:.0f}"]
        for row in result["rows"]
    ]
    header = ["tokens", "ms", "TFLOP/s"]
    about = f"{_prompt_alone(result)} {result['name']} shapes, bfloat16. {environment(result)}"
    return f"{markdown(header, lines)}\n\n{about}"


def _prompt_alone(products: Row) -> str:
    """A prompt that nobody shares the GPU with, over its products; its chunks have two blocks."""
    chunk = next(row for row in products["rows"] if row["tokens"] == 2048)
    rows = load("h200", "prefix-64")["rows"]
    row = next(row for row in rows if row["state_layout"] == "replay" and not row["host_tier"])
    tokens, ms = row["prompt_tokens"], row["ttft_ms"]["miss"]
    limit = tokens * chunk["step_ms"] / chunk["tokens"]
    return (
        f"A prompt of {tokens} tokens alone takes {ms:.0f} ms to its first token "
        f"({tokens / ms * 1e3:.0f} tokens/s), {ms / limit:.2f} times its products at the rate of "
        f"{chunk['tokens']} tokens."
    )


TABLES = {
    "serving": partial(closed, "h200", "serve-8b"),
    "serving-smaller": partial(closed, "h100", "serve-8b", "serve-8b-few"),
    "serving-arrivals": arrivals,
    "capture": capture,
    "products": products,
}


def _pairs(result: Row, other: str) -> list[tuple[Row, Row]]:
    """Our row of each load and the other engine's, of the first budgets."""
    loads: dict[Any, dict[str, Row]] = {}
    for row in result["rows"]:
        loads.setdefault((row["places"], row.get("load")), {}).setdefault(row["engine"], row)
    return [(found["ours"], found[other]) for found in loads.values() if other in found]


def _note(result: Row, pairs: list[tuple[Row, Row]]) -> str:
    options, engines = result["options"], result["engines"]
    if "vllm" in engines:
        beside = f"vLLM {engines['vllm']['vllm']}"
    else:
        beside = f"before: commit {engines['before']['environment']['commit']}"
    repeats = [len(ours["repeats"]) for ours, _ in pairs]
    counts = str(min(repeats)) if min(repeats) == max(repeats) else f"{min(repeats)}-{max(repeats)}"
    made = "one run" if counts == "1" else f"medians of {counts} repeats"
    if options.get("budgets"):
        budget = (
            "tokens a step: ours of prompts, vLLM's of all; times to first tokens without the "
            "requests that open a run"
        )
    else:
        budget = f"at most {options['max_tokens_per_step']} tokens a step"
    return (
        f"{options['lengths'].capitalize()} lengths, {options['drafts']} drafts, acceptance "
        f"{options['acceptance']}, {options['dtype']} weights, {options['ssm_dtype']} state, "
        f"{budget}; {options['per_place']} requests per place, {made}, {beside}. "
        f"{environment(result)}"
    )
