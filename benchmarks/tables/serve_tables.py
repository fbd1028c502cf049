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


def headline() -> str:
    """So many places, always taken: ours beside vLLM with its fastest budget."""
    results = [load("h200", name) for name in ("serve-8b", "serve-nano-30b")]
    lines, pairs = [], []
    for result in results:
        for places in sorted({row["places"] for row in result["rows"]} - {None}):
            rows = [row for row in result["rows"] if row["places"] == places]
            ours = next(row for row in rows if row["engine"] == "ours")
            theirs = [row for row in rows if row["engine"] == "vllm"]
            best = max(theirs, key=lambda row: row["output_tok_s"])
            pairs.append((ours, best))
            both = [f"{ours[name]:{form}} : {best[name]:{form}}" for name, _, form in SERVED]
            ratio = f"{best['ours_to_this']['output_tok_s']:.2f}"
            lines.append([result["name"], str(places), both[0], ratio, *both[1:]])
    names = [name for _, name, _ in SERVED]
    header = ["shapes", "places", f"{names[0]}, ours : vLLM", "÷", *names[1:]]
    return f"{markdown(header, lines)}\n\n{_note(results[0], pairs)}"


def served(name: str) -> str:
    """Every engine with every setting, and the tokens/s of the first one over each."""
    result = load("h200", name)
    lines = []
    for row in result["rows"]:
        if row["places"] is not None:
            line = [str(row["places"]), *_who(row)]
            line += [f"{row[figure]:{form}}" for figure, _, form in SERVED]
            ratio = row.get("ours_to_this")
            lines.append([*line, f"{ratio['output_tok_s']:.2f}" if ratio else ""])
    header = ["places", *WHO, *(n for _, n, _ in SERVED), "tokens/s, the first's ÷"]
    pairs = [pair for pair in _pairs(result, "vllm") if pair[0]["places"] is not None]
    return f"{markdown(header, lines)}\n\n{_note(result, pairs)}"


WHO = ("engine", "tokens a step", "next step is queued")


def _who(row: Row) -> list[str]:
    """Engine, its budget, when it queues steps. Older rows have their budget alone."""
    setting = row.get("setting", {"budget": row.get("budget")})
    if row["engine"] != "ours":
        return ["vLLM", f"{setting['budget']:,}", ""]
    when = "early" if "setting" not in row or setting.get("queue") == "early" else "late"
    if setting.get("steps_ahead") == 0:
        when = "after the results"
    return ["ours", f"{setting['budget']:,}", when]


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
    """Poisson arrivals, as many for every engine."""
    result = load("h200", "serve-8b-queueing")
    rows = [row for row in result["rows"] if row["places"] is None]
    lines = [
        [f"{row['rate']:.0f}", *_who(row), f"{row['good_share']:.0%}"]
        + [f"{row[figure]:{form}}" for figure, _, form in SERVED]
        for row in rows
    ]
    header = ["requests/s", *WHO, "good", *(name for _, name, _ in SERVED)]
    limits = result["options"]["objective"]
    said = (
        f"Good: requests with TTFT up to {limits['ttft']:.0f} ms and ITL up to "
        f"{limits['itl']:.0f} ms. "
    )
    pairs = [pair for pair in _pairs(result, "vllm") if pair[0]["places"] is None]
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


def fp8_products() -> str:
    """The same in 8 bits, with what quantises the inputs."""
    result = load("h200", "fp8_products")
    lines = [
        [
            str(row["tokens"]),
            f"{row['bf16']:.2f}",
            *(
                f"{row[of]:.2f} ({row[of] / row['bf16']:.2f})"
                for of in ("per_tensor", "per_channel")
            ),
            f"{row['floor']:.2f}",
        ]
        for row in result["rows"]
    ]
    header = [
        "tokens", "bfloat16, ms", "`FP8`, ms (÷)", "`FP8_PER_CHANNEL_PER_TOKEN`, ms (÷)",
        "weights read as fast as copied, ms",
    ]  # fmt: skip
    return f"{markdown(header, lines)}\n\n{result['name']} shapes. {environment(result)}"


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
    "serving": headline,
    "serving-budgets": partial(served, "serve-8b-budgets"),
    "serving-queueing": partial(served, "serve-8b-queueing"),
    "serving-smaller": partial(closed, "h100", "serve-8b", "serve-8b-few"),
    "serving-arrivals": arrivals,
    "capture": capture,
    "products": products,
    "fp8-products": fp8_products,
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
    if options.get("budgets") or options.get("turns"):
        budget = (
            "at most 2560 prompt tokens a step in ours unless said, vLLM's budget is of all; times "
            "to first tokens without the requests that open a run"
        )
    else:
        budget = f"at most {options['max_tokens_per_step']} tokens a step"
    return (
        f"{options['lengths'].capitalize()} lengths, {options['drafts']} drafts, acceptance "
        f"{options['acceptance']}, {options['dtype']} weights, {options['ssm_dtype']} state, "
        f"{budget}; {options['per_place']} requests per place, {made}, {beside}. "
        f"{environment(result)}"
    )
