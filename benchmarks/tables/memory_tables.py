"""Tables of memory: what a request costs, how many fit, prefix hits, copies to the host, the soak;
and of what drafts get accepted."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from markdown import markdown
from source import load, machine

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from capacity import memory_table

LAYOUTS = ("columns", "replay")


def request() -> str:
    """State of one request, by shape and dtype."""
    lines = []
    for entry in memory_table():
        parts = [entry[layout] for layout in LAYOUTS]
        lines.append(
            [
                entry["name"],
                entry["ssm_dtype"],
                str(parts[0]["block_size"]),
                *(_mib(parts[0][part]) for part in ("live", "snapshot")),
                *(_mib(part["guesses"]) for part in parts),
                *(_mib(part["state"]) for part in parts),
                f"{entry['state_ratio']:.2f}",
                f"{parts[0]['kv_per_token'] / 1024:.0f}",
            ]
        )
    header = [
        "shape", "state", "block, tokens", "live state", "a checkpoint", "drafts, `columns`",
        "records, `replay`", "sum, `columns`", "sum, `replay`", "ratio", "KV, KiB a token",
    ]  # fmt: skip
    return markdown(header, lines) + "\n\nFrom the layouts; nothing is measured."


def chat() -> str:
    """Turns of conversations that go on where the last one ended."""
    result = load("h100", "prefix-chat")
    lines = [
        [
            str(row["conversations"]),
            f"{row['run_tokens']:.1f}",
            f"{row['run_tokens_per_new']:.3f}",
            " / ".join(f"{row['ttft_ms'][name]:.1f}" for name in ("mean", "p50", "p99")),
            f"{row['turn_hits']} of {row['turns']}",
        ]
        for row in result["rows"]
    ]
    header = [
        "conversations side by side", "tokens run of a turn's prompt", "÷ new message",
        "TTFT mean / p50 / p99, ms", "turns that went on at the end of the last",
    ]  # fmt: skip
    trace, block = result["trace"], result["rows"][0]["block_size"]
    note = (
        f"{result['name']} shapes: a system prompt of {trace['system']} tokens, {trace['turns']} "
        f"turns of {trace['message']}, answers of about {trace['answer']}; states at multiples of "
        f"{block} tokens and where texts end. {machine(result)}"
    )
    return f"{markdown(header, lines)}\n\n{note}"


def capacity() -> str:
    """Requests in the same memory, and what they yield at once."""
    lines = []
    for name in ("capacity", "capacity-fp16"):
        for row in load("h200", name)["rows"]:
            lines.append(
                [
                    row["ssm_dtype"],
                    row["state_layout"],
                    str(row["requests"]),
                    str(row["preemptions"]),
                    "-" if row["step_ms"] is None else f"{row['step_ms']:.1f}",
                    "-" if row["decode_tok_s"] is None else f"{row['decode_tok_s']:.0f}",
                    f"{row['output_tok_s']:.0f}",
                ]
            )
    result = load("h200", "capacity")
    ratios = result["ratios"]["float32"]
    note = (
        f"With float32 states {ratios['requests']:.2f} times the requests, "
        f"{ratios['decode_tok_s']:.2f} times the tokens per second while they decode, and "
        f"{ratios['output_tok_s']:.2f} times with their prompts. {machine(result)}"
    )
    header = [
        "state", "layout", "requests", "preempted", "step, ms", "tokens/s, decoding",
        "tokens/s, with prompts",
    ]  # fmt: skip
    return markdown(header, lines) + "\n\n" + note


def prefix(name: str = "prefix") -> str:
    """Time to the first token on a miss, a hit, and a hit that comes from the host."""
    result = load("h200", name)
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in result["rows"]:
        key = tuple(row[name] for name in ("block_size", "retention", "state_layout"))
        cases.setdefault(key, {})["host" if row["host_tier"] else "device"] = row
    lines = []
    for (block, retention, layout), found in cases.items():
        here, host = found["device"], found.get("host")
        lines.append(
            [
                str(block),
                f"`{retention}`",
                layout,
                str(here["run_tokens"]),
                *(f"{here['ttft_ms'][name]:.1f}" for name in ("remainder", "miss", "hit")),
                f"{here['ratio']:.3f}",
                f"{host['ttft_ms']['host hit']:.1f}" if host else "-",
                f"{host['ratio']:.3f}" if host else "-",
            ]
        )
    header = [
        "block", "retention", "layout", "tokens left to run", "alone, ms", "miss, ms", "hit",
        "÷ miss", "hit on the host", "÷ miss",
    ]  # fmt: skip
    same = result["identical_prompts"][0]
    note = (
        f"Three equal prompts of {same['prompt_tokens']} tokens, drafts on: hits of "
        f"{', '.join(map(str, same['hit_blocks']))} blocks of {same['block_size']}, of at most "
        f"{same['most_blocks']}. {machine(result)}"
    )
    return markdown(header, lines) + "\n\n" + note


def eviction() -> str:
    """Hit tokens under several rules of what makes room."""
    result = load("cpu", "eviction")
    rules = ("lru", "pins", "worth", "future")
    lines = [
        [
            row["trace"],
            f"{row['state_share']:.0%}",
            *(f"{row['hit'][rule]:.3f}" for rule in rules),
            f"{row['possible']:.3f}",
            *(f"{row[f'worth_per_{rule}']:.2f}" for rule in ("lru", "pins", "future")),
        ]
        for row in result["rows"]
    ]
    header = [
        "trace", "memory for states", "last use", "pins last", "worth", "future", "possible",
        "worth ÷ last use", "÷ pins last", "÷ future",
    ]  # fmt: skip
    note = (
        f"{result['name']} shapes, float32 states, {result['gib']:g} GiB of cached prefixes, "
        f"{result['arrivals']} requests, of which a quarter is not counted. {machine(result)}"
    )
    return f"{markdown(header, lines)}\n\n{note}"


def soak() -> str:
    """What the long form of the soak counted."""
    result = load("h200", "soak")
    names = (
        "submitted", "preemptions", "ended by abort", "ended by deadline", "ended by error",
        "blocks from the host", "right", "wrong", "beginnings right", "beginnings wrong", "leaked",
    )  # fmt: skip
    lines = [
        [layout, *(str(result["counts"][layout].get(name, 0)) for name in names)]
        for layout in (*LAYOUTS, "all")
    ]
    return markdown(["layout", *names], lines) + "\n\n" + machine(result)


def acceptance() -> str:
    """Tokens that a verified step of the shipped checkpoint emits."""
    result = load("cpu", "acceptance")
    words = {"mtp": "MTP head", "eagle": "EAGLE head", "ngram": "n-gram look-up"}
    rows = [
        [words[row["drafter"]], f"{row['length']:.2f}", f"{row['same text']} of {row['texts']}"]
        for row in result["rows"]
        if row["drafter"] in words
    ]
    table = markdown(["drafter", "tokens per step", "text as without drafts"], rows)
    return f"{table}\n\nOn a CPU, commit {result['environment']['commit']}."


TABLES = {
    "acceptance": acceptance,
    "request-memory": request,
    "capacity": capacity,
    "chat": chat,
    "eviction": eviction,
    "prefix": prefix,
    "prefix-short": partial(prefix, "prefix-64"),
    "soak": soak,
}


def _mib(value: int) -> str:
    return f"{value / 2**20:.1f}"
